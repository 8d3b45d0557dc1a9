"""Snapshots of a module's state and of a call's inputs, outputs and side effects.

Calls run on clones of the inputs and start from the same buffers, so that a model that writes to
either can be run repeatedly and compared with itself.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import SignatureError, VerificationError
from .dependencies import PLAIN, Dependencies
from .first_use import FirstUse, RawAccess, unseen
from .introspection import StandIn, stood_for
from .iterators import Iterators
from .leaves import describe, without_memory
from .objects import apart
from .places import OF_TENSORS, AttributesPlace, HolderPlace, StatePlace
from .split import Args, argument_names, flatten, leaf_names, unflatten

Model = Callable[..., Any]
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Bytes of a storage from which on a copy may wait until it is used.
_LARGE = 1 << 20
# Copies of weights stay on a device that has so many times their memory free.
_ROOM = 4


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


class _KeptValues:
    """A tensor's values as they were; the tensor's own memory, until somebody uses that.

    Attributes:
        tensor: the tensor.
        value: its values; for a weight in host memory, unless there is room beside it.
        sum: of a weight's bits, where its values were moved to the host.
    """

    def __init__(self, tensor: torch.Tensor, *, weight: bool, room: bool) -> None:
        self.tensor = tensor
        self.value = tensor.detach()
        self.version = _version(tensor)
        self._moves = weight and not room and tensor.device.type != "cpu"
        self._used = False
        self.sum: torch.Tensor | None = None

    @property
    def used(self) -> bool:
        """Whether the values are a copy."""
        return self._used

    def use(self) -> None:
        """Copy the values, before something uses the memory."""
        if self._moves:
            self.sum = _sum_of(self.value)
        self.value = self.value.to("cpu", copy=True) if self._moves else self.value.clone()
        self._used = True

    def was_written(self) -> bool:
        """Whether unused memory was written to nevertheless."""
        if self._used or _version(self.tensor) == self.version:
            return False
        self.version = _version(self.tensor)
        # Where the tensor was given other memory, that may be what was written to.
        return _replaced(self.tensor, self.value) == 0


def _changed(weights: Mapping[str, _KeptValues]) -> list[str]:
    """Names of weights that hold other values than they did."""
    used = {name: kept for name, kept in weights.items() if kept.used}
    sums = {name: kept.sum for name, kept in used.items() if kept.sum is not None}
    now = checksums(used[name].tensor for name in sums)
    before = _values(list(sums.values()))
    others = {name for name, a, b in zip(sums, before, now, strict=True) if a != b}
    return [
        name
        for name, kept in used.items()
        if name in others or (kept.sum is None and not same_bits(kept.tensor, kept.value))
    ]


class _Memory:
    """What is kept of a module's tensors, shared by all snapshots of one piece of work."""

    def __init__(self, module: nn.Module, held: Dependencies, *, lazily: bool) -> None:
        reached = [value for place in held.places for value in place.held.values()]
        reached += [*module.modules(), *(getattr(m, "forward", None) for m in module.modules())]
        self._lazily = lazily and not any(map(_replays, reached))
        self._shown = self._lazily and any(map(_is_array, reached))
        self._room = self._lazily and _has_room(module)
        self._kept: dict[tuple[int, bool], _KeptValues] = {}
        self._unused: dict[int, list[_KeptValues]] = {}

    def keep(self, tensor: torch.Tensor, *, weight: bool = False) -> _KeptValues:
        """Keep a tensor's values as they are now, unless they are kept already."""
        kept = self._kept.get((id(tensor), weight))
        if kept is None:
            kept = self._kept[id(tensor), weight] = _KeptValues(
                tensor, weight=weight, room=self._room
            )
            if self._lazily and self._can_wait(tensor):
                self._unused.setdefault(tensor.untyped_storage()._cdata, []).append(kept)
            else:
                kept.use()
        return kept

    def use(self, storage: int | None) -> None:
        """Copy what a storage holds, given by identity, before it is used; None for all."""
        if not self._unused or (storage is not None and storage not in self._unused):
            return
        for identity in [*self._unused] if storage is None else [storage]:
            # Copying uses it, too.
            waiting = self._unused.pop(identity)
            try:
                with torch.no_grad(), torch._C.DisableTorchFunction():
                    while waiting:
                        waiting[-1].use()
                        waiting.pop()
            finally:
                if waiting:  # There is no memory for a copy.
                    self._unused[identity] = waiting

    def watching(self) -> AbstractContextManager[Any]:
        """A block that may use the memory.

        Where less is unused than was copied, the rest is copied too: no mode slows the block.
        """
        waiting = {each.tensor for several in self._unused.values() for each in several}
        copied = sum(each.tensor.nbytes for each in self._kept.values() if each.used)
        small = sum(tensor.nbytes for tensor in waiting) <= copied
        if small and not any(tensor.is_meta for tensor in waiting):
            self.use(None)
        return FirstUse(self.use, self._unused) if self._unused else contextlib.nullcontext()

    def watching_addresses(self) -> AbstractContextManager[Any]:
        """A block, inside of `watching`, in which uses of raw addresses are seen as well."""
        return RawAccess(self.use) if self._unused else contextlib.nullcontext()

    def _can_wait(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is worth waiting with, and all that use it can be seen."""
        if type(tensor) not in PLAIN or without_memory(tensor) or tensor.is_inference():
            return False
        if tensor.is_meta:
            return True
        storage = tensor.untyped_storage()
        # What NumPy shares cannot be resized; files and shared memory cannot either.
        return storage.nbytes() >= _LARGE and (storage.resizable() or not self._shown)


def _has_room(module: nn.Module) -> bool:
    """Whether there is plenty of memory for copies of a module's weights where they are."""
    sizes: Counter[torch.device] = Counter()
    for weight in module.parameters():
        if weight.is_cuda:
            sizes[weight.device] += weight.nbytes
    return all(torch.cuda.mem_get_info(d)[0] > _ROOM * size for d, size in sizes.items())


def _replays(value: Any) -> bool:
    """Whether a value may run work whose operations no mode sees: a graph."""
    if isinstance(value, StandIn | torch.cuda.CUDAGraph):
        return True
    if isinstance(value, nn.Module):
        return False
    module = getattr(type(value), "__module__", None)
    defined = getattr(value, "__module__", None) if callable(value) else None
    graphs = ("graphwright.graphs.", "graphwright.dispatch.", "graphwright.training.")
    return defined == "torch.cuda.graphs" or str(module).startswith(graphs)


def _is_array(value: Any) -> bool:
    """Whether a value may give Python other names for a tensor's memory."""
    kind = type(value)
    return kind is memoryview or (kind.__module__ == "numpy" and kind.__name__ == "ndarray")


class _Joined:
    """Small tensors of one kind that are compared all at once: a GPU is waited for each time.

    Args:
        names: of the tensors.
        tensors: contiguous and strided, of the same size of element and device.
        values: what they are compared with.
    """

    def __init__(
        self, names: list[str], tensors: list[torch.Tensor], values: list[torch.Tensor]
    ) -> None:
        self.names = frozenset(names)
        self._tensors = tensors
        self._places = self._where()
        self._bits = list(map(_bits, tensors))  # They share the tensors' memory.
        self._values = torch.cat(list(map(_bits, values)))

    def hold(self) -> bool:
        """Whether all of them hold these values."""
        if self._where() != self._places:
            return False
        return torch.equal(torch.cat(self._bits), self._values)

    def _where(self) -> list[tuple[int, torch.Size, torch.dtype]]:
        return [(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in self._tensors]


class _ReachedTensor(NamedTuple):
    """A tensor that a call reaches, and where.

    Attributes:
        tensor: the tensor.
        place: that holds it; None where no other can take its place, in a tuple say.
        key: under which the place holds it.
        remade: whether it is made before each call, as a hook of weight_norm does.
    """

    tensor: torch.Tensor
    place: StatePlace | None = None
    key: Any = None
    remade: bool = False

    def now(self) -> Any:
        """What is there now."""
        place = self.place
        return self.tensor if place is None else place.get(place.owner, self.key)


def _tensors_of(module: nn.Module, found: Dependencies) -> dict[str, _ReachedTensor]:
    """The tensors that a call of a module reaches, by name: those of its modules by their paths."""
    named = dict(_tensors_of_modules(module, found))
    seen = {id(reached.tensor) for reached in named.values()}
    # A function's, a ScriptModule's; in lists, objects, variables; and in tuples.
    others = [
        (n, _ReachedTensor(t)) for n, t in (*module.named_parameters(), *module.named_buffers())
    ]
    for place in found.places:
        others += ((str(place.key_name(key)), each) for key, each in _tensors_in(place))
    others += ((str(name), _ReachedTensor(tensor)) for name, tensor in found.tensors)
    for name, reached in others:
        if id(reached.tensor) not in seen:
            seen.add(id(reached.tensor))
            named[name if name not in named else f"{name} ({len(named)})"] = reached
    return {name: each for name, each in named.items() if each.tensor.layout is torch.strided}


def _tensors_of_modules(
    module: nn.Module, found: Dependencies
) -> Iterator[tuple[str, _ReachedTensor]]:
    """Parameters, buffers and attributes of a module and those in it, by their paths."""
    own = (HolderPlace, AttributesPlace)
    places = {id(place.owner): place for place in found.places if type(place) in own}
    for path, child in module.named_modules():
        root, part = f"{path}." if path else "", stood_for(child)
        for owner in (*(getattr(child, kind) for kind in OF_TENSORS), part):
            if (place := places.get(id(owner))) is not None:
                remade = owner is part and bool(part._forward_pre_hooks)
                for key, reached in _tensors_in(place, remade=remade):
                    yield f"{root}{key}", reached


def _tensors_in(place: StatePlace, *, remade: bool = False) -> Iterator[tuple[Any, _ReachedTensor]]:
    """The tensors that a place holds, by key."""
    for key, value in place.held.items():
        if isinstance(value, torch.Tensor):
            yield key, _ReachedTensor(value, place, key, remade)


class ModuleState:
    """A snapshot of what a module holds, to put back and to compare.

    Tensors that its calls reach, which they may change or replace, are kept as copies: buffers,
    attributes, tensors in lists and objects; everything else by identity, containers with their
    content; parameters, which inference must not change, in host memory, and on a GPU by a
    checksum, unless `weights` is False. With `lazily` they are copied where they are, if there is
    room.

    Attributes:
        iterators: those that a call can reach, and where they stood.

    Args:
        module: the module.
        weights: whether to keep parameters.
        lazily: copy large memory only before it is first used. All that may write to it has to run
            inside `watching`.
        shared: the snapshot of a module that this one is a part of, made at the start of the same
            work: what it keeps is shared.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        weights: bool = True,
        lazily: bool = False,
        shared: ModuleState | None = None,
    ) -> None:
        # Lists, dictionaries, objects and attributes, whatever holds them.
        self._held = Dependencies(module)
        self.iterators = Iterators(self._held)
        self._all = _tensors_of(module, self._held)
        self._tensors = {
            name: held.tensor
            for name, held in self._all.items()
            if not isinstance(held.tensor, nn.Parameter)
        }
        self._grad = {name: tensor.requires_grad for name, tensor in self._tensors.items()}
        memory = None if shared is None else shared._memory
        self._memory: _Memory = memory or _Memory(module, self._held, lazily=lazily)
        self._kept = {name: self._memory.keep(tensor) for name, tensor in self._tensors.items()}
        self._varied: dict[str, torch.Tensor] = {}
        self._joined: list[_Joined] | None = None
        # Each once, by its first name.
        first = {id(held.tensor): name for name, held in reversed(self._all.items())}
        self._named = {
            name: held.tensor
            for name, held in self._all.items()
            if weights and name not in self._tensors and first[id(held.tensor)] == name
        }
        self._weights = {
            name: self._memory.keep(parameter, weight=True)
            for name, parameter in self._named.items()
        }

    def watching(self) -> AbstractContextManager[Any]:
        """A block that may use the module's memory, which is copied before."""
        return self._memory.watching()

    def watching_addresses(self) -> AbstractContextManager[Any]:
        """A block, inside of `watching`, in which raw addresses are seen too; see `RawAccess`."""
        return self._memory.watching_addresses()

    def unused(self) -> list[torch.Tensor]:
        """Large tensors that nothing has used so far."""
        kept = [*self._kept.values(), *self._weights.values()]
        return [each.tensor for each in kept if not each.used]

    def restore(self) -> None:
        """Put back what changed, except for the values of parameters.

        Raises:
            VerificationError: memory was written to by what cannot be seen, on another thread say.
        """
        self._held.put_back()
        missed = [
            n for n, kept in (*self._kept.items(), *self._weights.items()) if kept.was_written()
        ]
        with unseen(), torch.no_grad():
            same = self._that_hold()
            for name, tensor in self._tensors.items():
                if tensor.requires_grad and not self._grad[name]:
                    tensor.detach_()
                if name not in same and not self._holds(name, tensor):
                    kept = self._kept[name]
                    if not kept.used:
                        self._memory.use(kept.value.untyped_storage()._cdata)
                    tensor.copy_(self._value(name))
        if missed:
            raise VerificationError(
                f"{missed[0]} was written to where no operation was seen, on another thread say: "
                "what it held before cannot be put back.",
                remedy="Write to it in the thread that calls the model.",
            )

    def _value(self, name: str) -> torch.Tensor:
        """What a tensor is restored to."""
        varied = self._varied.get(name)
        return self._kept[name].value if varied is None else varied

    def _holds(self, name: str, now: torch.Tensor) -> bool:
        """Whether a tensor holds what one of ours is restored to."""
        kept = self._kept[name]
        if not kept.used and name not in self._varied and _replaced(now, kept.value) == 0:
            return True
        return same_bits(now, self._value(name))

    def _that_hold(self) -> set[str]:
        """Names of small tensors that hold what they are restored to."""
        if self._joined is None:
            groups: dict[tuple[int, torch.device], list[str]] = {}
            for name, tensor in self._tensors.items():
                if _is_plain(tensor) and 0 < tensor.nbytes < _LARGE:
                    groups.setdefault((tensor.element_size(), tensor.device), []).append(name)
            self._joined = [
                _Joined(names, [self._tensors[n] for n in names], list(map(self._value, names)))
                for names in groups.values()
            ]
        return {name for group in self._joined if group.hold() for name in group.names}

    def vary(self, storages: Collection[int]) -> None:
        """From now on, restore other values in the buffers of some storages, given by identity."""
        generator = torch.Generator().manual_seed(0)
        self._joined = None
        for name, tensor in self._tensors.items():
            if tensor.untyped_storage()._cdata in storages and tensor.is_floating_point():
                added = 0.5 + torch.rand(tensor.shape, generator=generator, device="cpu")
                self._varied[name] = self._value(name) + added.to(tensor.device, tensor.dtype)

    def changes(self) -> dict[str, torch.Tensor]:
        """Copies of the buffers that differ from what was kept, by name."""
        found = {}
        with unseen():
            same = self._that_hold()
            for name, tensor in self._tensors.items():
                now = self._all[name].now()
                if now is tensor and name in same:
                    continue
                if isinstance(now, torch.Tensor) and not self._holds(name, now):
                    found[f"buffer {name} after the call"] = now.detach().clone()
        return found

    def marks(self) -> dict[str, tuple[int, int]]:
        """Marks by name that change when a tensor is written to or replaced by other memory.

        A mark changes even if the values that are written were there before.
        """
        return {
            name: (0 if held.remade else _replaced(held.now(), held.tensor), _version(held.tensor))
            for name, held in self._all.items()
        }

    def corrupted(self) -> str | None:
        """Name of a parameter whose bits changed, or None; changed parameters are put back."""
        found = _changed(self._weights)
        with torch.no_grad():
            for name in found:
                self._named[name].copy_(self._weights[name].value)
        return found[0] if found else None

    def changed(self) -> str | None:
        """Name of a tensor whose values changed, or None; nothing is put back."""
        found = _changed(self._weights)
        found += [
            name
            for name in self._tensors
            if not isinstance(now := self._all[name].now(), torch.Tensor)
            or not self._holds(name, now)
        ]
        return found[0] if found else None

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors that are kept, by name."""
        return [*self._named.items(), *self._tensors.items()]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bits are those of its memory, one after the other."""
    if type(tensor) not in PLAIN or without_memory(tensor) or tensor.is_meta:
        return False
    other = tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return not other and tensor.is_contiguous()


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
    return int(_sum_of(tensor))


def checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The checksum of each tensor; a device is waited for once."""
    return _values(list(map(_sum_of, tensors)))


def _sum_of(tensor: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not tensor.numel():
        return total
    for part in _bits(tensor).split(1 << 22):
        places = torch.arange(1, 2 * len(part), 2, device=tensor.device)
        total = 31 * total + (part.to(torch.int64) * places).sum()
    return total


def _values(sums: Sequence[torch.Tensor]) -> list[int]:
    """The numbers of some sums, in their order."""
    found: dict[int, int] = {}
    for device in {each.device for each in sums}:
        mine = [n for n, each in enumerate(sums) if each.device == device]
        found.update(zip(mine, torch.stack([sums[n] for n in mine]).tolist(), strict=True))
    return [found[n] for n in range(len(sums))]


@dataclass
class CallOutcome:
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
    result = apart(result)
    leaves, spec = pytree.tree_flatten(result)
    named = dict(zip(leaf_names(result, "output"), leaves, strict=True))
    for name, leaf in named.items():
        try:
            describe(leaf, name)
        except SignatureError as error:
            raise SignatureError(
                error.what,
                remedy="Return tensors, plain values, and containers and objects of them.",
            ) from error
    return named, spec


def run(
    model: Model,
    call: Call,
    state: ModuleState,
    look: Callable[[Any, Call], None] | None = None,
    mode: AbstractContextManager[Any] | None = None,
) -> CallOutcome:
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
    return CallOutcome(spec, keep(outputs), keep(inputs), state.changes(), written, wrote)


def keep(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the tensors among some leaves, with their strides."""
    return {
        name: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
        for name, leaf in leaves.items()
    }
