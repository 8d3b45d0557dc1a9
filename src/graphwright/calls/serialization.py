"""Trees of tensors and plain values in files: tensors as safetensors, everything else as JSON.

Reading executes and imports nothing. `TreeTemplate` turns a tree into a list of tensors, which is
all that exporters take, and back.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import ArtifactError
from .objects import build, has_nodes
from .written_trees import tree_of, tree_text

Json = Any


def write_tensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    once: bool = False,
    seen: Collection[str] = (),
) -> None:
    """Write tensors with their strides; tensors that share memory are written separately.

    Args:
        path: of the file.
        tensors: by name.
        once: write tensors with the same bits once; they are read back as one tensor.
        seen: names of tensors that somebody may write to: of these only such are written once that
            are the same tensor already.

    Raises:
        ArtifactError: safetensors cannot write them.
    """
    from safetensors.torch import save_file

    first: dict[Any, str] = {}
    same = {
        name: first.setdefault(_memory_of(t) if name in seen else _content_of(t), name)
        for name, t in (tensors if once else {}).items()
    }
    same = {name: other for name, other in same.items() if name != other}
    dense, tensors = {}, {name: t for name, t in tensors.items() if name not in same}
    for name, tensor in tensors.items():
        for dim, step in enumerate(tensor.stride()):
            if not step:  # An expanded dimension repeats one element.
                tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
        tensor = _resolved(tensor)
        whole = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        dense[name] = whole.detach().contiguous().cpu().clone()
    layouts = {
        name: [[*t.shape], [*t.stride()], str(t.dtype).removeprefix("torch."), t.requires_grad]
        for name, t in tensors.items()
    }
    metadata = {"layouts": json.dumps(layouts), "same": json.dumps(same)}
    try:
        save_file(dense, path, metadata=metadata)
    except Exception as error:  # Whatever safetensors makes of them.
        raise ArtifactError(
            f"Tensors among the weights, inputs or results cannot be written: {error!r}.",
            remedy="Dense tensors of plain dtypes can.",
        ) from error


def read_tensors(path: Path, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Read what `write_tensors` wrote: same values, shapes, strides and dtypes, on a device.

    Raises:
        ArtifactError: `write_tensors` did not write the file.
    """
    from safetensors import safe_open

    found = {}
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            layouts, same = (json.loads(metadata[name]) for name in ("layouts", "same"))
            if set(layouts) != set(file.keys()):
                raise ValueError("its table of layouts names other tensors")
            for name, (shape, strides, kind, wants_grad) in layouts.items():
                dtype = _dtype(kind)
                dense = file.get_tensor(name)
                tensor = torch.view_as_complex(dense) if dtype.is_complex else dense
                if tensor.dtype is not dtype:
                    raise ValueError(f"{name} has dtype {tensor.dtype}")
                found[name] = _with_layout(tensor, shape, strides).requires_grad_(wants_grad)
            if not set(layouts).isdisjoint(same):
                raise ValueError("one of them is there twice")
            found |= {name: found[other] for name, other in same.items()}
    except Exception as error:  # Whatever safetensors makes of it.
        raise ArtifactError(f"{path.name} holds no tensors that can be read: {error}.") from error
    return found


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with lazy conjugation and negation carried out."""
    return tensor.resolve_conj().resolve_neg()


def digest_of(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """A digest of a tensor's dtype, shape and bits."""
    dense = _resolved(tensor.detach()).contiguous().cpu()
    content = (ctypes.c_char * dense.nbytes).from_address(dense.data_ptr()) if dense.nbytes else b""
    return str(dense.dtype), tuple(dense.shape), hashlib.sha256(content).digest()


def _content_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return digest_of(tensor), tensor.stride(), tensor.requires_grad


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    begin = tensor.untyped_storage().data_ptr()
    where = (begin, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
    return (*where, id(tensor) if not begin else 0)


def _with_layout(
    tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    given = [size if step else min(size, 1) for size, step in zip(shape, strides, strict=True)]
    if list(tensor.shape) != given:
        raise ValueError(f"a tensor has shape {list(tensor.shape)}, not {given}")
    if list(tensor.stride()) != list(strides) or list(shape) != given:
        tensor = torch.empty_strided(
            given, strides, dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
        tensor = tensor.expand(list(shape))
    return tensor


def packed(
    tree: Any, tensors: dict[str, torch.Tensor], prefix: str, *, shared: bool = False
) -> Json:
    """Turn tuples, lists, dictionaries with text keys, tensors and plain values into JSON.

    Args:
        tree: what to pack.
        tensors: gets the tensors, by name; a tensor that occurs twice is added once.
        prefix: of their names.
        shared: allow tensors that share memory; they are read back as separate tensors.

    Raises:
        ArtifactError: there is something else, or two tensors share memory.
    """
    if isinstance(tree, torch.Tensor):
        return {"tensor": _packed_tensor(tree, tensors, prefix, shared=shared)}
    if type(tree) in (tuple, list):
        return {
            type(tree).__name__: [packed(each, tensors, prefix, shared=shared) for each in tree]
        }
    if type(tree) is dict and all(isinstance(key, str) for key in tree):
        inner = {key: packed(v, tensors, prefix, shared=shared) for key, v in tree.items()}
        return {"dict": inner}
    return _packed_value(tree)


def _packed_tensor(
    tensor: torch.Tensor, tensors: dict[str, torch.Tensor], prefix: str, *, shared: bool
) -> str:
    """The name of a tensor, which is added; arguments and errors are those of `packed`."""
    for name, known in tensors.items():
        if known is tensor:
            return name
    mine = tensor.untyped_storage()
    for name, known in tensors.items() if not shared else ():
        if mine.nbytes() and known.untyped_storage().data_ptr() == mine.data_ptr():
            raise ArtifactError(
                f"Two tensors to be saved share memory, one of them {name}.",
                remedy="Tune with inputs that are tensors of their own.",
            )
    name = f"{prefix}.{len(tensors)}"
    tensors[name] = tensor
    return name


def _packed_value(value: Any) -> Json:
    if value is None or isinstance(value, bool | str):
        return value
    if type(value) is int:
        return {"int": str(value)}
    if type(value) is float:
        return {"float": value.hex()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise ArtifactError(
        f"A value of type {type(value).__name__} among the sample's inputs or results cannot be "
        "saved.",
        remedy="Tensors, plain values, tuples, lists and dictionaries by text can.",
    )


def unpacked(given: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Inverse of `packed`; raises KeyError, TypeError or ValueError for other JSON."""
    if not isinstance(given, dict):
        return given
    ((kind, inner),) = given.items()
    if kind == "tensor":
        return tensors[inner]
    if kind in ("tuple", "list"):
        return (tuple if kind == "tuple" else list)(unpacked(each, tensors) for each in inner)
    if kind == "dict":
        return {key: unpacked(each, tensors) for key, each in inner.items()}
    if kind == "int":
        return int(inner)
    if kind == "float":
        return float.fromhex(inner)
    if kind == "device":
        return torch.device(inner)
    if kind == "dtype":
        return _dtype(inner)
    raise ValueError(f"there is no value of kind {kind!r}")


def _dtype(name: str) -> torch.dtype:
    found = vars(torch).get(name)  # getattr might import something.
    if not isinstance(found, torch.dtype):
        raise ValueError(f"there is no dtype {name!r:.40}")
    return found


@dataclass(frozen=True)
class TreeTemplate:
    """A tree without its tensors.

    Attributes:
        leaves: with None in place of tensors.
        slots: positions of the tensors among the leaves.
        spec: the tree.
    """

    leaves: tuple[Any, ...]
    slots: tuple[int, ...]
    spec: pytree.TreeSpec
    # Whether objects have to be built; compilers see through PyTorch's own functions best.
    objects: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "objects", has_nodes(self.spec))

    @classmethod
    def of(cls, leaves: Sequence[Any], spec: pytree.TreeSpec) -> TreeTemplate:
        """Take the tensors out of a flattened tree."""
        slots = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        rest = (None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return cls(tuple(rest), slots, spec)

    def fill(self, tensors: Iterable[torch.Tensor]) -> Any:
        """The tree with these tensors in the slots."""
        leaves = list(self.leaves)
        for slot, tensor in zip(self.slots, tensors, strict=True):
            leaves[slot] = tensor
        if self.objects:
            return build(leaves, self.spec)
        return pytree.tree_unflatten(leaves, self.spec)

    def written(self, *, given: int = 0) -> dict[str, Json]:
        """The template as JSON.

        Args:
            given: how many objects of a caller it may name.

        Raises:
            ArtifactError: a leaf or a container cannot be saved.
        """
        leaves = [packed(leaf, {}, "") for leaf in self.leaves]
        return {"leaves": leaves, "slots": [*self.slots], "tree": tree_text(self.spec, given=given)}

    @classmethod
    def read(cls, known: Mapping[str, Json], **may: Any) -> TreeTemplate:
        """Inverse of `written`.

        Args:
            known: the JSON.
            may: what `tree_of` takes beside the text.

        Raises:
            ArtifactError: a container's class is not known here.
            KeyError, TypeError, ValueError: the JSON is no template.
        """
        leaves = tuple(unpacked(leaf, {}) for leaf in known["leaves"])
        slots = tuple(int(slot) for slot in known["slots"])
        if any(not 0 <= slot < len(leaves) for slot in slots):
            raise ValueError(f"there are no leaves {slots} among {len(leaves)}")
        return cls(leaves, slots, tree_of(known["tree"], **may))
