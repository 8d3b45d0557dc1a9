"""A TunedModule behaves as the module does, and goes eager whenever the winner does not fit."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from chosen import choosing
from planted import Small
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

import graphwright as gw
from graphwright.artifacts.tuned_module import TunedModule
from graphwright.calls.signature import CallSignature
from graphwright.calls.watch import ModuleWatch
from graphwright.dispatch.fast_path import MISS, shortcut
from graphwright.report.report import Report
from graphwright.report.result import Status
from graphwright.strategies.base import AVAILABLE
from graphwright.strategies.registry import parse_candidates
from graphwright.strategies.runners import GRAPH
from graphwright.tuning.tuner import Tuning

REPORT = Report("Small", [], "latency", [], {}, chosen="planted", reason="planted was chosen.")
MARK = 1000.0


Made = tuple[TunedModule, Small, torch.Tensor]


@pytest.fixture(params=["the long way", "the short way"])
def tuned_small(request: pytest.FixtureRequest) -> Callable[..., Made]:
    """Makes a winner whose answers are off by MARK, so that one sees who answered."""

    def made(device: torch.device | str = "cpu", *, values: bool = True) -> Made:
        model = Small().eval().to(device)
        x = torch.randn(4, 16, device=device)

        def winner(*args: Any, **kwargs: Any) -> torch.Tensor:
            with torch.no_grad():
                return model(*args, **kwargs) + MARK

        signature = CallSignature.of((x,), {})
        watch = ModuleWatch(model, values=values)
        shortcuts = []
        if request.param == "the short way":

            def launch(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
                return winner(*tensors)

            short = shortcut(signature, launch, watch.unchanged, training=False)
            assert short is not None
            shortcuts.append(short)
        table = [(signature, winner)]
        return TunedModule(model, REPORT, table, watch, shortcuts=shortcuts), model, x

    return made


def won(result: torch.Tensor) -> bool:
    return bool(result.mean() > MARK / 2)


def test_a_fitting_call_is_answered_by_the_winner(tuned_small: Callable[..., Made]) -> None:
    tuned, _, x = tuned_small()
    assert won(tuned(x))
    assert won(tuned(torch.randn(4, 16)))
    assert won(tuned(x=torch.randn(4, 16)))
    assert tuned.calls == {"tuned": 3}


def test_a_graph_is_called_the_short_way(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Graphs on the CPU are for tests: tune() does not offer them.
    probed = {(id(GRAPH), device.type): (GRAPH, AVAILABLE)}
    monkeypatch.setattr("graphwright.strategies.base._probed", probed)
    model, x = Small().eval().to(device), torch.randn(4, 16, device=device)
    tuning = Tuning(model, (x,), strategies=["eager+graph"], remember=False)
    tuning.run()
    built = tuning.asked.candidates[-1].build(model, (x,), {})

    def long_way(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a call that fits took the long way")

    tuned = tuning._tuned("eager+graph", [replace(built, call=long_way)])
    for _ in range(3):
        x = torch.randn(4, 16, device=device)
        assert torch.equal(tuned(x), model(x).detach())
        with torch.no_grad():
            model.first.weight.mul_(1.5)  # The graph reads the weights where they are.
    assert tuned.calls == {"tuned": 3}
    with torch.no_grad():
        assert not tuned(x[:2]).requires_grad
    assert tuned.calls["eager: another signature"] == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda t, x: t(x[:1]),
        lambda t, x: t(x[:, torch.arange(16)].t().contiguous().t()),
        lambda t, x: t.double()(x.double()),
    ],
)
def test_another_call_goes_eager_and_is_counted(
    call: Any, tuned_small: Callable[..., Made]
) -> None:
    tuned, _, x = tuned_small()
    result = call(tuned, x)
    assert not won(result)
    assert not result.requires_grad
    assert tuned.calls == {"eager: another signature": 1}
    assert tuned._choice.fallback.last in tuned.explain()


def test_wrong_calls_raise_as_the_module_does(tuned_small: Callable[..., Made]) -> None:
    tuned, model, _ = tuned_small()
    with pytest.raises(RuntimeError) as mine:
        tuned(torch.ones(4, 3))
    with pytest.raises(RuntimeError) as theirs:
        model(torch.ones(4, 3))
    assert str(mine.value) == str(theirs.value)
    with pytest.raises(TypeError):
        tuned()


@pytest.mark.parametrize(
    "change",
    [
        lambda t, m: t.load_state_dict(Small().state_dict()),
        lambda t, m: t.load_state_dict(Small().state_dict(), assign=True),
        lambda t, m: setattr(m.first.weight, "data", torch.zeros(16, 16)),
        lambda t, m: setattr(m, "first", nn.Linear(16, 16).eval()),
        lambda t, m: setattr(t, "first", nn.Linear(16, 16).eval()),
        lambda t, m: t.register_forward_hook(lambda mod, a, out: out + 1),
        lambda t, m: m.register_forward_hook(lambda mod, a, out: out + 1),
        lambda t, m: m.offset.add_(1),
    ],
)
def test_a_changed_module_goes_eager_and_answers_right(
    change: Any, tuned_small: Callable[..., Made]
) -> None:
    tuned, model, x = tuned_small()
    change(tuned, model)
    assert torch.equal(tuned(x), model(x).detach())
    assert tuned.calls == {"eager: the module changed": 1}
    assert "Call graphwright.tune() again" in tuned.explain()


def test_a_renamed_attribute_is_noticed(tuned_small: Callable[..., Made]) -> None:
    tuned, model, x = tuned_small(values=False)
    model.gain = 2.0
    assert torch.equal(tuned(x), model(x).detach())
    del model.gain
    assert won(tuned(x))
    kept = model.second
    del model.second
    model.third = kept
    with pytest.raises(AttributeError, match="second"):
        model(x)
    with pytest.raises(AttributeError, match="second"):
        tuned(x)


def test_a_traced_call_goes_to_the_module(tuned_small: Callable[..., Made]) -> None:
    tuned, model, x = tuned_small()
    traced = make_fx(lambda given: tuned(given))(x)
    other = torch.randn(4, 16)
    assert torch.allclose(traced(other), model(other).detach())
    assert "tuned" not in tuned.calls


def test_a_capture_is_of_the_module_and_follows_its_weights(
    tuned_small: Callable[..., Made], device: torch.device
) -> None:
    # A graph of a winner that holds copies would go on with them.
    tuned, model, x = tuned_small(device)
    with torch.no_grad():
        assert won(tuned(x))
        with pytest.warns(RuntimeWarning, match="no graph can hold what planted made"):
            captured = gw.capture(tuned, x)
        graphed = gw.graph(lambda y: tuned(y))
        for _ in range(2):
            torch.testing.assert_close(captured(x), model(x))
            torch.testing.assert_close(graphed(x), model(x))
            for parameter in model.parameters():
                parameter.mul_(2)
        if device.type == "cuda":
            taken = torch.cuda.CUDAGraph()
            with torch.cuda.graph(taken):
                y = tuned(x)
            for parameter in model.parameters():
                parameter.mul_(2)
            taken.replay()
            torch.testing.assert_close(y, model(x))


def test_what_fails_since_the_module_changed_is_eager() -> None:
    model, x = Small().eval(), torch.randn(4, 16)
    signature, watch = CallSignature.of((x,), {}), ModuleWatch(model, values=False)
    fails = [False]

    def launch(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        if fails[0]:
            raise RuntimeError("freed")
        return model(*tensors).detach() + MARK

    short = shortcut(signature, launch, watch.unchanged, training=False)
    assert short is not None
    table = [(signature, lambda x: launch([x]))]
    tuned = TunedModule(model, REPORT, table, watch, pure=True, shortcuts=[short])
    assert won(tuned(x))
    fails[0] = True
    with pytest.raises(RuntimeError, match="freed"):
        tuned(x)
    model.first = nn.Linear(16, 16)
    assert torch.equal(tuned(x), model(x).detach())


@pytest.mark.parametrize("short_way", [True, False], ids=["the short way", "the long way"])
@pytest.mark.parametrize("change", ["a layer", "a switch"])
def test_what_has_changed_is_not_launched_again(
    change: str, short_way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Small().eval(), torch.randn(4, 16)
    signature, watch = CallSignature.of((x,), {}), ModuleWatch(model, values=False)
    launches = []

    def launch(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        launches.append(1)
        return model(*tensors).detach() + MARK

    short = shortcut(signature, launch, watch.unchanged, training=False)
    assert short is not None
    table = [(signature, lambda x: launch([x]))]
    shortcuts = [short] if short_way else []
    tuned = TunedModule(model, REPORT, table, watch, pure=True, shortcuts=shortcuts)
    assert won(tuned(x))
    kept = model.first
    if change == "a layer":
        model.first = nn.Linear(16, 16)
    else:
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    launches.clear()
    for _ in range(5):
        assert torch.equal(tuned(x), model(x).detach())
    # What is found once costs a launch; where both ways look, one each.
    assert len(launches) <= 1 + (short_way and change == "a layer")
    model.first = kept
    monkeypatch.undo()
    assert won(tuned(x))


def test_a_function_mode_sees_no_launch() -> None:
    model, x = Small().eval(), torch.randn(4, 16)
    signature, watch = CallSignature.of((x,), {}), ModuleWatch(model, values=False)
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def launch(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.empty_like(tensors[0])

    short = shortcut(signature, launch, watch.unchanged, training=False)
    assert short is not None
    with Mode():
        assert short((x,), {}) is MISS
    assert torch.empty_like not in seen


def test_in_place_updates_reach_a_winner_that_reads_the_weights(
    tuned_small: Callable[..., Made],
) -> None:
    tuned, model, x = tuned_small(values=False)
    tuned.load_state_dict(Small().state_dict())
    assert torch.equal(tuned(x), model(x).detach() + MARK)


def test_no_gradient_is_lost(tuned_small: Callable[..., Made]) -> None:
    tuned, model, x = tuned_small()
    wants = x.clone().requires_grad_()
    tuned(wants).sum().backward()
    assert wants.grad is not None
    tuned.train()
    assert model.training
    assert tuned(x).requires_grad
    assert tuned.calls == {"eager: gradients are wanted": 2}
    tuned.eval()
    assert won(tuned(x))


def test_it_behaves_as_the_module_does(tuned_small: Callable[..., Made]) -> None:
    tuned, model, _ = tuned_small()
    assert (
        list(tuned.state_dict())
        == list(model.state_dict())
        == [
            "offset",
            "first.weight",
            "first.bias",
            "second.weight",
            "second.bias",
        ]
    )
    assert [id(p) for p in tuned.parameters()] == [id(p) for p in model.parameters()]
    assert [n for n, _ in tuned.named_modules()] == [n for n, _ in model.named_modules()]
    assert tuned.first is model.first
    assert isinstance(tuned, nn.Module)
    tuned.to(torch.float64)
    assert model.first.weight.dtype is torch.float64
    tuned.note = 3
    assert model.note == 3
    assert "planted" in repr(tuned)
    assert tuned.requires_grad_(False) is tuned
    assert not model.first.weight.requires_grad


def test_methods_lengths_and_items_are_the_module_s() -> None:
    class Named(nn.Sequential):
        def describe(self) -> str:
            return f"{len(self)} layers"

    tuned = gw.tune(
        Named(nn.Linear(4, 4), nn.ReLU()).eval(), (torch.randn(2, 4),), strategies=["eager"]
    )
    assert tuned.describe() == "2 layers"
    assert len(tuned) == 2
    assert isinstance(tuned[1], nn.ReLU)
    with pytest.raises(AttributeError, match="no_such"):
        _ = tuned.no_such


def test_copies_and_pickles_start_untuned_and_say_so(tuned_small: Callable[..., Made]) -> None:
    tuned, model, x = tuned_small()
    for other in (copy.deepcopy(tuned), pickle.loads(pickle.dumps(tuned))):
        assert torch.equal(other(x), model(x).detach())
        assert other.calls == {"eager: nothing tuned": 1}
        assert "not tuned" in other.explain()
        assert other.first.weight is not model.first.weight


def test_a_tuned_module_can_be_tuned_again() -> None:
    model = Small().eval()
    x = torch.randn(4, 16)
    first = gw.tune(model, (x,), strategies=["eager:no_grad"])
    second = gw.tune(first, (x,), strategies=["eager:no_grad"])
    assert second.module is model


def test_autocast_is_part_of_the_call(tuned_small: Callable[..., Made]) -> None:
    tuned, model, x = tuned_small()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(tuned(x), model(x).detach())
    assert tuned.calls == {"eager: another signature": 1}


@pytest.mark.parametrize("strategy", ["torchscript", "aot_autograd", "eager+graph"])
def test_keyword_arguments_may_come_in_any_order(strategy: str, device: torch.device) -> None:
    class Difference(nn.Module):
        def forward(self, *, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return b - 2 * a

    model = Difference().eval()
    a, b = torch.randn(2, 4, device=device).unbind()
    tuning = Tuning(model, (), {"b": b.clone(), "a": a.clone()}, strategies=[strategy])
    tuning.run()
    row = tuning.report.row(strategy)
    assert row is not None
    if strategy.endswith("graph") and device.type == "cpu":
        assert row.status is Status.UNAVAILABLE
        return
    assert row.measurement is not None, row.reason
    built = tuning.asked.candidates[-1].build(model, (), {"b": b, "a": a})
    signature = CallSignature.of((), {"b": b.clone(), "a": a.clone()})
    tuned = TunedModule(model, tuning.report, [(signature, built.call)])
    x, y = torch.randn(2, 4, device=device).unbind()
    x, y = x.clone(), y.clone()
    assert torch.equal(tuned(a=x, b=y), y - 2 * x)
    assert torch.equal(tuned(b=y, a=x), y - 2 * x)
    assert tuned.calls == {"tuned": 2}


def test_eager_as_the_winner_gives_no_gradients_either() -> None:
    model = Small().eval()
    x = torch.randn(4, 16)
    tuned = gw.tune(model, (x,), strategies=["eager"])
    assert tuned.report.chosen == "eager"
    assert not tuned(x).requires_grad
    model.load_state_dict(Small().state_dict(), assign=True)
    assert torch.equal(tuned(x), model(x).detach())
    assert tuned.calls == {"tuned": 2}


def test_setting_goes_through_the_class_s_own_properties() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._scale = 1.0

        @property
        def scale(self) -> float:
            return self._scale

        @scale.setter
        def scale(self, value: float) -> None:
            self._scale = value

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self._scale

    model, x = Scaled().eval(), torch.ones(3)
    tuned = gw.tune(model, (x,), strategies=["eager:no_grad"])
    tuned.scale = 7.0
    assert model.scale == 7.0
    assert torch.equal(tuned(x), x * 7)


def test_it_can_be_used_inside_vmap() -> None:
    model = nn.PairwiseDistance().eval()
    tuned = gw.tune(model, (torch.randn(3), torch.randn(3)), strategies=["eager:no_grad"])
    a, b = torch.randn(5, 3), torch.randn(5, 3)
    torch.testing.assert_close(torch.vmap(tuned)(a, b), model(a, b).detach())


def test_a_scripted_module_can_be_tuned() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU())).eval()
    x = torch.randn(2, 4)
    tuned = gw.tune(model, (x,), strategies=["torchscript:freeze"])
    (candidate,) = parse_candidates(["torchscript:freeze"], ())
    built = candidate.build(model, (x,), {})
    signature, watch = CallSignature.of((x,), {}), ModuleWatch(model, values=True)
    fast = TunedModule(model, tuned.report, [(signature, built.call)], watch)
    torch.testing.assert_close(fast(x), model(x).detach())
    assert fast.calls == {"tuned": 1}
    with torch.no_grad():
        next(model.parameters()).add_(1)
    torch.testing.assert_close(fast(x), model(x).detach())
    assert fast.calls == {"tuned": 1, "eager: the module changed": 1}


class Stateful(nn.Module):
    """No graph as a whole; in training, each call changes it and draws."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads = reads
        self.first = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.counts = False
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if self.reads and y.sum().item() > 1e9:
            y = y * 2
        if self.counts:
            self.calls += 1
        return self.drop(self.norm(y)) + self.calls


@pytest.mark.parametrize("change", ["train", "attribute", "hook"])
@pytest.mark.parametrize("strategy", ["aot_autograd", "fused", "torchscript", "eager+graph"])
def test_a_changed_module_runs_once(strategy: str, change: str, device: torch.device) -> None:
    """What was built may run the module's own Python, or compile it again: not before the check."""
    if strategy == "eager+graph" and device.type == "cpu":
        pytest.skip("CUDA graphs need a GPU")
    model = Stateful(reads=strategy == "fused").eval().to(device)
    other, x = copy.deepcopy(model), torch.randn(4, 8, device=device)
    with choosing(strategy):
        tuned = gw.tune(
            model, (x,), strategies=[strategy], remember=False, progress=False, isolate=False
        )
    assert tuned.report.chosen == strategy
    ran: list[nn.Module] = []
    found = []
    with torch.no_grad():
        tuned(x)
        for each, call in ((model, tuned), (other, other)):
            if change == "train":
                each.train()
            elif change == "attribute":
                each.counts = True
            else:
                each.norm.register_forward_hook(lambda module, args, y: ran.append(module))
            torch.manual_seed(1)
            found.append(call(x))
    torch.testing.assert_close(*found)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, other.get_buffer(name))
    assert ran == ([model.norm, other.norm] if change == "hook" else [])
    assert tuned.calls == {"tuned": 1, "eager: the module changed": 1}
