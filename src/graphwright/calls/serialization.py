"""Trees of tensors and plain values as files: tensors by safetensors, all else as JSON.

Reading executes nothing and imports nothing, unless a tree's own class is asked for by name.

A call as tensors in a row, which is all that tracers and exporters take, and the way back.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import ArtifactError

Json = Any


def write_tensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    once: bool = False,
    seen: Collection[str] = (),
) -> None:
    """Write tensors with their strides; each by its own values, whatever memory they share.

    With `once` those that hold the same bits are written once, and come back as one tensor; those
    that are `seen`, by name, only if they are one already: somebody may write to them.
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
            if not step:  # An expanded dimension is the same again and again.
                tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
        tensor = _plain(tensor)
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
    """What `write_tensors` has written: same values, shapes, strides and dtypes, on a device.

    Raises:
        ArtifactError: the file is not of its making.
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
                found[name] = _laid_out(tensor, shape, strides).requires_grad_(wants_grad)
            if not set(layouts).isdisjoint(same):
                raise ValueError("one of them is there twice")
            found |= {name: found[other] for name, other in same.items()}
    except Exception as error:  # Whatever safetensors makes of it.
        raise ArtifactError(f"{path.name} holds no tensors that can be read: {error}.") from error
    return found


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Without what is still to be done to its values when they are read."""
    return tensor.resolve_conj().resolve_neg()


def digest_of(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """What two tensors have in common that hold the same bits in the same places."""
    dense = _plain(tensor.detach()).contiguous().cpu()
    content = (ctypes.c_char * dense.nbytes).from_address(dense.data_ptr()) if dense.nbytes else b""
    return str(dense.dtype), tuple(dense.shape), hashlib.sha256(content).digest()


def _content_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return digest_of(tensor), tensor.stride(), tensor.requires_grad


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    begin = tensor.untyped_storage().data_ptr()
    where = (begin, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
    return (*where, id(tensor) if not begin else 0)


def _laid_out(tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
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
    """Tuples, lists, dictionaries by text, tensors and plain values as JSON.

    Tensors are added to `tensors` under names that begin with the prefix; one that comes twice is
    the same tensor again. Those that share memory come back apart, if `shared` allows it.

    Raises:
        ArtifactError: there is something else, or two tensors share memory.
    """
    if isinstance(tree, torch.Tensor):
        for name, known in tensors.items():
            if known is tree:
                return {"tensor": name}
        mine = tree.untyped_storage()
        for name, known in tensors.items() if not shared else ():
            if mine.nbytes() and known.untyped_storage().data_ptr() == mine.data_ptr():
                raise ArtifactError(
                    f"Two tensors to be saved share memory, one of them {name}.",
                    remedy="Tune with inputs that are tensors of their own.",
                )
        tensors[f"{prefix}.{len(tensors)}"] = tree
        return {"tensor": f"{prefix}.{len(tensors) - 1}"}
    if type(tree) in (tuple, list):
        return {
            type(tree).__name__: [packed(each, tensors, prefix, shared=shared) for each in tree]
        }
    if type(tree) is dict and all(isinstance(key, str) for key in tree):
        inner = {key: packed(v, tensors, prefix, shared=shared) for key, v in tree.items()}
        return {"dict": inner}
    if tree is None or isinstance(tree, bool | str):
        return tree
    if type(tree) is int:
        return {"int": str(tree)}
    if type(tree) is float:
        return {"float": tree.hex()}
    if isinstance(tree, torch.dtype):
        return {"dtype": str(tree).removeprefix("torch.")}
    if isinstance(tree, torch.device):
        return {"device": str(tree)}
    raise ArtifactError(
        f"A value of type {type(tree).__name__} among the sample's inputs or results cannot be "
        "saved.",
        remedy="Tensors, plain values, tuples, lists and dictionaries by text can.",
    )


def unpacked(given: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What `packed` has made JSON of; raises KeyError, TypeError or ValueError where it has not."""
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
    found = vars(torch).get(name)  # An attribute might be imported for being asked for.
    if not isinstance(found, torch.dtype):
        raise ValueError(f"there is no dtype {name!r:.40}")
    return found


def tree_text(spec: pytree.TreeSpec) -> str:
    """The tree of a call's results as text.

    Raises:
        ArtifactError: it has a node of a class that PyTorch does not know by name, or one that
            could not be read without importing what the text names.
    """
    try:
        text = pytree.treespec_dumps(spec)
        if _read(json.loads(text)) != spec:
            raise ValueError("it comes back as another one")
        return text
    except Exception as error:
        raise ArtifactError(
            f"The structure of the results cannot be written down: {error}.",
            remedy="Return tuples, lists, dictionaries by text, or classes that are registered "
            "with torch.utils._pytree under a serialized_type_name.",
        ) from error


def tree_of(text: str, *, imports: bool = False) -> pytree.TreeSpec:
    """The tree that `tree_text` wrote.

    Args:
        text: of the tree.
        imports: whether a module may be imported that defines a class of the tree's.

    Raises:
        ArtifactError: it is none, or names a class that this process has not imported.
    """
    try:
        known = json.loads(text)
        unknown = _classes(known[1]) - set(pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE)
        for name in sorted(unknown) if imports else ():
            importlib.import_module(name.rpartition(".")[0])
        if not unknown or imports:
            return _read(known)
    except Exception as error:
        raise ArtifactError(
            f"The structure of the results cannot be made: {error!s:.300}."
        ) from error
    raise ArtifactError(
        f"The results are made of {', '.join(sorted(unknown))}, which is not imported here.",
        remedy="Import it first, pass the model, or load with trust=True.",
    )


_NAMED_TUPLE = "collections.namedtuple"


def _classes(schema: Json) -> set[str]:
    """The names of all classes in a tree; of a named tuple its context is the name."""
    inner = set().union(*map(_classes, schema["children_spec"]))
    name = schema["context" if schema["type"] == _NAMED_TUPLE else "type"]
    return inner | ({name} if name is not None else set())


def _read(known: Json) -> pytree.TreeSpec:
    """A tree of classes that are imported; raises where it is none, or reading might import."""
    protocol, schema = known
    _look_over(schema)
    # What was looked over, whatever else the text might say.
    return pytree.treespec_loads(json.dumps([protocol, schema]))


def _look_over(schema: Json) -> None:
    """Raise ValueError where PyTorch, to read a tree, would import what the tree names.

    It does so for the factory of a defaultdict, and wherever a context holds an object that says
    that it is an enumeration's member. What other classes do to read a context nobody knows.
    """
    name, context = schema["type"], schema["context"]
    if name == _NAMED_TUPLE:
        if not pytree.is_namedtuple_class(pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[context]):
            raise ValueError(f"{context} is no named tuple")
    elif name is not None:
        kind = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[name]
        reader = pytree.SUPPORTED_SERIALIZED_TYPES[kind].from_dumpable_context
        if name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND or reader is not None:
            raise ValueError(f"reading a {name} may import whatever it names")
        # Of a text that is no JSON PyTorch would still make its first objects.
        if _holds_object(json.loads(context)):
            raise ValueError(f"the context of a {name} names what would be imported")
    for child in schema["children_spec"]:
        _look_over(child)


def _holds_object(value: Json) -> bool:
    """Whether there is a JSON object in a value, or in a text in it."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return False
        return _holds_object(value)
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_holds_object, value)))


@dataclass(frozen=True)
class TreeTemplate:
    """A tree without its tensors: their slots among its leaves, where it has None, and the rest."""

    leaves: tuple[Any, ...]
    slots: tuple[int, ...]
    spec: pytree.TreeSpec

    @classmethod
    def of(cls, leaves: Sequence[Any], spec: pytree.TreeSpec) -> TreeTemplate:
        """Take the tensors out of a flattened tree."""
        slots = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        rest = (None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return cls(tuple(rest), slots, spec)

    def fill(self, tensors: Iterable[torch.Tensor]) -> Any:
        """The tree with other tensors in their places."""
        leaves = list(self.leaves)
        for slot, tensor in zip(self.slots, tensors, strict=True):
            leaves[slot] = tensor
        return pytree.tree_unflatten(leaves, self.spec)

    def written(self) -> dict[str, Json]:
        """It as JSON.

        Raises:
            ArtifactError: a leaf or a container cannot be written down.
        """
        leaves = [packed(leaf, {}, "") for leaf in self.leaves]
        return {"leaves": leaves, "slots": [*self.slots], "tree": tree_text(self.spec)}

    @classmethod
    def read(cls, known: Mapping[str, Json]) -> TreeTemplate:
        """What `written` gave.

        Raises:
            ArtifactError: a container's class is not known here.
            KeyError, TypeError, ValueError: it is none.
        """
        leaves = tuple(unpacked(leaf, {}) for leaf in known["leaves"])
        slots = tuple(int(slot) for slot in known["slots"])
        if any(not 0 <= slot < len(leaves) for slot in slots):
            raise ValueError(f"there are no leaves {slots} among {len(leaves)}")
        return cls(leaves, slots, tree_of(known["tree"]))
