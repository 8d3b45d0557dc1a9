"""What one call is given, returns and changes, kept in memory of its own.

Calls are made on clones of the inputs and from the same buffers, so that a model that writes
to either can be run again and again and compared with itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .signature import Args, argument_names, describe, flatten, leaf_names, unflatten

Model = Callable[..., Any]
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Call:
    """One set of inputs, by name."""

    name: str
    args: Args
    kwargs: Mapping[str, Any]

    def clone(self) -> Call:
        """The same call with tensors of its own: same values, strides, overlaps, aliases."""
        leaves, spec = flatten(self.args, self.kwargs)
        args, kwargs = unflatten(clone_leaves(leaves), spec)
        return replace(self, args=args, kwargs=kwargs)

    def leaves(self) -> dict[str, Any]:
        """The arguments' leaves by name."""
        leaves, _ = flatten(self.args, self.kwargs)
        return dict(zip(argument_names(self.args, self.kwargs), leaves, strict=True))

    def tensors(self) -> list[torch.Tensor]:
        """The arguments' tensors, each once, in the order of the arguments."""
        seen = {id(v): v for v in self.leaves().values() if isinstance(v, torch.Tensor)}
        return list(seen.values())


def clone_leaves(leaves: Sequence[Any]) -> list[Any]:
    """Clone tensors storage by storage, so that views of one storage stay views of one."""
    storages: dict[int, torch.UntypedStorage] = {}
    tensors: dict[int, torch.Tensor] = {}
    result = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            result.append(leaf)
            continue
        if id(leaf) not in tensors:
            storage = leaf.untyped_storage()
            if storage._cdata not in storages:
                storages[storage._cdata] = storage.clone()
            with torch.no_grad():
                copy = torch.empty(0, dtype=leaf.dtype, device=leaf.device).set_(
                    storages[storage._cdata], leaf.storage_offset(), leaf.size(), leaf.stride()
                )
            tensors[id(leaf)] = copy.requires_grad_(leaf.requires_grad)
        result.append(tensors[id(leaf)])
    return result


def can_hold_anything(tensor: torch.Tensor) -> bool:
    """Whether every element has memory of its own; an expanded tensor's have not."""
    return not any(
        step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in shape, dtype and every bit; NaN equals the same NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(_INTEGER[flat.element_size()])


class State:
    """A module's buffers and parameters as they were, to put back and to compare.

    Parameters, which inference must not change, are kept in host memory and compared by a
    checksum; buffers, which it may, where they are.
    """

    def __init__(self, module: nn.Module) -> None:
        self._buffers = dict(module.named_buffers())
        self._kept = {name: b.detach().clone() for name, b in self._buffers.items()}
        self._parameters = dict(module.named_parameters())
        self._checksums = self._sums()
        self._weights = {n: p.detach().to("cpu", copy=True) for n, p in self._parameters.items()}

    def restore(self) -> None:
        """Put the buffers back that changed."""
        with torch.no_grad():
            for name, buffer in self._buffers.items():
                if not same_bits(buffer, self._kept[name]):
                    buffer.copy_(self._kept[name])

    def changes(self) -> dict[str, torch.Tensor]:
        """Copies of the buffers that differ from what was kept, by name."""
        return {
            f"buffer {name} after the call": buffer.detach().clone()
            for name, buffer in self._buffers.items()
            if not same_bits(buffer, self._kept[name])
        }

    def corrupted(self) -> str | None:
        """Name of a parameter whose bits changed, or None; what changed is put back."""
        found = [name for name, value in self._sums().items() if value != self._checksums[name]]
        with torch.no_grad():
            for name in found:
                self._parameters[name].copy_(self._weights[name])
        return found[0] if found else None

    def _sums(self) -> dict[str, int]:
        return {name: int(_bits(p).sum(dtype=torch.int64)) for name, p in self._parameters.items()}


@dataclass
class Outcome:
    """What one call returned and changed."""

    spec: pytree.TreeSpec
    outputs: dict[str, Any]
    inputs: dict[str, Any]
    buffers: dict[str, torch.Tensor]

    def leaves(self) -> dict[str, Any]:
        """All that two outcomes must agree on, by name."""
        return {**self.outputs, **self.inputs, **self.buffers}


def outputs_by_name(result: Any) -> tuple[dict[str, Any], pytree.TreeSpec]:
    """The leaves of what a call returned, by name, and their tree.

    Raises:
        SignatureError: a leaf is an object that may hold tensors out of sight.
    """
    leaves, spec = pytree.tree_flatten(result)
    named = dict(zip(leaf_names(result, "output"), leaves, strict=True))
    for name, leaf in named.items():
        describe(leaf, name)
    return named, spec


def run(model: Model, call: Call, state: State) -> Outcome:
    """Call a model on clones of the inputs, from the kept state, and keep what it did.

    Raises:
        SignatureError: the model returned something that cannot be compared.
    """
    state.restore()
    mine = call.clone()
    outputs, spec = outputs_by_name(model(*mine.args, **mine.kwargs))
    inputs = {f"{name} after the call": leaf for name, leaf in mine.leaves().items()}
    return Outcome(spec, keep(outputs), keep(inputs), state.changes())


def keep(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the tensors among some leaves; strides are kept as they are."""
    return {
        name: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
        for name, leaf in leaves.items()
    }
