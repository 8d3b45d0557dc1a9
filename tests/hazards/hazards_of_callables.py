"""What goes wrong with forwards and backwards as graphs: more of hazards.py."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
from hazards import (
    any_call_fits,
    hazard,
    module_is_not_watched,
    net,
    nothing_is_undone,
    rand,
    random_numbers_stand_still,
    refused,
    same,
)
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the field's name for it

import graphwright as gw
from graphwright.graphs.cpu import recorder as cpu
from graphwright.graphs.cuda import recorder as cuda
from graphwright.training.callables import activations, forward_backward, graphed_forward


def graphed_and_eager(model: nn.Module, *sample: Any, **options: Any) -> tuple[Any, Any]:
    eager = copy.deepcopy(model)
    return gw.make_graphed_callables(model, sample, **options), eager


def same_gradients(mine: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None, name
        assert b.grad is not None, name
        same(a.grad, b.grad, f"the gradient of {name}")


# 2. Gradients are the caller's own.


def gradients_stay_static(patch: pytest.MonkeyPatch) -> None:
    run, kept = activations.run_backward, {}

    def static(backward: Any, grads: Any) -> Any:
        made = run(backward, grads)
        first = kept.setdefault(id(backward), made)
        for old, new in zip(first, made, strict=True):
            if old is not None:
                old.copy_(new)
        return first

    patch.setattr(activations, "run_backward", static)


@hazard(2, gradients_stay_static)
def gradients_of_step_1_are_right_after_step_2(device: torch.device) -> None:
    model, eager = graphed_and_eager(net(device).train(), rand(device, 8, 16).requires_grad_())
    xs = [rand(device, 8, 16).requires_grad_() for _ in range(3)]
    found = [
        [torch.autograd.grad(m(x).sum(), [x, *m.parameters()]) for x in xs] for m in (model, eager)
    ]
    for mine, theirs in zip(*found, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            same(a, b)


def gradients_of_outputs_are_not_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(activations, "as_given", lambda grad, static: static)


@hazard(2, gradients_of_outputs_are_not_copied)
def accumulation_equals_eager(device: torch.device) -> None:
    model, eager = graphed_and_eager(net(device).train(), rand(device, 8, 16))
    for _ in range(4):
        x = rand(device, 8, 16)
        for module in (model, eager):
            (module(x).pow(2).mean() / 4).backward()
    same_gradients(model, eager)


def hooks_go_along(patch: pytest.MonkeyPatch) -> None:
    def itself(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    patch.setattr(forward_backward, "_stand_in", itself)


@hazard(2, hooks_go_along)
def hooks_of_parameters_run_once(device: torch.device) -> None:
    layer = nn.Linear(16, 4).to(device)
    layer.weight.register_hook(lambda grad: grad * 2)
    x = rand(device, 8, 16)
    wanted = torch.autograd.grad(layer(x).sum(), [layer.weight])[0]
    gw.make_graphed_callables(layer, (x,))
    same(torch.autograd.grad(layer(x).sum(), [layer.weight])[0], wanted)


# 3. Warm-up changes nothing.


@hazard(3, nothing_is_undone)
def warm_up_of_a_pair_changes_nothing(device: torch.device) -> None:
    model = nn.Sequential(net(device), nn.Dropout(0.5)).to(device).train()
    x = rand(device, 8, 16)
    torch.manual_seed(1)
    model(x).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    torch.manual_seed(2)
    wanted = torch.rand(8, device=device)
    torch.manual_seed(2)
    gw.make_graphed_callables(model, (x,))
    same(torch.rand(8, device=device), wanted, "random numbers")
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        same(parameter.grad, grads[name], name)


# 4, 5. Calls that do not fit.


@hazard(4, any_call_fits)
def a_pair_answers_no_other_kind_of_call(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).cumsum(0)

    graphed = gw.make_graphed_callables(fn, (rand(device, 16, 16),))
    square = rand(device, 16, 16)
    graphed(square)
    for x in (square.t(), square[:1], square[:8], square.double()):
        same(graphed(x), fn(x))


@hazard(5, module_is_not_watched)
def a_pair_notices_rebound_weights(device: torch.device) -> None:
    model, eager = graphed_and_eager(nn.Linear(16, 4).to(device), rand(device, 8, 16))
    weight, x = rand(device, 4, 16), rand(device, 8, 16)
    for module in (model, eager):
        module.weight.data = weight.clone()
        module(x).pow(2).sum().backward()
    same_gradients(model, eager)


def versions_are_not_seen(patch: pytest.MonkeyPatch) -> None:
    saved = property(lambda self: (), lambda self, value: None)
    patch.setattr(activations.Activations, "saved", saved, raising=False)


@hazard(5, versions_are_not_seen)
def a_weight_changed_before_the_backward_is_an_error(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)).to(device)
    gw.make_graphed_callables(model, (rand(device, 8, 16),))
    loss = model(rand(device, 8, 16)).sum()
    with torch.no_grad():
        model[1].weight.mul_(2)
    refused(RuntimeError, loss.backward)


# 7. Forwards before backwards.


def all_activations_count_as_free(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(activations.Activations, "free", property(lambda self: True))
    begin = activations.Activations.begin

    def unnumbered(self: Any, lease: Any) -> None:
        begin(self, lease)
        self.turn = 1
        if lease is not None:
            lease.turn = 1

    patch.setattr(activations.Activations, "begin", unnumbered)


@hazard(7, all_activations_count_as_free)
def two_forwards_before_a_backward(device: torch.device) -> None:
    xs = [rand(device, 8, 16) for _ in range(2)]
    model, eager = graphed_and_eager(net(device), xs[0], activation_sets=2)
    for module in (model, eager):
        for loss in [module(x).pow(2).sum() for x in xs]:
            loss.backward()
    same_gradients(model, eager)
    model, eager = graphed_and_eager(net(device), xs[0], activation_sets=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It says that the second forward is eager.
        for module in (model, eager):
            for loss in [module(x).pow(2).sum() for x in xs]:
                loss.backward()
    same_gradients(model, eager)


def the_first_backward_ends_it(patch: pytest.MonkeyPatch) -> None:
    backward, begin = activations.Lease.backward, activations.Activations.begin

    def ends(self: Any, grads: Any) -> Any:
        made = backward(self, grads)
        self.running, self._token = False, None
        return made

    def unnumbered(self: Any, lease: Any) -> None:
        begin(self, lease)
        self.turn = lease.turn = 1

    patch.setattr(activations.Lease, "backward", ends)
    patch.setattr(activations.Activations, "begin", unnumbered)


@hazard(7, the_first_backward_ends_it)
def a_second_backward_after_another_forward(device: torch.device) -> None:
    xs = [rand(device, 8, 16) for _ in range(2)]
    model, eager = graphed_and_eager(net(device), xs[0])
    for module in (model, eager):
        loss = module(xs[0]).pow(2).sum()
        loss.backward(retain_graph=True)
        module(xs[1]).sum().backward()
        loss.backward()
    same_gradients(model, eager)


def sets_of_activations_share_memory(patch: pytest.MonkeyPatch) -> None:
    for recorder in (cpu.CpuRecorder, cuda.CudaRecorder):
        patch.setattr(recorder, "apart", lambda self: contextlib.nullcontext())


@hazard(7, sets_of_activations_share_memory)
def a_set_is_added_while_a_forward_waits(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return ((((x * 2 + 1) * 3 - 1) * 2 + 1).sin() * 2).sin()

    xs = [rand(device, 64, 64).requires_grad_() for _ in range(3)]
    wanted = [torch.autograd.grad(fn(x).sum(), x)[0] for x in xs]
    graphed = gw.make_graphed_callables(fn, (xs[0],))
    losses = [graphed(x).sum() for x in xs]
    assert graphed.statistics.replays == len(xs)
    for place in (1, 2, 0):
        same(torch.autograd.grad(losses[place], xs[place])[0], wanted[place])


def activations_lie_anywhere(patch: pytest.MonkeyPatch) -> None:
    for recorder in (cpu.CpuRecorder, cuda.CudaRecorder):
        patch.setattr(recorder, "apart", lambda self: contextlib.nullcontext())


@hazard(7, activations_lie_anywhere)
def graphs_of_a_pool_may_run_in_any_order(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return ((((x * 2 + 1) * 3 - 1) * 2 + 1).sin() * 2).sin()

    x = rand(device, 64, 64).requires_grad_()
    first = gw.make_graphed_callables(fn, (x,))
    other = gw.make_graphed_callables(lambda x: fn(x) * 2, (x,), pool=first.pool)
    wanted = torch.autograd.grad(fn(x).sum() * 2, x)[0]
    loss = other(x).sum()
    first(rand(device, 64, 64).requires_grad_()).sum().backward()
    same(torch.autograd.grad(loss, x)[0], wanted)


def the_last_forward_s_are_taken(patch: pytest.MonkeyPatch) -> None:
    backward = activations.Lease.backward

    def last(self: Any, grads: Any) -> Any:
        self.activations = max(self.pair._sets, key=lambda chosen: chosen.turn)
        self.turn = self.activations.turn
        return backward(self, grads)

    patch.setattr(activations.Lease, "backward", last)


@hazard(7, the_last_forward_s_are_taken)
def a_backward_is_of_its_own_forward(device: torch.device) -> None:
    x = torch.ones(256, device=device, requires_grad=True)
    fn = gw.make_graphed_callables(lambda x: F.dropout(x, 0.5), (x,), activation_sets=2)
    ys = [fn(x) for _ in range(2)]
    for y in ys:
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad != 0, y != 0), "the backward is of another forward"


# 8. Randomness.


@hazard(8, random_numbers_stand_still)
def dropout_in_training_differs_and_repeats(device: torch.device) -> None:
    x = torch.ones(64, 64, device=device, requires_grad=True)
    graphed = gw.make_graphed_callables(nn.Dropout(0.5), (x,))
    first = graphed(x).detach()
    assert not torch.equal(first, graphed(x))
    torch.manual_seed(9)
    mine = [graphed(x).detach() for _ in range(3)]
    torch.manual_seed(9)
    for result in mine:
        same(result, F.dropout(x, 0.5).detach())


# 15. Train, eval, train.


def modes_are_not_seen(patch: pytest.MonkeyPatch) -> None:
    module_is_not_watched(patch)
    patch.setattr(graphed_forward.GraphedForward, "_why_original", lambda self: None)


@hazard(15, modes_are_not_seen)
def a_pair_is_for_one_mode(device: torch.device) -> None:
    model, eager = graphed_and_eager(net(device).train(), rand(device, 8, 16))
    for mode in (True, False, True):
        x = rand(device, 8, 16)
        for module in (model, eager):
            module.train(mode)
        mine, theirs = model(x), eager(x)
        same(mine.detach(), theirs.detach())
        mine.sum().backward()
        theirs.sum().backward()
    same_gradients(model, eager)
    for mine, theirs in zip(model.buffers(), eager.buffers(), strict=True):
        same(mine, theirs)
