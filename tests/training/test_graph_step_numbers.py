"""Numbers of optimizers that change between the steps of a graph: those of all optimizers, as all
schedulers and users change them."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import graphwright as gw
from graphwright.training.step import builder
from graphwright.training.step.numbers import Number, as_tensors

STEPS = 12
# Of each optimizer that there is, the options with which graph_step() takes it on the CPU or,
# with `capturable`, on a GPU; None for those that compute on the host.
OPTIONS: dict[str, list[dict[str, Any]] | None] = {
    "Adafactor": None,
    "LBFGS": None,
    "Muon": None,
    "SparseAdam": None,
    "SGD": [
        {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "foreach": True, "weight_decay": 0.1},
        {"momentum": 0.9, "fused": True, "weight_decay": 0.1},
    ],
    "Adam": [{"fused": True, "amsgrad": True, "weight_decay": 0.1}],
    "AdamW": [{"fused": True}, {"fused": True, "maximize": True}],
    "Adagrad": [{"fused": True, "lr_decay": 0.01, "weight_decay": 0.1}],
}
WITHOUT_KERNEL = [("Adagrad", "cuda")]
CAPTURABLE = ["Adadelta", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"]
MORE: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "ASGD": {"weight_decay": 0.1, "t0": 3.0},
    "RMSprop": {"weight_decay": 0.1, "momentum": 0.5, "centered": True},
    "Rprop": {"step_sizes": (0.01, 0.02)},
}
# These have no effect on a step, or none with the other options above.
WITHOUT_EFFECT = {"initial_accumulator_value"}


def all_options(name: str) -> list[dict[str, Any]]:
    found = list(OPTIONS.get(name) or ())
    if name in CAPTURABLE:
        more = MORE.get(name, {"weight_decay": 0.1})
        found += [{"capturable": True, "foreach": foreach, **more} for foreach in (True, False)]
    return found


CASES = [(name, options) for name in OPTIONS for options in OPTIONS[name] or ()]
CASES_ON_GPU = [(name, o) for name in CAPTURABLE for o in all_options(name) if "capturable" in o]


def ids(case: Any) -> str:
    if not isinstance(case, dict):
        return str(case)
    return "-".join(k if v is True else f"{k}={v}" for k, v in case.items())


@pytest.fixture
def capturable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have PyTorch's `capturable` optimizers run on the CPU, too: they compute the same there."""
    for name in {*map(str.lower, CAPTURABLE), "optimizer"} - {"adamw"}:
        module = importlib.import_module(f"torch.optim.{name}")
        if hasattr(module, "_get_capturable_supported_devices"):
            monkeypatch.setattr(
                module, "_get_capturable_supported_devices", lambda *_, **__: ["cpu", "cuda"]
            )
    monkeypatch.setattr(builder, "make_capturable", lambda *_: None)


def net(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)


def rows(device: torch.device, count: int) -> Iterator[torch.Tensor]:
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


Make = Callable[[nn.Module], Any]
Change = Callable[[Any, int], Any]


def train(
    make: Make, change: Change, device: torch.device, *, graphed: bool, steps: int = STEPS
) -> tuple[list[torch.Tensor], Any]:
    """Losses, weights and the optimizer's state after steps with changes in between."""
    model = net(device)
    optimizer = make(model)
    step: Any = plain(model, optimizer)
    if graphed:
        step = gw.graph_step(step, next(rows(device, 1)), optimizer=optimizer)
    seen = []
    for index, x in enumerate(rows(device, steps)):
        seen.append(step(x).detach().clone())
        change(optimizer, index)
    seen += [p.detach().clone() for p in model.parameters()]
    for state in optimizer.state.values():
        seen += [v.detach().clone() for v in state.values() if isinstance(v, torch.Tensor)]
    return seen, step


def agree(make: Make, change: Change, device: torch.device, steps: int = STEPS) -> Any:
    """Train eagerly and with a graph, alike but for rounding; returns the statistics."""
    expected, _ = train(make, change, device, graphed=False, steps=steps)
    actual, graphed = train(make, change, device, graphed=True, steps=steps)
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-6)
    return graphed.statistics


def numbers_of(group: dict[str, Any]) -> list[str]:
    """The options of a group that are numbers, or several; the learning rate apart."""

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    found = []
    for key, value in group.items():
        several = value if isinstance(value, tuple) else (value,)
        if key not in ("lr", "params") and all(map(is_number, several)):
            found.append(key)
    return found


def another(key: str, value: Any, index: int) -> Any:
    """Another value of an option that makes a difference, for each step."""
    if key == "eps":
        return 1e-3 * (1 + index % 5)
    if isinstance(value, tuple):
        return tuple(each * (1 - 0.01 * (1 + index % 5)) for each in value)
    return value * (1 - 0.1 * (1 + index % 5)) if value else 0.01 * (1 + index % 5)


def made(name: str, options: dict[str, Any]) -> Make:
    return lambda model: getattr(torch.optim, name)(model.parameters(), lr=0.02, **options)


def changing(keys: list[str]) -> Change:
    """Gives options another value before each step."""
    first: dict[str, Any] = {}

    def change(optimizer: Any, index: int) -> None:
        group = optimizer.param_groups[0]
        if index == 0:
            first.update(group)
        group.update({key: another(key, first[key], index) for key in keys})

    return change


def check_numbers(name: str, options: dict[str, Any], device: torch.device, *, each: bool) -> int:
    """Train with options that change, together or one at a time; how many made a difference."""
    if (name, device.type) in WITHOUT_KERNEL:
        pytest.skip("PyTorch has no fused kernel of it there")
    make = made(name, options)
    keys = numbers_of(make(net(device)).param_groups[0])
    assert keys
    still, _ = train(make, lambda *_: None, device, graphed=False)
    counted = 0
    for some in [[key] for key in keys] if each else [keys]:
        change = changing(some)
        moved, _ = train(make, change, device, graphed=False)
        same = all(map(torch.equal, still, moved))
        without = set(some) <= WITHOUT_EFFECT or (some == ["dampening"] and options.get("nesterov"))
        assert not same or without or some == ["dampening"], some
        counted += not same
        statistics = agree(make, change, device)
        assert statistics.captures <= 3  # a constant twice, then a tensor
        first = sum(statistics.eager.values())
        assert first <= 1
        assert set(statistics.eager) <= {"first step of an optimizer"}
        assert statistics.replays == STEPS - first
    return counted


def test_every_optimizer_of_pytorch_is_among_the_cases() -> None:
    kinds = [value for value in vars(torch.optim).values() if inspect.isclass(value)]
    known = {*OPTIONS, *CAPTURABLE}
    names = {kind.__name__ for kind in kinds if issubclass(kind, torch.optim.Optimizer)}
    assert names - {"Optimizer"} <= known


@pytest.mark.parametrize(("name", "options"), CASES, ids=ids)
def test_all_numbers_of_an_optimizer_may_change_at_every_step(
    name: str, options: dict[str, Any], device: torch.device
) -> None:
    assert check_numbers(name, options, device, each=False)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), CASES, ids=ids)
def test_each_number_of_an_optimizer_may_change_at_every_step(
    name: str, options: dict[str, Any], device: torch.device
) -> None:
    assert check_numbers(name, options, device, each=True) >= 2


@pytest.mark.parametrize(("name", "options"), CASES_ON_GPU[::2], ids=ids)
@pytest.mark.usefixtures("capturable")
def test_all_numbers_of_an_optimizer_that_is_capturable(
    name: str, options: dict[str, Any], device: torch.device
) -> None:
    assert check_numbers(name, options, device, each=False)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), CASES_ON_GPU, ids=ids)
@pytest.mark.usefixtures("capturable")
def test_each_number_of_an_optimizer_that_is_capturable(
    name: str, options: dict[str, Any], device: torch.device
) -> None:
    assert check_numbers(name, options, device, each=True) >= 2


# Schedulers.


def halves(epoch: int) -> float:
    return 0.5 + 0.5 / (1 + epoch)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.05, 3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, halves),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.3, total_iters=6),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [3, 6], 0.5),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, halves),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.05, 30),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8, 2.0),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.7),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.5), lr_scheduler.CosineAnnealingLR(o, 5)], [4]
    ),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, 5),
}
# These move a momentum, which some optimizers do not have.
MOVE_MOMENTA = ("CyclicLR", "OneCycleLR")


def test_every_scheduler_of_pytorch_is_among_the_cases() -> None:
    kinds = [value for value in vars(lr_scheduler).values() if inspect.isclass(value)]
    base = lr_scheduler.LRScheduler
    names = {kind.__name__ for kind in kinds if issubclass(kind, base)}
    assert names - {"LRScheduler", "_LRScheduler"} <= set(SCHEDULERS)


def check_scheduler(
    scheduler: str, name: str, options: dict[str, Any], device: torch.device
) -> None:
    takes = getattr(torch.optim, name)([torch.zeros(1)], **options).defaults
    if scheduler in MOVE_MOMENTA and not {"momentum", "betas"} & set(takes):
        with pytest.raises(ValueError, match="momentum"):
            SCHEDULERS[scheduler](made(name, options)(net(device)))
        return

    def make(model: nn.Module) -> Any:
        # Two groups, of which one has another learning rate.
        first, second = model[0].parameters(), model[2].parameters()  # type: ignore[index]  # a Sequential
        groups: Any = [{"params": first}, {"params": second, "lr": 0.004}]
        optimizer = getattr(torch.optim, name)(groups, lr=0.02, **options)
        optimizer.of_test = SCHEDULERS[scheduler](optimizer)
        return optimizer

    def change(optimizer: Any, index: int) -> None:
        plateau = scheduler == "ReduceLROnPlateau"
        optimizer.of_test.step(*([float(index % 3)] if plateau else []))

    statistics = agree(make, change, device)
    assert statistics.captures <= 2  # A plateau's comes unannounced.
    first = statistics.eager["first step of an optimizer"]
    assert first <= 1
    assert statistics.replays == STEPS - first


PAIRS = [(scheduler, *case) for scheduler in SCHEDULERS for case in CASES]
# One of each kind of scheduler with AdamW; those that move a momentum with SGD, too.
FEW = [
    (scheduler, name, options)
    for scheduler, name, options in PAIRS
    if options == {"fused": True} or (scheduler in MOVE_MOMENTA and options == OPTIONS["SGD"][0])  # type: ignore[index]  # not None
]


@pytest.mark.parametrize(("scheduler", "name", "options"), FEW, ids=ids)
def test_a_scheduler_changes_numbers_that_a_graph_reads(
    scheduler: str, name: str, options: dict[str, Any], device: torch.device
) -> None:
    check_scheduler(scheduler, name, options, device)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheduler", "name", "options"), [p for p in PAIRS if p not in FEW], ids=ids
)
def test_every_scheduler_with_every_optimizer(
    scheduler: str, name: str, options: dict[str, Any], device: torch.device
) -> None:
    check_scheduler(scheduler, name, options, device)


# What a graph holds for.


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)


def test_a_momentum_that_becomes_zero_and_back(device: torch.device) -> None:
    """PyTorch asks whether there is a momentum at all, and does something else then."""
    values = [0.9, 0.8, 0.7, 0.0, 0.6, 0.0, 0.5, 0.4]

    def change(optimizer: Any, index: int) -> None:
        optimizer.param_groups[0]["momentum"] = values[index % len(values)]

    statistics = agree(sgd, change, device, 24)
    assert statistics.replays == 24
    assert statistics.captures <= 4


def test_the_group_keeps_the_user_s_numbers(device: torch.device) -> None:
    seen = []

    def change(optimizer: Any, index: int) -> None:
        group = optimizer.param_groups[0]
        group["betas"] = (0.9 - 0.01 * index, 0.99)
        group["weight_decay"] = 0.1 + 0.01 * index
        saved = optimizer.state_dict()["param_groups"][0]
        seen.append((saved["betas"], saved["weight_decay"], group["betas"]))

    train(adamw, change, device, graphed=True)
    expected = [((0.9 - 0.01 * i, 0.99), 0.1 + 0.01 * i) for i in range(STEPS)]
    assert [(betas, decay) for betas, decay, _ in seen] == expected
    assert all(type(value) is float for _, _, betas in seen for value in betas)


def test_a_state_is_loaded_while_numbers_change(device: torch.device) -> None:
    saved: dict[str, Any] = {}

    def make(model: nn.Module) -> Any:
        optimizer = adamw(model)
        optimizer.of_test = lr_scheduler.OneCycleLR(optimizer, 0.05, 30)
        return optimizer

    def change(optimizer: Any, index: int) -> None:
        optimizer.of_test.step()
        if index == 4:
            saved.update(optimizer.state_dict())
        if index == 8:
            optimizer.load_state_dict(saved)

    statistics = agree(make, change, device)
    assert statistics.captures == 1


def test_an_option_that_changes_once_is_a_constant_bit_for_bit(device: torch.device) -> None:
    def change(optimizer: Any, index: int) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.3 if index == 5 else 0.1
        if index > 5:
            optimizer.param_groups[0]["weight_decay"] = 0.3

    expected, _ = train(sgd, change, device, graphed=False)
    actual, graphed = train(sgd, change, device, graphed=True)
    assert all(map(torch.equal, actual, expected))
    assert graphed.statistics.captures == 2
    assert graphed.explain().count("read from a tensor") == 0


def test_values_that_come_back_have_graphs_that_wait(device: torch.device) -> None:
    def change(optimizer: Any, index: int) -> None:
        optimizer.param_groups[0]["nesterov"] = index % 2 == 0

    expected, _ = train(sgd, change, device, graphed=False, steps=30)
    actual, graphed = train(sgd, change, device, graphed=True, steps=30)
    assert all(map(torch.equal, actual, expected))
    assert graphed.statistics.captures == 2
    assert graphed.statistics.replays == 30


def test_graphs_that_wait_give_way_to_new_ones(device: torch.device) -> None:
    model = net(device)
    optimizer = sgd(model)
    step = gw.graph_step(plain(model, optimizer), next(rows(device, 1)), max_graphs=1)
    for index, x in enumerate(rows(device, 6)):
        optimizer.param_groups[0]["nesterov"] = index % 2 == 1
        step(x)
    assert not step.statistics.eager
    assert step.statistics.captures == 6


def test_under_a_scaler_numbers_are_tensors_too(device: torch.device) -> None:
    scales: list[float] = []

    def run(graphed: bool) -> tuple[list[torch.Tensor], Any]:
        model = net(device)
        optimizer = adamw(model)
        scheduler = lr_scheduler.OneCycleLR(optimizer, 0.05, 30)
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**126, growth_interval=3)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = 100 * model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss

        call: Any = gw.graph_step(step, next(rows(device, 1))) if graphed else step
        seen = []
        for x in rows(device, 20):
            seen.append(call(x).detach().clone())
            scheduler.step()
            scales.append(scaler.get_scale())
        return [*seen, *(p.detach() for p in model.parameters())], call

    expected, actual = run(False)[0], run(True)
    torch.testing.assert_close(actual[0], expected, rtol=2e-5, atol=2e-6)
    assert scales[:20] == scales[20:]
    assert min(scales) < scales[-1]  # Some steps overflowed, and others did not.
    assert actual[1].statistics.captures == 1
    assert actual[1].statistics.replays == 20


def test_a_first_run_that_fails_after_the_optimizer_leaves_numbers_alone(
    device: torch.device,
) -> None:
    def run(graphed: bool) -> tuple[list[torch.Tensor], Any]:
        model = net(device)
        frozen = model.get_submodule("0").requires_grad_(False).bias
        frozen.grad = torch.ones_like(frozen)
        optimizer = adamw(model.get_submodule("2"))
        scheduler = lr_scheduler.OneCycleLR(optimizer, 0.05, 30)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()
            optimizer.step()
            assert frozen.grad is not None
            frozen.grad.mul_(0.5)  # Not possible with the first stand-in for it.
            return loss

        call: Any = gw.graph_step(step, next(rows(device, 1))) if graphed else step
        seen = []
        for x in rows(device, STEPS):
            seen.append(call(x).detach().clone())
            scheduler.step()
        return [*seen, *(p.detach() for p in model.parameters()), frozen.grad], call

    (actual, graphed), (expected, _) = run(True), run(False)
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-6)
    assert graphed.statistics.captures == 1
    assert graphed.statistics.replays == STEPS


class OnHost(torch.optim.SGD):
    """An optimizer of a user's that reads its numbers as such."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it returns nothing
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.add_(parameter.detach(), alpha=float(group["weight_decay"]))
                parameter.data.add_(parameter.grad, alpha=-float(group["lr"]))


class OnDevice(torch.optim.SGD):
    """One that computes with them."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it returns nothing
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.add_(parameter.detach(), alpha=group["weight_decay"] * 2)
                parameter.data.sub_(parameter.grad, alpha=group["lr"])


def host(model: nn.Module) -> Any:
    return OnHost(model.parameters(), lr=0.05, weight_decay=0.1)


def decays(optimizer: Any, index: int) -> None:
    optimizer.param_groups[0]["weight_decay"] *= 0.99


def test_an_optimizer_of_one_s_own_may_compute_with_changing_numbers(device: torch.device) -> None:
    statistics = agree(
        lambda model: OnDevice(model.parameters(), lr=0.05, weight_decay=0.1), decays, device
    )
    assert statistics.replays == STEPS
    assert statistics.captures <= 3


def test_numbers_that_are_read_end_in_eager_steps_with_one_warning(
    device: torch.device, clock: Any
) -> None:
    expected, _ = train(host, decays, device, graphed=False, steps=40)
    with pytest.warns(gw.FallbackWarning, match="weight_decay of OnHost has changed") as caught:
        actual, graphed = train(host, decays, device, graphed=True, steps=40)
    assert all(map(torch.equal, actual, expected))
    assert graphed.statistics.captures <= 6
    [told] = caught
    text = str(told.message)
    assert "reading it from a tensor failed: " in text
    if device.type == "cpu":
        assert "A value of a tensor is read" in text
    assert "Change it more rarely" in text
    optimizer = graphed._builder.numbers[0]._optimizer
    # The remedy: from here on it stays as it is for longer.
    before = graphed.statistics.replays
    for index, x in enumerate(rows(device, 120)):
        clock.now_s += 0.1
        if index == 60:
            optimizer.param_groups[0]["weight_decay"] *= 0.99
        graphed(x)
    assert graphed.statistics.replays > before + 30


def test_captures_stay_few_however_long_numbers_change(device: torch.device, clock: Any) -> None:
    """Each change costs a capture that soon is of no use: so fewer and fewer are made."""

    def change(optimizer: Any, index: int) -> None:
        clock.now_s += 0.1
        if index % 20 == 0:
            decays(optimizer, index)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        expected, _ = train(host, change, device, graphed=False, steps=400)
        actual, graphed = train(host, change, device, graphed=True, steps=400)
    assert all(map(torch.equal, actual, expected))
    # The first, three free ones, one that reads a tensor; others after 2, 4, 8 and 16 s of 40.
    assert graphed.statistics.captures <= 10


def test_numbers_of_parameters_in_half_precision_stay_constants(
    device: torch.device, clock: Any
) -> None:
    def make(model: nn.Module) -> Any:
        model.bfloat16()
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def change(optimizer: Any, index: int) -> None:
        optimizer.param_groups[0]["momentum"] *= 0.999

    def run(graphed: bool) -> tuple[list[torch.Tensor], Any]:
        model = net(device)
        optimizer = make(model)
        step: Any = plain(model, optimizer)
        if graphed:
            step = gw.graph_step(step, next(rows(device, 1)).bfloat16())
        seen = []
        for index, x in enumerate(rows(device, 20)):
            seen.append(step(x.bfloat16()).detach().clone())
            change(optimizer, index)
        return [*seen, *(p.detach() for p in model.parameters())], step

    expected, _ = run(False)
    with pytest.warns(gw.FallbackWarning, match="not all parameters are in float32 or float64"):
        actual, graphed = run(True)
    assert all(map(torch.equal, actual, expected))
    assert graphed.statistics.captures <= 6


def test_a_step_that_sets_a_number_which_is_a_tensor_is_refused(device: torch.device) -> None:
    model = net(device)
    optimizer = sgd(model)
    lr_scheduler.CyclicLR(optimizer, 0.01, 0.05, 3)
    inner = plain(model, optimizer)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.param_groups[0]["momentum"] *= 0.9
        return inner(x)

    before = optimizer.param_groups[0]["momentum"]
    with pytest.raises(gw.CaptureError, match="sets momentum of an optimizer"):
        gw.graph_step(step, next(rows(device, 1)))
    assert optimizer.param_groups[0]["momentum"] == before


def test_a_loss_that_reads_a_number_keeps_its_dtype(device: torch.device) -> None:
    """A tensor of a number is in float64; as a number it would not make the loss wider."""

    def run(graphed: bool) -> list[torch.Tensor]:
        model = net(device)
        optimizer = sgd(model)
        inner = plain(model, optimizer)

        def step(x: torch.Tensor) -> torch.Tensor:
            return inner(x) * optimizer.param_groups[0]["momentum"]

        call: Any = gw.graph_step(step, next(rows(device, 1))) if graphed else step
        seen = []
        for x in rows(device, STEPS):
            seen.append(call(x).detach().clone())
            optimizer.param_groups[0]["momentum"] *= 0.9
        return seen

    expected, actual = run(False), run(True)
    assert {t.dtype for t in actual} == {torch.float32}
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings(
    "ignore:The step .* runs eagerly.*cannot be captured:graphwright.FallbackWarning"
)
def test_a_tensor_of_the_user_s_in_place_of_a_number_is_not_overlooked() -> None:
    def change(optimizer: Any, index: int) -> None:
        group = optimizer.param_groups[0]
        group["weight_decay"] = torch.tensor(0.2) if index == 7 else 0.1 + 0.01 * index

    def make(model: nn.Module) -> Any:
        return OnDevice(model.parameters(), lr=0.05, weight_decay=0.1)

    statistics = agree(make, change, torch.device("cpu"), 40)
    assert statistics.replays >= 20


def test_a_compiled_model_is_not_compiled_anew_for_numbers_in_tensors(device: torch.device) -> None:
    """The mode that rewrites calls is on while an optimizer steps, and not around the model."""
    torch._dynamo.reset()
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model = net(device)
    optimizer = sgd(model)
    number = Number(optimizer, 0, "momentum", device)
    number.move_to_tensors()
    step = plain(torch.compile(model, backend=backend), optimizer)  # type: ignore[arg-type]  # it is a module
    for _ in range(3):
        with as_tensors([number], []):
            step(next(rows(device, 1)))
    assert len(compiled) == 1
    assert optimizer.param_groups[0]["momentum"] == 0.9


def test_a_step_that_fails_leaves_the_user_s_numbers(device: torch.device) -> None:
    model = net(device)
    optimizer = sgd(model)
    number = Number(optimizer, 0, "momentum", device)
    number.move_to_tensors()

    def fail(*_: Any) -> None:
        raise ValueError("mine")

    optimizer.register_step_pre_hook(fail)
    with pytest.raises(ValueError, match="mine"), as_tensors([number], []):
        plain(model, optimizer)(next(rows(device, 1)))
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert torch.overrides._get_current_function_mode_stack() == []
