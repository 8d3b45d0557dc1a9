"""Each reason to leave a call to eager code, or to refuse it, alone."""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy
import pytest
import torch
from chosen import choosing
from torch import nn
from torch.autograd import forward_ad
from torch.optim import SGD, Adam

import graphwright as gw
from graphwright.calls.host_generators import HostGenerators
from graphwright.errors import CaptureError
from graphwright.graphs import warmup
from graphwright.graphs.call_spec import signature_of
from graphwright.graphs.conditions import as_captured
from graphwright.graphs.effects import GivenObjects, Unrepeatable
from graphwright.training.callables.captured_pair import BUSY
from graphwright.training.step.optimizers import OptimizerMemory, Settings
from graphwright.training.step.wrappers import is_optimizer

X = torch.linspace(-1, 1, 32).view(4, 8)


def _hooks() -> AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


def _in_training(part: Any) -> AbstractContextManager[Any]:
    part.train()
    stack = contextlib.ExitStack()
    stack.callback(part.eval)
    return stack


@pytest.mark.parametrize(
    ("why", "around"),
    [
        ("the module is in training mode", _in_training),
        ("inside another capture", lambda part: as_captured()),
        ("it is traced or transformed", lambda part: forward_ad.dual_level()),
        ("under hooks for saved tensors", lambda part: _hooks()),
    ],
)
def test_a_graphed_callable_goes_to_its_original(
    why: str, around: Callable[[Any], AbstractContextManager[Any]]
) -> None:
    part: Any = gw.make_graphed_callables(nn.Linear(8, 8).eval(), (X,))
    forward = part.forward
    assert forward._why_original() is None
    with around(part):
        assert why in forward._why_original()
    assert forward._why_original() is None


def test_a_graphed_callable_goes_to_its_original_where_it_is_compiled_or_its_pool_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part: Any = gw.make_graphed_callables(nn.Linear(8, 8), (X,))
    forward = part.forward
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert forward._why_original() == "it is traced or transformed"
    BUSY.add(id(forward.pool))
    try:
        assert "same pool" in forward._why_original()
    finally:
        BUSY.discard(id(forward.pool))
    part.eval()
    assert forward._why_original() == "the module is in eval mode"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_fused_module_goes_to_the_module_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    fused: Any = gw.fuse(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), (X,))
    with torch.no_grad():
        assert fused._why_not((X,), {}) is None
        with as_captured():
            assert fused._why_not((X,), {}) == "inside another capture"
        with monkeypatch.context() as patch:
            patch.setattr("graphwright.fusion.fused_module.captured_by_others", lambda: True)
            assert fused._why_not((X,), {}) == "inside another capture"
        with forward_ad.dual_level():
            assert fused._why_not((X,), {}) == "it is traced or transformed"
        handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
        try:
            assert fused._why_not((X,), {}) == "there are global forward hooks"
        finally:
            handle.remove()
        assert fused._why_not((X,), {}) is None
    assert fused._why_not((X.clone().requires_grad_(),), {}) is not None


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_tuned_module_goes_to_the_module_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    with choosing("torchscript:freeze"):
        tuned = gw.tune(
            model, (X,), strategies=["torchscript:freeze"], isolate=False, remember=False
        )
    with torch.no_grad():
        tuned(X)
        with as_captured():
            tuned(X)
        assert tuned.calls == {"tuned": 1, "eager: inside another capture": 1}
        with monkeypatch.context() as patch:
            # What was built holds copies of the weights, of which no other capture knows.
            patch.setattr(tuned._choice, "may_not_launch", lambda: True)
            tuned(X)
        assert tuned.calls == {"tuned": 1, "eager: inside another capture": 2}
        with forward_ad.dual_level():
            tuned(X)
        assert tuned.calls["eager: it is traced or transformed"] == 1
    model[0].train()
    tuned(X)
    assert tuned.calls["eager: gradients are wanted"] == 1
    assert tuned.calls["tuned"] == 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("strategy", ["eager", "torchscript"])
@pytest.mark.parametrize("rows", [2, 3])
def test_a_tuned_module_whose_gradients_are_wanted_gives_them(strategy: str, rows: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    wanting = torch.randn(2, 8, requires_grad=True)
    with choosing(strategy):
        tuned, of_wanting = (
            gw.tune(model, (x,), strategies=[strategy], isolate=False, remember=False)
            for x in (wanting.detach(), wanting)
        )
    x = torch.randn(rows, 8)
    assert of_wanting(x.clone().requires_grad_()).requires_grad
    assert not tuned(x).requires_grad
    model[0].train()  # What eager answers needs no watching, and it is asked at each call.
    assert tuned(x).requires_grad
    model.train()
    assert tuned(x).requires_grad
    # Whole or in part, nothing is lost where no gradients can be.
    with torch.no_grad():
        tuned(x)
    assert tuned.calls["eager: gradients are wanted"] == 2


class Adds(nn.Module):
    """Writes to its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(self.weight)


class Draws(Adds):
    """Draws random numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * torch.rand_like(x)


class Counts(Adds):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.weight


@pytest.mark.parametrize("make", [Adds, Draws, Counts])
def test_a_call_that_is_refused_for_the_module_has_done_nothing(make: Any) -> None:
    with torch.no_grad():
        model = make().eval()
        captured = gw.capture(model, X.clone())
        captured(X.clone())
        model.weight = nn.Parameter(torch.zeros(8))
        x, state, calls = X.clone(), torch.get_rng_state(), getattr(model, "calls", 0)
        with pytest.raises(gw.SignatureError, match="weight"):
            captured(x)
    assert torch.equal(x, X)
    assert torch.equal(torch.get_rng_state(), state)
    assert getattr(model, "calls", 0) == calls


@pytest.mark.parametrize(
    ("args", "why"),
    [((X.clone().requires_grad_(),), "requires grad"), ((X,), "Linear is in training mode")],
)
def test_a_captured_call_gives_no_gradients(args: Any, why: str) -> None:
    model = nn.Linear(8, 8).train("training" in why)
    with pytest.raises(CaptureError, match=f"{why}.* gives no gradients"):
        signature_of(args, {}, model)
    with torch.no_grad():
        assert signature_of(args, {}, model)


def test_writes_to_the_host_and_set_ups_are_refused() -> None:
    storage = X.untyped_storage()
    warmup._refuse_writes_on_host([])
    with pytest.raises(CaptureError, match="writes to a tensor on the host"):
        warmup._refuse_writes_on_host([storage])
    warmup._refuse_first_run_setup([storage], [storage])
    with pytest.raises(CaptureError, match="sets something up"):
        warmup._refuse_first_run_setup([storage], [])


def test_an_object_that_a_call_makes_another_kind_of_is_refused() -> None:
    made, steps = defaultdict(list, a=1), Steps()
    for change in (
        lambda: setattr(made, "default_factory", None),
        lambda: setattr(steps, "__class__", Both),
    ):
        given = GivenObjects((made, steps))
        assert given.changes() == ([], [])
        change()
        with pytest.raises(Unrepeatable, match="another class"):
            given.changes()


def test_a_call_that_sets_gradients_is_refused() -> None:
    weight = nn.Parameter(torch.ones(8))

    def sets(x: torch.Tensor) -> torch.Tensor:
        weight.grad = x.sum(0)
        return x * weight

    with torch.no_grad(), pytest.raises(CaptureError, match="sets gradients"):
        gw.capture(sets, X)
    assert weight.grad is None


def test_a_step_whose_pool_is_closed_is_eager() -> None:
    model, pool = nn.Linear(8, 1), gw.MemoryPool()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    graphed = gw.graph_step(step, X, optimizer=optimizer, pool=pool)
    graphed(X)
    pool.close()
    graphed(X)
    assert graphed.statistics.eager["closed"] == 1


def _optimizer(**options: Any) -> SGD:
    return SGD(nn.Linear(2, 2).parameters(), **options)


class Read:
    """A number that an optimizer reads from a tensor, and asks whether it is zero."""

    in_tensors, key = True, "momentum"

    def __init__(self, optimizer: SGD) -> None:
        self.group = optimizer.param_groups[0]
        self.option = optimizer, 0, self.key
        self.known = True

    @property
    def value(self) -> Any:
        return self.group[self.key]

    def answers(self, value: Any) -> Any:
        return [value != 0] if self.known else None


def test_options_differ_by_type_and_value() -> None:
    optimizer = _optimizer(lr=math.nan, momentum=0)
    settings = Settings([optimizer], [], [], None)
    assert settings.difference() is None
    for key, value in (("momentum", 0.0), ("momentum", 0.5), ("nesterov", True), ("lr", 0.1)):
        before = optimizer.param_groups[0][key]
        optimizer.param_groups[0][key] = value
        assert settings.difference() == (optimizer, 0, key)
        optimizer.param_groups[0][key] = before
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert settings.difference() == (optimizer, 0, "params")


def test_of_a_number_in_a_tensor_what_was_asked_of_it_counts() -> None:
    optimizer = _optimizer(lr=0.1, momentum=0.5)
    number: Any = Read(optimizer)
    settings = Settings([optimizer], [], [number], None)
    optimizer.param_groups[0]["momentum"] = 0.9
    assert settings.difference() is None
    optimizer.param_groups[0]["momentum"] = 0.0
    assert settings.difference() == number.option
    optimizer.param_groups[0]["momentum"], number.known = 0.7, False
    assert settings.difference() == number.option


def test_what_a_scaler_computes_with_counts() -> None:
    optimizer, scaler = _optimizer(lr=0.1), torch.amp.GradScaler("cpu")
    settings = Settings([optimizer], [], [], scaler)
    for change in (
        lambda: scaler.set_growth_factor(3.0),
        lambda: scaler.set_backoff_factor(0.25),
        lambda: scaler.set_growth_interval(3),
    ):
        assert settings.difference() is None
        change()
        assert settings.difference() == (scaler, 0, "growth")
        settings = Settings([optimizer], [], [], scaler)


def test_each_tensor_of_an_optimizer_s_state_stays_where_it_is() -> None:
    model = nn.Linear(2, 2)
    optimizer = Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    used = {t.untyped_storage()._cdata for s in optimizer.state.values() for t in s.values()}
    memory = OptimizerMemory([optimizer], None, used)
    state = optimizer.state[model.weight]
    assert memory.intact()
    last = optimizer.state[model.bias]
    last["more"] = torch.zeros(1)
    assert not memory.intact()
    del last["more"]
    before = state["exp_avg"]
    state["exp_avg"] = before.clone()
    assert not memory.intact()
    state["exp_avg"] = before
    assert memory.intact()
    optimizer.state.pop(model.weight)
    assert not memory.intact()


class Steps:
    """Has a step alone."""

    def step(self) -> None:
        """Do nothing."""


class Zeroes:
    """Sets gradients to zero alone."""

    def zero_grad(self) -> None:
        """Do nothing."""


class Both(Steps, Zeroes):
    """Is called as an optimizer is."""


class Trained(nn.Module, Steps):
    """A module with a step."""


def test_an_optimizer_is_what_is_called_as_one() -> None:
    assert is_optimizer(_optimizer(lr=0.1))
    assert is_optimizer(Both())
    assert not any(map(is_optimizer, (Steps(), Zeroes(), Trained(), Both)))


def test_only_those_that_are_put_back_are_told_of() -> None:
    class Found:
        """What a call can reach."""

        def __init__(self, *objects: Any) -> None:
            self.objects, self.places = list(objects), list[Any]()

    own, done = numpy.random.default_rng(0), threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        kept = HostGenerators(Found(own))
        own.random()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kept.put_back(own=False)
        with pytest.warns(RuntimeWarning, match="was drawn from"):
            kept.put_back()
    finally:
        done.set()
        other.join()
