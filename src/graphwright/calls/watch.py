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
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..errors import levels_above
from .dependencies import PLAIN, Dependencies, compare_walks
from .dictionaries import all_at_once, read, reader
from .differences import difference
from .forking import lock
from .introspection import ORIGINAL_CLASS, without_answers
from .leaves import guard_of, without_memory
from .places import FastWay, Name, StatePlace
from .snapshots import checksums
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
_TRAINED = operator.attrgetter("requires_grad")
_ATTRIBUTES = operator.attrgetter("__dict__")
_row = itertools.chain.from_iterable


class Watched(Protocol):
    """Something whose changes can be noticed."""

    def unchanged(self) -> bool:
        """A fast check, which may return False where nothing has changed."""

    def changed(self) -> str | None:
        """What has changed, in words, or None."""


class _Tensors:
    """Watched tensors: where they are, how they lie there and, if that matters, their values.

    Filled in once, and never changed.

    Attributes:
        all: the tensors, as far as they have memory and may not be replaced.
        memory: their storages.
        subclassed: whether one is of a class that may have functions of its own.

    Args:
        found: what was found.
        values: whether changes in place count.
        training: whether it counts which of them are trained.
    """

    __slots__ = (
        *("all", "memory", "subclassed", "_names", "_addresses", "_geometries", "_guard"),
        *("_trained", "_versioned", "_counted", "_versions"),
    )

    def __init__(self, found: Dependencies, *, values: bool, training: bool) -> None:
        named = [(str(name), tensor) for name, tensor in _with_places(found)]
        self._names = [name for name, _ in named]
        self.all = [tensor for _, tensor in named]
        self.memory = [tensor.untyped_storage() for tensor in self.all]
        self.subclassed = any(type(tensor) not in PLAIN for tensor in self.all)
        self._addresses = list(map(_ADDRESS, self.all))
        self._geometries = list(map(_geometry, self.all))
        self._guard = guard_of(self.all)
        self._trained = list(map(_TRAINED, self.all)) if training else None
        # Inference tensors keep no version counter; they cannot change outside inference mode.
        counted = [each for each in named if values and not each[1].is_inference()]
        self._versioned = [name for name, _ in counted]
        self._counted = [tensor for _, tensor in counted]
        self._versions = list(map(_VERSION, self._counted))

    def same(self) -> bool:
        """Whether address, geometry and, if they matter, values are what they were."""
        if list(map(_ADDRESS, self.all)) != self._addresses:
            return False
        plain = self._guard is not None and self._guard(*self.all)
        if not plain and list(map(_geometry, self.all)) != self._geometries:
            return False
        if not self._versions:
            return True
        return list(map(_VERSION, self._counted)) == self._versions

    def same_of_any_class(self) -> bool:
        """The same, without the functions of the tensors' classes."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.same()

    def trained_as_before(self) -> bool:
        """Whether, if that matters, those are trained that were."""
        return self._trained is None or list(map(_TRAINED, self.all)) == self._trained

    def difference(self, sums: list[int] | None) -> str | None:
        """What has changed, in words, or None.

        Args:
            sums: checksums of the values as they were, if these differ.
        """
        addresses = list(map(_ADDRESS, self.all))
        if (index := _first_difference(addresses, self._addresses)) is not None:
            return f"the memory of {self._names[index]} moved"
        geometries = list(map(_geometry, self.all))
        if (index := _first_difference(geometries, self._geometries)) is not None:
            return f"the shape, strides or dtype of {self._names[index]} changed"
        versions = list(map(_VERSION, self._counted))
        if (index := _first_difference(versions, self._versions)) is not None:
            return f"{self._versioned[index]} changed in place, {HELD}"
        if sums is not None and (index := _first_difference(checksums(self.all), sums)) is not None:
            return (
                f"{self._names[index]} changed in place in a way that PyTorch does not report, "
                f"{HELD}"
            )
        if not self.trained_as_before():
            return "a parameter or buffer was frozen, or is trained by now"
        return None

    def rebound(self, held: Container[int]) -> bool:
        """Whether one is none of those that are held, by identity, has moved or lies otherwise."""
        return any(id(tensor) not in held for tensor in self.all) or (
            list(map(_ADDRESS, self.all)) != self._addresses
            or list(map(_geometry, self.all)) != self._geometries
        )

    def parts(self) -> list[list[Any]]:
        """What the check in C++ is made of: the tensors, and their versions where these count."""
        counted = dict(zip(map(id, self._counted), self._versions, strict=True))
        return [self.all, [counted.get(id(tensor), -1) for tensor in self.all]]


class _Compared:
    """What is compared with what at every call, laid out so that nearly all of it runs in C.

    It is filled in once and then published as a whole: checks in other threads see all of one or
    all of another.

    Attributes:
        found: what the module depends on; what its places held is one thread's to change.
        tensors: the tensors among that.
        ordered: its places, first those whose versions are compared.
        owners: modules and objects whose attributes are watched.
        attributes: the dictionaries in which the owners have their attributes.
        dictionaries: dictionaries that hold something.
        readers: what gives the versions of these attributes and dictionaries.
        versions: what they gave.
        types: the classes of modules and objects whose class is watched.
        own_types: the same without those that were given here, so that something else answers.
        classes: attributes of classes of which only `forward` is watched.
        forwards: these methods.
        lists: lists, deques, tuples and sets.
        items: everything in them, in a row.
        long: containers that are watched by their length alone.
        lengths: the lengths of the lists, then of these.
        getters: functions that read several other values, what from, and what they gave.
        files: variables of the files that the last ones read from. The check in C++ looks whether
            they were written to instead.
        unchanged: the check in Python of all of this.

    Args:
        found: what was found.
        tensors: the tensors among that.
        versions: of the dictionaries, taken before they were read.
        before: what was compared before, of the same walk.
        types: the classes of what is watched, taken before they were compared.
    """

    __slots__ = (
        *("found", "tensors", "ordered", "owners", "attributes", "dictionaries", "readers"),
        *(
            "versions",
            "types",
            "own_types",
            "classes",
            "forwards",
            "lists",
            "items",
            "long",
            "lengths",
        ),
        *("getters", "files", "unchanged"),
    )

    def __init__(
        self,
        found: Dependencies,
        tensors: _Tensors,
        versions: list[Any] | None = None,
        before: _Compared | None = None,
        types: list[type] | None = None,
    ) -> None:
        ways: dict[FastWay, list[StatePlace]] = {way: [] for way in FastWay}
        for place in found.places:
            ways[place.way()].append(place)
        versioned = [*ways[FastWay.ATTRIBUTES], *ways[FastWay.DICTIONARY]]
        lists, long, forwards = ways[FastWay.ITEMS], ways[FastWay.LENGTH], ways[FastWay.FORWARD]
        self.found = found
        self.tensors = tensors
        self.ordered = list(_row(ways.values()))
        self.owners = _owners(ways[FastWay.ATTRIBUTES])
        self.attributes: list[dict[str, Any]] = list(map(_ATTRIBUTES, self.owners))
        self.dictionaries = _owners(ways[FastWay.DICTIONARY])
        self.readers = _readers([*self.attributes, *self.dictionaries], before)
        if versions is None or len(versions) != len(versioned):
            versions = _versions_of(versioned, self.readers)
        self.versions = versions
        self.types = list(map(type, found.typed)) if types is None else types
        self.own_types = list(map(without_answers, self.types))
        self.classes = list(map(vars, _owners(forwards)))
        self.forwards = list(_row(s.held.values() for s in forwards))
        self.lists = _owners(lists)
        self.items = list(_row(s.held.values() for s in lists))
        self.long = _owners(long)
        self.lengths = [len(s.held) for s in lists] + list(_row(s.held.values() for s in long))
        files = ways[FastWay.FILE]
        self.getters = list(_row(s.getters() for s in (*ways[FastWay.VALUES], *files)))
        # Somebody may write to a class that a module was given here, as to any other.
        given = dict.fromkeys(cls for cls in self.types if ORIGINAL_CLASS in vars(cls))
        self.getters[:0] = [(_forward_of, cls, _forward_of(cls)) for cls in given]
        self.files = list(map(vars, _owners(files)))
        self.unchanged = self._in_python()

    def versions_now(self) -> list[Any]:
        """Versions of all dictionaries, as they are now."""
        attributes = list(map(_ATTRIBUTES, self.owners))
        return list(map(read, _readers([*attributes, *self.dictionaries], self)))

    def in_c(self) -> Callable[[], bool] | None:
        """The check in C++ of all of this, if there can be one."""
        if not COMPILED:
            return None
        own = self.getters[: len(self.getters) - len(self.files)]
        counted, written = len(self.lists), [*self.dictionaries, *self.files]
        parts: list[list[Any]] = [self.owners, written, self.found.empty, self.found.typed]
        parts += [self.types, self.classes, self.forwards, self.lists, self.lengths[:counted]]
        parts += [self.items, self.long, self.lengths[counted:], own, *self.tensors.parts()]
        try:
            return COMPILED[0](*parts)
        except Exception:  # One of the objects is of a kind that it does not know.
            return None

    def _in_python(self) -> Callable[[], bool]:
        # Local names, which are found faster than attributes.
        row, same = _row, operator.is_
        attributes_of, forward = _ATTRIBUTES, _FORWARD
        owners, attributes = self.owners, self.attributes
        versions_of, dictionaries, versions = all_at_once(self.readers, self.versions)
        empty, typed, types_ = self.found.empty, self.found.typed, self.types
        classes, forwards = self.classes, self.forwards
        lists, items, sized, lengths = self.lists, self.items, self.lists + self.long, self.lengths
        getters = [(get, of) for get, of, _ in self.getters]
        values = [value for _, _, held in self.getters for value in held]
        tensors = self.tensors
        same_tensors = tensors.same_of_any_class if tensors.subclassed else tensors.same

        def unchanged() -> bool:
            try:
                if (
                    versions_of(dictionaries) != versions
                    or not all(map(same, map(attributes_of, owners), attributes))
                    or list(map(type, typed)) != types_
                    or any(empty)
                    or list(map(forward, classes)) != forwards
                ):
                    return False
                if sized and list(map(len, sized)) != lengths:
                    return False
                if lists and not all(map(same, row(lists), items)):
                    return False
                seen = [*row([get(of) for get, of in getters])]
            except Exception:  # One of them is gone; of a class a base's method runs now.
                return False
            if len(seen) != len(values) or not all(map(same, seen, values)):
                return False
            return same_tensors()

        return unchanged


def _forward_of(cls: Any) -> tuple[Any, ...]:
    return (cls.forward,)


def _with_places(found: Dependencies) -> Iterator[tuple[Name, torch.Tensor]]:
    """The tensors among what was found that have memory, and may not be replaced."""
    ignores = found.ignores or (lambda tensor: False)
    for name, tensor in found.tensors:
        has_place = tensor.layout is torch.strided and without_memory(tensor) is None
        if has_place and not ignores(tensor):
            yield name, tensor


def _owners(places: Iterable[StatePlace]) -> list[Any]:
    return [place.owner for place in places]


def _versions_of(places: Sequence[StatePlace], readers: Sequence[Any]) -> list[Any]:
    """The versions of what some places read; None where that is not what they held."""
    versions = list(map(read, readers))
    for index, place in enumerate(places):
        if not place.holds_the_same():  # Another thread wrote to it since it was read.
            versions[index] = None
    return versions


def _readers(dictionaries: Sequence[dict[Any, Any]], before: _Compared | None = None) -> list[Any]:
    """What gives the versions of dictionaries; what gave them before, if these are the same."""
    if before is not None:
        known = (*before.attributes, *before.dictionaries)
        if len(known) == len(dictionaries) and all(map(operator.is_, known, dictionaries)):
            return before.readers
    return list(map(reader, dictionaries))


class _Audit:
    """Compares a checksum of tensors' values at every Nth look.

    Attributes:
        every: N.
        sums: the checksums, in the order of the tensors.
        differs: whether the last comparison found other values; then each look compares.
    """

    def __init__(self, every: int, tensors: Sequence[torch.Tensor]) -> None:
        self.every = every
        self.sums = checksums(tensors)
        self.differs = False
        self._looks = 0

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the values are the same, as far as an audit is due."""
        self._looks += 1
        # Once a change is found, each check looks, until it is put back.
        if self.differs or self._looks % self.every == 0:
            self.differs = checksums(tensors) != self.sums
        return not self.differs


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
        # What is compared is one thread's to replace.
        self._lock = lock()
        # Of parts inside, whose changes count too.
        self._joined: list[Watched] = []
        # The check in C++ of what is compared, if there is one.
        self._compiled: Callable[[], bool] | None = None
        # How often in a row the check in Python found no change, and how often it has to before
        # one in C++ is made.
        self._quiet, self._patience = 0, _QUIET
        self._looks_at_all = checks == "full"
        self._begin(found or self._walk())
        self.audit = audit if values else None
        self._audit = None if self.audit is None else _Audit(self.audit, self._compared.tensors.all)
        self.unchanged = self._comparison() if self._looks_at_all else lambda: True
        if self._looks_at_all and found is None:
            _warn_of_computed(self._compared.found)

    @property
    def visits(self) -> Mapping[int, int]:
        """Everything that the module reaches, by identity."""
        return self._compared.found.visits

    @property
    def objects(self) -> list[Any]:
        """The same, itself."""
        return self._compared.found.objects

    @property
    def memory(self) -> list[torch.UntypedStorage]:
        """Storages of all watched tensors."""
        return self._compared.tensors.memory

    @property
    def tensor_ids(self) -> set[int]:
        """The identities of all tensors that were found."""
        return {id(tensor) for _, tensor in self._compared.found.tensors}

    def join(self, other: Watched) -> None:
        """From now on, notice what another notices, too."""
        if all(other is not known for known in self._joined):
            self._joined.append(other)

    def _begin(self, found: Dependencies, versions: list[Any] | None = None) -> None:
        """From now on, compare with these dependencies."""
        self.unread = tuple(found.unread)
        tensors = _Tensors(found, values=self.values, training=self._training)
        self._settle(found, tensors, versions)

    def _settle(
        self,
        found: Dependencies,
        tensors: _Tensors,
        versions: list[Any] | None = None,
        before: _Compared | None = None,
        types: list[type] | None = None,
    ) -> None:
        """Publish what the fast check compares; the arguments are those of `_Compared`."""
        self._compared = _Compared(found, tensors, versions, before, types)
        self._drop_compiled()

    def _comparison(self) -> Callable[[], bool]:
        """The fast check."""
        joined, training, audit = self._joined, self._training, self._audit

        def unchanged() -> bool:
            check = self._compiled
            if check is None or not check():
                if check is not None:
                    self._drop_compiled()
                if not self._compared.unchanged():
                    return False
                self._quiet += 1
                if WANTED and next(_looks) > _MANY:
                    WANTED.pop()()
                if COMPILED and self._quiet >= self._patience:
                    self._compile()
            # What neither check looks at.
            if training and not self._compared.tensors.trained_as_before():
                return False
            if audit is not None and not audit.holds(self._compared.tensors.all):
                return False
            return not joined or all(other.unchanged() for other in joined)

        return unchanged

    def _compile(self) -> None:
        """Go on with the check in C++, if there can be one."""
        self._quiet, compared = 0, self._compared
        made = compared.in_c()
        # It knows nothing of what another thread wrote before it was made.
        with self._lock:
            if made is None:
                self._be_patient()
            elif compared is self._compared and compared.unchanged():
                self._compiled = made

    def _drop_compiled(self) -> None:
        """Go on without the check in C++, which is of what was watched before."""
        if self._compiled is not None:
            self._be_patient()
        self._compiled, self._quiet = None, 0

    def _be_patient(self) -> None:
        """Wait longer before the next check in C++ is made."""
        self._patience = min(2 * self._patience, _MOST_QUIET)

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
        compared = self._compared
        versions = compared.versions_now()
        types_now = list(map(type, compared.found.typed))
        change, unsure = self._difference(compared, versions, types_now)
        if change is not None:
            return change
        if not unsure or compared.found.exchange(unsure):
            self._settle(compared.found, compared.tensors, versions, compared, types_now)
            return None
        change = compared.found.surely_replaced(unsure)
        if change is not None:
            return change
        fresh = self._walk()
        change = compare_walks(compared.found, fresh, unsure)
        # Without what each call writes to it, another container may look like the old one.
        for owner in self._owners:
            if change is None and owner in compared.found.visits and owner not in fresh.visits:
                change = "an object to which each call writes was replaced"
        if change is None:
            self._begin(fresh, versions)
        return change

    def _difference(
        self, compared: _Compared, versions: list[Any], types_now: list[type]
    ) -> tuple[str | None, list[Any]]:
        """What has changed, in words; and values that only another walk can compare."""
        found, known = compared.found, compared.versions
        if any(found.empty):
            return "a parameter, buffer, submodule or forward hook was added", []
        for before, cls in zip(compared.own_types, types_now, strict=True):
            if without_answers(cls) is not before:
                return f"a {before.__name__} became a {cls.__name__}", []
        unsure: list[Any] = []
        for index, place in enumerate(compared.ordered):
            if index < len(versions) and versions[index] == known[index]:
                continue  # It has not been written to.
            try:
                now = place.read()
            except Exception:  # The owner has become something else.
                return f"{place.name} was replaced", []
            change, unknown = difference(place, now, found.ignores)
            if change is not None:
                return change, []
            unsure += unknown
        audit = self._audit
        sums = audit.sums if audit is not None and audit.differs else None
        return compared.tensors.difference(sums), unsure

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
        return self._compared.tensors.rebound(held)


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
        return ["the module is not checked for changes"]
    if watch.audit is not None:
        return []
    took = []
    for _ in range(_COST_LOOKS):
        began = time.perf_counter()
        if not watch.unchanged():
            return []
        took.append(time.perf_counter() - began)
    return [f"checking the module for changes takes {min(took) * 1e6:.1f} µs per call"]


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
