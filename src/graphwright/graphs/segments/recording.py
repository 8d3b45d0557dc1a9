"""RecordingTracer: records a call in segments, by the steps that an ObservingTracer noted."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...calls.operations import tensors
from ...evaluation.garbage_collection import garbage_collection_off
from ..host_draws import Draw
from ..recorder import Recorder, SegmentRecorder
from ..static_inputs import Geometry, StaticInputs
from ..static_outputs import StaticOutputs
from .segment import Break, HoistedConstant, Segment
from .steps import New, Step
from .tracer import Differs, Tracer, replaced

Finishing = Callable[[Tracer, Any], tuple[StaticOutputs | None, list[torch.Tensor]]]


class RecordingTracer(Tracer):
    """Records the steps after the known ones, which have to be those that were observed.

    Args:
        node: the first segment to record.
        script: the observed steps.
        recorder: what records them.
        feeds: memory that is copied into before the first segment.
        generators: random generators that the graphs draw from.
        draws: what the call was seen to draw on the host beside them.
        given: as for `Tracer`.

    Attributes:
        nodes: the segments that were recorded.
        culprit: the operation that could not be recorded.
    """

    def __init__(
        self,
        node: Segment,
        script: Iterable[Step],
        recorder: Recorder,
        feeds: Sequence[torch.Tensor],
        generators: Sequence[torch.Generator],
        draws: Sequence[Draw],
        *given: Any,
    ) -> None:
        super().__init__(*given)
        self.nodes = [node]
        self.culprit: Any = None
        self._script = deque(script)
        self._recorder = recorder
        self._feeds = feeds
        self._draws_from = generators
        self._seen_draws = tuple(draws)
        self._segment_recorder: SegmentRecorder | None = None
        self._ending = contextlib.ExitStack()
        self._segment_recorders: list[SegmentRecorder] = []

    def record(
        self, work: Callable[[StaticInputs], Any], inputs: StaticInputs, finish: Finishing
    ) -> None:
        """Run the work and record it. After an error nothing is left.

        Args:
            work: runs the call on static inputs.
            inputs: these.
            finish: makes the static outputs, and names what is to be copied out.

        Raises:
            Differs: the work does something else than was observed.
            CaptureError: it cannot be recorded.
        """
        try:
            # The captures of segments outlast `seen`, and destroying a graph would break them.
            with garbage_collection_off(), self._ending:
                with self.seen():
                    result = work(inputs)
                self.finish(result)
                if self._script:
                    raise Differs(f"{self._script[0].func} is missing")
                if self.draws.to_repeat(self.device) != self._seen_draws:
                    raise Differs("it draws other random numbers on the host")
                segment_recorder = self._begin()
                node = self.nodes[-1]
                node.draws = self._seen_draws
                node.results, drains = finish(self, result)
                segment_recorder.drain(drains)
                self._end(drained=bool(drains))
        except BaseException:
            for node in self.nodes:
                node.close()
            raise
        finally:
            for segment_recorder in reversed(self._segment_recorders):
                segment_recorder.forget()

    def before(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        """Note what is used, without copies for undoing: recorders undo by themselves."""
        self.operation = func
        for tensor in tensors((args, kwargs)):
            if tensor.layout is torch.strided and not tensor.is_nested:
                self.read(tensor)

    def run_new(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: tuple[Any, ...]
    ) -> Any:
        """Record an operation."""
        if not self._script or not self._script[0].same(func, arguments):
            raise Differs(f"{func} is new, or has other arguments")
        step = self._script.popleft()
        segment_recorder, node = self._begin(), self.nodes[-1]
        given = tensors((args, kwargs))
        hosts = self.host_tensors(func, args, kwargs)
        if hosts:
            for host, static in zip(hosts, step.statics, strict=True):
                if not self.is_made(host):
                    node.sources.append(HoistedConstant(host, static))
            args, kwargs = replaced((args, kwargs), hosts, step.statics)
        if step.key is not None:
            self._cut(step, Break(func, args, kwargs, step, content=self.content))
            return self.answered(step, given)
        try:
            result = segment_recorder.run(func, args, kwargs)
        except Exception:
            self.culprit = func
            raise
        for leaf, made in zip(pytree.tree_leaves(result), step.made, strict=True):
            if isinstance(made, New):
                if Geometry.of(leaf) != made.geometry:
                    raise Differs(f"{func} gives another shape")
                self.made(leaf)
                self._adopt(leaf.untyped_storage(), made.number)
        node.steps.append(step)
        return result

    def _cut(self, step: Step, break_: Break) -> None:
        """End the segment at a break, and begin the one that follows the observed outcome."""
        self._end()
        node = self.nodes[-1]
        known = node.memory_so_far()
        node.held = {n: s for n, s in self.living().items() if n not in known}
        node.count, node.break_ = self._count, break_
        child = Segment.after(node, step, self._recorder.allocate)
        self._memory |= child.memory
        assert step.key is not None
        break_.after[step.key] = child
        self.nodes.append(child)

    def _begin(self) -> SegmentRecorder:
        if self._segment_recorder is None:
            feeds = self._feeds if self.nodes[-1].parent is None else ()
            self._segment_recorder = self._ending.enter_context(
                self._recorder.segment(feeds, self._draws_from)
            )
            self._segment_recorders.append(self._segment_recorder)
        return self._segment_recorder

    def _end(self, *, drained: bool = False) -> None:
        segment_recorder, node = self._segment_recorder, self.nodes[-1]
        self._segment_recorder = None
        self._ending.close()
        assert segment_recorder is not None
        if node.steps or drained or (node.parent is None and self._feeds):
            node.recording = segment_recorder.recording
            node.recording.name = f"segment {len([*node.path()])}"
        else:
            segment_recorder.recording.close()
