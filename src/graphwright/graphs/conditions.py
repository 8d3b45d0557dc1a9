"""The conditions that captured code runs under: process-wide switches, and who is capturing now."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..calls.modes import SharedSwitch, cached_weights_refused
from ..calls.signature import under_hooks_for_saved_tensors
from ..calls.switches import AttentionFastPath
from ..errors import CaptureError


class _ThreadConditions(threading.local):
    """What this thread is inside of.

    Attributes:
        depth: how many captures.
        inference: how many blocks, captures included, in which nothing may be trained.
        kept: what lives until the captures are over.
    """

    depth = 0
    inference = 0
    kept: tuple[object, ...] = ()


THREAD = _ThreadConditions()


class _Pretending(threading.local):
    """What this thread is told of captures.

    Attributes:
        depth: how many `pretend_capturing` blocks it is in.
        as_eager: how many `answering_as_eager` blocks.
        questions: how often code that is neither PyTorch's nor ours has asked.
    """

    depth = 0
    as_eager = 0
    questions = 0


_PRETENDING = _Pretending()
# What is told the truth in any case.
_OWN = ("torch", "graphwright")


def _answer_yes() -> Callable[[], object]:
    asked = torch.cuda.is_current_stream_capturing

    def is_current_stream_capturing() -> bool:
        if not _PRETENDING.depth:
            return asked()
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        if caller.partition(".")[0] not in _OWN:
            _PRETENDING.questions += 1
            return not _PRETENDING.as_eager
        return True

    torch.cuda.is_current_stream_capturing = is_current_stream_capturing
    return lambda: setattr(torch.cuda, "is_current_stream_capturing", asked)


_PRETENCE = SharedSwitch(_answer_yes)


@contextlib.contextmanager
def pretend_capturing() -> Iterator[None]:
    """Have torch.cuda.is_current_stream_capturing() return True on this thread.

    Libraries call it, and skip reads of device values during a capture. Warm-up and recording have
    to run the same work.
    """
    with _PRETENCE.thrown():
        _PRETENDING.depth += 1
        try:
            yield
        finally:
            _PRETENDING.depth -= 1


@contextlib.contextmanager
def answering_as_eager(enabled: bool = True) -> Iterator[None]:
    """Have torch.cuda.is_current_stream_capturing() return False to libraries, as outside captures.

    For work that reads nothing from the device in eager mode: what libraries leave out in captures
    to avoid reads is often the faster way.
    """
    _PRETENDING.as_eager += enabled
    try:
        yield
    finally:
        _PRETENDING.as_eager -= enabled


def questions() -> int:
    """How often libraries have asked whether they are captured, in pretended captures."""
    return _PRETENDING.questions


@contextlib.contextmanager
def autocast_cache_apart() -> Iterator[None]:
    """Use no cast that was made before the block, and keep none that is made inside it.

    Autocast caches casts of weights until it is left. A graph must make its own casts: one from
    outside would be freed under it and would not follow the weight; one from inside lies in the
    graph's memory.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def capturing_now() -> bool:
    """Whether this thread is warming up or capturing a graph."""
    return THREAD.depth > 0


def keep_while_capturing(*dropped: object) -> None:
    """Keep what nobody holds any more until this thread's captures are over.

    Destroying a CUDA graph would break them (pytorch #91302).
    """
    if THREAD.depth:
        THREAD.kept = (*THREAD.kept, *dropped)


def captured_by_others() -> bool:
    """Whether the current CUDA stream is being captured, by graphwright or anyone else."""
    # Where CUDA was built in and there is no GPU, asking raises.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def for_inference() -> Iterator[None]:
    """Have graphed training steps refuse to run inside the block, which must train nothing."""
    THREAD.inference += 1
    try:
        yield
    finally:
        THREAD.inference -= 1


def only_for_inference() -> bool:
    """Whether this thread captures, fuses or tunes something that must train nothing."""
    return THREAD.inference > 0


def refuse_hooks_for_saved_tensors() -> None:
    """Raise CaptureError where hooks for saved tensors are on."""
    if under_hooks_for_saved_tensors():
        raise CaptureError(
            "Hooks for saved tensors are on; a graph would have them at every replay.",
            remedy="Capture outside of torch.autograd.graph.saved_tensors_hooks, save_on_cpu and "
            "torch.utils.checkpoint; calls under them are eager.",
        )


def hidden_from_hooks_for_saved_tensors() -> contextlib.AbstractContextManager[object]:
    """Have hooks for saved tensors of callers see nothing of what runs inside the block."""
    if not under_hooks_for_saved_tensors():
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)


def _as_it_is(saved: Any) -> Any:
    return saved


@contextlib.contextmanager
def as_captured() -> Iterator[None]:
    """Run the block as a capture would: no gradients, inference mode or hooks; same kernels."""
    THREAD.depth += 1
    try:
        with (
            _same_kernels(),
            cached_weights_refused(),
            torch.inference_mode(False),
            torch.no_grad(),
            hidden_from_hooks_for_saved_tensors(),
        ):
            yield
    finally:
        THREAD.depth -= 1
        if not THREAD.depth:
            THREAD.kept = ()


@contextlib.contextmanager
def _same_kernels() -> Iterator[None]:
    """Keep modules from choosing other kernels just because a capture turns gradients off.

    nn.TransformerEncoder and nn.MultiheadAttention have such a fast path. It stays on for callers
    who turned gradients off themselves.
    """
    if not torch.is_grad_enabled():
        yield
        return
    with _NO_FAST_PATH.thrown():
        yield


def _fast_path_off() -> Callable[[], object]:
    setting = torch.backends.mha.get_fastpath_enabled()
    # Calls of other threads have to see the user's setting.
    AttentionFastPath.user_setting = setting
    torch.backends.mha.set_fastpath_enabled(False)

    def put_back() -> None:
        torch.backends.mha.set_fastpath_enabled(setting)
        AttentionFastPath.user_setting = None

    return put_back


_NO_FAST_PATH = SharedSwitch(_fast_path_off)
