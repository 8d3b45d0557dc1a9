"""What a call does to objects and attributes, and what keeps it from being captured.

What goes wrong is in hazards_of_objects.py, random programs in test_random_objects.py.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    note: Any = None


def test_an_object_is_built_again_without_its_init(device: torch.device) -> None:
    made = []

    class Counted:
        def __init__(self, x: torch.Tensor) -> None:
            made.append(1)
            self.x = x

    graph = gw.capture(lambda batch: Counted(batch.x * 2), Batch(torch.ones(2, device=device)))
    made.clear()
    result = graph(Batch(torch.full((2,), 3.0, device=device)))
    assert type(result) is Counted
    torch.testing.assert_close(result.x, torch.full((2,), 6.0, device=device))
    assert not made


@pytest.mark.parametrize(
    ("note", "what"),
    [
        (threading.Lock(), r"args\[0\].note is an object of type lock"),
        ((n for n in ()), r"args\[0\].note is an object of type generator"),
        (nn.Linear(1, 1), r"args\[0\].note is an object of type Linear"),
        ([{"deep": open}], r"args\[0\].note\[0\]\['deep'\] is an object of type builtin"),
    ],
)
def test_what_cannot_be_seen_into_is_refused_by_name(note: Any, what: str) -> None:
    with pytest.raises(gw.CaptureError, match=what):
        gw.capture(lambda batch: batch.x * 2, Batch(torch.ones(2), note))


def test_an_object_that_holds_itself_is_refused_by_name() -> None:
    batch = Batch(torch.ones(2))
    batch.note = {"back": [batch]}
    with pytest.raises(gw.CaptureError, match=r"note\[0\]\[0\] refers back to \[0\]"):
        gw.capture(lambda batch: batch.x * 2, batch)


def test_an_object_with_a_finalizer_is_refused_by_name() -> None:
    class Closing(Batch):
        def __del__(self) -> None:
            pass

    with pytest.raises(gw.CaptureError, match=r"args\[0\] is an object of type .*Closing"):
        gw.capture(lambda batch: batch.x * 2, Closing(torch.ones(2)))


def test_a_registered_container_that_the_call_changes_is_refused() -> None:
    class Own:
        def __init__(self, items: list[Any]) -> None:
            self.items = items

    torch.utils._pytree.register_pytree_node(
        Own, lambda own: (own.items, None), lambda items, _: Own(list(items))
    )

    def grows(own: Own) -> torch.Tensor:
        own.items.append(own.items[0])
        return own.items[0] * 2

    with pytest.raises(gw.CaptureError, match="a Own, in a way of its own"):
        gw.capture(grows, Own([torch.ones(2)]))


def test_the_first_call_with_objects_is_eager_and_nobody_is_warned(device: torch.device) -> None:
    graphed = gw.graph(lambda batch: batch.x * 2)
    for n in range(3):
        graphed(Batch(torch.full((2,), float(n), device=device)))
    assert graphed.statistics.hits == 2
    assert graphed.statistics.eager == {"the first call with objects of these shapes": 1}
    assert "1 call eager: the first call with objects" in graphed.explain()


def test_a_container_that_was_given_comes_back_as_itself(device: torch.device) -> None:
    def adds(kept: dict[str, Any], rows: collections.deque[Any]) -> Any:
        kept["y"] = kept["x"] * 2
        rows.append(kept["y"] + 1)
        return kept, rows

    def given() -> tuple[Any, Any]:
        return {"x": torch.ones(2, device=device)}, collections.deque([1])

    graphed = gw.graph(adds)
    graphed.prepare([given()])
    kept, rows = given()
    one, other = graphed(kept, rows)
    assert one is kept
    assert other is rows
    torch.testing.assert_close(rows[1], torch.full((2,), 3.0, device=device))


def test_a_state_that_the_call_reads_is_refused_and_stays_right(device: torch.device) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state = torch.zeros(1, 4, device=device)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before, self.state = self.state, x * 2
            return torch.where(x.sum() > 100, before, x)

    model, its = Recurrent().eval(), Recurrent().eval()
    with pytest.raises(gw.CaptureError, match="attribute state of Recurrent changes"):
        gw.capture(model, torch.ones(1, 4, device=device))
    graphed = gw.graph(model)
    for scale in (0.0, 1.0, 1000.0, 2000.0):
        x = torch.full((1, 4), scale, device=device)
        torch.testing.assert_close(graphed(x), its(x))
        torch.testing.assert_close(model.state, its.state)


def test_hooks_that_keep_what_they_see(device: torch.device) -> None:
    seen: dict[str, torch.Tensor] = {}
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval().to(device)
    model[0].register_forward_hook(lambda module, args, result: seen.__setitem__("out", result))
    graphed = gw.graph(model)
    with torch.no_grad():
        for n in range(3):
            x = torch.full((2, 4), float(n), device=device)
            graphed(x)
            torch.testing.assert_close(seen["out"], model[0](x))
    assert graphed.statistics.hits == 3
    assert graphed.statistics.captures == 1


def test_captures_leave_attributes_as_they_were(device: torch.device) -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = x * 2
            return x + 1

    model = Keeps().eval()
    graph = gw.capture(model, torch.ones(2, device=device))
    assert model.last is None
    graph(torch.full((2,), 4.0, device=device))
    torch.testing.assert_close(model.last, torch.full((2,), 8.0, device=device))
