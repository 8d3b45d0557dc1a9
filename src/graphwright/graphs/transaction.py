"""The transaction around warm-up and recording: a capture that fails changes nothing."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from ..errors import CaptureError, GraphwrightError, SignatureError, first_line, user_frame
from .capture_turns import turns_of
from .conditions import as_captured, capturing_now, for_inference, refuse_hooks_for_saved_tensors
from .journal import seeded_on_gpu
from .memory import MemoryPool, sweep
from .python_state import PythonState


@contextlib.contextmanager
def transaction(
    pool: MemoryPool,
    module: nn.Module,
    forget: Callable[[], None],
    trained: Sequence[torch.Tensor] | None = None,
) -> Iterator[PythonState]:
    """Put back what changes inside the block; on an error, drop the recording and name the cause.

    Args:
        pool: the pool that is captured into.
        module: what is captured.
        forget: drops what was recorded.
        trained: parameters whose gradients may be set; by default none.
    """
    if trained is not None:
        refuse_hooks_for_saved_tensors()
    with (
        turns_of(module, getattr(module, "_function", None)).alone(),
        for_inference() if trained is None else contextlib.nullcontext(),
        _rolled_back(pool, module, forget, trained) as state,
    ):
        yield state


@contextlib.contextmanager
def _rolled_back(
    pool: MemoryPool,
    module: nn.Module,
    forget: Callable[[], None],
    trained: Sequence[torch.Tensor] | None,
) -> Iterator[PythonState]:
    state = PythonState(module, trained)
    done = False
    try:
        with as_captured():
            yield state
        done = True
    except BaseException as error:
        forget()
        if not isinstance(error, Exception):
            let_go(error)
            raise
        translated = _translated(error)
        if translated is error:
            raise
        raise translated from error
    finally:
        state.restore(python=not done)
        if not capturing_now():
            sweep(pool)


def let_go(error: BaseException) -> None:
    """Clear the frames of an error and its causes, so that they keep no tensor alive."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


def _translated(error: Exception) -> GraphwrightError:
    """The same error as one of graphwright's classes, with its place in the user's code."""
    where = user_frame(error)
    let_go(error)
    if isinstance(error, CaptureError) and (error.where or not where):
        return error
    if isinstance(error, GraphwrightError):
        cls = CaptureError if isinstance(error, SignatureError) else type(error)
        return cls(error.what, where=error.where or where, remedy=error.remedy)
    return CaptureError(
        f"The call failed while it was being captured: {first_line(error)}",
        where=where,
        remedy=seeded_on_gpu(error) or "See the original error, which is this one's cause.",
    )
