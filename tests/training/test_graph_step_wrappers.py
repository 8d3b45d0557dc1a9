"""graph_step() with optimizers in wrappers: accelerate's, Lightning's and users'."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw

STEPS = 12
Change = Callable[[int], Any]


def net(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)


def rows(device: torch.device, count: int = STEPS) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(4, 3, generator=generator).to(device)


def plain(model: nn.Module, optimizer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def curve(model: nn.Module, step: Any, device: torch.device, change: Change) -> list[torch.Tensor]:
    """The losses of steps with changes in between, and the weights in the end."""
    seen = []
    for index, x in enumerate(rows(device)):
        seen.append(step(x).detach().clone())
        change(index)
    return [*seen, *(p.detach().clone() for p in model.parameters())]


def nothing(index: int) -> None:
    """No change."""


def agree(make: Callable[[], Any], device: torch.device, **given: Any) -> gw.StepStatistics:
    """Train eagerly and with a graph, bit for bit alike; returns the statistics."""
    model, step, optimizer, change = make()
    expected = curve(model, step, device, change)
    model, step, optimizer, change = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graphed = gw.graph_step(step, next(rows(device)), optimizer=optimizer, **given)
        actual = curve(model, graphed, device, change)
    assert all(map(torch.equal, actual, expected))
    return graphed.statistics


class Scales:
    """A wrapper that is no Optimizer, and scales gradients."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.factor = 0.7

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(self.factor)
        self.optimizer.step()


class Inherits(Scales, torch.optim.Optimizer):
    """One that is an Optimizer without calling its __init__(), as accelerate's."""

    __reduce__ = object.__reduce__
    __repr__ = object.__repr__


class Initialized(torch.optim.Optimizer):
    """One that shares the parameter groups of an optimizer, and has a state of its own."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer.param_groups, {})
        self.param_groups = optimizer.param_groups
        self.inner = [optimizer]
        self.factor = 0.7

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner[0].zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it returns nothing
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(self.factor)
        self.inner[0].step()


class Fabric:
    """Like Lightning Fabric's: of a class made for it, with the optimizer's own attributes."""

    def __init__(self, optimizer: Any) -> None:
        self.__dict__ = {k: v for k, v in vars(optimizer).items() if k not in ("step", "zero_grad")}
        kind = type(optimizer)
        bases = (kind,) if isinstance(optimizer, Fabric) else (Fabric, kind)
        self.__class__ = type(f"Fabric{kind.__name__}", bases, {})
        self._optimizer = optimizer
        self.factor = 0.7

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def step(self, closure: Any = None) -> Any:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(self.factor)
        return self._optimizer.step()


WRAPPERS = [Scales, Inherits, Initialized, Fabric]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def each_way() -> Iterator[Any]:
    """Each wrapper with any three of the others in all combinations; the rest is exhaustive."""
    for wrapper in WRAPPERS:
        for numbers in itertools.product((0, 1), repeat=4):
            inner, depth, given, changes = numbers
            yield pytest.param(
                wrapper,
                (sgd, adamw)[inner],
                depth + 1,
                bool(given),
                bool(changes),
                marks=[pytest.mark.exhaustive] * (sum(numbers) % 2),
            )


@pytest.mark.parametrize(("wrapper", "inner", "depth", "given", "changes"), [*each_way()])
def test_a_wrapper_is_looked_through(
    wrapper: Any, inner: Any, depth: int, given: bool, changes: bool, device: torch.device
) -> None:
    def make() -> Any:
        model = net(device)
        optimizer = inner(model)
        for _ in range(depth):
            optimizer = wrapper(optimizer)

        def change(index: int) -> None:
            if changes and index == 5:
                optimizer.factor = 0.2

        return model, plain(model, optimizer), optimizer if given else None, change

    statistics = agree(make, device)
    assert statistics.replays == STEPS
    assert statistics.captures == 1 + changes


class ReadsItself(torch.optim.SGD):
    """An optimizer of a user's that computes with attributes of its own."""

    read, not_read = 0.7, 0.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it returns nothing
        self.scale()
        super().step()

    def scale(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(self.read)


@pytest.mark.parametrize("attribute", ["read", "not_read"])
@pytest.mark.parametrize("hidden", [False, True])
def test_attributes_of_an_optimizer_of_one_s_own_are_watched(
    attribute: str, hidden: bool, device: torch.device
) -> None:
    def make() -> Any:
        model = net(device)
        optimizer = ReadsItself(model.parameters(), lr=0.1)
        optimizer.read = 0.7
        somewhere = {"else": [optimizer]}

        def step(x: torch.Tensor) -> torch.Tensor:
            return plain(model, somewhere["else"][0])(x)

        def change(index: int) -> None:
            if attribute == "not_read" or index == 5:
                setattr(optimizer, attribute, 0.3 + 0.01 * index)

        return model, step if hidden else plain(model, optimizer), None, change

    statistics = agree(make, device)
    assert statistics.replays == STEPS
    assert statistics.captures == 1 + (attribute == "read")


def prepared(device: torch.device, **options: Any) -> tuple[Any, nn.Module, Any]:
    """accelerate's Accelerator, with a model and an optimizer that it has wrapped."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=device.type == "cpu", **options)
    model = net(device)
    model, optimizer = accelerator.prepare(model, adamw(model))
    return accelerator, model, optimizer


def test_accelerate_s_optimizer_is_looked_through(device: torch.device) -> None:
    def make() -> Any:
        accelerator, model, optimizer = prepared(device)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            return loss

        return model, step, optimizer, nothing

    statistics = agree(make, device)
    assert (statistics.replays, statistics.captures) == (STEPS, 1)


@pytest.mark.parametrize("loader", [False, True], ids=["batches", "loader"])
def test_accelerate_s_accumulation_has_a_graph_for_each_kind_of_step(
    loader: bool, device: torch.device
) -> None:
    from torch.utils.data import DataLoader, TensorDataset

    def train(graphed: bool) -> tuple[list[torch.Tensor], Any]:
        accelerator, model, optimizer = prepared(device, gradient_accumulation_steps=3)
        batches: Any = list(rows(device))
        if loader:
            data = TensorDataset(torch.cat(batches))
            batches = accelerator.prepare(DataLoader(data, batch_size=4))
        rate = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.9)
        scheduler = accelerator.prepare(rate)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = gw.graph_step(step, next(rows(device)), optimizer=optimizer) if graphed else step
        seen = []
        for _ in range(4):  # As often as a run has epochs, or more often than graphs are kept.
            for batch in batches:
                with accelerator.accumulate(model):
                    seen.append(run(batch[0] if loader else batch).detach().clone())
                    scheduler.step()
        return [*seen, *(p.detach() for p in model.parameters())], run

    expected, _ = train(False)
    actual, graphed = train(True)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert graphed.statistics.replays == 4 * STEPS
    assert graphed.statistics.captures <= 4  # gradients that are new or there, and with a step


@pytest.mark.parametrize("reads", [False, True])
def test_a_step_that_reads_accelerate_s_counter_is_right(reads: bool, device: torch.device) -> None:
    """Its counter is not watched, unless the step reads it."""

    def make() -> Any:
        accelerator, model, optimizer = prepared(device)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean() * (1 + accelerator.step % 2)
            accelerator.backward(loss)
            optimizer.step()
            return loss

        def other(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            return loss

        def change(index: int) -> None:
            if index < 3:
                accelerator.step += 1

        return model, step if reads else other, optimizer, change

    statistics = agree(make, device)
    assert statistics.captures == (4 if reads else 1)


def test_accumulation_inside_of_a_step_is_refused_and_works_around_it(
    device: torch.device,
) -> None:
    accelerator, model, optimizer = prepared(device, gradient_accumulation_steps=3)

    def inner(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def step(x: torch.Tensor) -> torch.Tensor:
        with accelerator.accumulate(model):
            return inner(x)

    with pytest.raises(gw.CaptureError, match="step changes with every call") as caught:
        gw.graph_step(step, next(rows(device)), optimizer=optimizer)
    assert "update it where the graph is called" in (caught.value.remedy or "")
    graphed = gw.graph_step(inner, next(rows(device)), optimizer=optimizer)
    for x in rows(device):
        with accelerator.accumulate(model):
            graphed(x)
    assert graphed.statistics.replays == STEPS


def test_a_wrapper_with_a_scaler_skips_the_steps_that_overflow(device: torch.device) -> None:
    optimizers = pytest.importorskip("accelerate.optimizer")
    skipped: list[float] = []

    def make() -> Any:
        prepared(device)  # accelerate wants an Accelerator first.
        model = net(device)
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**127, growth_interval=3)
        optimizer = optimizers.AcceleratedOptimizer(adamw(model), scaler=scaler)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = 100 * model(x).square().mean()
            optimizer.scaler.scale(loss).backward()
            optimizer.step()
            return loss

        return model, step, optimizer, lambda index: skipped.append(scaler.get_scale())

    statistics = agree(make, device)
    assert statistics.replays == STEPS
    assert skipped[:STEPS] == skipped[STEPS:]
    assert any(b < a for a, b in itertools.pairwise(skipped[:STEPS]))


def test_the_optimizer_inside_of_a_wrapper_is_the_one_that_is_refused() -> None:
    device = torch.device("cpu")

    def make(**options: Any) -> Any:
        model = net(device)
        optimizer = Inherits(torch.optim.Adam(model.parameters(), lr=0.01, **options))
        return model, plain(model, optimizer), optimizer, nothing

    _, step, optimizer, _ = make()
    with pytest.raises(gw.CaptureError, match=r"^Adam counts its steps in Python") as caught:
        gw.graph_step(step, next(rows(device)), optimizer=optimizer)
    assert caught.value.remedy == "Pass fused=True to Adam."
    assert agree(lambda: make(fused=True), device).replays == STEPS


class EveryOther:
    """A wrapper that counts in Python and steps every other time."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.count = 0

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.count += 1
        if self.count % 2 == 0:
            self.optimizer.step()


class EveryOtherAsOptimizer(EveryOther, torch.optim.Optimizer):
    """The same as an Optimizer."""

    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]  # read only
    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]  # read only
    __repr__ = object.__repr__


@pytest.mark.parametrize("wrapper", [EveryOther, EveryOtherAsOptimizer])
def test_a_wrapper_that_counts_is_refused_and_the_count_works_as_an_argument(
    wrapper: Any, device: torch.device
) -> None:
    model = net(device)
    inner = sgd(model)
    optimizer = wrapper(inner)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(gw.CaptureError, match=r"count changes with every call"):
        gw.graph_step(plain(model, optimizer), next(rows(device)), optimizer=optimizer)
    assert optimizer.count == 0
    assert all(map(torch.equal, model.parameters(), before))

    def make() -> Any:
        model = net(device)
        inner = sgd(model)

        def step(x: torch.Tensor, steps: bool) -> torch.Tensor:
            inner.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()
            if steps:
                inner.step()
            return loss

        return model, step

    def losses(step: Any) -> list[torch.Tensor]:
        return [step(x, i % 2 == 1).detach() for i, x in enumerate(rows(device))]

    expected = losses(make()[1])
    actual = losses(gw.graph_step(make()[1], (next(rows(device)), False)))
    assert all(map(torch.equal, actual, expected))


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation: two gradients a step, an option and a state of its own."""

    def __init__(self, parameters: Any, base: Any, **options: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old"] = parameter.detach().clone()
                parameter.add_(parameter.grad, alpha=group["rho"])
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(self.state[parameter]["old"])
        self.base.step()
        self.zero_grad()


def test_a_wrapper_with_an_option_and_a_state_of_its_own(device: torch.device) -> None:
    def make() -> Any:
        model = net(device)
        optimizer = Sam(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()
            optimizer.climb()
            model(x).square().mean().backward()
            optimizer.descend()
            return loss

        def change(index: int) -> None:
            if index == 5:
                optimizer.param_groups[0]["rho"] = 0.3

        return model, step, optimizer, change

    statistics = agree(make, device)
    assert (statistics.replays, statistics.captures) == (STEPS, 2)


def test_an_optimizer_for_several_processes_is_refused_and_its_inner_one_works() -> None:
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    from torch.distributed.optim import ZeroRedundancyOptimizer  # type: ignore[attr-defined]

    device = torch.device("cpu")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = net(device)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01, fused=True
        )
        for given in (optimizer, None):
            with pytest.raises(gw.CaptureError, match="talks to other processes") as caught:
                gw.graph_step(plain(model, optimizer), next(rows(device)), optimizer=given)
            assert caught.value.remedy == "Train with torch.optim.AdamW in one process."
    finally:
        distributed.destroy_process_group()

    def make() -> Any:
        model = net(device)
        optimizer = adamw(model)
        return model, plain(model, optimizer), optimizer, nothing

    assert agree(make, device).replays == STEPS


def test_what_wraps_no_optimizer_is_no_optimizer(device: torch.device) -> None:
    model = net(device)
    step = plain(model, sgd(model))
    for wrong in (object(), Scales(None), model, "SGD"):
        with pytest.raises(gw.OptionError, match=r"not a torch\.optim\.Optimizer and wraps none"):
            gw.graph_step(step, next(rows(device)), optimizer=wrong)  # type: ignore[arg-type]  # wrong
