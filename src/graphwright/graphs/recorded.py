"""Recorded, what a recording has given: a graph or segments, and the static tensors around it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .call_spec import CallSpec
from .call_work import CallWork
from .host_draws import DrawingRecording
from .recorder import Allocate, Recorder, Recording
from .segments.tree import SegmentTree
from .static_inputs import CopyPlan, StaticInputs, byte_view
from .static_outputs import StaticOutputs
from .warmup import Warmed


@dataclass(frozen=True, eq=False, slots=True)
class Recorded:
    """A call that was recorded.

    Attributes:
        recording: what a replay repeats; of a call in segments, the first one.
        inputs: the static inputs.
        results: what the call returned; None in segments, where that depends on the path.
        tree: the segments; None where there is one graph.
        copies: how arguments are copied in and back.
        sources: positions of the arguments that are copied in as bytes.
        bases: what is copied out for the caller; nothing if the results are the graph's own.
        is_simple: whether nothing is copied but sources and bases.
        sends: whether arguments are on the host and the call runs on another device.
        meets_objects: whether calls have to be told of the objects among their arguments.
        in_place: of arguments that it works on where the sample has them: positions, addresses at
            the time of the recording, and the tensors.
        apart: positions of the other arguments that are tensors.
        for_sample: the same call recorded in place, for calls with the sample's own cache.
    """

    recording: Recording
    inputs: StaticInputs
    results: StaticOutputs | None
    tree: SegmentTree | None
    copies: CopyPlan
    sources: Sequence[int]
    bases: Sequence[torch.Tensor]
    is_simple: bool
    sends: bool
    meets_objects: bool
    in_place: Sequence[tuple[int, int, torch.Tensor]]
    apart: Sequence[int]
    for_sample: Recorded | None = None

    def best_for(self, leaves: Sequence[Any]) -> Recorded:
        """What answers a call with some leaves: this, or without copies of the sample's cache."""
        own = self.for_sample
        return self if own is None or not own.is_in_place(leaves) else own

    def replay(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """Replay for the leaves of a call's arguments; the copies of the bases for the caller."""
        self.recording.order()
        targets = [torch.empty_like(base) for base in self.bases]
        if self.sends:
            self.inputs.send(leaves)
        if self.is_simple:
            self.recording.run([leaves[slot] for slot in self.sources], targets)
        else:
            self.copies.run(self.recording, self.inputs, leaves, targets)
        return targets

    def is_in_place(self, leaves: Sequence[Any]) -> bool:
        """Whether the leaves of a call's arguments are the memory that it works on in place.

        That may have been freed, or have moved: then other memory may be where it was.
        """
        return all(
            leaves[slot].data_ptr() == address == static.data_ptr()
            for slot, address, static in self.in_place
        )


def record_call(
    spec: CallSpec,
    sample: Sequence[Any],
    warmed: Warmed,
    work: CallWork,
    recorder: Recorder,
    allocate: Allocate,
    results_of: Callable[[Any], Any],
    in_place: Sequence[int] = (),
) -> Recorded:
    """Record a warm call: as a graph, or in the segments that warm-up has divided it into.

    Args:
        spec: the call.
        sample: the leaves of its arguments.
        warmed: what warm-up has found out about it.
        work: runs it.
        recorder: what records it.
        allocate: gives memory for its static inputs.
        results_of: gives what the caller is to get, of what the work returned.
        in_place: positions of the leaves that it works on where the sample has them.
    """
    inputs = StaticInputs(sample, allocate, in_place=in_place)
    tree = warmed.tree
    copies = CopyPlan.of(inputs, warmed.mutated, fresh=spec.fresh, together=tree is None)
    results: StaticOutputs | None
    if tree is None:
        # No closures: an error's traceback would keep what they refer to alive.
        drains = _Drains(inputs, copies, warmed, results_of)
        recording = recorder.record(
            functools.partial(work, inputs),
            [byte_view(inputs.tensor(slot)) for slot in copies.sources],
            drains,
            warmed.generators,
            spec.streams,
        )
        results = drains.results
    else:
        root = tree.record(work, inputs, copies, warmed.mutated, recorder)
        assert root.recording is not None
        recording = root.recording
        # A single segment without a break is a plain graph.
        plain = root.break_ is None and not (root.sources or tree.frozen)
        results = root.results if plain else None
    if warmed.draws and results is not None:
        recording = DrawingRecording(recording, warmed.draws)
    return Recorded(
        recording=recording,
        inputs=inputs,
        results=results,
        tree=tree if results is None else None,
        copies=copies,
        sources=copies.sources,
        bases=() if results is None or not spec.fresh else results.bases,
        is_simple=copies.is_simple,
        sends=bool(inputs.hosts),
        meets_objects=spec.signature.has_objects or (spec.holds_objects and results is None),
        in_place=[(slot, each.data_ptr(), each) for slot, each in inputs.given()],
        apart=inputs.apart(),
    )


class _Drains:
    """Makes the static outputs of what was recorded, and names the memory to be copied out."""

    def __init__(
        self,
        inputs: StaticInputs,
        copies: CopyPlan,
        warmed: Warmed,
        results_of: Callable[[Any], Any],
    ) -> None:
        self.results: StaticOutputs | None = None
        self._given = inputs, copies, warmed, results_of

    def __call__(self, tree: Any) -> list[torch.Tensor]:
        inputs, copies, warmed, results_of = self._given
        external = {storage._cdata for storage in warmed.external}
        self.results = results = StaticOutputs(results_of(tree), inputs, external)
        back = [inputs.tensor(slot) for slot in copies.back]
        return [byte_view(t) for t in (*results.bases, *back)] if copies.fresh else []
