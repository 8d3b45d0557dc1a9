"""TensorRT: which versions go together, what is passed to its compiler, how it says no.

Its libraries are not on PyPI: a module that only looks like torch_tensorrt stands in for it here.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from graphwright.errors import StrategyFailed
from graphwright.strategies.registry import default_candidates, parse_candidates
from graphwright.strategies.tensorrt import TENSORRT, version_problem

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("torch_version", "tensorrt_version", "fits"),
    [
        ("2.11.0", "2.11.0", True),
        ("2.11.0+cu130", "2.11.1", True),
        ("2.11.0", "2.11.0+cu130", True),
        ("2.11.0a0+git1234567", "2.11.0.dev20260101+cu130", True),
        ("2.11.0rc3", "2.11.0", True),
        ("2.11.0", "2.12.0", False),
        ("2.12.0.dev20260101+cu130", "2.11.0", False),
        ("2.1.0", "2.11.0", False),
        ("2.11.0", "2.1.0", False),
        ("2.11.0", "12.11.0", False),
        ("3.0.0", "2.11.0", False),
        ("2.11.0", "unknown", False),
        ("2.11.0", None, False),
    ],
)
def test_versions_go_together_by_their_minor(
    torch_version: str, tensorrt_version: str | None, fits: bool
) -> None:
    problem = version_problem(torch_version, tensorrt_version)
    assert (problem is None) is fits
    if problem is not None and tensorrt_version is not None:
        assert torch_version in problem
        assert tensorrt_version in problem


def stands_in(monkeypatch: pytest.MonkeyPatch, version: str | None) -> list[dict[str, Any]]:
    """A torch_tensorrt that hands out the model as it is, and the arguments that it was given."""
    calls: list[dict[str, Any]] = []

    def compile_(model: nn.Module, **given: Any) -> nn.Module:
        calls.append(given)
        return model

    fake = types.ModuleType("torch_tensorrt")
    vars(fake)["compile"] = compile_
    monkeypatch.setitem(sys.modules, "torch_tensorrt", fake)
    monkeypatch.setattr("graphwright.strategies.tensorrt._installed", lambda: version)
    return calls


def test_it_needs_a_gpu_and_is_not_tried_without(monkeypatch: pytest.MonkeyPatch) -> None:
    stands_in(monkeypatch, torch.__version__)
    found = TENSORRT.probe(CPU)
    assert not found.available
    assert "GPU" in found.reason
    model = nn.Linear(2, 2)
    on = {d.type: {c.name for c in default_candidates(model, d, ())} for d in (CPU, GPU)}
    assert "tensorrt" not in on["cpu"]
    assert "tensorrt" in on["cuda"]
    assert "tensorrt+graph" not in on["cuda"]


@pytest.mark.parametrize("version", [None, "1.4.0"])
def test_other_versions_are_told_with_the_command(
    version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = stands_in(monkeypatch, version)
    found = TENSORRT.probe(GPU)
    minor = ".".join(torch.__version__.split(".")[:2])
    assert not found.available
    assert found.reason == version_problem(torch.__version__, version)
    assert found.remedy == (
        f"pip install torch-tensorrt=={minor}.* --extra-index-url https://pypi.nvidia.com"
    )
    with pytest.raises(StrategyFailed, match="torch-tensorrt") as caught:
        TENSORRT.build(nn.Linear(2, 2), (torch.randn(1, 2),), {})
    assert caught.value.remedy == found.remedy
    assert not calls


def test_an_import_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    stands_in(monkeypatch, torch.__version__)
    monkeypatch.setitem(sys.modules, "torch_tensorrt", None)
    model, x = nn.Linear(2, 2), torch.randn(1, 2)
    monkeypatch.setattr("graphwright.strategies.tensorrt.tiny_model", lambda device: (model, x))
    found = TENSORRT.probe(GPU)
    assert not found.available
    assert "cannot be imported: ModuleNotFoundError" in found.reason


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, sign: int) -> dict[str, torch.Tensor]:
        return {"y": self.linear(x).t() * sign}


@pytest.mark.parametrize(("matmul", "conv"), [("ieee", "tf32"), ("tf32", "ieee"), ("tf32", "tf32")])
def test_it_compiles_in_the_models_own_precision(
    matmul: str, conv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = stands_in(monkeypatch, torch.__version__)
    monkeypatch.setattr(
        torch._C, "_get_fp32_precision_getter", lambda _, op: {"matmul": matmul, "conv": conv}[op]
    )
    model, x = Net().eval(), torch.randn(3, 4)
    (candidate,) = parse_candidates(["tensorrt"], ())
    built = candidate.build(model, (x,), {"sign": -1})
    (given,) = calls
    assert given.pop("arg_inputs")[0] is x
    assert given == {
        "ir": "dynamo",
        "kwarg_inputs": {"sign": -1},
        "use_explicit_typing": True,
        "truncate_double": False,
        "disable_tf32": (matmul, conv) != ("tf32", "tf32"),
    }
    assert built.holds_weights
    result, expected = built.call(x, sign=-1)["y"], model(x, sign=-1)["y"]
    torch.testing.assert_close(result, expected.detach())
    assert result.stride() == expected.stride()
    assert not result.requires_grad


def test_another_structure_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stands_in(monkeypatch, torch.__version__)
    monkeypatch.setattr(
        "graphwright.strategies.tensorrt._compiled", lambda model, args, kwargs: lambda x: [x]
    )
    with pytest.raises(StrategyFailed, match="another structure"):
        TENSORRT.build(nn.Linear(2, 2), (torch.randn(1, 2),), {})
