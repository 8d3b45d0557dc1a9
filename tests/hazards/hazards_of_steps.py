"""What goes wrong with whole training steps as graphs: more of hazards.py."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hazards import (
    backwards_threads_have_theirs_anywhere,
    check_without_workspaces,
    hazard,
    module_is_not_watched,
    nothing_is_undone,
    rand,
    random_numbers_stand_still,
    same,
)
from torch.nn import functional as F  # noqa: N812  # the field's name for it
from training_steps import (
    Training,
    fp16_with_scaler,
    mlp,
    mlp_with_adamw,
    mlp_with_dropout,
    rows,
    transformer_in_bf16,
)

import graphwright as gw
from graphwright.graphs import call_work
from graphwright.training.step import captured_step, components, optimizers
from graphwright.training.step.graphed_step import GraphedStep

Between = Callable[[Training, int], None]


def graph_of(training: Training) -> GraphedStep:
    sample = next(training.batches)
    return gw.graph_step(training.step, sample, optimizer=training.optimizer)


def both(make: Any, device: torch.device, between: Between, steps: int = 8) -> None:
    """Train eagerly and by a graph, with something done between the steps; compare."""
    found: list[list[torch.Tensor]] = []
    for graphed in (False, True):
        training = make(device)
        step = graph_of(training) if graphed else training.step
        if not graphed:
            next(training.batches)
        torch.manual_seed(5)
        seen = []
        for index in range(steps):
            result = step(*next(training.batches))
            loss = result[0] if isinstance(result, tuple) else result
            seen.append(loss.detach().clone())
            between(training, index)
        found.append([*seen, *(p.detach().clone() for p in training.model.parameters())])
    for a, b in zip(*reversed(found), strict=True):
        same(a, b)


def nothing(training: Training, index: int) -> None:
    """Between the steps."""


# 2. Gradients are the caller's own, and are added to.


def holders_are_not_seen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(captured_step.CapturedStep, "_let_holders_keep_theirs", lambda self: None)


@hazard(2, holders_are_not_seen)
def gradients_that_are_held_outlive_the_next_step(device: torch.device) -> None:
    training = mlp_with_adamw(device)
    graphed = graph_of(training)
    graphed(*next(training.batches))
    held = [p.grad for p in training.model.parameters() if p.grad is not None]
    kept = [grad.clone() for grad in held]
    graphed(*next(training.batches))
    for a, b in zip(held, kept, strict=True):
        same(a, b)


def any_gradients_will_do(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(captured_step.CapturedStep, "begins_here", lambda self: True)


@hazard(2, any_gradients_will_do)
def micro_steps_add_up(device: torch.device) -> None:
    def make(device: torch.device) -> Training:
        model = mlp(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def micro(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return Training(micro, model, optimizer, rows(device))

    def every_third(training: Training, index: int) -> None:
        if index % 3 == 2:
            training.optimizer.step()
            training.optimizer.zero_grad()

    both(make, device, every_third, 9)


# 3. Warm-up changes nothing.


@hazard(3, nothing_is_undone)
def setting_a_step_up_changes_nothing(device: torch.device) -> None:
    training = mlp_with_dropout(device)
    before = copy.deepcopy(training.model.state_dict())
    state = torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()
    graph_of(training)
    for name, tensor in training.model.state_dict().items():
        same(tensor, before[name], name)
    now = torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()
    assert torch.equal(now, state)
    assert all(p.grad is None for p in training.model.parameters())


def states_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(components.OptimizersKept, "put_back", lambda self: None)


@hazard(3, states_stay)
def an_optimizer_begins_at_its_first_step(device: torch.device) -> None:
    training = mlp_with_adamw(device)
    graph_of(training)
    assert not training.optimizer.state


# 5. What is loaded is trained on.


def states_are_not_brought_home(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(optimizers.OptimizerMemory, "intact", lambda self: True)


@hazard(5, states_are_not_brought_home)
def a_loaded_state_takes_effect(device: torch.device) -> None:
    kept: dict[int, Any] = {}

    def load(training: Training, index: int) -> None:
        if index == 2:
            kept[id(training)] = copy.deepcopy(training.optimizer.state_dict())
        if index == 5:
            training.optimizer.load_state_dict(kept[id(training)])

    both(mlp_with_adamw, device, load, 10)


@hazard(5, module_is_not_watched)
def rebound_weights_are_trained(device: torch.device) -> None:
    def rebind(training: Training, index: int) -> None:
        if index == 3:
            for parameter in training.model.parameters():
                parameter.data = parameter.data.clone() * 0.9

    both(mlp_with_adamw, device, rebind)


def options_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(optimizers.Settings, "difference", lambda self: None)


@hazard(5, options_are_not_looked_at)
def a_learning_rate_takes_effect(device: torch.device) -> None:
    def halve(training: Training, index: int) -> None:
        training.optimizer.param_groups[0]["lr"] *= 0.25

    both(mlp_with_adamw, device, halve)


# 8. Dropout differs from step to step.


@hazard(8, random_numbers_stand_still)
def steps_draw_their_own_random_numbers(device: torch.device) -> None:
    both(mlp_with_dropout, device, nothing)


# 9. A failed capture leaves nothing behind.


@hazard(9, nothing_is_undone)
def a_step_that_cannot_be_captured_changes_nothing(device: torch.device) -> None:
    training = mlp_with_adamw(device)
    before = [p.detach().clone() for p in training.model.parameters()]

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        loss = training.step(x, y)
        return float(loss)

    try:
        gw.graph_step(step, next(training.batches), optimizer=training.optimizer)
    except gw.CaptureError:
        pass
    else:
        raise AssertionError("a step that reads its loss was captured")
    for a, b in zip(training.model.parameters(), before, strict=True):
        same(a.detach(), b)


# 14. Autocast.


def casts_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(call_work, "autocast_cache_apart", contextlib.nullcontext)


@hazard(12, backwards_threads_have_theirs_anywhere, only="cuda", isolated=True)
def cleared_workspaces_of_a_step_are_nobody_else_s(device: torch.device) -> None:
    weight = torch.nn.Parameter(rand(device, 64, 64).half())
    optimizer = torch.optim.SGD([weight], lr=0.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (x @ weight).float().square().mean()
        loss.backward()
        optimizer.step()
        assert weight.grad is not None
        return weight.grad

    # The sum over all rows is one that cuBLAS splits.
    x = rand(device, 65536, 64).half()
    graphed = gw.graph_step(step, (x,))
    check_without_workspaces(lambda: graphed(x).clone(), lambda: step(x).clone())


@hazard(14, casts_are_kept)
def weights_are_cast_in_every_step(device: torch.device) -> None:
    training, other = transformer_in_bf16(device), transformer_in_bf16(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        with torch.enable_grad():
            for one in (training, other):
                # Autocast now has casts of these weights.
                one.model(next(one.batches)[0])
        graphed = graph_of(training)
        torch.manual_seed(3)
        mine = [graphed(*next(training.batches)) for _ in range(4)]
    next(other.batches)
    torch.manual_seed(3)
    with torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False):
        theirs = [other.step(*next(other.batches)).detach() for _ in range(4)]
    for a, b in zip(mine, theirs, strict=True):
        same(a, b)


# 15. Train, eval, train.


@hazard(15, module_is_not_watched)
def dropout_goes_and_comes_back(device: torch.device) -> None:
    def switch(training: Training, index: int) -> None:
        training.model.train(index % 4 == 3)

    both(mlp_with_dropout, device, switch, 12)


# 19. What overflows is skipped.


def scales_are_not_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.amp.GradScaler, "update", lambda self: self._per_optimizer_states.clear())


@hazard(19, scales_are_not_kept)
def overflowing_steps_change_no_weights(device: torch.device) -> None:
    training = fp16_with_scaler(device)
    graphed = graph_of(training)
    before = [p.detach().clone() for p in training.model.parameters()]
    graphed(*next(training.batches))
    for a, b in zip(training.model.parameters(), before, strict=True):
        same(a.detach(), b)
    for _ in range(20):
        graphed(*next(training.batches))
    moved = zip(training.model.parameters(), before, strict=True)
    assert any(not torch.equal(a.detach(), b) for a, b in moved)
