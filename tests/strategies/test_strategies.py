"""Each strategy builds a callable that computes the same; what is missing says so."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planted import Small
from torch import nn

import graphwright as gw
from graphwright.calls.snapshots import Call
from graphwright.errors import OptionError, StrategyFailed
from graphwright.evaluation.reference import reference
from graphwright.evaluation.verification import verify
from graphwright.strategies.base import Candidate, probe
from graphwright.strategies.registry import (
    COMPILERS,
    REWRITES,
    RUNNERS,
    default_candidates,
    parse_candidates,
    without,
)

SLOW_TO_COMPILE = ["aot_inductor", "aot_inductor:freeze", "inductor:freeze", "bf16+inductor"]
NAMES = [
    *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_TO_COMPILE),
    *(c.name for c in COMPILERS if c.name not in [*SLOW_TO_COMPILE, "inductor:max-autotune"]),
    "channels_last",
    "channels_last+torchscript:optimize",
    "channels_last+inductor",
    "channels_last+graph",
    "bf16",
    "fp16",
    "tf32",
    "eager+graph",
    "torchscript:freeze+graph",
    "torchscript:optimize+graph",
    "aot_autograd+graph",
    "fused+graph",
    "inductor+graph",
    "inductor:freeze+graph",
    "channels_last+inductor+graph",
]


class Net(nn.Module):
    """Convolution, batch norm, keyword argument, and outputs in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        features = torch.relu(self.norm(self.conv(x)))
        return {"features": features, "logits": self.head(features.mean((2, 3))) * scale}


@pytest.mark.parametrize("name", NAMES)
def test_a_candidate_computes_the_same_or_says_why_it_cannot(
    name: str, device: torch.device
) -> None:
    (candidate,) = parse_candidates([name], ("bf16", "fp16", "tf32"))
    found = candidate.availability(device)
    if not found.available:
        assert found.reason
        optional = name.startswith(("onnxruntime", "tensorrt", "xla"))
        optional = optional and "pip install" in found.remedy
        assert device.type == "cpu" or optional, f"{name} ought to run on CUDA: {found.reason}"
        return
    model = Net().eval().to(device)
    call = Call(
        "the sample",
        (torch.randn(4, 3, 16, 16, device=device),),
        {"scale": torch.rand(4, 1, device=device)},
    )
    ref = reference(model, model, call)
    before = [set(vars(each)) for each in model.modules()]
    built = candidate.build(model, call.args, call.kwargs)
    verdict = verify(built.call, ref, ulp=candidate.lossy_ulp)
    assert verdict.ok, verdict.reason
    assert [set(vars(each)) for each in model.modules()] == before
    result = built.call(*call.args, **call.kwargs)
    expected = model(*call.args, **call.kwargs)
    assert result["features"].stride() == expected["features"].stride()
    assert all(p.dtype is torch.float32 for p in model.parameters())
    if name != "eager":
        assert not result["logits"].requires_grad


@pytest.mark.parametrize(
    ("last", "may"),
    [
        (nn.ReLU(), True),
        (nn.Sigmoid(), True),
        (nn.MaxPool2d(2), True),
        (nn.GELU(), False),
        (nn.Hardswish(), False),
    ],
    ids=str,
)
def test_where_onednn_may_lose_nan_the_row_says_so(last: nn.Module, may: bool) -> None:
    """Whether it does goes by the kernel that oneDNN takes."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), last, nn.Conv2d(8, 8, 3)).eval()
    x = torch.randn(2, 3, 16, 16)
    (candidate,) = parse_candidates(["torchscript:optimize"], ())
    built = candidate.build(model, (x,), {})
    x[0, 0, 0, 0] = math.nan
    lost = bool(model(x).isnan().any()) and not bool(built.call(x).isnan().any())
    told = any("may come out as numbers" in note for note in built.notes)
    assert told == (may and torch.backends.mkldnn.is_available())
    assert told or not lost


def test_names_are_unique_and_made_of_parts() -> None:
    names = [part.name for part in (*REWRITES, *COMPILERS, *RUNNERS)]
    assert len(set(names)) == len(names)
    parsed = parse_candidates(["graph", "channels_last+eager", "channels_last+inductor+graph"], ())
    assert [c.name for c in parsed] == [
        "eager+graph",
        "channels_last",
        "channels_last+inductor+graph",
    ]


@pytest.mark.parametrize(
    "name", ["turbo", "inductor+inductor", "", "graph+graph", "tf32+bf16+eager"]
)
def test_unknown_names_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(OptionError, match="channels_last"):
        parse_candidates([name], ("tf32", "bf16"))


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        ([], ["eager", "eager+graph", "inductor", "channels_last+inductor+graph", "bf16"]),
        (["inductor"], ["eager", "eager+graph", "bf16"]),
        (["inductor+graph"], ["eager", "eager+graph", "inductor", "bf16"]),
        (["graph"], ["eager", "inductor", "bf16"]),
        (["eager+graph", "channels_last"], ["eager", "inductor", "bf16"]),
        (["bf16", "xla"], ["eager", "eager+graph", "inductor", "channels_last+inductor+graph"]),
        (["inductor:freeze"], None),
    ],
)
def test_what_is_excluded_goes_with_all_that_has_its_parts(
    exclude: list[str], left: list[str] | None
) -> None:
    names = ["eager", "eager+graph", "inductor", "channels_last+inductor+graph", "bf16"]
    candidates = parse_candidates(names, ("bf16",))
    assert [c.name for c in without(candidates, exclude)] == (names if left is None else left)


def test_nothing_lossy_is_tried_unless_allowed() -> None:
    model, cpu = Net().eval(), torch.device("cpu")
    assert all(c.lossy_ulp is None for c in default_candidates(model, cpu, ()))
    allowed = default_candidates(model, cpu, ("bf16",))
    assert {c.rewrite.name for c in allowed if c.rewrite} == {"channels_last", "bf16"}
    with pytest.raises(OptionError, match="allow"):
        parse_candidates(["bf16"], ())


def test_channels_last_is_tried_where_there_are_convolutions() -> None:
    cpu = torch.device("cpu")
    names = {c.name for c in default_candidates(Net().eval(), cpu, ())}
    assert {
        "eager:no_grad",
        "eager:inference_mode",
        "channels_last",
        "channels_last+inductor",
    } <= names
    assert "inductor:max-autotune" not in names
    assert not any("channels_last" in c.name for c in default_candidates(Small(), cpu, ()))


def test_foreign_errors_are_translated_at_one_seam() -> None:
    class Unscriptable(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(x.numpy() * 2)

    model = Unscriptable().eval()
    (candidate,) = parse_candidates(["aot_autograd"], ())
    with pytest.raises(StrategyFailed, match="aot_autograd could not build this model") as caught:
        candidate.build(nn.Sequential(model, Fails()), (torch.randn(3),), {})
    assert caught.value.__cause__ is not None


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("cannot be built")


def test_a_probe_runs_once_and_its_failure_is_an_answer() -> None:
    calls = []

    class Broken:
        name, complexity = "broken", 1

        def probe(self, device: torch.device) -> Any:
            calls.append(device)
            raise OSError("no such library")

        def build(self, *_: Any) -> Any:
            raise AssertionError("never built")

    broken = Broken()
    for _ in range(2):
        found = Candidate(broken).availability(torch.device("cpu"))
        assert not found.available
        assert "OSError: no such library" in found.reason
    assert len(calls) == 1


def test_scripting_that_fails_falls_back_to_a_trace_with_the_reason() -> None:
    class TakesAnything(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
            return self.linear(args[0]) + kwargs["y"]

    (candidate,) = parse_candidates(["torchscript"], ())
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    model = TakesAnything().eval()
    built = candidate.build(model, (x,), {"y": y})
    assert any("traced, since torch.jit.script failed" in note for note in built.notes)
    torch.testing.assert_close(built.call(x, y=y), model(x, y=y).detach())


def test_many_compilations_of_one_model_do_not_go_eager() -> None:
    """TorchDynamo's limit of eight entries a code object is silent (hence `fresh_entry`)."""
    model = Small().eval()
    (candidate,) = parse_candidates(["aot_autograd"], ())
    for _ in range(10):
        candidate.build(model, (torch.randn(2, 16),), {})


def test_rewrites_of_a_plain_function_are_refused() -> None:
    from graphwright.calls.modules import FunctionModule

    (candidate,) = parse_candidates(["channels_last"], ())
    with pytest.raises(StrategyFailed, match="plain function"):
        candidate.build(FunctionModule(torch.relu), (torch.randn(1, 2, 3, 4),), {})


class Broken(nn.Module):
    """A graph break, behind which TorchDynamo caches code by the module's own functions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        torch._dynamo.graph_break()
        return y * 2


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.linear(x))


@pytest.mark.parametrize("discard", [False, True])
def test_frozen_weights_stay_with_the_candidate(discard: bool) -> None:
    model, x = Broken().eval(), torch.randn(4, 8)
    frozen, plain = parse_candidates(["inductor:freeze", "inductor"], ())
    with torch.no_grad(), torch._inductor.config.patch(freezing_discard_parameters=discard):
        frozen.build(model, (x,), {})
        for parameter in model.parameters():
            parameter.mul_(2)
        expected = model(x)
        for candidate in (plain, frozen):
            built = candidate.build(model, (x,), {})
            torch.testing.assert_close(built.call(x), expected)
            assert built.holds_weights is (candidate is frozen)
        torch.testing.assert_close(torch.compile(model, dynamic=False)(x), expected)


@pytest.mark.slow
def test_probes_leave_the_random_state_alone(device: torch.device) -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    # Of XLA, which changes its process, tests/strategies/test_xla.py asks this.
    compilers = [c for c in COMPILERS if not c.name.startswith(("inductor", "xla"))]
    for part in (*REWRITES, *RUNNERS, *compilers):
        probe(part, device)
        if device.type == "cuda":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                part.probe(device)
    assert torch.equal(torch.random.get_rng_state(), before)


class Reads(nn.Module):
    """Cannot be scripted; may go two ways, by a size or by a value."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.by = by
        self.limit = torch.tensor(8.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ways: dict[str, Callable[[], Any]] = {
            "value": lambda: x.sum() > 8,
            "size": lambda: x.reshape(x.shape[0], -1).shape[0] > 2,
            "own": lambda: self.limit > 2,
        }
        y: torch.Tensor = self.linear(x)
        return y if ways[self.by]() else y * 2


@pytest.mark.parametrize(("by", "refused"), [("value", True), ("size", False), ("own", False)])
def test_a_trace_that_would_freeze_a_value_of_the_inputs_is_refused(by: str, refused: bool) -> None:
    model, x = Reads(by).eval(), torch.ones(4, 8)
    tuned = gw.tune(
        model, (x,), strategies=["torchscript"], isolate=False, remember=False, progress=False
    )
    row = tuned.report.row("torchscript")
    assert row is not None
    assert ("reads a value that depends on its inputs" in row.reason) is refused
    assert (row.measurement is None) is refused
