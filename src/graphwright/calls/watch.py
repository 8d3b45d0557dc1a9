"""Notice whatever makes work that was built from a module out of date.

`ModuleWatch` compares what a call depends on (`dependencies`) with what it was; a plain function is
watched as a module that holds what the function reaches.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import OptionError
from .dependencies import (
    Dependencies,
    Source,
    _Attributes,
    _Cells,
    _ClassParts,
    _Dictionary,
    _Globals,
    _Length,
    _Parts,
    _Sequence,
    _Set,
    _Slots,
    apart,
    difference,
)
from .signature import guard_of, without_memory
from .snapshots import checksum


class ModuleWatch:
    """Notices whatever makes work that was built from a module out of date.

    Watched is what `Dependencies` finds: parameters, buffers, submodules and attributes by
    identity, plain values by value, wherever modules hold them: in lists, dictionaries, sets and
    objects too; tensors by address and shape; forward hooks, those for all modules among them; the
    classes of modules and the methods that these run; for a function its code, what it closes over
    and the globals that it names. With `values=True` also in-place changes of tensors, for work
    that holds a copy of the weights or has folded them; with `audit=N` too by a checksum of all
    their values at every Nth look, which finds writes that PyTorch does not report (through
    `.data`, NumPy or a pointer).

    The watch keeps the tensors' memory alive, so that what was built never reads memory that was
    given to others, and no address comes back.

    Attributes:
        memory: that of all tensors that it watches.
        unread: names of objects that it cannot look into.
        unchanged: a quick look; it may say no where nothing has changed but to an equal value in
            another object: ask `changed()` then.
    """

    unchanged: Callable[[], bool]

    def __init__(
        self,
        module: nn.Module,
        *,
        values: bool,
        training: bool = False,
        audit: int | None = None,
        hooks: bool = True,
        found: Dependencies | None = None,
    ) -> None:
        """Begin to watch.

        Args:
            module: what is watched.
            values: also notice in-place changes of tensors.
            training: watch hooks for the backward too, and no hook of the module itself: for work
                that stands for its `forward`, around which they run.
            audit: with `values`, compare a checksum of the tensors' values at every Nth look.
            hooks: also watch what hooks reach. Where they run at every call it is no concern.
            found: what the module depends on, where that is known.
        """
        self.values = values
        self._module = module
        self._walk = functools.partial(Dependencies, module, training=training, hooks=hooks)
        self._training = training
        self.audit = self._audit = audit if values else None
        self._looks = 0
        self._other_values = False
        self._quick = _Quick()
        self.unchanged = self._quick.comparison(self)
        self._begin(found or self._walk())
        self._sums = [] if self._audit is None else list(map(checksum, self._tensors))

    def _begin(self, found: Dependencies, versions: list[Any] | None = None) -> None:
        """Compare with these dependencies from now on."""
        self._found = found
        self.unread = tuple(found.unread)
        ignores = found.ignores or (lambda tensor: False)
        named = [
            (name, t)
            for name, t in found.tensors
            if t.layout is torch.strided and without_memory(t) is None and not ignores(t)
        ]
        self._names = [str(name) for name, _ in named]
        self._tensors = [tensor for _, tensor in named]
        self.memory = [tensor.untyped_storage() for tensor in self._tensors]
        self._addresses = list(map(_ADDRESS, self._tensors))
        self._geometries = list(map(_geometry, self._tensors))
        self._trained = [t.requires_grad for t in self._tensors] if self._training else None
        self._guard = guard_of(self._tensors)
        # Inference tensors keep no version counter; they cannot change outside inference mode.
        versioned = [(name, tensor) for name, tensor in named if not tensor.is_inference()]
        self._versioned = versioned if self.values else []
        self._counted = [tensor for _, tensor in self._versioned]
        self._versions = list(map(_VERSION, self._counted))
        self._types = list(map(type, found.typed))
        self._settle(versions)

    def _settle(self, versions: list[Any] | None = None) -> None:
        """Take what was compared for what is quickly compared with.

        Args:
            versions: of the dictionaries, from before they were read.
        """
        found, quick = self._found, self._quick
        attributed = [s for s in found.sources if type(s) is _Attributes]
        filled = [s for s in found.sources if isinstance(s, _Dictionary) and _has_version(s.owner)]
        lists = [s for s in found.sources if isinstance(s, _Sequence | _Set)]
        simple = [s for s in found.sources if type(s) is _ClassParts and [*s.held] == ["forward"]]
        long = [s for s in found.sources if type(s) is _Length]
        known = set(map(id, (*attributed, *filled, *lists, *simple, *long)))
        others = [s for s in found.sources if id(s) not in known]
        self._ordered = [*attributed, *filled, *lists, *simple, *long, *others]
        quick.owners[:] = [s.owner for s in attributed]
        quick.filled[:] = [s.owner for s in filled]
        quick.empty[:] = found.empty
        quick.typed[:] = found.typed
        quick.types[:] = self._types
        quick.classes[:] = [vars(s.owner) for s in simple]
        quick.forwards[:] = [s.held["forward"] for s in simple]
        quick.lists[:] = [s.owner for s in lists]
        quick.items[:] = [value for s in lists for value in s.held.values()]
        quick.lengths[:] = [len(s.held) for s in lists]
        quick.long[:] = [s.owner for s in long]
        quick.long_lengths[:] = [s.held["its length"] for s in long]
        getters = [getter for source in others for getter in _getters(source)]
        quick.getters[:] = [(get, of) for get, of, _ in getters]
        quick.values[:] = itertools.chain.from_iterable([held for _, _, held in getters])
        quick.addressed[:] = self._tensors
        quick.addresses[:] = self._addresses
        if versions is None or len(versions) != len(attributed) + len(filled):
            versions = quick.versions_now()
        quick.versions[:] = versions

    def same_tensors(self) -> bool:
        """Whether geometry and, where they matter, values and training are what they were."""
        plain = self._guard is not None and self._guard(*self._tensors)
        if not plain and list(map(_geometry, self._tensors)) != self._geometries:
            return False
        if self._versions and list(map(_VERSION, self._counted)) != self._versions:
            return False
        if self._trained is not None and self._thawed():
            return False
        return self._audit is None or self._audited()

    def _audited(self) -> bool:
        """Whether the values are the same, as far as it is time to look."""
        assert self._audit is not None
        self._looks += 1
        if self._other_values or self._looks % self._audit == 0:  # Once found, until put back.
            self._other_values = list(map(checksum, self._tensors)) != self._sums
        return not self._other_values

    def changed(self) -> str | None:
        """What has changed since the watch was made, in words, or None."""
        if self.unchanged():
            return None
        # Before anything is compared: what another thread writes meanwhile must not pass for old.
        versions = self._quick.versions_now()
        change, unsure = self._difference(versions)
        if change is not None:
            return change
        if not unsure:
            self._settle(versions)
            return None
        fresh = self._walk()
        change = apart(self._found, fresh, unsure)
        if change is None:
            self._begin(fresh, versions)
        return change

    def _difference(self, versions: list[Any]) -> tuple[str | None, list[Any]]:
        """What has changed; and what only another walk can tell."""
        if any(self._found.empty):
            return "a parameter, buffer, submodule or forward hook was added", []
        for value, before in zip(self._found.typed, self._types, strict=True):
            if type(value) is not before:
                return f"a {before.__name__} became a {type(value).__name__}", []
        unsure: list[Any] = []
        known = self._quick.versions
        same_size = len(known) == len(versions)
        for index, source in enumerate(self._ordered):
            if same_size and index < len(versions) and versions[index] == known[index]:
                continue  # It has not been written to.
            try:
                now = source.read()
            except Exception:  # What holds the values has changed its kind.
                return f"{source.name} was replaced", []
            change, unknown = difference(source, now, self._found.ignores)
            if change is not None:
                return change, []
            unsure += unknown
        return self._difference_of_tensors(), unsure

    def _difference_of_tensors(self) -> str | None:
        """What has changed about tensors that are held as they were."""
        addresses = list(map(_ADDRESS, self._tensors))
        if (index := _first_apart(addresses, self._addresses)) is not None:
            return f"the memory of {self._names[index]} moved"
        geometries = list(map(_geometry, self._tensors))
        if (index := _first_apart(geometries, self._geometries)) is not None:
            return f"the shape, strides or dtype of {self._names[index]} changed"
        versions = list(map(_VERSION, self._counted))
        if (index := _first_apart(versions, self._versions)) is not None:
            name = self._versioned[index][0]
            return f"{name} changed in place, and what was built holds a copy"
        if self._other_values:
            sums = list(map(checksum, self._tensors))
            if (index := _first_apart(sums, self._sums)) is not None:
                return (
                    f"{self._names[index]} changed in place in a way that PyTorch does not report, "
                    "and what was built holds a copy"
                )
        if self._thawed():
            return "a parameter or buffer was frozen, or is trained by now"
        return None

    def _thawed(self) -> bool:
        if self._trained is None:
            return False
        return [tensor.requires_grad for tensor in self._tensors] != self._trained

    def rebound(self) -> bool:
        """Whether a tensor that was watched is held no longer, or has moved, for good."""
        held = {id(tensor) for _, tensor in Dependencies(self._module).tensors}
        return any(id(tensor) not in held for tensor in self._tensors) or (
            list(map(_ADDRESS, self._tensors)) != self._addresses
            or list(map(_geometry, self._tensors)) != self._geometries
        )


class _Quick:
    """What is compared at every call, laid out so that nearly all of it runs in C.

    Attributes:
        owners: modules and objects, whose attributes count.
        filled: dictionaries that hold something.
        versions: of the attributes of the first and of the others.
        empty: dictionaries that hold nothing.
        typed: modules and objects, whose class counts.
        types: the classes.
        classes: classes of modules of which just `forward` counts.
        forwards: of these.
        lists: sequences.
        lengths: of these.
        items: what they hold, in a row.
        long: what is watched by its length alone.
        long_lengths: of these.
        getters: other things that are read, as a function that gives several, and of what.
        values: what these give, in a row.
        addressed: tensors.
        addresses: of these.
    """

    def __init__(self) -> None:
        self.owners: list[Any] = []
        self.filled: list[dict[Any, Any]] = []
        self.versions: list[Any] = []
        self.empty: list[Any] = []
        self.typed: list[Any] = []
        self.types: list[type] = []
        self.classes: list[Any] = []
        self.forwards: list[Any] = []
        self.lists: list[Any] = []
        self.lengths: list[int] = []
        self.items: list[Any] = []
        self.long: list[Any] = []
        self.long_lengths: list[int] = []
        self.getters: list[tuple[Callable[[Any], Any], Any]] = []
        self.values: list[Any] = []
        self.addressed: list[torch.Tensor] = []
        self.addresses: list[int] = []

    def versions_now(self) -> list[Any]:
        """Of all dictionaries."""
        return [*map(_version, map(_ATTRIBUTES, self.owners)), *map(_version, self.filled)]

    def comparison(self, watch: ModuleWatch) -> Callable[[], bool]:
        """A function that says whether all is the same, the tensors of a watch included."""
        # Names of the function's own, which are found faster than attributes.
        row, same = itertools.chain.from_iterable, operator.is_
        attributes, version, address = _ATTRIBUTES, _version, _ADDRESS
        owners, filled, versions = self.owners, self.filled, self.versions
        empty, typed, types_ = self.empty, self.typed, self.types
        classes, forwards = self.classes, self.forwards
        lists, lengths, items = self.lists, self.lengths, self.items
        getters, values = self.getters, self.values
        long, long_lengths = self.long, self.long_lengths
        addressed, addresses = self.addressed, self.addresses
        tensors = watch.same_tensors

        def unchanged() -> bool:
            if [*map(version, map(attributes, owners)), *map(version, filled)] != versions:
                return False
            if list(map(type, typed)) != types_ or any(empty):
                return False
            try:
                if list(map(_FORWARD, classes)) != forwards:
                    return False
            except KeyError:  # It is the base class's now.
                return False
            if long and list(map(len, long)) != long_lengths:
                return False
            if lists and not (
                list(map(len, lists)) == lengths and all(map(same, row(lists), items))
            ):
                return False
            try:
                if getters and not all(map(same, row([get(of) for get, of in getters]), values)):
                    return False
            except Exception:  # One of them is gone.
                return False
            return list(map(address, addressed)) == addresses and tensors()

        return unchanged


def _getters(source: Source) -> list[tuple[Callable[[Any], Any], Any, tuple[Any, ...]]]:
    """How the values of a source are read quickly: functions, what of, and what they gave."""
    held = source.held
    if isinstance(source, _Cells):
        cells = source.owner.__closure__ or ()
        # Twice the same: for one alone it gives no tuple.
        get = operator.attrgetter("cell_contents", "cell_contents")
        names = zip(source.owner.__code__.co_freevars, cells, strict=True)
        return [(get, cell, (held[n], held[n])) for n, cell in names if n in held]
    keys = tuple(held)
    if not keys:
        return []
    twice = (held[keys[0]], *held.values())
    if isinstance(source, _Globals):
        return [(operator.itemgetter(keys[0], *keys), source.owner, twice)]
    if isinstance(source, _ClassParts):
        return [(operator.itemgetter(keys[0], *keys), vars(source.owner), twice)]
    if isinstance(source, _Parts | _Slots):
        return [(operator.attrgetter(keys[0], *keys), source.owner, twice)]
    return [(_both, source, (*keys, *held.values()))]


def _both(source: Source) -> list[Any]:
    now = source.read()
    return [*now, *now.values()]


def check_audit(audit: Any) -> None:
    """Refuse what is no number of calls.

    Raises:
        OptionError: it is none.
    """
    if audit is not None and (not isinstance(audit, int) or isinstance(audit, bool) or audit < 1):
        raise OptionError(f"audit is a number of calls above 0, or None, not {audit!r}.")


def unread_in_words(watch: ModuleWatch) -> list[str]:
    """One line on the objects that a watch cannot look into; none where there are none."""
    if not watch.unread:
        return []
    shown = ", ".join(watch.unread[:_SHOWN])
    more = len(watch.unread) - _SHOWN
    return [f"not looked into: {shown}{f' and {more} more' if more > 0 else ''}"]


def _first_apart(new: Sequence[Any], old: Sequence[Any]) -> int | None:
    for index, (a, b) in enumerate(zip(new, old, strict=True)):
        if a != b:
            return index
    return None


_SHOWN = 5
_ADDRESS = torch.Tensor.data_ptr
_FORWARD = operator.itemgetter("forward")
_VERSION = operator.attrgetter("_version")
_ATTRIBUTES = operator.attrgetter("__dict__")


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _content(dictionary: dict[Any, Any]) -> Any:
    """What stands for the version of a dictionary, where nobody tells it."""
    return tuple(map(id, itertools.chain(dictionary, dictionary.values())))


def _version_of_dictionaries() -> Callable[[dict[Any, Any]], Any]:
    """What gives the version of a dictionary, which no other one and no later state of it has.

    torch.compile guards modules with it. It is no public interface, hence tried out.
    """
    try:
        from torch._C._dynamo.guards import dict_version

        class Tried:
            pass

        tried: Any = Tried()
        tried.a = 1
        versions = [dict_version(tried.__dict__)]
        for change in (
            lambda: setattr(tried, "a", 2),
            lambda: tried.__dict__.update(a=3),
            lambda: setattr(tried, "b", 3),
            lambda: delattr(tried, "b"),
            lambda: setattr(tried, "__dict__", dict(tried.__dict__)),
        ):
            change()
            versions.append(dict_version(tried.__dict__))
        works = len(set(versions)) == len(versions) and versions[-1] == dict_version(tried.__dict__)
    except Exception:
        return _content
    found: Callable[[dict[Any, Any]], Any] = dict_version
    return found if works else _content


_version = _version_of_dictionaries()


def _has_version(holder: Any) -> bool:
    # The order of an OrderedDict changes without one.
    return isinstance(holder, dict) and not isinstance(holder, OrderedDict)
