"""What benchmarks of single models take for right."""

from __future__ import annotations

import torch
from torch import nn

from bench.common.peers import Case, set_up
from graphwright.evaluation.measurement import Timer


class Coarse(nn.Module):
    """Its input, but for the bits that half precision has no room for at 1000."""

    def __init__(self, middle: float = 1000.0) -> None:
        super().__init__()
        self.middle = middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.middle) - self.middle


def test_what_is_as_near_to_float64_as_eager_is_right_however_far_from_eager() -> None:
    device = torch.device("cpu")
    case = Case.made(Coarse(), (torch.randn(64).half(),), {}, device)
    ways = {
        "as exact": lambda case: Coarse(1024.0),
        "less exact": lambda case: Coarse(8000.0),
        "off": lambda case: lambda x: case.model(x) + 2,
        "no number": lambda case: lambda x: case.model(x) * float("nan"),
        "another shape": lambda case: lambda x: (case.model(x) + 1, x),
    }
    calls, rows = set_up(case, ways, Timer(device), lambda way: None)
    assert list(calls) == ["as exact"]
    assert {way: row["status"] for way, row in rows.items()} == {
        "as exact": "ok",
        **dict.fromkeys(["less exact", "off", "no number", "another shape"], "wrong"),
    }
    (note,) = rows["as exact"]["notes"]
    assert note.startswith("is off float64 by ")
    assert rows["as exact"]["max_abs_difference"] > 0.02
