"""One call as one CUDA graph: static inputs, replay, outputs that the caller owns.

A graph is captured on a stream of its own in capture mode "thread_local", so that other threads
may go on using the device, with garbage collection held off, since freeing an old graph inside a
capture breaks it (pytorch #91302, #174724).
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import CaptureError, first_line, user_frame
from ..measurement import collection_held_off
from ..signature import Args, Kwargs, flatten, unflatten
from ..snapshots import can_hold_anything, clone_leaves, same_bits

WARMUP = 3


class CudaGraph:
    """A call captured once and replayed for arguments of the same shapes.

    Calls are serialised by a lock and ordered across streams: there is one set of static inputs.
    """

    def __init__(self, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> None:
        """Warm up and capture `function(*args, **kwargs)`.

        Raises:
            CaptureError: the work cannot be captured; the device is left usable.
        """
        self._lock = threading.Lock()
        # The graph reads what the function holds, weights above all, by address: keep it alive.
        self._function = function
        leaves, spec = flatten(args, kwargs)
        static = clone_leaves(leaves)
        tensors = [leaf for leaf in static if isinstance(leaf, torch.Tensor)]
        self._device = next((t.device for t in tensors if t.is_cuda), None)
        if self._device is None:
            raise CaptureError(
                "There is no CUDA tensor among the arguments, so there is nothing to capture.",
                remedy="Move the model and its inputs to the GPU.",
            )
        if not all(t.is_cuda for t in tensors):
            raise CaptureError(
                "An argument is a CPU tensor, whose value the graph would keep for ever.",
                remedy="Move it to the GPU.",
            )
        for tensor in tensors:
            if not can_hold_anything(tensor):
                raise CaptureError(
                    "An argument is an expanded tensor, which no copy can be written into.",
                    remedy="Pass its .contiguous() form.",
                )
        self._slots = [i for i, leaf in enumerate(static) if isinstance(leaf, torch.Tensor)]
        self._inputs = tensors
        self._graph = torch.cuda.CUDAGraph()
        self._last_stream = torch.cuda.current_stream(self._device)
        self._index = self._last_stream.device_index
        self._plain = not kwargs and all(isinstance(a, torch.Tensor) for a in args)
        static_args, static_kwargs = unflatten(static, spec)
        try:
            outputs = self._capture(lambda: function(*static_args, **static_kwargs))
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(
                f"The call cannot be captured as a CUDA graph: {first_line(error)}",
                where=user_frame(error),
                remedy="Operations that wait for the GPU or copy from pageable host memory "
                "cannot be part of a graph.",
            ) from error
        self._outputs, self._out_spec = pytree.tree_flatten(outputs)
        self._nested = not isinstance(outputs, torch.Tensor)
        storages = [v.untyped_storage() for v in self._outputs if isinstance(v, torch.Tensor)]
        # Outputs that are views of one memory have to be so again in the caller's copies.
        self._views = len({s.data_ptr() for s in storages}) < len(storages)
        inputs = {t.untyped_storage().data_ptr() for t in tensors if t.numel()}
        for leaf in self._outputs:
            if not isinstance(leaf, torch.Tensor) or not leaf.numel():
                continue
            if leaf.untyped_storage().data_ptr() in inputs:
                raise CaptureError(
                    "An output shares memory with an input, which this runner cannot keep up.",
                    remedy="Return a copy.",
                )

    def _capture(self, work: Callable[[], Any]) -> Any:
        before = clone_leaves(self._inputs)
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(self._last_stream)
        generator = torch.cuda.default_generators[stream.device.index]
        random_state = generator.clone_state()
        with torch.cuda.stream(stream):
            for _ in range(WARMUP):
                work()
            if not all(map(same_bits, before, self._inputs)):
                raise CaptureError(
                    "The call writes to its inputs, and this runner does not write them back."
                )
            with _refusing_synchronisation():
                work()
            stream.synchronize()
            with collection_held_off():
                self._graph.capture_begin(capture_error_mode="thread_local")
                try:
                    outputs = work()
                except BaseException:
                    # The capture's own end fails too once the capture is broken, and the random
                    # generator would stay in capture mode.
                    with contextlib.suppress(Exception), warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        self._graph.capture_end()
                    generator.graphsafe_set_state(random_state)
                    raise
                self._graph.capture_end()
        self._last_stream.wait_stream(stream)
        torch.cuda.synchronize(self._device)
        return outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Copy the inputs in, replay, and return copies of the outputs."""
        leaves = args if self._plain and not kwargs else flatten(args, kwargs)[0]
        with self._lock, torch.no_grad():
            self._order()
            for slot, target in zip(self._slots, self._inputs, strict=True):
                source = leaves[slot]
                # copy_ would broadcast and cast without a word.
                if source.shape != target.shape or source.dtype != target.dtype:
                    raise CaptureError(
                        f"Captured for {tuple(target.shape)} {target.dtype}, called with "
                        f"{tuple(source.shape)} {source.dtype}.",
                        remedy="Capture another graph for these inputs.",
                    )
                target.copy_(source)
            self._graph.replay()
            if self._views:
                outputs = clone_leaves(self._outputs)
            else:
                outputs = [v.clone() if isinstance(v, torch.Tensor) else v for v in self._outputs]
        return pytree.tree_unflatten(outputs, self._out_spec) if self._nested else outputs[0]

    def _order(self) -> None:
        """On another stream than last time, wait for that one: the static tensors are shared."""
        raw = torch._C._cuda_getCurrentRawStream(self._index)
        if raw != self._last_stream.cuda_stream:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_stream(self._last_stream)
            self._last_stream = stream


@contextlib.contextmanager
def _refusing_synchronisation() -> Iterator[None]:
    """Raise where the work waits for the GPU: a broken capture is costlier than a trial run.

    Libraries ask whether a capture is under way and then leave such reads out, so the answer has
    to be yes here too.
    """
    asked = torch.cuda.is_current_stream_capturing
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked
        torch.cuda.set_sync_debug_mode(before)
