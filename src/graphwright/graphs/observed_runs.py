"""ObservedRuns: runs of a call that are seen operation by operation, and undone.

Warm-up compares them: as plain eager code, without dropout, with nothing in the places that the
call writes to, with other seeds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..calls.modes import compilers_off
from ..calls.objects import apart
from ..calls.places import MISSING, Written, kind_of
from ..errors import CaptureError, first_line, user_frame
from .comparison import Comparison, WithoutDropout, check_same_result, rounding_of
from .host_draws import OTHER_SEED, Draw, UsesOf
from .journal import Copies, Journal
from .python_state import PythonState, StateChanges
from .random_state import put_seed, put_state
from .recorder import Allocate, Recorder
from .static_inputs import StaticInputs, hosts_among

_ON_DEVICE = (
    "Pass it on the device, and let the call compute with it there; or pass its values as plain "
    "numbers, each of which gets a graph of its own."
)


class ObservedRuns:
    """Observed runs of a call, each of which is undone.

    Args:
        work: runs the call on static inputs.
        sample: the leaves of its arguments.
        recorder: what will record it.
        python_state: the Python side of its state.
        comparison: how its results are compared with eager's.
        copies: copies of memory from outside, shared with other runs that start from it.
    """

    def __init__(
        self,
        work: Callable[[StaticInputs], Any],
        sample: Sequence[Any],
        recorder: Recorder,
        python_state: PythonState,
        comparison: Comparison,
        copies: Copies | None,
    ) -> None:
        self.work = work
        self.sample = sample
        self.recorder = recorder
        self.state = python_state
        self.comparison = comparison
        self.copies = copies
        # Where the leaves of the last eager run's results were.
        self._devices: list[torch.device | None] = []

    def inputs(self, *, as_given: bool = False) -> StaticInputs:
        """Copies of the sample in ordinary memory, to run on.

        Args:
            as_given: whether arguments on the host stay there.
        """
        allocate = _ordinary_allocator(self.recorder.device)
        return StaticInputs(self.sample, allocate, as_given=as_given)

    def eager(
        self, under: AbstractContextManager[Any] | None = None, *, as_given: bool = False
    ) -> tuple[Any, Journal, list[torch.UntypedStorage], tuple[int, ...]]:
        """Run the call as plain eager code.

        Args:
            under: a context to run it in.
            as_given: whether arguments on the host stay there.

        Returns:
            what `Comparison.keep` kept of its results; its journal; the storages that it changed
            among those of the model's tensors; the slots of the arguments that it wrote to.
        """
        inputs = self.inputs(as_given=as_given)
        journal = Journal(self.copies)
        try:
            with self.recorder.warming(pretend=False), compilers_off(), journal:
                with self.state.refusing_advances(), under or contextlib.nullcontext():
                    result = self.work(inputs)
                    kept = self.comparison.keep(result)
            leaves = pytree.tree_leaves(result)
            self._devices = [x.device if isinstance(x, torch.Tensor) else None for x in leaves]
            del result, leaves
            self.state.check()
            written = [storage for storage in journal.written if self.state.holds(storage)]
            written = [storage for storage in written if journal.changed(storage)]
            slots = tuple(s for s in inputs.slots if journal.wrote_to(inputs.tensor(s)))
        finally:
            journal.undo()
        for slot in inputs.slots:
            journal.external.pop(inputs.tensor(slot).untyped_storage()._cdata, None)
        if self.copies is not None:
            self.recorder.tidy()  # The next run needs blocks of other sizes.
        return kept, journal, written, slots

    def eager_on_device(
        self, names: Sequence[str]
    ) -> tuple[Any, Journal, list[torch.UntypedStorage], tuple[int, ...]]:
        """As `eager`, which has arguments on the host on the device; that must change nothing.

        Args:
            names: of the arguments' leaves.

        Raises:
            CaptureError: it does: the call needs them on the host.
        """
        hosts = hosts_among(self.sample, self.recorder.device)
        if not hosts:
            return self.eager()
        named = ", ".join(names[slot] for slot in hosts) or "An argument"
        try:
            run = self.eager()
        except Exception as error:
            self.eager(as_given=True)  # Where that fails too, it is the call's own error.
            raise CaptureError(
                f"{named} on the host: the call fails with a copy of it on the device, which is "
                f"what a graph reads: {first_line(error)}",
                where=user_frame(error),
                remedy=_ON_DEVICE,
            ) from error
        devices = self._devices
        given, _, _, slots = self.eager(as_given=True)
        try:
            if devices != self._devices or slots != run[-1]:
                raise CaptureError("")
            self.comparison.compare(run[0], given, run[1].dtypes)
        except CaptureError as error:
            raise CaptureError(
                f"{named} on the host: the call computes or writes something else with a copy of "
                "it on the device, which is what a graph reads.",
                remedy=_ON_DEVICE,
            ) from error
        return run

    def compare_without_dropout(self) -> None:
        """Compare a run that pretends to be captured with a plain one, both without dropout.

        Raises:
            CaptureError: their results differ.
        """
        eager, *_ = self.eager(WithoutDropout())
        inputs = self.inputs()
        journal = Journal(self.copies)
        try:
            with self.recorder.warming(), compilers_off(), journal, WithoutDropout():
                result = run_in_pretended_capture(self.work, inputs)
            self.comparison.check(result, eager, journal.dtypes)
        finally:
            journal.undo()

    def find_written(
        self, places: list[Written], eager: Any, generators: Sequence[torch.Generator]
    ) -> None:
        """Keep of some places those to which the call writes; it must not read any of them.

        It runs once more where they hold nothing: what it returns and leaves in them must be what
        the last run has.

        Args:
            places: attributes and items of dictionaries.
            eager: what `Comparison.keep` kept of eager's result.
            generators: random generators that the call draws from.

        Raises:
            StateChanges: the call reads one of them before it writes to it, or may.
        """
        held = [(place, place.value()) for place in places]
        kept = {
            id(place): Comparison().keep(apart([value]))
            for place, value in held
            if value is not MISSING and not place.counts
        }
        names = ", ".join(place.name for place in places)
        inputs, journal = self.inputs(), Journal(self.copies)
        try:
            for place in places:
                place.empty()
            with self.recorder.warming(), compilers_off(), journal:
                result = self.work(inputs)
            self.comparison.check(result, eager, journal.dtypes)
            untouched = _keep_written(places, held, kept, rounding_of(journal.dtypes))
            if generators:
                raise StateChanges("It draws random numbers.")
            if untouched:
                journal.undo()
                self._refuse_removals(untouched)
        except Exception as error:
            refused = StateChanges(
                f"{names} changes with every call, and a graph repeats no Python: what it held "
                "before may matter to the call.",
                remedy="Set it in every call before it is read; or keep it out of the captured "
                "call: pass it in and return it as a tensor.",
            )
            if not any(place.counts for place, _ in held):
                refused.places = tuple(place for place, _ in held if place.is_plain)
            raise refused from error
        finally:
            journal.undo()

    def _refuse_removals(self, places: Sequence[Written]) -> None:
        """Run the call with something in places that it does not write to: it must stay there.

        Raises:
            StateChanges: the call removes it.
        """
        held = [(place, place.value()) for place in places]
        inputs = self.inputs()
        journal = Journal(self.copies)
        there = object()
        try:
            for place in places:
                place.put(there)
            with self.recorder.warming(), compilers_off(), journal:
                self.work(inputs)
            if any(place.value() is not there for place in places):
                raise StateChanges("It removes what another call has left there.")
        finally:
            journal.undo()
            for place, value in held:
                place.put(value)

    def refuse_seeding(
        self, generators: Sequence[torch.Generator], draws: Sequence[Draw], eager: Any
    ) -> None:
        """Run the call with other seeds, and refuse it unless it draws from those.

        Args:
            generators: random generators that it draws from.
            draws: what it draws on the host, which must make no difference.
            eager: what `Comparison.keep` kept of eager's result, if that is to be the same.

        Raises:
            CaptureError: it seeds its generators itself, makes its own generator, or uses `draws`.
        """
        states = [(generator, generator.get_state()) for generator in generators]
        journal = Journal(self.copies)
        try:
            for generator in generators:
                put_seed(generator, OTHER_SEED)
            journal.expect(generators)
            inputs = self.inputs()
            seen = UsesOf(journal.draws) if draws else contextlib.nullcontext()
            with self.recorder.warming(), compilers_off(), journal, seen:
                result = run_in_pretended_capture(self.work, inputs)
            journal.check_end()
            if draws:
                unused = journal.draws.made == list(draws) and self._gives(result, eager, journal)
                self.state.refuse_host_randomness(
                    self.recorder.device, generators, [journal.draws] if unused else []
                )
        finally:
            journal.undo()
            for generator, state in states:
                put_state(generator, state)
        journal.drop_unused_generators()
        if any(all(g is not known for known in generators) for g in journal.generators):
            raise CaptureError(
                "The call makes a random generator of its own every time; a graph would draw from "
                "the first one for ever.",
                remedy="Make it once, outside the captured call.",
            )

    def _gives(self, result: Any, eager: Any, journal: Journal) -> bool:
        """Whether a run's result is eager's; True if that is not known."""
        try:
            if eager is not None:
                self.comparison.check(result, eager, journal.dtypes)
        except CaptureError:
            return False
        return True


def _keep_written(
    places: list[Written],
    held: Sequence[tuple[Written, Any]],
    kept: Mapping[int, Any],
    rounding: float,
) -> list[Written]:
    """Keep of some places, which held nothing before a run, those that it has written to.

    Args:
        places: attributes and items.
        held: with what each held before that.
        kept: copies of the tensors in it, by the place's identity.
        rounding: by which what a place holds now may differ from them.

    Returns:
        those that it has left alone.
    """
    untouched = [place for place in places if not place.counts and place.value() is MISSING]
    for place, value in held:
        if not _is_written(place, value, kept.get(id(place)), rounding):
            places.remove(place)
    return untouched


def _is_written(place: Written, value: Any, before: Any, rounding: float) -> bool:
    """Whether a run wrote to a place that held nothing, or counted there.

    Args:
        place: an attribute or item.
        value: what it held before, which is put back where the run did not write.
        before: copies of the tensors in it.
        rounding: by which what it holds now may differ.

    Raises:
        CaptureError: something else is left there.
    """
    now = place.value()
    if place.counts:
        place.step = place.added()
        place.put(value)
        return bool(place.step)
    if now is MISSING:
        place.put(value)
        return False
    if kind_of(now) is None or kind_of(now) != kind_of(value):
        raise StateChanges("Another value is left there.")
    check_same_result(apart([now]), before or [], rounding)
    return True


def run_in_pretended_capture(work: Callable[[StaticInputs], Any], inputs: StaticInputs) -> Any:
    """Run work that pretends to be captured; an error is its own doing, since it ran without."""
    try:
        return work(inputs)
    except Exception as error:
        if isinstance(error, CaptureError):
            raise
        raise CaptureError(
            f"The call works by itself and fails once it is told that a capture is under way: "
            f"{first_line(error)}",
            where=user_frame(error),
            remedy="It asks torch.cuda.is_current_stream_capturing(), and takes another way.",
        ) from error


def _ordinary_allocator(device: torch.device) -> Allocate:
    return lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device)
