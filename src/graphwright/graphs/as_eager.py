"""Whether a call is faster as eager code runs it: in segments between what libraries read there.

transformers looks into a mask in eager mode, and leaves it out if it masks nothing. In a capture it
cannot look, and runs slower kernels of attention with the mask. One graph of these is right for
every mask; segments with the look between them are faster for most. Both are captured and timed.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..calls.split import Args, Kwargs
from ..errors import CaptureError
from ..evaluation.clock import medians_in_turns
from .segments.tree import SegmentTree
from .transaction import let_go

# Where this is tried: the CPU recorder's times say nothing of a GPU's.
TRIED_ON = frozenset({"cuda"})
# Rounds that are timed, after those in which something is set up or timed by the segments.
_ROUNDS, _FIRST = 7, 6
# Segments are taken below this share of the time: they keep calls from overlapping.
_BELOW = 0.9
# Each look may double the paths that calls take.
_MOST_LOOKS = 3


class CaptureMode(enum.Enum):
    """What libraries are told that ask whether a capture is under way, and what is recorded then.

    Attributes:
        UNDECIDED: that one is, as long as the call runs the same in eager mode.
        CAPTURED: that one is.
        EAGER: that none is; one graph of what eager code runs.
        LOOKING: that none is; segments between what libraries read there.
        as_eager: whether they are told that none is.
    """

    UNDECIDED = "undecided", False
    CAPTURED = "captured", False
    EAGER = "eager", True
    LOOKING = "looking", True

    def __init__(self, name: str, as_eager: bool) -> None:
        self.as_eager = as_eager


class Twin(Protocol):
    """A captured call, as far as it is used here."""

    mutates: bool
    random: bool
    has_effects: bool
    places: list[Any]

    @property
    def tree(self) -> SegmentTree | None: ...
    @property
    def given_up(self) -> CaptureError | None: ...
    def warm(self) -> object: ...
    def record(self) -> None: ...
    def close(self) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def is_faster_as_eager(
    make: Callable[[CaptureMode], Twin], args: Args, kwargs: Kwargs, device: torch.device
) -> bool:
    """Time a call in segments as eager code runs it beside one graph; both are closed again.

    Args:
        make: makes the call's graph, not yet warm: in segments, or one.
        args: positional arguments of the call.
        kwargs: its keyword arguments.
        device: where it runs.

    Returns:
        whether segments are faster; False where anything fails or changes something.
    """
    twins: list[Twin] = []
    try:
        for mode in (CaptureMode.LOOKING, CaptureMode.CAPTURED):
            twin = make(mode)
            twins.append(twin)
            twin.warm()
            if _changes_something(twin):
                return False
            twin.record()
            if _changes_something(twin) or (mode is CaptureMode.LOOKING and not _only_looks(twin)):
                return False
        prepared = [_prepared(twin, args, kwargs) for twin in twins]
        in_segments_s, whole_s = medians_in_turns(prepared, device, rounds=_ROUNDS, warmup=_FIRST)
        return twins[0].given_up is None and in_segments_s <= _BELOW * whole_s
    except Exception as error:  # One graph was known to do before this was tried.
        let_go(error)
        return False
    finally:
        for twin in twins:
            twin.close()


def _changes_something(twin: Twin) -> bool:
    """Whether a call leaves anything behind but its results, which must not happen again here."""
    return twin.mutates or twin.random or twin.has_effects or bool(twin.places)


def _only_looks(twin: Twin) -> bool:
    """Whether a call is in segments, and all that is read between them is a few truth values."""
    root = None if twin.tree is None else twin.tree.root
    if root is None:
        return False
    breaks = [node.break_ for node in root.below() if node.break_ is not None]
    return 0 < len(breaks) <= _MOST_LOOKS and all(each.is_truth_value for each in breaks)


def _prepared(twin: Twin, args: Args, kwargs: Kwargs) -> Callable[[], Callable[[], object]]:
    """Makes the same call for each round."""
    return lambda: functools.partial(twin, *args, **kwargs)
