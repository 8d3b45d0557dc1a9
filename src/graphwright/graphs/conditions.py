"""What code runs under while it is captured: who captures, which switches are thrown."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator

import torch

from ..calls.modes import Shared
from ..calls.modes import compilers_off as compilers_off
from ..calls.signature import FastPath
from ..errors import CaptureError


class _Pretending(threading.local):
    """How often this thread is inside of `capturing_seems_on`."""

    depth = 0


_PRETENDING = _Pretending()


def _answer_with_yes() -> Callable[[], object]:
    asked = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: _PRETENDING.depth > 0 or asked()
    return lambda: setattr(torch.cuda, "is_current_stream_capturing", asked)


_SEEMS = Shared(_answer_with_yes)


@contextlib.contextmanager
def capturing_seems_on() -> Iterator[None]:
    """Answer torch.cuda.is_current_stream_capturing() on this thread with True.

    Libraries ask, and leave out reads of device values while a capture is under way; what is
    warmed up and what is recorded have to be the same work.
    """
    with _SEEMS.thrown():
        _PRETENDING.depth += 1
        try:
            yield
        finally:
            _PRETENDING.depth -= 1


@contextlib.contextmanager
def collection_off() -> Iterator[None]:
    """Keep Python's garbage collection from running inside the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def autocast_cache_apart() -> Iterator[None]:
    """Use no cast made before the block, and leave none that was made inside it.

    Autocast keeps casts of weights until it is left. A graph must make its own: one from outside
    would be freed under it, and would not follow the weight; one from inside lies in its memory.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


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
