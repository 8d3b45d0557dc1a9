"""PythonState: what warm-up may change beside tensors' values, kept and put back.

Random numbers of the host, gradients, attributes and containers are kept before the first run. What
changes in every run is state that a graph cannot update; it is refused by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ..calls.dependencies import Dependencies
from ..calls.host_generators import HostGenerators
from ..calls.iterators import Iterators
from ..calls.leaves import without_memory
from ..calls.objects import same
from ..calls.places import (
    MISSING,
    AttributesPlace,
    ClassPartsPlace,
    DictionaryPlace,
    HolderPlace,
    StatePlace,
    Written,
    kind_of,
    tensors_in,
)
from ..calls.watch import ModuleWatch
from ..errors import CaptureError
from .host_draws import HostDraws, drawn_from, is_foreign


class StateChanges(CaptureError):
    """The captured call keeps state in Python that changes with every call.

    Attributes:
        places: if what these hold were an argument and a result, nothing else would change.
    """

    places: tuple[Written, ...] = ()


class PythonState:
    """The Python side of a module's state as it was before the first run.

    Args:
        module: what is captured; a plain function as a FunctionModule.
        trained: parameters whose gradients the call may set; by default it may set none.
        hooks: whether changes made by hooks count as changes; they are put back in any case.
    """

    def __init__(
        self,
        module: nn.Module,
        trained: Sequence[torch.Tensor] | None = None,
        *,
        hooks: bool = True,
    ) -> None:
        self._module = module
        self._hooks = hooks
        self._trains = trained is not None
        self._kept = _Snapshot(module)
        trainable = trained
        if trained is None:  # Also what a function closes over, and what objects hold.
            reached = [t for _, t in self._kept.found.tensors if t.is_leaf]
            trainable = list({id(t): t for t in (*module.parameters(), *reached)}.values())
        self._grads = [(p, grad_of(p)) for p in trainable or ()]
        # As they are before the first run: of the process, and what the call can reach.
        self._generators = HostGenerators(self._kept.found)
        self._iterators = Iterators(self._kept.found)
        held = [t for _, t in self._kept.found.tensors]
        held += [*module.parameters(), *module.buffers()]  # Those of a ScriptModule too.
        held = list({id(t): t for t in held if t.layout is torch.strided}.values())
        # Inside a transform of torch.func the alias is a wrapped tensor.
        self._data = [(tensor, tensor.detach(), place_of(tensor)) for tensor in held]
        # A call that should train nothing may do so by mistake.
        optimizers = self._kept.found.optimizers if trained is None else []
        self._optimizers = [
            (o, {p: dict(state) for p, state in o.state.items()}, list(map(dict, o.param_groups)))
            for o in optimizers
        ]
        self._last: _Snapshot | None = None
        self._places: list[Written] | None = None
        self._written: list[Written] = []
        # What counters hold before the call counts for the first time, by the place's identity.
        self._bases: dict[int, int] = {}

    def allow_writes(self, places: list[Written], written: list[Written]) -> None:
        """Let the call write to attributes and items of dictionaries that it does not read.

        Args:
            places: those that are known; what is found is added.
            written: is filled with those to which it writes, once that is known.
        """
        self._places, self._written = places, written

    def settle(self) -> None:
        """Take all places for those to which the call writes."""
        self._written[:] = self.places

    @property
    def unsettled(self) -> str | None:
        """The name of a place of which it is not known whether the call reads it."""
        return next((place.name for place in self.places if place not in self._written), None)

    @property
    def places(self) -> list[Written]:
        """Attributes and items to which the call may write."""
        return self._places or []

    @property
    def objects(self) -> list[Any]:
        """What the module held before the first run, and its globals and closures."""
        return self._kept.found.objects

    def refusing_advances(self) -> AbstractContextManager[None]:
        """A block for the first run, in which no iterator may be advanced that was there before.

        Raises:
            CaptureError: the run would advance one; as a rule it is stopped before that.
        """
        return self._iterators.guarded()

    def check(self, read: Container[int] | None = None) -> None:
        """Compare with the state after the last run: what changes again and again is state.

        What changes in the first run alone may be a cache.

        Args:
            read: storages that the run has used from outside, by identity, where new places may be
                found to which each run writes; None where all are known.

        Raises:
            CaptureError: something changed; names the attribute or variable.
        """
        self._iterators.check()
        if not self._trains and any(grad_of(p) is not grad for p, grad in self._grads):
            raise CaptureError(
                "The call sets gradients of parameters, which a captured call does not.",
                remedy="Leave backward() out of the captured call.",
            )
        before = self._last
        if before is not None and before.still_holds():
            return
        self._last = now = _Snapshot(self._module, hooks=self._hooks)
        name, carried = (None, []) if before is None else self._first_state(before, now, read)
        if name is not None:
            error = StateChanges(
                f"{name} changes with every call, and a graph repeats no Python.",
                remedy="Keep it out of the captured call: pass it in and return it as a tensor, or "
                "update it where the graph is called.",
            )
            error.places = tuple(carried)
            raise error

    def _first_state(
        self, before: _Snapshot, now: _Snapshot, read: Container[int] | None
    ) -> tuple[str | None, list[Written]]:
        """The name of something that changed and that a graph cannot repeat.

        With it, all such places, if others could give the call what they hold.
        """
        places = self._places
        if places is None:
            return next((name for name, *_ in _changes(before, now)), None), []
        first: str | None = None
        carried: list[Written] = []
        rebound: set[int] = set()
        for name, place, key, old, new in _changes(before, now, rebound):
            if place is None:
                return name, []
            if not self._may_change(name, place, key, old, new, read):
                other = _carried(name, place, key, old, new)
                if other is None:
                    return name, []
                first = first or name
                carried.append(other)
            rebound.update(map(id, tensors_in(old)))
        return first, carried

    def _may_change(
        self,
        name: str,
        place: StatePlace,
        key: Any,
        old: Any,
        new: Any,
        read: Container[int] | None,
    ) -> bool:
        """Whether a place that changed is one that the call may write to; new ones are kept."""
        places = self._places
        assert places is not None
        if any(p.owner is place.owner and p.key == key for p in places):
            return True
        found = None if read is None else _written(name, place, key, old, new, read)
        if found is None:
            return False
        if found.counts:
            # The first run may have set it up, which stays; then it counted.
            self._bases[id(found)] = old - (new - old)
        places.append(found)
        return True

    def _at_first(self, written: Written) -> Any:
        """What was there before the first run."""
        for place in self._kept.found.places:
            if place.owner is written.owner and type(place) is written.kind:
                return place.held.get(written.key, MISSING)
        return MISSING

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage belongs to one of the model's tensors, and the call does not train."""
        return not self._trains and any(
            alias.untyped_storage()._cdata == storage._cdata
            for _, alias, _ in self._data
            if without_memory(alias) is None
        )

    def reaches(self, value: Any) -> bool:
        """Whether the module held something before the first run."""
        return id(value) in self._kept.found.visits

    def changed(self) -> str | None:
        """The name of something that has changed since the beginning; None if nothing has."""
        return next((name for name, *_ in _changes(self._kept, _Snapshot(self._module))), None)

    def refuse_host_randomness(
        self,
        device: torch.device,
        generators: Sequence[torch.Generator],
        draws: Sequence[HostDraws] = (),
    ) -> None:
        """Raise CaptureError if the call drew from a generator that a graph cannot repeat.

        Args:
            device: where the graph runs.
            generators: PyTorch's generators that the call drew from.
            draws: those of its runs from the host's default generator, if each replay can make them
                again; none may be used.
        """
        foreign = [g for g in generators if is_foreign(g, device)]
        if draws:
            for run in draws:
                run.to_repeat(device)
            foreign = [g for g in foreign if g is not torch.default_generator]
        drawn = [f"a generator on the {g.device}" for g in foreign]
        moved = self._generators.moved_of_process()
        drawn += [] if moved is None else [moved]
        if drawn:
            raise drawn_from(drawn[0])

    def restore(self, *, python: bool) -> None:
        """Put back random numbers and gradients; with `python`, attributes and containers too.

        After a successful capture what the first run set up stays, as after an eager call: a cache,
        say, or new memory for parameters. What it drew for that from a generator of the module's
        own stays drawn: draws in later runs are refused.
        """
        self._generators.put_back(own=python)
        for parameter, grad in self._grads:
            if grad_of(parameter) is not grad:
                parameter.grad = grad
        for optimizer, states, groups in self._optimizers:
            optimizer.state.clear()
            optimizer.state.update(states)
            for group, before in zip(optimizer.param_groups, groups, strict=False):
                group.update(before)
        for written in self._places or ():
            base = self._bases.get(id(written))
            written.put(self._at_first(written) if base is None else base)
        if python:
            self._kept.found.put_back()
            for tensor, alias, place in self._data:
                if place_of(tensor) != place:
                    tensor.data = alias
        for snapshot in (self._kept, self._last):
            if snapshot is not None:
                snapshot.let_go()


def grad_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A parameter's gradient; None for a tensor that is no leaf and has none."""
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Address, shape and strides of a tensor; the address is 0 where it has none."""
    address = tensor.data_ptr() if without_memory(tensor) is None else 0
    return address, tensor.shape, tensor.stride()


class _Snapshot:
    """Everything that a call can reach, tensors' values aside, as it was at one moment.

    It keeps what it has seen alive, so that no identity is reused meanwhile.
    """

    def __init__(self, module: nn.Module, *, hooks: bool = True) -> None:
        self.found = Dependencies(module, training=True, whole=True, hooks=hooks)
        self.places = {
            str(name): (tensor, place_of(tensor))
            for name, tensor in self.found.tensors
            if tensor.layout is torch.strided
        }
        self._generators = HostGenerators(self.found, process=False)
        self._watch = ModuleWatch(module, values=False, training=True, found=self.found)

    def still_holds(self) -> bool:
        """Whether nothing has changed; may be False though nothing has."""
        return self._watch.unchanged() and self.drawn() is None

    def let_go(self) -> None:
        """Keep alive no longer what it has seen, once nobody refers to it."""
        self._watch.let_go()

    def drawn(self) -> str | None:
        """The name of a random generator in it that has moved; None if none has."""
        return self._generators.moved()


def _labelled(places: Iterable[StatePlace]) -> Iterator[tuple[tuple[Any, ...], StatePlace]]:
    """Places with what tells them apart; functions of a file read the same globals."""
    counts: Counter[tuple[Any, ...]] = Counter()
    for place in places:
        label = type(place), str(place.name), id(place.owner)
        counts[label] += 1
        yield (*label, counts[label]), place


def _written(
    name: str, place: StatePlace, key: Any, old: Any, new: Any, read: Container[int]
) -> Written | None:
    """A value that each run replaces by new tensors without reading the old ones, or may add to.

    None for others.

    Args:
        name: of the value.
        place: what holds it.
        key: under which it does.
        old: what was there before the last run.
        new: what that run left there.
        read: storages that the run has used from outside, by identity.
    """
    if type(place) not in (AttributesPlace, ClassPartsPlace, DictionaryPlace):
        return None
    if type(old) is int and type(new) is int:
        return Written(name, place.owner, key, type(place), counts=True)
    if type(place) is ClassPartsPlace:
        return None
    kind = kind_of(new)
    if kind is None or MISSING in (old, new) or kind_of(old) != kind:
        return None
    displaced = tensors_in(old)
    if not displaced or any(t.untyped_storage()._cdata in read for t in displaced):
        return None
    return Written(name, place.owner, key, type(place))


def _carried(name: str, place: StatePlace, key: Any, old: Any, new: Any) -> Written | None:
    """A value with tensors in it that may be an argument and a result of the call."""
    if type(place) not in (AttributesPlace, DictionaryPlace, HolderPlace):
        return None
    if isinstance(new, nn.Parameter):
        return None
    kinds = kind_of(old), kind_of(new)
    if None in kinds or not (tensors_in(old) or tensors_in(new)):
        return None
    found = Written(name, place.owner, key, type(place))
    return found if found.is_plain else None


def _changes(
    before: _Snapshot, now: _Snapshot, rebound: Container[int] = ()
) -> Iterator[tuple[str, StatePlace | None, Any, Any, Any]]:
    """What differs between two snapshots: the name, what holds it, its key, and both values.

    Args:
        before: the earlier one.
        now: the later one.
        rebound: tensors, by identity, of which it is known that others took their places.
    """
    known = dict(_labelled(now.found.places))
    for label, old in _labelled(before.found.places):
        place = known.get(label)
        if place is None:
            continue  # Another object took its place, which shows in the place that holds it.
        if place.held.keys() != old.held.keys():
            key = next(iter(place.held.keys() ^ old.held.keys()))
            named = place.name if place.name.text else place.key_name(key)
            yield str(named), None, key, MISSING, MISSING
        # The order of attributes changes where those that calls set are put back meanwhile.
        elif type(place) is DictionaryPlace and [*place.held] != [*old.held]:
            yield f"the order of {place.name}", None, None, MISSING, MISSING
        for key, value in place.held.items():
            if key in old.held and not same(old.held[key], value):
                yield str(place.key_name(key)), place, key, old.held[key], value
    for name, (tensor, lies) in before.places.items():
        if id(tensor) in rebound:
            continue
        if now.places.get(name, (None, None)) != (tensor, lies) and name in now.places:
            yield name, None, None, tensor, tensor
    if (drawn := before.drawn()) is not None:
        yield drawn, None, None, None, None
