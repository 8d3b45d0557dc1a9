"""Training steps as graphs, with something done in between that eager training would notice."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw

Graphed = Callable[..., Any]
Scenario = Callable[[torch.device, Graphed], list[Any]]
SCENARIOS: list[Scenario] = []


def scenario(fn: Scenario) -> Scenario:
    SCENARIOS.append(fn)
    return fn


def rows(device: torch.device, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(8, 6, generator=generator).to(device)


def net(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).to(device)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).pow(2).mean()
    return loss


def weights(*models: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for model in models for p in model.parameters()]


def plain(model: nn.Module, optimizer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        return loss

    return step


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    more = {"capturable": True} if next(model.parameters()).is_cuda else {}
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True, **more, **options)


@scenario
def an_optimizer_that_steps_every_third_time(device: torch.device, graphed: Graphed) -> list[Any]:
    model = net(device)
    optimizer = sgd(model, momentum=0.9)

    def step(x: torch.Tensor, last: bool) -> torch.Tensor:
        loss = loss_of(model, x)
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    step_ = graphed(step, (rows(device, 0), False))
    for i in range(9):
        step_(rows(device, i), i % 3 == 2)
    return [*weights(model), len(optimizer.state_dict()["state"])]


@scenario
def a_layer_is_frozen_and_thawed(device: torch.device, graphed: Graphed) -> list[Any]:
    model = net(device)
    step = graphed(plain(model, adamw(model)), rows(device, 0))
    for i in range(9):
        if i % 3 == 0:
            model[0].requires_grad_(i % 2 == 1)
        step(rows(device, i))
    return weights(model)


@scenario
def gradients_are_held_and_zeroed(device: torch.device, graphed: Graphed) -> list[Any]:
    model = net(device)

    def micro(x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, x)
        loss.backward()
        return loss

    step, held = graphed(micro, rows(device, 0)), []
    for i in range(4):
        step(rows(device, i))
        held += [p.grad for p in model.parameters()]
        model.zero_grad()
    return held


@scenario
def views_of_gradients_are_held(device: torch.device, graphed: Graphed) -> list[Any]:
    model = net(device)
    step, held = graphed(plain(model, sgd(model)), rows(device, 0)), []
    for i in range(4):
        step(rows(device, i))
        held += [p.grad.view(-1)[:3] for p in model.parameters() if p.grad is not None]
    return held


@scenario
def other_graphs_of_the_pool_run_between(device: torch.device, graphed: Graphed) -> list[Any]:
    model, pool, a = net(device), gw.MemoryPool(), rows(device, 1)
    infer = gw.capture(lambda x: torch.tanh(x @ x.T) @ x, a, pool=pool)

    def micro(x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, x)
        loss.backward()
        return loss

    step = graphed(micro, rows(device, 0), pool=pool)
    for i in range(4):
        step(rows(device, i))
        infer(a)
    return [p.grad for p in model.parameters()]


@scenario
def the_optimizer_is_replaced(device: torch.device, graphed: Graphed) -> list[Any]:
    class Trainer:
        def __init__(self) -> None:
            self.model = net(device)
            self.optimizer: Any = sgd(self.model)

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return plain(self.model, self.optimizer)(x)

    trainer = Trainer()
    step = graphed(trainer.step, rows(device, 0))
    for i in range(6):
        if i == 3:
            trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.001)
        step(rows(device, i))
    return weights(trainer.model)


class Lit(nn.Module):
    """A model with its optimizer in an attribute."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.net = net(device)
        self.optimizers = [sgd(self.net, momentum=0.9)]

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return plain(self.net, self.optimizers[0])(x)


@scenario
def an_optimizer_out_of_sight(device: torch.device, graphed: Graphed) -> list[Any]:
    lit = Lit(device)
    step = graphed(lit.training_step, rows(device, 0))
    begun = len(lit.optimizers[0].state)
    for i in range(6):
        if i == 3:
            lit.optimizers[0].param_groups[0]["lr"] = 0.001
        step(rows(device, i))
    return [*weights(lit), begun]


@scenario
def a_model_in_a_list_is_switched_and_moved(device: torch.device, graphed: Graphed) -> list[Any]:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(6, 7), nn.Dropout(0.5), nn.Linear(7, 3)).to(device)]
    optimizer = sgd(models[0])

    def step(x: torch.Tensor) -> torch.Tensor:
        return plain(models[0], optimizer)(x)

    step_ = graphed(step, rows(device, 0))
    torch.manual_seed(4)
    for i in range(8):
        if i == 3:
            models[0].eval()
        if i == 5:
            for parameter in models[0].parameters():
                parameter.data = parameter.data.clone()
        step_(rows(device, i))
    return weights(models[0])


def halve_gradient(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def halve_gradients(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            halve_gradient(parameter)


@scenario
def hooks_come_and_go(device: torch.device, graphed: Graphed) -> list[Any]:
    model = net(device)
    optimizer = sgd(model)
    step = graphed(plain(model, optimizer), rows(device, 0))
    handles: list[Any] = []
    for i in range(12):
        if i == 2:
            handles.append(model[0].weight.register_hook(lambda grad: grad * 2))
        if i == 4:
            handles.append(model[2].weight.register_post_accumulate_grad_hook(halve_gradient))
        if i == 6:
            triple = lambda m, given, grads: (given[0] * 3,)  # noqa: E731  # as short as it is
            handles.append(model[1].register_full_backward_hook(triple))
        if i == 8:
            handles.append(optimizer.register_step_pre_hook(halve_gradients))
        if i == 10:
            for handle in handles:
                handle.remove()
        step(rows(device, i))
    return weights(model)


@scenario
def gradients_that_a_step_leaves_alone_stay(device: torch.device, graphed: Graphed) -> list[Any]:
    first, second = net(device), nn.Linear(6, 3).to(device)
    both = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(first, x)
        loss.backward()
        return loss

    step_ = graphed(step, rows(device, 0), optimizer=both)
    for i in range(4):
        loss_of(second, rows(device, i)).backward()
        step_(rows(device, i))
        if i % 2:
            both.step()
            both.zero_grad()
    return weights(first, second)


@scenario
def parameters_are_assigned(device: torch.device, graphed: Graphed) -> list[Any]:
    model = net(device)
    state = {k: v.clone() + 0.1 for k, v in model.state_dict().items()}

    def micro(x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, x)
        loss.backward()
        return loss

    step = graphed(micro, rows(device, 0))
    for i in range(6):
        if i == 3:
            model.load_state_dict(state, assign=True)
        step(rows(device, i))
    return [p.grad for p in model.parameters()]


@scenario
def a_number_becomes_a_tensor(device: torch.device, graphed: Graphed) -> list[Any]:
    model = net(device)
    optimizer = adamw(model)
    step = graphed(plain(model, optimizer), rows(device, 0))
    for i in range(9):
        if i == 3:
            optimizer.param_groups[0]["lr"] = 0.25
        if i == 6:
            optimizer.param_groups[0]["lr"] = torch.tensor(0.5, device=device)
        step(rows(device, i))
    return weights(model)


@scenario
def one_of_two_groups_gets_a_learning_rate_of_its_own(
    device: torch.device, graphed: Graphed
) -> list[Any]:
    model, lr = net(device), torch.tensor(0.1, device=device)
    groups: Any = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=lr, fused=True, capturable=device.type == "cuda")
    step = graphed(plain(model, optimizer), rows(device, 0))
    for i in range(6):
        if i == 3:
            optimizer.param_groups[0]["lr"] = torch.tensor(0.001, device=device)
        step(rows(device, i))
    return weights(model)


@scenario
def parameters_change_groups(device: torch.device, graphed: Graphed) -> list[Any]:
    model = net(device)
    groups: Any = [
        {"params": [*model[0].parameters()], "lr": 0.1},
        {"params": [*model[2].parameters()], "lr": 0.001},
    ]
    optimizer = torch.optim.SGD(groups)
    step = graphed(plain(model, optimizer), rows(device, 0))
    for i in range(6):
        if i == 3:
            one, other = optimizer.param_groups
            one["params"], other["params"] = other["params"], one["params"]
        step(rows(device, i))
    return weights(model)


@scenario
def a_scaler_grows_faster(device: torch.device, graphed: Graphed) -> list[Any]:
    model = net(device)
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0, growth_interval=100)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    step_ = graphed(step, rows(device, 0))
    for i in range(8):
        if i == 3:
            scaler.set_growth_interval(1)
        step_(rows(device, i))
    return [*weights(model), scaler.get_scale()]


@scenario
def the_learning_rate_is_returned(device: torch.device, graphed: Graphed) -> list[Any]:
    model = net(device)
    optimizer = adamw(model)
    inner = plain(model, optimizer)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return inner(x), optimizer.param_groups[0]["lr"]

    step_, seen = graphed(step, rows(device, 0)), []
    for i in range(6):
        optimizer.param_groups[0]["lr"] = 0.5**i
        seen.append(step_(rows(device, i))[1])
    return [float(lr) for lr in seen]


@scenario
def two_states_change_places(device: torch.device, graphed: Graphed) -> list[Any]:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(rows(device, 3).flatten()[: parameter.numel()].view_as(parameter))
    optimizer = adamw(model)
    step = graphed(plain(model, optimizer), rows(device, 0))
    for i in range(6):
        if i == 3:
            a, b = (optimizer.state[layer.weight] for layer in (model[0], model[1]))
            a["exp_avg"], b["exp_avg"] = b["exp_avg"], a["exp_avg"]
        step(rows(device, i))
    return weights(model)


@scenario
def a_new_group_is_added(device: torch.device, graphed: Graphed) -> list[Any]:
    model, more = net(device), nn.Linear(3, 3).to(device)
    nn.init.eye_(more.weight)
    optimizer = sgd(model, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = more(model(x)).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    step_ = graphed(step, rows(device, 0))
    for i in range(8):
        if i == 4:
            optimizer.add_param_group({"params": more.parameters(), "lr": 0.01})
        step_(rows(device, i))
    return weights(model, more)


@scenario
def a_scheduler_meets_a_parameter_that_joins_later(
    device: torch.device, graphed: Graphed
) -> list[Any]:
    model = net(device)
    optimizer = sgd(model, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model[0].requires_grad_(False)
    step = graphed(plain(model, optimizer), rows(device, 0))
    for i in range(8):
        if i == 4:
            model[0].requires_grad_(True)
        step(rows(device, i))
        scheduler.step()
    return weights(model)


@scenario
def moved_in_one_step_only(device: torch.device, graphed: Graphed) -> list[Any]:
    """zero_grad at the end, and something returned that the optimizer has updated."""
    model = net(device)
    optimizer = adamw(model)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        return model[0].bias.norm()

    step_ = graphed(step, rows(device, 0))
    return [step_(rows(device, i)).detach().clone() for i in range(6)]


@scenario
def frozen_gradients_are_left_alone(device: torch.device, graphed: Graphed) -> list[Any]:
    first, second = net(device), nn.Linear(3, 2).to(device)
    one, other = sgd(first), sgd(second)

    def step(x: torch.Tensor) -> torch.Tensor:
        one.zero_grad()
        loss = second(first(x)).pow(2).mean()
        loss.backward()
        one.step()
        return loss

    second.requires_grad_(False)
    step_ = graphed(step, rows(device, 0))
    for i in range(4):
        second.requires_grad_(True)
        loss_of(second, first(rows(device, i)).detach()).backward()
        second.requires_grad_(False)
        step_(rows(device, i))
    other.step()
    return weights(first, second)


@scenario
def a_state_that_was_saved_is_loaded_again(device: torch.device, graphed: Graphed) -> list[Any]:
    model = net(device)
    optimizer = adamw(model)
    step = graphed(plain(model, optimizer), rows(device, 0))
    early: Any = None
    for i in range(9):
        if i == 2:
            early = copy.deepcopy(optimizer.state_dict())
        if i == 5:
            saved = optimizer.state_dict()
            optimizer.load_state_dict(copy.deepcopy(early))
        if i == 6:
            optimizer.load_state_dict(saved)
        if i == 7:
            saved = optimizer.state_dict()
            optimizer.state.clear()
        if i == 8:
            optimizer.load_state_dict(saved)
        step(rows(device, i))
    return weights(model)


@scenario
def autograd_and_others_hold_gradients(device: torch.device, graphed: Graphed) -> list[Any]:
    model, shared = net(device), net(device)
    step = graphed(plain(model, sgd(model)), rows(device, 0))
    step(rows(device, 0))
    factors = [torch.ones_like(p, requires_grad=True) for p in model.parameters()]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    later = sum((a * g).sum() for a, g in zip(factors, gradients, strict=True))
    del gradients
    step(rows(device, 1))
    assert isinstance(later, torch.Tensor)
    later.backward()
    for mine, its in zip(shared.parameters(), model.parameters(), strict=True):
        mine.grad = its.grad
    step(rows(device, 2))
    return [*(a.grad for a in factors), *(p.grad for p in shared.parameters())]


@scenario
def two_networks_against_each_other(device: torch.device, graphed: Graphed) -> list[Any]:
    maker, judge = nn.Linear(6, 6).to(device), net(device)
    with torch.no_grad():
        maker.weight.copy_(torch.eye(6))
        maker.bias.zero_()
    one, other = adamw(maker), adamw(judge)

    def make(x: torch.Tensor) -> torch.Tensor:
        one.zero_grad()
        loss = judge(maker(x)).pow(2).mean()
        loss.backward()
        one.step()
        return loss

    def tell(x: torch.Tensor) -> torch.Tensor:
        other.zero_grad()
        loss = (judge(maker(x).detach()) - judge(x) + 1).pow(2).mean()
        loss.backward()
        other.step()
        return loss

    steps = [graphed(fn, rows(device, 0)) for fn in (tell, make)]
    for i in range(12):
        for step in steps:
            step(rows(device, i))
    for step in steps:
        if isinstance(step, gw.GraphedStep):
            assert step.statistics.captures <= 3
            assert not step.statistics.eager
    return weights(maker, judge)


@scenario
def some_gradients_are_zeroed_others_pile_up(device: torch.device, graphed: Graphed) -> list[Any]:
    model = net(device)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    step = graphed(plain(model, optimizer), rows(device, 0))
    for i in range(12):
        step(rows(device, i))
    if isinstance(step, gw.GraphedStep):
        assert step.statistics.captures <= 3
        assert not step.statistics.eager
    return [*weights(model), model[0].weight.grad]


@scenario
def a_view_is_left_in_a_variable(device: torch.device, graphed: Graphed) -> list[Any]:
    model = net(device)
    step, seen = graphed(plain(model, sgd(model)), rows(device, 0)), []
    for i in range(12):
        step(rows(device, i))
        for parameter in model.parameters():
            assert parameter.grad is not None
            grad = parameter.grad.detach()
            seen.append(grad.norm())
    if isinstance(step, gw.GraphedStep):
        assert step.statistics.captures <= 2
        assert not step.statistics.eager
    return [*weights(model), *seen, grad]


@scenario
def an_attribute_of_the_trainer_changes(device: torch.device, graphed: Graphed) -> list[Any]:
    class Trainer:
        def __init__(self) -> None:
            self.model = net(device)
            self.optimizer = sgd(self.model)
            self.total = torch.zeros((), device=device)

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return plain(self.model, self.optimizer)(x)

    trainer = Trainer()
    step = graphed(trainer.step, rows(device, 0))
    for i in range(8):
        trainer.total = trainer.total + step(rows(device, i)).detach()
    if isinstance(step, gw.GraphedStep):
        assert step.statistics.captures == 1
    return [*weights(trainer.model), trainer.total]


class Own(torch.optim.SGD):
    """An optimizer of the user's own."""


@scenario
def modules_and_classes_of_the_user_s(device: torch.device, graphed: Graphed) -> list[Any]:
    model = net(device)
    optimizer = Own(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = nn.MSELoss()(nn.Softmax(1)(model(x)), torch.zeros(8, 3, device=device))
        loss.backward()
        optimizer.step()
        return loss

    step_ = graphed(step, rows(device, 0))
    for i in range(5):
        step_(rows(device, i))
    return weights(model)


@scenario
def many_groups_get_other_learning_rates(device: torch.device, graphed: Graphed) -> list[Any]:
    model = net(device)
    groups: Any = [{"params": [p], "lr": 0.01 * i} for i, p in enumerate(model.parameters(), 1)]
    optimizer = torch.optim.AdamW(groups, fused=True, capturable=device.type == "cuda")
    step = graphed(plain(model, optimizer), rows(device, 0), on_miss="eager")
    for i in range(9):
        if i % 3 == 2:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        step(rows(device, i))
    if isinstance(step, gw.GraphedStep):
        assert step.statistics.captures == 2
        assert not step.statistics.eager
    return weights(model)


@scenario
def hooks_take_the_places_of_others(device: torch.device, graphed: Graphed) -> list[Any]:
    model, by = net(device), [2.0]
    optimizer = sgd(model)

    def scaled(grad: torch.Tensor) -> torch.Tensor:
        return grad * by[0]

    def scales(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(by[0])

    handles = [
        model[0].weight.register_hook(lambda grad: grad * 2),
        model[2].weight.register_hook(scaled),
        optimizer.register_step_pre_hook(scales),
    ]
    step = graphed(plain(model, optimizer), rows(device, 0))
    for i in range(9):
        if i == 3:
            handles[0].remove()
            handles[0] = model[0].weight.register_hook(lambda grad: grad * 5)
        if i == 6:
            by[0] = 0.5  # The hooks close over it.
        step(rows(device, i))
    return weights(model)


class Reversed(torch.autograd.Function):
    by = 1.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return -Reversed.by * grads[0]


@scenario
def a_function_of_one_s_own_changes(device: torch.device, graphed: Graphed) -> list[Any]:
    model, reverse = net(device), Reversed.apply
    optimizer = sgd(model)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model[2](reverse(model[1](model[0](x)))).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    step_ = graphed(step, rows(device, 0))
    try:
        for i in range(9):
            Reversed.by = 1.0 + i // 3
            step_(rows(device, i))
    finally:
        Reversed.by = 1.0
    return weights(model)


class Settings:
    scale = 1.0
    shift = 1.0


def shifted(x: torch.Tensor) -> torch.Tensor:
    return x * Settings.shift


@scenario
def two_functions_name_attributes_of_one_class(device: torch.device, graphed: Graphed) -> list[Any]:
    model = net(device)
    optimizer = sgd(model)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = shifted(loss_of(model, x)) * Settings.scale
        loss.backward()
        optimizer.step()
        return loss

    step_ = graphed(step, rows(device, 0))
    try:
        for i in range(9):
            Settings.scale, Settings.shift = 1.0 + (i > 3), 1.0 + (i > 6)
            step_(rows(device, i))
    finally:
        Settings.scale = Settings.shift = 1.0
    return weights(model)


@scenario
def a_list_among_the_options_changes(device: torch.device, graphed: Graphed) -> list[Any]:
    model = net(device)
    optimizer = adamw(model)
    betas = [0.9, 0.99]
    optimizer.param_groups[0]["betas"] = betas
    step = graphed(plain(model, optimizer), rows(device, 0))
    for i in range(8):
        if i == 4:
            betas[0] = 0.2
        step(rows(device, i))
    return weights(model)


class Scaled(torch.optim.SGD):
    """Scales gradients by an option that a group may have."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it returns nothing
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(group.get("gain", 1.0))
        super().step()


@scenario
def an_option_comes_and_goes(device: torch.device, graphed: Graphed) -> list[Any]:
    model = net(device)
    optimizer = Scaled(model.parameters(), lr=0.1)
    step = graphed(plain(model, optimizer), rows(device, 0))
    for i in range(8):
        if i == 3:
            optimizer.param_groups[0]["gain"] = 2.0
        if i == 6:
            del optimizer.param_groups[0]["gain"]
        step(rows(device, i))
    return weights(model)


@scenario
def gradients_are_kept_by_others(device: torch.device, graphed: Graphed) -> list[Any]:
    model = net(device)
    step = graphed(plain(model, sgd(model)), rows(device, 0))
    kept: list[Any] = []
    for i in range(8):
        step(rows(device, i))
        if i in (2, 5):
            grad = model[0].weight.grad
            kept.append(grad.untyped_storage() if i == 5 else torch.from_dlpack(grad))
    return [*weights(model), kept[0].clone(), torch.tensor(list(bytes(kept[1].cpu())))]


@scenario
def a_scheduler_of_half_precision(device: torch.device, graphed: Graphed) -> list[Any]:
    model = net(device).to(torch.bfloat16)
    optimizer = sgd(model, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    step = graphed(plain(model, optimizer), rows(device, 0).bfloat16())
    for i in range(8):
        step(rows(device, i).bfloat16())
        scheduler.step()
    return [each.float().mul(8).round() for each in weights(model)]  # It rounds otherwise.


class Counts(torch.optim.SGD):
    """An optimizer that takes another step every third time, as Lookahead does."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it returns nothing
        super().step()
        self.steps += 1


def test_an_optimizer_of_one_s_own_that_counts_is_refused(device: torch.device) -> None:
    model = net(device)
    optimizer = Counts(model.parameters(), lr=0.1)
    before = weights(model)
    with pytest.raises(gw.CaptureError, match="sets steps of an optimizer"):
        gw.graph_step(plain(model, optimizer), rows(device, 0))
    assert optimizer.steps == 0
    assert all(map(torch.equal, weights(model), before))


@pytest.mark.filterwarnings("ignore:The step .* runs eagerly.*mine:graphwright.FallbackWarning")
def test_a_step_that_failed_once_is_a_graph_again(device: torch.device) -> None:
    model, fails = net(device), [False]
    optimizer = sgd(model)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        if fails[0]:
            raise ValueError("mine")
        optimizer.step()
        return loss

    graphed = gw.graph_step(step, rows(device, 0))
    graphed(rows(device, 0))
    fails[0] = True
    with pytest.raises(ValueError, match="mine"):
        graphed(rows(device, 1))
    fails[0] = False
    replays = graphed.statistics.replays
    for i in range(5):
        graphed(rows(device, i))
    assert graphed.statistics.replays == replays + 5
    graphed.release()
    fails[0] = True
    with pytest.raises(ValueError, match="mine"):
        graphed(rows(device, 1))
    fails[0] = False
    for i in range(40):  # No graph is left: one is captured again, though not at once.
        graphed(rows(device, i))
    assert graphed.statistics.captures == 2


@pytest.mark.parametrize("fn", SCENARIOS, ids=lambda fn: str(fn.__name__))
def test_what_eager_training_would_notice(fn: Scenario, device: torch.device) -> None:
    made: list[gw.GraphedStep] = []

    def graphed(step: Any, sample: Any, **options: Any) -> Any:
        made.append(gw.graph_step(step, sample, **options))
        return made[-1]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of backward hooks on inputs that need no gradient
        expected = fn(device, lambda step, sample, **options: step)
        actual = fn(device, graphed)
    assert made[0].statistics.replays > 1
    for a, b in zip(actual, expected, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        else:
            assert a == b


def test_an_argument_that_requires_grad(device: torch.device) -> None:
    model, encoder = net(device), nn.Linear(6, 6).to(device)
    step, x = plain(model, sgd(model)), rows(device, 0)
    with pytest.raises(gw.CaptureError, match="requires grad"):
        gw.graph_step(step, encoder(x))
    assert encoder.weight.grad is None
    graphed = gw.graph_step(step, x)
    graphed(encoder(x))
    assert encoder.weight.grad is not None
    assert graphed.statistics.eager == {"an argument requires grad": 1}


def test_state_that_a_step_makes_itself_is_refused(device: torch.device) -> None:
    model, momenta = net(device), {}

    def step(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                momentum = momenta.setdefault(name, torch.zeros_like(parameter))
                momentum.mul_(0.9).add_(parameter.grad)
                parameter.sub_(momentum, alpha=0.1)
        return loss

    before = weights(model)
    with pytest.raises(gw.CaptureError, match="makes a tensor in its first run"):
        gw.graph_step(step, rows(device, 0))
    assert not momenta
    assert all(map(torch.equal, weights(model), before))


@pytest.mark.filterwarnings(
    "ignore:The step .* runs eagerly.*sets the learning rate:graphwright.FallbackWarning"
)
def test_a_step_that_sets_another_rate_each_time_leaves_it_set(device: torch.device) -> None:
    model, rate = net(device), [0.1]
    optimizer = sgd(model)
    inner = plain(model, optimizer)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.param_groups[0]["lr"] = rate[0]
        return inner(x)

    graphed = gw.graph_step(step, rows(device, 0))
    for i in range(40):
        rate[0] = 0.1 / (i + 1)
        graphed(rows(device, i))
        assert optimizer.param_groups[0]["lr"] == rate[0]
    assert graphed.statistics.captures < 20


def test_options_that_a_step_sets_are_refused(device: torch.device) -> None:
    model = net(device)
    optimizer = sgd(model, weight_decay=0.1)
    inner = plain(model, optimizer)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.param_groups[0]["weight_decay"] *= 1.5
        return inner(x)

    with pytest.raises(gw.CaptureError, match="sets weight_decay"):
        gw.graph_step(step, rows(device, 0))
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_random_numbers_of_an_object_of_python_s_are_refused(device: torch.device) -> None:
    model, rng = net(device), random.Random(0)
    optimizer = sgd(model)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x)
        (loss * rng.random()).backward()
        optimizer.step()
        return loss

    with pytest.raises(gw.CaptureError):
        gw.graph_step(step, rows(device, 0))


def test_a_failed_capture_leaves_containers_as_they_were(device: torch.device) -> None:
    model, seen = net(device), [0]
    optimizer = sgd(model, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = copy.deepcopy(scheduler.state_dict())

    def step(batch: dict[str, torch.Tensor]) -> Any:
        batch["loss"] = loss_of(model, batch.pop("x"))
        batch["loss"].backward()
        seen[0] += 1
        optimizer.step()
        scheduler.step()
        raise ValueError("on purpose")

    batch = {"x": rows(device, 0)}
    with pytest.raises(gw.CaptureError):
        gw.graph_step(step, (batch,))
    assert list(batch) == ["x"]
    assert seen == [0]
    assert not optimizer.state
    assert scheduler.state_dict() == state


def test_step_under_hooks_for_saved_tensors_is_eager(device: torch.device) -> None:
    model = net(device)
    twin = copy.deepcopy(model)
    graphed = gw.graph_step(plain(model, sgd(model)), rows(device, 0))
    eager, seen = plain(twin, sgd(twin)), []

    def halved(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor / 2 if tensor.is_floating_point() else tensor

    for index in range(4):
        with torch.autograd.graph.saved_tensors_hooks(halved, lambda tensor: tensor):
            if index % 2:
                graphed(rows(device, index)), eager(rows(device, index))
                continue
        graphed(rows(device, index)), eager(rows(device, index))
    assert seen
    for mine, theirs in zip(weights(model), weights(twin), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert graphed.statistics.eager["under hooks for saved tensors"] == 2


def fused_step(step: Graphed, x: torch.Tensor) -> None:
    raise gw.CaptureError(gw.fuse(step, (x,)).untraced[-1][1])


def tuned_step(step: Graphed, x: torch.Tensor) -> None:
    gw.tune(step, (x,), strategies=["eager:no_grad"], progress=False, remember=False)


def captured_step(step: Graphed, x: torch.Tensor) -> None:
    gw.capture(step, x)


@pytest.mark.parametrize("make", [fused_step, tuned_step, captured_step])
def test_step_trains_nothing_where_it_is_put_into_what_infers(
    make: Callable[[Graphed, torch.Tensor], None], device: torch.device
) -> None:
    model = net(device)
    step = gw.graph_step(plain(model, sgd(model, momentum=0.5)), rows(device, 0))
    before = weights(model)
    with pytest.raises(gw.CaptureError, match="training step"):
        make(step, rows(device, 0))
    for mine, theirs in zip(weights(model), before, strict=True):
        assert torch.equal(mine, theirs)
    step(rows(device, 0))
    assert step.statistics.replays == 1


def test_a_step_under_anomaly_detection_is_eager(device: torch.device) -> None:
    weight = torch.zeros(2, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (weight * x).sqrt().sum() * 0  # Its gradient is NaN.
        loss.backward()
        return loss

    x = torch.ones(2, device=device)
    graphed = gw.graph_step(step, (x,), optimizer=optimizer)
    graphed(x)
    for _ in range(2):
        with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="nan"):
            graphed(x)
    graphed(x)
    assert graphed.statistics.replays == 2
    assert graphed.statistics.eager == {"under anomaly detection": 2}


def test_nothing_is_captured_for_training_under_hooks_for_saved_tensors(
    device: torch.device,
) -> None:
    model, x = net(device), rows(device, 0)
    before = weights(model)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 0, lambda t: t):
        with pytest.raises(gw.CaptureError, match="Hooks for saved tensors"):
            gw.graph_step(plain(model, sgd(model)), x)
        with pytest.raises(gw.CaptureError, match="Hooks for saved tensors"):
            gw.make_graphed_callables(model, (x,))
    for mine, theirs in zip(weights(model), before, strict=True):
        assert torch.equal(mine, theirs)
    gw.make_graphed_callables(model, (x,))(x).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


class Steps:
    """Runs steps that it holds."""

    def __init__(self, *steps: Callable[..., torch.Tensor]) -> None:
        self.steps = list(steps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return sum(step(x) for step in self.steps)


@pytest.mark.parametrize("held", ["closure", "object"])
def test_a_change_of_what_a_step_inside_of_a_step_reads_is_seen(
    held: str, device: torch.device
) -> None:
    found = []
    for graphed in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(3, 3).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        options = {"factor": 1.0}

        def train(
            x: torch.Tensor, model: Any = model, optimizer: Any = optimizer, options: Any = options
        ) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) * options["factor"]).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        x = torch.ones(2, 3, device=device)
        inner = gw.graph_step(train, (x,)) if graphed else train
        outer: Any = Steps(inner) if held == "object" else lambda x, inner=inner: inner(x)
        outer = gw.graph_step(outer, (x,)) if graphed else outer
        losses = [outer(x), outer(x)]
        options["factor"] = 3.0
        found.append([float(loss) for loss in [*losses, outer(x), outer(x)]])
    assert found[0] == found[1]
