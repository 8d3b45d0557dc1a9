"""Decisions about calls, without a graph or a device."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from typing import Any

import pytest
import torch

import graphwright as gw
from graphwright.calls.signature import CallSignature
from graphwright.dispatch.decision import (
    CAPTURED,
    CLOSED,
    FIRST,
    GRADIENTS,
    LIMIT,
    NOT_YET,
    TRANSFORMED,
    UNCAPTURED,
    UNFITTING,
    UNPAID,
    Miss,
    shut,
)
from graphwright.dispatch.fallback import Fallback, Words
from graphwright.dispatch.waiting import _MANY_NEW, WaitingCalls
from graphwright.graphs.capture_budget import FREE_LOOKS

# In the order in which they are asked.
GATES = {
    "transformed": (TRANSFORMED, "as it is"),
    "wants_grad": (GRADIENTS, "as it is"),
    "closed": (CLOSED, "detached"),
    "captured": (CAPTURED, "detached"),
}


@pytest.mark.parametrize("situation", list(itertools.product([False, True], repeat=len(GATES))))
def test_the_first_gate_that_is_shut_says_why(situation: tuple[bool, ...]) -> None:
    missed = shut(**dict(zip(GATES, situation, strict=True)))
    wanted = next(
        (said for is_shut, said in zip(situation, GATES.values(), strict=True) if is_shut), None
    )
    assert (missed and (missed.category, missed.way)) == wanted


def signature(*values: Any) -> CallSignature:
    return CallSignature.of((torch.ones(2), *values), {})


def words() -> Words:
    return Words("A part", "They are counted.", "No graph of a part fits", "Prepare one.")


def nothing_is_asked() -> tuple[str, str]:
    raise AssertionError("what most calls differ in is looked for only where that is told")


def postponed(waiting: WaitingCalls, call: CallSignature, **options: Any) -> Miss:
    given: dict[str, Any] = {"is_new": True, "no_room": False, "unpaid": nothing_is_asked} | options
    return waiting.postpone(call, 0.001, **given)


def test_a_call_waits_until_it_comes_back(clock: Any) -> None:
    waiting = WaitingCalls()
    assert waiting.why(None) is None
    assert postponed(waiting, signature(1)).category == NOT_YET
    assert waiting.why(None) is None


def test_where_no_kind_comes_back_it_is_told_why_once_for_a_cause(clock: Any) -> None:
    waiting, causes = WaitingCalls(), iter(range(100))

    def unpaid() -> tuple[str, str]:
        return "a value", f"args[1] is another one, as seen the {next(causes)}. time"

    found = [postponed(waiting, signature(n), unpaid=unpaid).category for n in range(_MANY_NEW + 2)]
    assert found == [NOT_YET] * _MANY_NEW + [UNPAID] * 2
    reasons = {postponed(waiting, signature(n), unpaid=unpaid).reason for n in range(3)}
    assert reasons == {"args[1] is another one, as seen the 0. time"}
    waiting.came_back()
    assert postponed(waiting, signature(0)).category == NOT_YET


def test_what_is_refused_again_and_again_says_so_rather_than_how_calls_differ(clock: Any) -> None:
    waiting = WaitingCalls()
    waiting.refusal = "It reads a value."
    missed = postponed(waiting, signature(1), is_new=False, no_room=True)
    assert (missed.category, missed.reason) == (UNPAID, "It reads a value.")


def test_after_many_looks_in_vain_calls_rest(clock: Any) -> None:
    waiting = WaitingCalls()
    for n in range(FREE_LOOKS):
        postponed(waiting, signature(n))
    assert waiting.why(None) is None
    last = postponed(waiting, signature(-1), no_room=True, unpaid=lambda: ("values", "they differ"))
    assert waiting.why(None) == dataclasses.replace(last, way="unexamined")
    assert repr(waiting) == f"WaitingCalls(at rest: {UNPAID}, 0 refused)"
    clock.now_s += 1
    assert waiting.why(None) is None
    waiting.begin_anew()
    assert not waiting.looks.mostly_in_vain


def test_refused_calls_are_not_looked_at_for_a_while(clock: Any) -> None:
    waiting, call = WaitingCalls(), signature(1)
    assert waiting.refused(call) is None
    assert repr(waiting) == "WaitingCalls(looking, 0 refused)"
    missed = Miss(UNCAPTURED, "It reads a value.", after_capture=True)
    refused = waiting.refuse(call, 0.001, missed)
    assert waiting.refused(signature(1)) is refused
    assert waiting.refused(signature(2)) is None
    assert waiting.why(refused) == Miss(UNCAPTURED, "It reads a value.", way="unexamined")
    clock.now_s += 1
    assert waiting.why(refused) is None
    # Where the budget leaves no capture for it, it is still eager for why it was refused.
    assert postponed(waiting, call).category == UNCAPTURED
    assert waiting.why(refused) is not None
    # For another reason it is looked at anew.
    assert waiting.refuse(call, 0.001, Miss(LIMIT)) is not refused
    waiting.clear()
    assert waiting.refused(call) is None


def test_the_first_call_with_objects_of_a_shape_waits() -> None:
    waiting = WaitingCalls()
    assert waiting.first(None) is None
    missed = waiting.first("a cache of 4")
    assert missed is not None
    assert missed.category == FIRST
    assert waiting.first("a cache of 4") is None
    waiting.note("a cache of 5")
    assert waiting.first("a cache of 5") is None
    waiting.clear()
    assert waiting.first("a cache of 5") is not None


def told(fallback: Fallback, category: str, reason: str = "") -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fallback.tell(category, reason)
    return [str(each.message) for each in caught]


def test_each_kind_is_told_of_once() -> None:
    fallback = Fallback(words, "capture", str)
    assert repr(fallback) == "Fallback(on_miss='capture', last=None)"
    (text,) = told(fallback, UNFITTING, "x has another shape")
    assert text == (
        "A part runs eagerly for this kind of call, since no graph fits: x has another shape. "
        "They are counted."
    )
    assert told(fallback, UNFITTING, "y has another shape") == []
    # What cannot be captured is told of by its reason.
    assert len(told(fallback, UNCAPTURED, "x")) == 1
    assert told(fallback, UNCAPTURED, "x") == []
    assert len(told(fallback, UNCAPTURED, "y")) == 1
    # A graph will answer these soon.
    assert told(fallback, NOT_YET) == told(fallback, FIRST) == []
    assert told(Fallback(None, "capture", str), UNFITTING) == []


def test_a_call_is_refused_where_that_is_asked_for() -> None:
    Fallback(words, "capture", str).refuse("x has another shape")
    with pytest.raises(gw.SignatureError, match=r"No graph of a part fits: x has another shape"):
        Fallback(words, "error", str).refuse("x has another shape")
