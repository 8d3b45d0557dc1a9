"""A capture changes nothing unless it succeeds: the frame around warm-up and recording."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from ..errors import CaptureError, GraphwrightError, SignatureError, first_line, user_frame
from ..signature import FastPath
from .journal import Shared, seeded_on_gpu
from .memory import MemoryPool
from .turns import turns_of
from .undo import Undo

_CUDA = torch.version.cuda is not None or torch.version.hip is not None


class _Thread(threading.local):
    """How many captures this thread is in."""

    depth = 0
    # How many blocks, these or others, may train nothing.
    inference = 0


THREAD = _Thread()


def capturing_now() -> bool:
    """Whether this thread is warming up or capturing a graph."""
    return THREAD.depth > 0


def captured_by_others() -> bool:
    """Whether the current CUDA stream is being captured, by whomsoever."""
    return _CUDA and torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def for_inference() -> Iterator[None]:
    """Have training steps refuse to run inside the block: what is done there trains nothing."""
    THREAD.inference += 1
    try:
        yield
    finally:
        THREAD.inference -= 1


def only_for_inference() -> bool:
    """Whether this thread captures, fuses or tunes something that may train nothing."""
    return THREAD.inference > 0


@contextlib.contextmanager
def transaction(
    pool: MemoryPool,
    module: nn.Module,
    forget: Callable[[], None],
    trained: Sequence[torch.Tensor] | None = None,
) -> Iterator[Undo]:
    """Put back what was changed inside; on an error, leave nothing and name the cause.

    Args:
        pool: where it is done.
        module: what is captured.
        forget: gives up what was recorded.
        trained: parameters whose gradients may be set; by default none.
    """
    if trained is not None:
        refuse_hooks_for_saved_tensors()
    with (
        turns_of(module, getattr(module, "_function", None)).alone(),
        for_inference() if trained is None else contextlib.nullcontext(),
        _put_back(pool, module, forget, trained) as undo,
    ):
        yield undo


def under_hooks_for_saved_tensors() -> bool:
    """Whether autograd hands what it saves to somebody's hooks."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def refuse_hooks_for_saved_tensors() -> None:
    """Raise CaptureError where autograd hands what it saves to somebody's hooks."""
    if under_hooks_for_saved_tensors():
        raise CaptureError(
            "Hooks for saved tensors are on; a graph would have them at every replay.",
            remedy="Capture outside of torch.autograd.graph.saved_tensors_hooks, save_on_cpu and "
            "torch.utils.checkpoint; calls under them are eager.",
        )


@contextlib.contextmanager
def _put_back(
    pool: MemoryPool,
    module: nn.Module,
    forget: Callable[[], None],
    trained: Sequence[torch.Tensor] | None,
) -> Iterator[Undo]:
    undo = Undo(module, trained)
    done = False
    try:
        with as_captured():
            yield undo
        done = True
    except BaseException as error:
        forget()
        if not isinstance(error, Exception):
            let_go(error)
            raise
        told = _translated(error)
        if told is error:
            raise
        raise told from error
    finally:
        undo.restore(python=not done)
        if not capturing_now():
            pool.sweep()


@contextlib.contextmanager
def as_captured() -> Iterator[None]:
    """Run Python as a capture does, whether or not one is under way."""
    THREAD.depth += 1
    try:
        with _same_kernels(), torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        THREAD.depth -= 1


@contextlib.contextmanager
def _same_kernels() -> Iterator[None]:
    """Keep modules from computing other numbers for the sole reason that gradients are off.

    nn.TransformerEncoder and nn.MultiheadAttention have such a path. It is left to callers who had
    gradients off themselves.
    """
    if not torch.is_grad_enabled():
        yield
        return
    with _PLAIN_ATTENTION.thrown():
        yield


def _plain_attention() -> Callable[[], object]:
    fast = torch.backends.mha.get_fastpath_enabled()
    FastPath.kept = fast  # Calls of other threads are none of it.
    torch.backends.mha.set_fastpath_enabled(False)

    def back() -> None:
        torch.backends.mha.set_fastpath_enabled(fast)
        FastPath.kept = None

    return back


_PLAIN_ATTENTION = Shared(_plain_attention)


def let_go(error: BaseException) -> None:
    """Let go of the tensors that the frames of an error hold: nothing stays allocated."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


def _translated(error: Exception) -> GraphwrightError:
    """The error as graphwright's own, with its place in the user's code."""
    where = user_frame(error)
    let_go(error)
    if isinstance(error, CaptureError) and (error.where or not where):
        return error
    if isinstance(error, GraphwrightError):
        kind = CaptureError if isinstance(error, SignatureError) else type(error)
        return kind(error.what, where=error.where or where, remedy=error.remedy)
    return CaptureError(
        f"The call failed while it was being captured: {first_line(error)}",
        where=where,
        remedy=seeded_on_gpu(error) or "See the original error, which is this one's cause.",
    )
