"""Decisions: why no graph answers a call, apart from what is done about it.

A call passes gates, in one order. The first that is shut says why the call is eager; behind the
last one stands the table of what was made. A decision is what was found there, or a `Miss`. Each
reason is a sentence that goes on from "since", and stands here once for all that answers calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Whatever the arguments are; see `shut`.
TRANSFORMED = "it is traced or transformed"
GRADIENTS = "gradients are wanted"
CLOSED = "closed"
CAPTURED = "inside another capture"
UNDER_HOOKS = "under hooks for saved tensors"
# What was made is for another call, or for the module as it was.
CHANGED = "the module changed"
UNFITTING = "no graph fits"
SHARED = "an argument shares memory with a tensor of the call's own"
UNKNOWN_ARGUMENT = "an argument that cannot be captured"
# No graph can be made, or none is made now.
UNCAPTURED = "it cannot be captured"
LIMIT = "the pool's limit"
UNPAID = "capturing does not pay off"
FIRST = "the first call with objects of these shapes"
FIRST_CARRIED = "the first call that reads an attribute and then sets it"
NOT_YET = "not captured yet"

# How the function runs without a graph: "detached", so that its results require no grad;
# "unexamined", likewise, under the gradient mode of the call, since nobody has looked at the
# module; "as it is", with gradients.
Way = Literal["detached", "unexamined", "as it is"]


@dataclass(frozen=True)
class Miss:
    """Why no graph answers a call.

    Attributes:
        category: as statistics count it.
        reason: in detail.
        sizes: the call's named sizes, if there are buckets.
        way: how the function runs.
        after_capture: whether a capture was tried for this very call.
    """

    category: str
    reason: str = ""
    sizes: tuple[int, ...] | None = None
    way: Way = "detached"
    after_capture: bool = False


def shut(*, transformed: bool, wants_grad: bool, closed: bool, captured: bool) -> Miss | None:
    """The first gate that a call does not pass, whatever its arguments are; None if it passes all.

    Args:
        transformed: whether it is traced, or something around it has to see all operations.
        wants_grad: whether it is for training.
        closed: whether what answers it was closed.
        captured: whether it is part of a capture.
    """
    if transformed:
        return Miss(TRANSFORMED, way="as it is")
    # A training step that is captured wants gradients too.
    if wants_grad:
        return Miss(GRADIENTS, way="as it is")
    if closed:
        return Miss(CLOSED)
    return Miss(CAPTURED) if captured else None
