"""Record a call's forward and backward, once for each set of activations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...errors import CaptureError
from ...graphs.memory import MemoryPool, retire, shared_bytes
from ...graphs.recorder import Recorder, SegmentRecorder
from ...graphs.static_inputs import CopyPlan, Geometry, StaticInputs, byte_view, is_dense
from ...graphs.warmup import Warmed
from .activations import Activations, Backward
from .backward_outputs import Outputs
from .forward_backward import MemoryObserver, Passes


class PairRecorder:
    """Records the forward and the backward of a call that is warm.

    Args:
        passes: the forward and backward to record.
        warmed: what warm-up has shown about them.
        recorder: the recorder of the device.
        pool: the pool that the graphs live in.
    """

    def __init__(
        self, passes: Passes, warmed: Warmed, recorder: Recorder, pool: MemoryPool
    ) -> None:
        self._passes = passes
        self._warmed = warmed
        self._recorder = recorder
        self._pool = pool

    def record(self, sample: Sequence[Any]) -> Activations:
        """Record forward and backward as a new set of activations.

        Raises:
            CaptureError: they cannot be recorded; nothing of them is left in the pool.
        """
        known = {storage._cdata for storage in self._warmed.external}
        segments: list[SegmentRecorder] = []
        done: Activations | None = None
        try:
            # Activations must survive replays of other graphs, so they share memory with none.
            # What a backward needs is not needed after it, so backwards may share memory.
            with self._recorder.apart():
                before = self._recorder.reserved
                inputs = StaticInputs(sample, self._recorder.allocate)
                done = self._forward(inputs, known, segments)
                done.nbytes = self._recorder.reserved - before
            if self._passes.outputs and self._passes.no_backward is None:
                self._backward(done, known, segments)
        except BaseException:
            if done is not None:
                for recording in done.recordings():
                    retire(self._pool, recording)
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
        copies = CopyPlan.of(inputs, self._warmed.mutated, fresh=True, together=True)
        feeds = [byte_view(inputs.tensor(slot)) for slot in copies.sources]
        memory = MemoryObserver()
        with self._recorder.segment(feeds, self._warmed.generators) as segment:
            segments.append(segment)
            with segment.watching(), self._observing(memory):
                tree = self._passes.forward(inputs)
            outputs = Outputs(tree, inputs, {s._cdata for s in self._warmed.external})
            self._passes.outputs = outputs.select_differentiable(pytree.tree_leaves(tree))
            back = [byte_view(inputs.tensor(slot)) for slot in copies.back]
            segment.drain([*map(byte_view, outputs.results.bases), *back])
        try:
            memory.refuse_unknown(known)
        except CaptureError:
            retire(self._pool, segment.recording)
            raise
        known |= {storage._cdata for storage in memory.still_alive()}
        return Activations(inputs, copies, outputs, segment.recording, None, (), [])

    def _backward(
        self, done: Activations, known: set[int], segments: list[SegmentRecorder]
    ) -> None:
        allocate = shared_bytes(self._pool)
        given = [_like(output, allocate) for output in self._passes.outputs]
        known |= {grad.untyped_storage()._cdata for grad in given}
        memory = MemoryObserver()
        with self._recorder.segment(
            list(map(byte_view, given)), self._warmed.generators
        ) as segment:
            segments.append(segment)
            reach = self._passes.reach()
            with segment.watching(), self._observing(memory):
                grads = self._passes.backward(given)
            segment.drain([byte_view(grad) for grad in grads if grad is not None])
        shapes = [None if grad is None else Geometry.of(grad) for grad in grads]
        device = self._recorder.device
        done.backward = Backward(segment.recording, given, shapes, reach, device)
        memory.refuse_unknown(known)
        done.saved = self._passes.read
        # The nodes keep alive what autograd has saved.
        done.held = [output.grad_fn for output in self._passes.outputs]

    def _observing(self, memory: MemoryObserver) -> contextlib.AbstractContextManager[Any]:
        """Observe memory on the CPU, where operations are recorded one by one.

        A CUDA capture does without: under a dispatch mode, compiled functions would not run.
        """
        return memory if self._recorder.device.type == "cpu" else contextlib.nullcontext()


def _like(output: torch.Tensor, allocate: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Memory for the gradient of an output."""
    plain = output.detach()
    geometry = Geometry.of(plain if is_dense(plain) else plain.contiguous())
    return geometry.at(allocate(plain.numel() * plain.element_size()), 0)
