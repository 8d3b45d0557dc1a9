"""Architectures of transformers, tiny and with random weights: what is captured equals eager.

Each is captured once and replayed for inputs that differ in all values and in their padding, or
is refused by the name of what cannot be repeated. The sample is not padded: that is where models
leave out their masks, which would be wrong for whatever follows.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from shares import share
from tiny_architectures import CALLS, CASES, Case, Make
from torch.utils import _pytree as pytree

import graphwright as gw

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("case", share(CASES, of=3), ids=str)
def test_an_architecture_replays_as_eager_computes_or_is_refused(case: Case) -> None:
    model = case.build()
    with torch.no_grad():
        if case.refused:
            model(**case.inputs(0))  # Eager computes it.
            with pytest.raises(gw.CaptureError) as refusal:
                gw.capture(model, **case.inputs(0))
            assert [word for word in case.refused if word not in str(refusal.value)] == []
            return
        graph = gw.capture(model, **case.inputs(0))
        replays_as_eager_computes(graph, model, case.inputs)


# What no division into segments helps: Python's own state, its random numbers, memory that is made
# by code that nobody sees, and code that does something else when it is told of a capture.
UNDIVIDED = ("attribute", "Python's random", "computes something else", "made anew")


@pytest.mark.parametrize("case", share(case for case in CASES if case.refused), ids=str)
def test_what_one_graph_cannot_hold_is_divided_into_segments(case: Case) -> None:
    model = case.build()
    graphed = gw.graph(model)
    divided = not case.refused[0].startswith(UNDIVIDED)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error" if divided else "ignore")
        graphed(**case.inputs(0))
        replays_as_eager_computes(graphed, model, case.inputs)
    assert (graphed.statistics.eager == {}) == divided


def replays_as_eager_computes(graph: Any, model: torch.nn.Module, inputs: Make) -> None:
    before: list[Any] = []
    kept: list[Any] = []
    for step in range(1, CALLS + 1):
        given = inputs(step)
        torch.manual_seed(step)
        expected, expected_tree = pytree.tree_flatten(model(**given))
        torch.manual_seed(step)
        found, tree = pytree.tree_flatten(graph(**given))
        assert tree == expected_tree
        tensors = [leaf for leaf in expected if isinstance(leaf, torch.Tensor)]
        assert tensors
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        # Results belong to the caller, and the calls were worth comparing.
        torch.testing.assert_close(before, kept, rtol=0, atol=0)
        if kept:
            assert any(not torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))
        before = [leaf for leaf in found if isinstance(leaf, torch.Tensor)]
        kept = [leaf.clone() for leaf in before]


def test_most_are_captured() -> None:
    assert len({case.model for case in CASES if not case.refused}) >= 50
