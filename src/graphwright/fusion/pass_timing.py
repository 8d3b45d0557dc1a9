"""Whether passes pay: a graph is timed with and without them, as it will run.

On a GPU both are captured and replayed, since what matters there is the time of the device; on the
CPU both are called.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..calls.first_use import unseen
from ..calls.split import Args, Kwargs
from ..evaluation.clock import event_seconds, seconds_of
from ..evaluation.gpu_turns import alone_on
from ..graphs.capture import capturing
from .passes.attention import ATTENTION, MASKS
from .passes.base import Pass
from .passes.epilogues import EPILOGUES
from .passes.idioms import BY_HAND
from .passes.layout import CHANNELS_LAST
from .passes.linears import ACTIVATIONS, GATES, PADDED, PATCHES, PROJECTIONS
from .passes.norms import NORMS, RESIDUALS
from .passes.pooling import CHANNEL_GATES, MEANS, POOLS

# Passes that are timed together: one alone may cost time that another one wins. Those that fold
# constants or take work away are in no group, as they leave less to do in any case.
GROUPS: dict[str, tuple[Pass, ...]] = {
    "what was written by hand": (BY_HAND, MASKS, ATTENTION),
    "convolutions": (CHANNELS_LAST, EPILOGUES, MEANS, CHANNEL_GATES, POOLS, PATCHES),
    "linear layers": (PROJECTIONS, GATES, ACTIVATIONS, PADDED),
    "norms": (RESIDUALS, NORMS),
}
# A group, or all of it, is left out if it loses more than this share of the time.
WORTH = 0.01
_ROUNDS = 7
# Seconds of a block, and calls in it at most.
_BLOCK_S, _MOST = 0.004, 50
Run = Callable[[], object]


class LastCall:
    """What is timed of the last first call, which is often compared with several others."""

    def __init__(self) -> None:
        self._call: object = None
        self._run: Run | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> LastCall:
        return self

    def __exit__(self, *error: object) -> None:
        self._call = self._run = None
        self._stack.close()

    def ready(self, call: Callable[..., object], *given: Any) -> Run:
        """What is timed of a call, made anew if it is another one than the last."""
        if self._run is None or self._call is not call:
            self.__exit__()
            self._run = self._stack.enter_context(_ready(call, *given))
            self._call = call
        return self._run


def compared(
    calls: Sequence[Callable[..., object]],
    args: Args,
    kwargs: Kwargs,
    device: torch.device,
    kept: LastCall | None = None,
) -> list[float]:
    """Seconds of each call, of blocks in turns: the medians, on a GPU the fastest ones.

    What else uses a GPU meanwhile only adds to the time of a block.

    Args:
        calls: the first of them is kept for later comparisons.
        args: of each call.
        kwargs: likewise.
        device: where they run.
        kept: of earlier comparisons.
    """
    given = args, kwargs, device
    with unseen(), contextlib.ExitStack() as stack:
        kept = stack.enter_context(LastCall()) if kept is None else kept
        runs = [kept.ready(calls[0], *given)]
        runs += [stack.enter_context(_ready(call, *given)) for call in calls[1:]]
        stack.enter_context(alone_on(device))
        count = max(1, min(_MOST, int(_BLOCK_S / max(_block(runs[0], 2, device), 1e-7))))
        found: list[list[float]] = [[] for _ in runs]
        for turn in range(_ROUNDS):
            order = range(len(runs)) if turn % 2 else range(len(runs) - 1, -1, -1)
            for place in order:
                found[place].append(_block(runs[place], count, device))
        typical = min if device.type == "cuda" else statistics.median
        return [typical(each) for each in found]


@contextlib.contextmanager
def _ready(
    call: Callable[..., object], args: Args, kwargs: Kwargs, device: torch.device
) -> Iterator[Run]:
    """What is timed of a call: its replay on a GPU."""
    with torch.no_grad():
        for _ in range(2):
            call(*args, **kwargs)
        if device.type != "cuda":
            yield lambda: call(*args, **kwargs)
            return
        with capturing(device=device) as graph:
            kept = call(*args, **kwargs)
        try:
            yield graph.replay
        finally:
            del kept
            graph.close()


def _block(run: Run, count: int, device: torch.device) -> float:
    """Seconds of a run in a block of some."""

    def block() -> None:
        with torch.no_grad():
            for _ in range(count):
                run()

    took = event_seconds if device.type == "cuda" else seconds_of
    return took(block, device) / count
