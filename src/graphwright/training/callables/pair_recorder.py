"""Recording a call's forward and backward, once for each set of activations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...errors import CaptureError
from ...graphs.memory import MemoryPool
from ...graphs.recorder import Recorder, SegmentRecorder
from ...graphs.static_tensors import Geometry, StaticInputs, flat, is_dense
from ...graphs.warmup import Warmed
from .activations import Activations, Backward, Copies
from .forward_backward import Passes, Seen
from .outputs import Outputs


class Taking:
    """Records the passes of a call, which is warm.

    Args:
        passes: what is recorded.
        warmed: what warm-up has found out.
        recorder: by what.
        pool: where.
    """

    def __init__(
        self,
        passes: Passes,
        warmed: Warmed,
        recorder: Recorder,
        pool: MemoryPool,
    ) -> None:
        self._passes = passes
        self._warmed = warmed
        self._recorder = recorder
        self._pool = pool

    def record(self, sample: Sequence[Any]) -> Activations:
        """Record forward and backward, with memory of their own.

        Raises:
            CaptureError: they cannot be recorded; nothing is left of them.
        """
        known = {storage._cdata for storage in self._warmed.external}
        segments: list[SegmentRecorder] = []
        done: Activations | None = None
        try:
            # Activations live on between the replays of other graphs, and may lie in the memory of
            # none of them. What a backward needs is not needed after it.
            with self._recorder.apart():
                inputs = StaticInputs(sample, self._recorder.allocate)
                done = self._forward(inputs, known, segments)
            if self._passes.outputs and self._passes.no_backward is None:
                self._backward(done, known, segments)
        except BaseException:
            if done is not None:
                for recording in done.recordings():
                    self._pool.retire(recording)
            raise
        finally:
            self._passes.forget()
            for segment in reversed(segments):
                segment.forget()
        return done

    def _forward(
        self, inputs: StaticInputs, known: set[int], segments: list[SegmentRecorder]
    ) -> Activations:
        known |= {inputs.tensor(slot).untyped_storage()._cdata for slot in inputs.slots}
        copies = Copies.of(inputs, self._warmed.mutated)
        feeds = [flat(inputs.tensor(slot)) for slot in copies.sources]
        seen = Seen()
        with self._recorder.segment(feeds, self._warmed.generators) as segment:
            segments.append(segment)
            with segment.watching(), self._looking(seen):
                tree = self._passes.forward(inputs)
            outputs = Outputs(tree, inputs, {s._cdata for s in self._warmed.external})
            self._passes.outputs = outputs.of(pytree.tree_leaves(tree))
            back = [flat(inputs.tensor(slot)) for slot in copies.back]
            segment.drain([*map(flat, outputs.results.bases), *back])
        try:
            seen.refuse_what_is_new(known)
        except CaptureError:
            self._pool.retire(segment.recording)
            raise
        known |= {storage._cdata for storage in seen.living()}
        return Activations(inputs, copies, outputs, segment.recording, None, (), [])

    def _backward(
        self, done: Activations, known: set[int], segments: list[SegmentRecorder]
    ) -> None:
        allocate = self._pool.shared_bytes()
        given = [_like(output, allocate) for output in self._passes.outputs]
        known |= {grad.untyped_storage()._cdata for grad in given}
        seen = Seen()
        with self._recorder.segment(list(map(flat, given)), self._warmed.generators) as segment:
            segments.append(segment)
            reach = self._passes.reach()
            with segment.watching(), self._looking(seen):
                grads = self._passes.backward(given)
            segment.drain([flat(grad) for grad in grads if grad is not None])
        shapes = [None if grad is None else Geometry.of(grad) for grad in grads]
        device = self._recorder.device
        done.backward = Backward(segment.recording, given, shapes, reach, device)
        seen.refuse_what_is_new(known)
        done.saved = self._passes.read
        # What autograd has saved lives on with its nodes.
        done.held = [output.grad_fn for output in self._passes.outputs]

    def _looking(self, seen: Seen) -> contextlib.AbstractContextManager[Any]:
        """See the operations, where they are recorded one by one.

        A capture goes without: under a dispatch mode, torch.compile would not run what it made.
        """
        return seen if self._recorder.device.type == "cpu" else contextlib.nullcontext()


def _like(output: torch.Tensor, allocate: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Memory for the gradient of an output."""
    plain = output.detach()
    geometry = Geometry.of(plain if is_dense(plain) else plain.contiguous())
    return geometry.at(allocate(plain.numel() * plain.element_size()), 0)
