"""Snapshots of a module's state and of a call's inputs, outputs and side effects.

Calls run on clones of the inputs and start from the same buffers, so that a model that writes to
either can be run repeatedly and compared with itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .dependencies import Dependencies
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
        """The same call with new tensors: same values, strides, overlaps and aliases."""
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
    """Clone tensors storage by storage, so that tensors that shared a storage still do."""
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
    """Whether every element has its own memory, unlike an expanded tensor's elements."""
    return not any(
        step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def layout(tensor: torch.Tensor) -> list[int]:
    """The strides that matter: those of dimensions with more than one element."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in shape, dtype and every bit; NaN equals the same NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def same_value(a: Any, b: Any) -> bool:
    """Whether two values, no tensors, have the same type and are equal; NaN equals NaN."""
    return type(a) is type(b) and bool(a == b or (a != a and b != b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_quantized:
        flat = flat.int_repr()
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(_INTEGER[flat.element_size()])


class ModuleState:
    """A snapshot of what a module holds, to put back and to compare.

    Buffers and tensor attributes, which a call may change or replace, are kept as copies;
    everything else that it reaches by identity, containers with their content; parameters, which
    inference must not change, in host memory and by a checksum, unless `weights` is False.
    """

    def __init__(self, module: nn.Module, *, weights: bool = True) -> None:
        # Lists, dictionaries, objects and attributes, whatever holds them.
        self._held = Dependencies(module)
        # By name: the dictionary that holds each tensor, its key there, and the tensor.
        self._places: dict[str, tuple[dict[str, Any], str, torch.Tensor]] = {}
        # Weights that a hook, of weight_norm say, makes anew before each call.
        remade = set()
        self._slots: dict[str, tuple[dict[str, Any], str, torch.Tensor]] = {}
        for path, child in module.named_modules():
            root = f"{path}." if path else ""
            attributes = child.__dict__
            for holder in (child._buffers, attributes):
                if not isinstance(holder, dict):  # A ScriptModule shows a view.
                    continue
                for name, value in holder.items():
                    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                        self._places[root + name] = (holder, name, value)
                        if holder is attributes and child._forward_pre_hooks:
                            remade.add(root + name)
            slots = child._parameters
            for name, parameter in slots.items() if isinstance(slots, dict) else ():
                if parameter is not None and parameter.layout is torch.strided:
                    self._slots[root + name] = (slots, name, parameter)
        self._remade = frozenset(remade)
        self._grad = {name: t.requires_grad for name, (_, _, t) in self._places.items()}
        self._kept = {name: t.detach().clone() for name, (_, _, t) in self._places.items()}
        self._parameters = {
            name: parameter
            for name, parameter in module.named_parameters()
            if weights and parameter.layout is torch.strided
        }
        self._checksums = self._sums()
        self._weights = {n: p.detach().to("cpu", copy=True) for n, p in self._parameters.items()}

    def restore(self) -> None:
        """Put back what changed, except for the values of parameters."""
        self._held.put_back()
        for slots, key, parameter in self._slots.values():
            if slots.get(key) is not parameter:
                slots[key] = parameter
        with torch.no_grad():
            for name, (holder, key, tensor) in self._places.items():
                holder[key] = tensor
                if tensor.requires_grad and not self._grad[name]:
                    tensor.detach_()
                if not same_bits(tensor, self._kept[name]):
                    tensor.copy_(self._kept[name])

    def vary(self, storages: Collection[int]) -> None:
        """From now on, restore other values in the buffers of some storages, given by identity."""
        generator = torch.Generator().manual_seed(0)
        for name, (_, _, tensor) in self._places.items():
            if tensor.untyped_storage()._cdata in storages and tensor.is_floating_point():
                added = 0.5 + torch.rand(tensor.shape, generator=generator, device="cpu")
                self._kept[name] = self._kept[name] + added.to(tensor.device, tensor.dtype)

    def changes(self) -> dict[str, torch.Tensor]:
        """Copies of the buffers that differ from what was kept, by name."""
        found = {}
        for name, (holder, key, _) in self._places.items():
            now = holder.get(key)
            if isinstance(now, torch.Tensor) and not same_bits(now, self._kept[name]):
                found[f"buffer {name} after the call"] = now.detach().clone()
        return found

    def marks(self) -> dict[str, tuple[int, int]]:
        """Marks by name that change when a tensor is written to or replaced by other memory.

        A mark changes even if the values that are written were there before.
        """
        places = {n: p for n, p in self._places.items() if n not in self._remade} | self._slots
        found = {
            name: (_replaced(holder.get(key), tensor), _version(tensor))
            for name, (holder, key, tensor) in places.items()
        }
        return found | {n: (0, _version(self._places[n][2])) for n in self._remade}

    def corrupted(self) -> str | None:
        """Name of a parameter whose bits changed, or None; changed parameters are put back."""
        found = [name for name, value in self._sums().items() if value != self._checksums[name]]
        with torch.no_grad():
            for name in found:
                self._parameters[name].copy_(self._weights[name])
        return found[0] if found else None

    def changed(self) -> str | None:
        """Name of a tensor whose values changed, or None; nothing is put back."""
        found = [n for n, value in self._sums().items() if value != self._checksums[n]]
        found += [
            name
            for name, (holder, key, _) in self._places.items()
            if not isinstance(holder.get(key), torch.Tensor)
            or not same_bits(holder[key], self._kept[name])
        ]
        return found[0] if found else None

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Parameters and buffers by name."""
        return [*self._parameters.items(), *((n, t) for n, (_, _, t) in self._places.items())]

    def _sums(self) -> dict[str, int]:
        return {name: checksum(parameter) for name, parameter in self._parameters.items()}


def _replaced(now: Any, before: torch.Tensor) -> int:
    """The identity of a tensor in another one's place; 0 if it is the same memory."""
    if now is before or (
        isinstance(now, torch.Tensor)
        and now.layout is torch.strided
        and now.device == before.device
        and now.dtype == before.dtype
        and now.data_ptr() == before.data_ptr()
        and now.shape == before.shape
        and now.stride() == before.stride()
    ):
        return 0
    return id(now)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def checksum(tensor: torch.Tensor) -> int:
    """A sum over the tensor's bits, modulo 2**64, in which each element has another weight."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not tensor.numel():
        return 0
    for part in _bits(tensor).split(1 << 22):
        places = torch.arange(1, 2 * len(part), 2, device=tensor.device)
        total = 31 * total + (part.to(torch.int64) * places).sum()
    return int(total)


@dataclass
class Outcome:
    """What one call returned and changed.

    `written` names the module's tensors that the call wrote to, even if the values are the same;
    `wrote_inputs` tells whether it wrote to its arguments.
    """

    spec: pytree.TreeSpec
    outputs: dict[str, Any]
    inputs: dict[str, Any]
    buffers: dict[str, torch.Tensor]
    written: frozenset[str] = frozenset()
    wrote_inputs: bool = False

    def leaves(self) -> dict[str, Any]:
        """Everything that two outcomes must agree on, by name."""
        return {**self.outputs, **self.inputs, **self.buffers}


def outputs_by_name(result: Any) -> tuple[dict[str, Any], pytree.TreeSpec]:
    """The leaves of what a call returned, by name, and their tree.

    Raises:
        SignatureError: a leaf is an object that may hide tensors.
    """
    leaves, spec = pytree.tree_flatten(result)
    named = dict(zip(leaf_names(result, "output"), leaves, strict=True))
    for name, leaf in named.items():
        describe(leaf, name)
    return named, spec


def run(
    model: Model,
    call: Call,
    state: ModuleState,
    look: Callable[[Any, Call], None] | None = None,
    mode: AbstractContextManager[Any] | None = None,
) -> Outcome:
    """Call a model on clones of the inputs, from a given state, and keep what it did.

    Args:
        model: what is called.
        call: the inputs.
        state: the state to start from.
        look: called with what the model returned and the cloned call, before copies are made.
        mode: what the model alone runs under, not the copies and comparisons around it.

    Raises:
        SignatureError: the model returned something that cannot be compared.
    """
    state.restore()
    mine = call.clone()
    before, given = state.marks(), [_version(tensor) for tensor in mine.tensors()]
    with contextlib.nullcontext() if mode is None else mode:
        result = model(*mine.args, **mine.kwargs)
    written = frozenset(name for name, mark in state.marks().items() if mark != before[name])
    wrote = given != [_version(tensor) for tensor in mine.tensors()]
    if look is not None:
        look(result, mine)
    outputs, spec = outputs_by_name(result)
    inputs = {f"{name} after the call": leaf for name, leaf in mine.leaves().items()}
    return Outcome(spec, keep(outputs), keep(inputs), state.changes(), written, wrote)


def keep(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the tensors among some leaves, with their strides."""
    return {
        name: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
        for name, leaf in leaves.items()
    }
