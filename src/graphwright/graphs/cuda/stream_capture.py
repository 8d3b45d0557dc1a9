"""One capture of a CUDA graph, and the clean-up after one that fails.

The capture mode is "thread_local", so that other threads can go on using the device
(pytorch #174724). Python's garbage collector is off, since destroying an old graph during a capture
breaks it (pytorch #91302).
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...evaluation.garbage_collection import garbage_collection_off
from ..conditions import pretend_capturing
from ..recorder import Interrupted

# One capture at a time in a process.
_GATE = threading.RLock()
_PATIENCE_S = 10.0
# What an operation says that finds the capture broken: cudaErrorStreamCaptureInvalidated, or of
# a library that nothing was launched. cuBLAS and cuDNN have no other cause for it in a capture.
_BROKEN_BY_OTHERS = re.compile(
    "previous error during capture|(CUBLAS|CUDNN)_STATUS_EXECUTION_FAILED"
)


@contextlib.contextmanager
def capturing(
    device: torch.device,
    pool: Any,
    generators: Sequence[torch.Generator],
    on_stream: contextlib.AbstractContextManager[None],
    set_aside: Callable[[Any], None],
) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture what is issued inside; after an error the device and the pool are as before.

    Args:
        device: the device.
        pool: its memory, a torch.cuda.MemPool.
        generators: random generators that may be drawn from inside.
        on_stream: makes the capture stream the current one.
        set_aside: is told of a pool that nothing can be captured into any more.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    default = torch.cuda.default_generators[device.index]
    others = [g for g in generators if g is not default]
    for generator in others:
        graph.register_generator_state(generator)
    users = pool.use_count()
    with (
        _hold_back_synchronize(),
        on_stream,
        pretend_capturing(),
        garbage_collection_off(),
    ):
        torch.cuda.synchronize(device)
        try:
            graph.capture_begin(pool=pool.id, capture_error_mode="thread_local")
            yield graph
            _end(graph)
        except BaseException as error:
            if not _abandon(graph, device.index, pool, users, others):
                set_aside(pool)
            if isinstance(error, RuntimeError) and _BROKEN_BY_OTHERS.search(str(error)):
                raise Interrupted(
                    "Another thread has broken the capture.",
                    remedy="Synchronise and allocate on other threads before or after it.",
                ) from error
            raise


def _abandon(
    graph: torch.cuda.CUDAGraph,
    index: int,
    pool: Any,
    users: int,
    generators: Sequence[torch.Generator],
) -> bool:
    """End a capture that failed.

    If the capture itself is broken, ending it fails too, and PyTorch leaves the allocators and the
    random generators in capture mode (pytorch #190308). All are taken out of it but the allocator
    of pinned memory, which nobody can reach: it refuses to begin with the same pool again.

    Returns:
        whether the pool can be captured into again.
    """
    try:
        _end(graph)
        graph.reset()
        return True
    except Exception:
        pass
    # Its destructor would end the process if the capture had not even begun.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(index, pool.id)
    while pool.use_count() > users:
        torch._C._cuda_releasePool(index, pool.id)
    # A successful capture of nothing takes the generators out of capture mode. Giving them another
    # state object would too, but graphs that draw from them would not follow.
    nothing = torch.cuda.CUDAGraph(keep_graph=True)
    for generator in generators:
        nothing.register_generator_state(generator)
    nothing.capture_begin(capture_error_mode="thread_local")
    _end(nothing)
    return False


@contextlib.contextmanager
def _hold_back_synchronize() -> Iterator[None]:
    """Have torch.cuda.synchronize() on other threads wait until the capture is over.

    In any capture mode it would break the capture, and raise an error itself.
    """
    with _GATE:
        plain, owner = torch.cuda.synchronize, threading.get_ident()

        def synchronize(device: Any = None) -> None:
            if threading.get_ident() != owner and _GATE.acquire(timeout=_PATIENCE_S):
                _GATE.release()
            plain(device)

        torch.cuda.synchronize = synchronize
        try:
            yield
        finally:
            torch.cuda.synchronize = plain


def _end(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture, without PyTorch's warning about empty graphs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph.capture_end()
