"""ModuleWatch: notices changes that make work built from a module out of date.

It compares what a call depends on (`dependencies`) with what it was. A plain function is watched as
a module that holds what the function reaches.
"""

from __future__ import annotations

import functools
import itertools
import operator
import time
import types
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..errors import levels_above
from .dependencies import PLAIN, Dependencies, compare_walks
from .dictionaries import read, reader
from .differences import difference
from .forking import lock
from .leaves import guard_of, without_memory
from .snapshots import checksums
from .sources import FastWay
from .split import Args, Kwargs

# What is looked at before a call is answered by what was built: its arguments and the module, its
# arguments alone, or nothing.
Checks = Literal["full", "signature", "none"]
# Gives the tensors of a call in a row, or None where they are no such tensors as those of another.
FittingTensors = Callable[[Args, Kwargs], Args | None]
# The checks in C++, of modules and of arguments, once they are built: `ops/compiled_checks.py`.
COMPILED: list[Callable[..., Callable[[], bool]]] = []
COMPILED_ARGUMENTS: list[Callable[[Args, tuple[str, ...], bool, bool], FittingTensors]] = []
# What builds it; called once, when looks in Python have become many.
WANTED: list[Callable[[], object]] = []
_MANY = 500
_looks = itertools.count(1)
# Checks in Python in a row that find no change before one in C++ is made: at first, and where what
# is watched is written to again and again.
_QUIET, _MOST_QUIET = 2, 1024
# Looks whose cost is told by the fastest.
_COST_LOOKS = 10
# Why values count that change in place.
HELD = "and what was built holds a copy"
# How many objects that cannot be looked into are named.
_SHOWN = 5
# Code of which it was told that it looks up globals by names that it computes.
_WARNED_OF: weakref.WeakSet[types.CodeType] = weakref.WeakSet()
# Read by functions in C, as these run at every call.
_ADDRESS = torch.Tensor.data_ptr
_FORWARD = operator.itemgetter("forward")
_VERSION = operator.attrgetter("_version")
_ATTRIBUTES = operator.attrgetter("__dict__")


class Watched(Protocol):
    """Something whose changes can be noticed."""

    def unchanged(self) -> bool:
        """A fast check, which may return False where nothing has changed."""

    def changed(self) -> str | None:
        """What has changed, in words, or None."""


class ModuleWatch:
    """Notices changes that make work built from a module out of date.

    It watches what `Dependencies` finds: parameters, buffers, submodules and attributes by
    identity, plain values by value, also in lists, dictionaries, sets and objects; tensors by
    address and shape; forward hooks, also those for all modules; the classes of modules and the
    methods that run; for a function its code, its closure and the globals that it names. With
    `values=True` it also watches in-place changes of tensors, for work that holds copies of the
    weights. With `audit=N` every Nth check compares a checksum of all values too, which finds
    writes that PyTorch does not report (through `.data`, NumPy or a pointer).

    The watch keeps the tensors' memory alive, so that what was built never reads memory that was
    given to others, and no address is reused.

    Attributes:
        memory: storages of all watched tensors.
        unread: names of objects that it cannot look into.
        unchanged: a fast check; it may return False if only equal values in other objects took the
            place of values, so `changed()` has to decide.
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
        checks: Checks = "full",
        hidden: Mapping[int, frozenset[Any]] | None = None,
        given: Sequence[type] = (),
    ) -> None:
        """Begin to watch.

        Args:
            module: what is watched.
            values: also notice in-place changes of tensors.
            training: also watch hooks for the backward, but not the module's own hooks: for work
                that replaces its `forward`, around which these still run.
            audit: with `values`, compare a checksum of the tensors' values at every Nth check.
            hooks: also watch what hooks reach; not needed where they run at every call.
            found: what the module depends on, if that is known.
            checks: with any but "full", nothing is looked at and nothing has ever changed.
            hidden: attributes and items that are not watched, by the identity of their owners.
            given: classes of a call's arguments; then only these are watched.
        """
        self.values = values
        if values:
            _have_fused_steps_counted()
        self._module = module
        self._walk = functools.partial(
            Dependencies, module, training=training, hooks=hooks, hidden=hidden, given=given
        )
        self._training = training
        self._owners = () if hidden is None else tuple(hidden)
        self.audit = self._audit = audit if values else None
        self._looks = 0
        self._other_values = False
        # What is found and what it is compared with are one thread's to replace.
        self._lock = lock()
        # Of parts inside, whose changes count too.
        self._joined: list[Watched] = []
        self._quick = _Quick()
        self._looks_at_all = checks == "full"
        self.unchanged = self._quick.comparison(self) if self._looks_at_all else lambda: True
        self._begin(found or self._walk())
        self._sums = [] if self._audit is None else checksums(self._tensors)
        if self._looks_at_all and found is None:
            _warn_of_computed(self._found)

    @property
    def visits(self) -> Mapping[int, int]:
        """Everything that the module reaches, by identity."""
        return self._found.visits

    @property
    def objects(self) -> list[Any]:
        """The same, itself."""
        return self._found.objects

    def join(self, other: Watched) -> None:
        """From now on, notice what another notices, too."""
        if all(other is not known for known in self._joined):
            self._joined.append(other)

    def _begin(self, found: Dependencies, versions: list[Any] | None = None) -> None:
        """From now on, compare with these dependencies."""
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
        self._subclassed = any(type(tensor) not in PLAIN for tensor in self._tensors)
        self._guard = guard_of(self._tensors)
        # Inference tensors keep no version counter; they cannot change outside inference mode.
        versioned = [(name, tensor) for name, tensor in named if not tensor.is_inference()]
        self._versioned = versioned if self.values else []
        self._counted = [tensor for _, tensor in self._versioned]
        self._versions = list(map(_VERSION, self._counted))
        self._types = list(map(type, found.typed))
        self._settle(versions)

    def _settle(self, versions: list[Any] | None = None) -> None:
        """Fill in what the fast check compares, from the current dependencies.

        Args:
            versions: of the dictionaries, taken before they were read.
        """
        found, quick = self._found, self._quick
        ways = {way: [s for s in found.sources if s.way() is way] for way in FastWay}
        self._ordered = [source for sources in ways.values() for source in sources]
        attributed, dictionaries = ways[FastWay.ATTRIBUTES], ways[FastWay.DICTIONARY]
        lists, simple, long = ways[FastWay.ITEMS], ways[FastWay.FORWARD], ways[FastWay.LENGTH]
        files = ways[FastWay.FILE]
        others = [*ways[FastWay.VALUES], *files]
        quick.look_at([s.owner for s in attributed], [s.owner for s in dictionaries])
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
        getters = [getter for source in others for getter in source.getters()]
        quick.getters[:] = [(get, of) for get, of, _ in getters]
        quick.counts[:] = [len(held) for _, _, held in getters]
        quick.values[:] = itertools.chain.from_iterable([held for _, _, held in getters])
        quick.files[:] = [vars(s.owner) for s in files]
        quick.addressed[:] = self._tensors
        quick.addresses[:] = self._addresses
        if versions is None or len(versions) != len(attributed) + len(dictionaries):
            versions = quick.versions_now()
            for index, source in enumerate((*attributed, *dictionaries)):
                if (
                    not source.holds_the_same()
                ):  # Another thread has written to it since it was read.
                    versions[index] = None
        quick.versions[:] = versions
        quick.settled += 1
        quick.drop_compiled()

    def compiled(self) -> Callable[[], bool] | None:
        """The check in C++ of all but audits, gradients and other watches, if there can be one."""
        quick = self._quick
        if not COMPILED:
            return None
        counted = dict(zip(map(id, self._counted), self._versions, strict=True))
        tensors = [counted.get(id(tensor), -1) for tensor in self._tensors]
        try:
            return COMPILED[0](*quick.parts(), self._tensors, tensors)
        except Exception:  # One of the objects is of a kind that it does not know.
            return None

    def unaudited(self) -> bool:
        """Whether what the check in C++ leaves out is as it was."""
        if self._trained is not None and self._thawed():
            return False
        return self._audit is None or self._audited()

    def same_tensors(self) -> bool:
        """Whether geometry and, if they matter, values and requires_grad are what they were."""
        plain = self._guard is not None and self._guard(*self._tensors)
        if not plain and list(map(_geometry, self._tensors)) != self._geometries:
            return False
        if self._versions and list(map(_VERSION, self._counted)) != self._versions:
            return False
        if self._trained is not None and self._thawed():
            return False
        return self._audit is None or self._audited()

    def _audited(self) -> bool:
        """Whether the values are the same, as far as an audit is due."""
        assert self._audit is not None
        self._looks += 1
        # Once a change is found, each check looks, until it is put back.
        if self._other_values or self._looks % self._audit == 0:
            self._other_values = checksums(self._tensors) != self._sums
        return not self._other_values

    def let_go(self) -> None:
        """Watch nothing any more: what it has seen is kept alive by nobody."""
        self.unchanged = lambda: False  # It refers to the watch, which refers to it.

    def changed(self) -> str | None:
        """What has changed since the watch was made, in words, or None."""
        if self.unchanged():
            return None
        with self._lock:
            own = self._changed()
        return own or next(filter(None, (watch.changed() for watch in self._joined)), None)

    def _changed(self) -> str | None:
        # Taken before anything is compared: writes of other threads meanwhile must show.
        versions = self._quick.versions_now()
        change, unsure = self._difference(versions)
        if change is not None:
            return change
        if not unsure or self._found.exchange(unsure):
            self._settle(versions)
            return None
        fresh = self._walk()
        change = compare_walks(self._found, fresh, unsure)
        # Without what each call writes to it, another container may look like the old one.
        for owner in self._owners:
            if change is None and owner in self._found.visits and owner not in fresh.visits:
                change = "an object to which each call writes was replaced"
        if change is None:
            self._begin(fresh, versions)
        return change

    def _difference(self, versions: list[Any]) -> tuple[str | None, list[Any]]:
        """What has changed, in words; and values that only another walk can compare."""
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
            except Exception:  # The owner has become something else.
                return f"{source.name} was replaced", []
            change, unknown = difference(source, now, self._found.ignores)
            if change is not None:
                return change, []
            unsure += unknown
        return self._difference_of_tensors(), unsure

    def _difference_of_tensors(self) -> str | None:
        """What has changed about the watched tensors themselves, in words."""
        addresses = list(map(_ADDRESS, self._tensors))
        if (index := _first_difference(addresses, self._addresses)) is not None:
            return f"the memory of {self._names[index]} moved"
        geometries = list(map(_geometry, self._tensors))
        if (index := _first_difference(geometries, self._geometries)) is not None:
            return f"the shape, strides or dtype of {self._names[index]} changed"
        versions = list(map(_VERSION, self._counted))
        if (index := _first_difference(versions, self._versions)) is not None:
            name = self._versioned[index][0]
            return f"{name} changed in place, {HELD}"
        if self._other_values:
            sums = checksums(self._tensors)
            if (index := _first_difference(sums, self._sums)) is not None:
                return (
                    f"{self._names[index]} changed in place in a way that PyTorch does not report, "
                    f"{HELD}"
                )
        if self._thawed():
            return "a parameter or buffer was frozen, or is trained by now"
        return None

    def _thawed(self) -> bool:
        if self._trained is None:
            return False
        return [tensor.requires_grad for tensor in self._tensors] != self._trained

    @property
    def tensor_ids(self) -> set[int]:
        """The identities of all tensors that were found."""
        return {id(tensor) for _, tensor in self._found.tensors}

    def rebound(self, held: set[int] | None = None) -> bool:
        """Whether a watched tensor is gone, has moved or changed its shape; or a part changed.

        Args:
            held: identities of the tensors that the module holds now, if they are known.
        """
        if not self._looks_at_all:
            return False
        if any(watch.changed() is not None for watch in self._joined):
            return True
        if held is None:
            held = {id(tensor) for _, tensor in Dependencies(self._module).tensors}
        return any(id(tensor) not in held for tensor in self._tensors) or (
            list(map(_ADDRESS, self._tensors)) != self._addresses
            or list(map(_geometry, self._tensors)) != self._geometries
        )


class _Quick:
    """What is compared at every call, laid out so that nearly all of it runs in C.

    Attributes:
        owners: modules and objects whose attributes are watched.
        dictionaries: dictionaries that hold something.
        versions: of the owners' attributes, then of the dictionaries.
        attributes: the dictionaries in which the owners have their attributes.
        readers: what gives the versions.
        empty: dictionaries that hold nothing.
        typed: modules and objects whose class is watched.
        types: their classes.
        classes: attributes of classes of which only `forward` is watched.
        forwards: these methods.
        lists: lists, deques, tuples and sets.
        lengths: their lengths.
        items: everything in them, in a row.
        long: containers that are watched by their length alone.
        long_lengths: their lengths.
        getters: a function that reads several other values, and what it reads them from.
        counts: how many values each gives.
        values: everything that these give, in a row.
        files: variables of the files that the last ones read from. The check in C++ looks whether
            they were written to instead.
        addressed: tensors.
        addresses: their addresses.
        compiled: the check in C++ of all of this, if there is one.
        quiet: how often in a row the check in Python found no change.
        patience: how often it has to, before one in C++ is made.
        settled: how often what is compared was filled in.
    """

    def __init__(self) -> None:
        self.owners: list[Any] = []
        self.dictionaries: list[dict[Any, Any]] = []
        self.versions: list[Any] = []
        self.attributes: list[dict[str, Any]] = []
        self.readers: list[Any] = []
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
        self.counts: list[int] = []
        self.values: list[Any] = []
        self.files: list[dict[str, Any]] = []
        self.addressed: list[torch.Tensor] = []
        self.addresses: list[int] = []
        self.compiled: Callable[[], bool] | None = None
        self.quiet = 0
        self.patience = _QUIET
        self.settled = 0

    def drop_compiled(self) -> None:
        """Go on without the check in C++, which is of what was watched before."""
        if self.compiled is not None:
            self.be_patient()
        self.compiled, self.quiet = None, 0

    def be_patient(self) -> None:
        """Wait longer before the next check in C++ is made."""
        self.patience = min(2 * self.patience, _MOST_QUIET)

    def parts(self) -> list[list[Any]]:
        """What the check in C++ is made of, without tensors, in its order."""
        written = [*self.dictionaries, *self.files]
        parts: list[list[Any]] = [self.owners, written, self.empty, self.typed, self.types]
        parts += [self.classes, self.forwards, self.lists, self.lengths, self.items]
        getters, begin = [], 0
        for (get, of), count in zip(self.getters, self.counts, strict=True):
            getters.append((get, of, tuple(self.values[begin : begin + count])))
            begin += count
        getters = getters[: len(getters) - len(self.files)]
        return [*parts, self.long, self.long_lengths, getters]

    def versions_now(self) -> list[Any]:
        """Versions of all dictionaries, as they are now."""
        attributes = list(map(_ATTRIBUTES, self.owners))
        if not all(map(operator.is_, attributes, self.attributes)):
            # First: until the versions are filled in, these give others.
            self.readers[:] = map(reader, (*attributes, *self.dictionaries))
            self.attributes[:] = attributes
        return list(map(read, self.readers))

    def look_at(self, owners: list[Any], dictionaries: list[dict[Any, Any]]) -> None:
        """From now on, compare the versions of these owners' attributes and of dictionaries."""
        now, known = [*owners, *dictionaries], [*self.owners, *self.dictionaries]
        same_owners = len(owners) == len(self.owners) and len(now) == len(known)
        if same_owners and all(map(operator.is_, now, known)):
            return
        attributes = list(map(_ATTRIBUTES, owners))
        self.readers[:] = map(reader, (*attributes, *dictionaries))
        self.attributes[:] = attributes
        self.owners[:] = owners
        self.dictionaries[:] = dictionaries

    def comparison(self, watch: ModuleWatch) -> Callable[[], bool]:
        """Make the fast check, which includes the tensors of a watch."""
        # Local names, which are found faster than attributes.
        row, same = itertools.chain.from_iterable, operator.is_
        attributes_of, address, read_version = _ATTRIBUTES, _ADDRESS, read
        owners, attributes = self.owners, self.attributes
        readers, versions = self.readers, self.versions
        empty, typed, types_ = self.empty, self.typed, self.types
        classes, forwards = self.classes, self.forwards
        lists, lengths, items = self.lists, self.lengths, self.items
        getters, values = self.getters, self.values
        long, long_lengths = self.long, self.long_lengths
        addressed, addresses = self.addressed, self.addresses
        tensors, joined = watch.same_tensors, watch._joined
        looks_further = watch._training or watch._audit is not None

        def unchanged() -> bool:
            check = self.compiled
            if check is not None:
                if check():
                    if looks_further and not watch.unaudited():
                        return False
                    return not joined or all(other.unchanged() for other in joined)
                self.drop_compiled()
            if not unchanged_in_python():
                return False
            self.quiet += 1
            if WANTED and next(_looks) > _MANY:
                WANTED.pop()()
            if COMPILED and self.quiet >= self.patience:
                self.quiet = 0
                settled, made = self.settled, watch.compiled()
                # It knows nothing of what another thread wrote before it was made.
                with watch._lock:
                    if made is None:
                        self.be_patient()
                    elif unchanged_in_python() and settled == self.settled:
                        self.compiled = made
            return True

        def unchanged_in_python() -> bool:
            if list(map(read_version, readers)) != versions:
                return False
            if not all(map(same, map(attributes_of, owners), attributes)):
                return False
            if list(map(type, typed)) != types_ or any(empty):
                return False
            try:
                if list(map(_FORWARD, classes)) != forwards:
                    return False
            except KeyError:  # It was removed; now a base class's runs.
                return False
            if long and list(map(len, long)) != long_lengths:
                return False
            if lists and not (
                list(map(len, lists)) == lengths and all(map(same, row(lists), items))
            ):
                return False
            try:
                seen = [*row([get(of) for get, of in getters])]
            except Exception:  # One of them is gone.
                return False
            if len(seen) != len(values) or not all(map(same, seen, values)):
                return False
            if watch._subclassed:
                with torch._C.DisableTorchFunctionSubclass():
                    if list(map(address, addressed)) != addresses or not tensors():
                        return False
            elif list(map(address, addressed)) != addresses or not tensors():
                return False
            return not joined or all(other.unchanged() for other in joined)

        return unchanged


@functools.cache
def _have_fused_steps_counted() -> None:
    """Have the steps of fused optimizers count as changes in place: PyTorch does not count them."""
    register_optimizer_step_post_hook(_count_fused_step)


def _count_fused_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        if group.get("fused"):
            written = [p for p in group["params"] if p.grad is not None and not p.is_inference()]
            torch.autograd.graph.increment_version(written)


def _warn_of_computed(found: Dependencies) -> None:
    """Warn, once for a function, that it looks up globals by names that it computes."""
    new = [(code, what) for code, what in found.computed.items() if code not in _WARNED_OF]
    if not new:
        return
    _WARNED_OF.update(code for code, _ in new)
    warnings.warn(
        f"Not watched: {'; '.join(what for _, what in new)}. If what it finds there changes, what "
        "was built goes on with the old value. Write the name out, or pass the value as an "
        "argument.",
        RuntimeWarning,
        stacklevel=levels_above(),
    )


def cost_in_words(watch: ModuleWatch) -> list[str]:
    """A line on what it costs to look for changes; none where looking has a consequence."""
    if not watch._looks_at_all:
        return ["changes of the module are not looked for"]
    if watch.audit is not None:
        return []
    took = []
    for _ in range(_COST_LOOKS):
        began = time.perf_counter()
        if not watch.unchanged():
            return []
        took.append(time.perf_counter() - began)
    return [f"looking for changes takes {min(took) * 1e6:.1f} µs a call"]


def unread_in_words(watch: ModuleWatch) -> list[str]:
    """A line on the objects that a watch cannot look into, if there are any."""
    if not watch.unread:
        return []
    shown = ", ".join(watch.unread[:_SHOWN])
    more = len(watch.unread) - _SHOWN
    return [f"not looked into: {shown}{f' and {more} more' if more > 0 else ''}"]


def _first_difference(new: Sequence[Any], old: Sequence[Any]) -> int | None:
    for index, (a, b) in enumerate(zip(new, old, strict=True)):
        if a != b:
            return index
    return None


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
