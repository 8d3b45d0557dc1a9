"""make_graphed_callables against eager: numbers, gradients, and what torch.cuda's gets wrong."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import pickle
import threading
import time
import warnings
from collections.abc import Callable
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the field's name for it
from torch.utils.checkpoint import checkpoint

import graphwright as gw
from graphwright.training.callables.graphed_forward import TrainingCallStatistics

Make = Callable[[], nn.Module]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 12, num_layers=2, batch_first=True)
        self.out = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(x)[0][:, -1])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.GELU(), nn.Linear(16, 4))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    )


MODELS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "mlp with dropout": (mlp, (6, 8)),
    "cnn with batch norm": (cnn, (4, 3, 8, 8)),
    "lstm": (Recurrent, (4, 5, 8)),
}


def copied(module: nn.Module) -> nn.Module:
    """A copy, with the weights of cuDNN's RNNs in one piece again."""
    made = copy.deepcopy(module)
    for child in made.modules():
        if isinstance(child, nn.RNNBase):
            child.flatten_parameters()
    return made


def pair_of(make: Make, device: torch.device) -> tuple[nn.Module, nn.Module]:
    module = make().to(device)
    return module, copied(module)


def same(mine: Any, theirs: Any) -> None:
    """Bit for bit on the CPU; other kernels may be chosen on a GPU."""
    if isinstance(theirs, torch.Tensor):
        assert mine.shape == theirs.shape
        assert mine.dtype == theirs.dtype
        assert mine.requires_grad == theirs.requires_grad
        if theirs.device.type == "cpu":
            assert torch.equal(mine, theirs)
        else:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    elif isinstance(theirs, dict):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            same(mine[name], value)
    elif isinstance(theirs, tuple | list):
        assert type(mine) is type(theirs)
        assert len(mine) == len(theirs)
        for a, b in zip(mine, theirs, strict=True):
            same(a, b)
    else:
        assert mine == theirs


def same_state(mine: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        same(a, b)
        assert (a.grad is None) == (b.grad is None), name
        if b.grad is not None:
            same(a.grad, b.grad)
    for a, b in zip(mine.buffers(), theirs.buffers(), strict=True):
        same(a, b)


def statistics(graphed: Any) -> TrainingCallStatistics:
    found = graphed.forward.statistics if isinstance(graphed, nn.Module) else graphed.statistics
    assert isinstance(found, TrainingCallStatistics)
    return found


def rand(device: torch.device, *shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, device=device, requires_grad=grad)


def both(mine: Any, theirs: Any, *args: Any, seed: int = 0, **kwargs: Any) -> None:
    """Call and differentiate the two alike; all is the same, gradients of arguments too."""
    results = []
    for fn in (mine, theirs):
        leaves, spec = torch.utils._pytree.tree_flatten((args, kwargs))
        given = [
            leaf.detach().clone().requires_grad_(leaf.requires_grad)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in leaves
        ]
        its_args, its_kwargs = torch.utils._pytree.tree_unflatten(given, spec)
        torch.manual_seed(seed)
        made = fn(*its_args, **its_kwargs)
        total = sum(
            (leaf.float() ** 2).sum()
            for leaf in torch.utils._pytree.tree_leaves(made)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        )
        if isinstance(total, torch.Tensor):
            total.backward()
        grads = [leaf.grad for leaf in given if isinstance(leaf, torch.Tensor)]
        results.append((made, [None if g is None else g.clone() for g in grads]))
    (a, grads_a), (b, grads_b) = results
    same(a, b)
    same(grads_a, grads_b)


# Training.


@pytest.mark.parametrize("name", MODELS)
def test_thirty_steps_equal_eager(name: str, device: torch.device) -> None:
    make, shape = MODELS[name]
    graphed, eager = pair_of(make, device)
    assert gw.make_graphed_callables(graphed, (rand(device, *shape),)) is graphed
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (graphed, eager)]
    for step in range(30):
        x, target = rand(device, *shape), rand(device, shape[0], 4)
        losses = []
        for module, optimizer in zip((graphed, eager), optimizers, strict=True):
            torch.manual_seed(step)
            optimizer.zero_grad(set_to_none=bool(step % 2))
            loss = F.mse_loss(module(x), target)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        same(*losses)
    same_state(graphed, eager)
    assert statistics(graphed).replays == 30
    assert not statistics(graphed).eager


def test_warm_up_and_capture_change_nothing(device: torch.device) -> None:
    module = nn.Sequential(cnn(), nn.Dropout(0.5)).to(device)
    x = rand(device, 4, 3, 8, 8, grad=True)
    module(x).sum().backward()
    before = copy.deepcopy(module)
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    kept = [p.grad for p in module.parameters()]
    x_before = x.detach().clone()
    torch.manual_seed(3)
    expected = torch.rand(4, device=device)
    torch.manual_seed(3)
    gw.make_graphed_callables(module, (x,))
    same(torch.rand(4, device=device), expected)
    for mine, theirs in zip(
        module.state_dict().values(), before.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs)
    for (name, p), grad in zip(module.named_parameters(), kept, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, grads[name])
    assert torch.equal(x, x_before)


def test_dropout_differs_and_follows_the_seed(device: torch.device) -> None:
    graphed = gw.make_graphed_callables(nn.Dropout(0.5), (rand(device, 64, grad=True),))
    x = torch.ones(64, device=device, requires_grad=True)
    first, second = graphed(x).detach(), graphed(x).detach()
    assert not torch.equal(first, second)
    for seed in range(3):
        both(graphed, nn.Dropout(0.5), x, seed=seed)
        x.grad = None
        y = graphed(x)
        y.sum().backward()
        assert torch.equal(x.grad != 0, y != 0), "the backward is of another forward"


def test_gradients_accumulate(device: torch.device) -> None:
    graphed, eager = pair_of(mlp, device)
    gw.make_graphed_callables(graphed, (rand(device, 6, 8),))
    for _ in range(2):
        for micro in range(4):
            x = rand(device, 6, 8)
            for module in (graphed, eager):
                torch.manual_seed(micro)
                (module(x).pow(2).mean() / 4).backward()
        same_state(graphed, eager)
        for module in (graphed, eager):
            module.zero_grad(set_to_none=False)


def test_gradients_are_the_caller_s_own(device: torch.device) -> None:
    layer, eager = pair_of(lambda: nn.Linear(8, 4), device)
    gw.make_graphed_callables(layer, (rand(device, 6, 8, grad=True),))
    x, seen = rand(device, 6, 8, grad=True), []
    layer.weight.register_hook(seen.append)
    found = torch.autograd.grad(layer(x).pow(2).sum(), [x, layer.weight, layer.bias])
    layer(x).pow(2).sum().backward()
    grads = [x.grad, layer.weight.grad, layer.bias.grad]
    x.grad = layer.weight.grad = layer.bias.grad = None
    for _ in range(3):
        other = rand(device, 6, 8, grad=True)
        layer(other).pow(2).sum().backward()
    wanted = torch.autograd.grad(eager(x).pow(2).sum(), [x, eager.weight, eager.bias])
    same(found, wanted)
    same(tuple(grads), wanted)
    same(seen[:2], [wanted[1], wanted[1]])


def test_an_output_survives_later_calls(device: torch.device) -> None:
    layer = nn.Linear(8, 4).to(device)
    eager = copy.deepcopy(layer)
    gw.make_graphed_callables(layer, (rand(device, 6, 8),), activation_sets=3)
    xs = [rand(device, 6, 8) for _ in range(3)]
    for y, x in zip([layer(x) for x in xs], xs, strict=True):
        same(y, eager(x))


@pytest.mark.parametrize("how", ["sum", "expanded", "transposed"])
def test_gradients_of_any_strides_come_in(how: str, device: torch.device) -> None:
    layer, eager = pair_of(lambda: nn.Linear(8, 6), device)
    gw.make_graphed_callables(layer, (rand(device, 6, 8),))
    x = rand(device, 6, 8)
    given = {
        "sum": torch.ones((), device=device).expand(6, 6),
        "expanded": rand(device, 6).expand(6, 6),
        "transposed": rand(device, 6, 6).t(),
    }[how]
    for module in (layer, eager):
        module(x).backward(given)
    for mine, theirs in zip(layer.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


# What torch.cuda's takes.


@pytest.mark.parametrize("cache", [True, False])
def test_autocast_is_part_of_the_call(cache: bool, device: torch.device) -> None:
    graphed, eager = pair_of(
        lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), device
    )
    x = rand(device, 6, 8)
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=cache):
        eager(x)
        gw.make_graphed_callables(graphed, (x,))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (graphed, eager)]
    for step in range(4):
        x = rand(device, 6, 8)
        for module, optimizer in zip((graphed, eager), optimizers, strict=True):
            with torch.autocast(device.type, torch.bfloat16, enabled=step < 3, cache_enabled=cache):
                y = module(x)
            assert y.dtype is (torch.bfloat16 if step < 3 else torch.float32)
            y.float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        same_state(graphed, eager)
    assert statistics(graphed).captures == 2


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(8, 4)
        self.spare = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def test_what_is_unused_is_named_or_goes_without(device: torch.device) -> None:
    graphed, eager = pair_of(Partly, device)
    args = rand(device, 6, 8, grad=True), rand(device, 6, 8, grad=True)
    with pytest.raises(gw.CaptureError, match=r"args\[1\], parameter spare.weight, .*spare.bias"):
        gw.make_graphed_callables(graphed, args)
    assert "forward" not in vars(graphed)
    gw.make_graphed_callables(graphed, args, allow_unused_input=True)
    both(graphed, eager, *args)
    same_state(graphed, eager)
    assert graphed.spare.weight.grad is None


def test_without_parameters_and_without_gradients(device: torch.device) -> None:
    class Add(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x * 2 + y

    graphed = gw.make_graphed_callables(Add(), (rand(device, 4, grad=True), rand(device, 4)))
    both(graphed, Add(), rand(device, 4, grad=True), rand(device, 4))
    frozen = nn.Linear(8, 4).to(device).requires_grad_(False)
    eager = copy.deepcopy(frozen)
    gw.make_graphed_callables(frozen, (rand(device, 6, 8),))
    for _ in range(3):
        both(frozen, eager, rand(device, 6, 8))
    assert not frozen(rand(device, 6, 8)).requires_grad
    assert statistics(frozen).replays == 4


def test_several_in_one_pool_in_any_order(device: torch.device) -> None:
    makes = [lambda: nn.Linear(8, 8), mlp, lambda: nn.Sequential(nn.Linear(8, 4), nn.Tanh())]
    twins = [pair_of(make, device) for make in makes]
    eager = [theirs for _, theirs in twins]
    x = rand(device, 6, 8)
    graphed = gw.make_graphed_callables(tuple(g for g, _ in twins), ((x,),) * 3)
    assert all(a is b for a, (b, _) in zip(graphed, twins, strict=True))
    for forwards, backwards in (((0, 1, 2), (2, 1, 0)), ((2, 0, 1), (0, 2, 1)), ((1, 2), (1, 2))):
        x = rand(device, 6, 8)
        for modules in (graphed, eager):
            torch.manual_seed(1)
            losses = {i: modules[i](x).pow(2).sum() for i in forwards}
            for i in backwards:
                losses[i].backward()
        for mine, theirs in zip(graphed, eager, strict=True):
            same_state(mine, theirs)
    losses = []
    for modules in (graphed, eager):
        torch.manual_seed(2)
        x = modules[0](rand(device, 6, 8))
        losses.append(modules[2](x).sum() + modules[1](x.relu()).sum())
        losses[-1].backward()
    same(*losses)
    for mine, theirs in zip(graphed, eager, strict=True):
        same_state(mine, theirs)


def test_trees_keywords_and_plain_values(device: torch.device) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, batch: Any, scale: float, *, mask: Any = None, name: str = "a") -> Any:
            y = self.layer(batch["x"]) * scale + batch["more"][0]
            if mask is not None:
                y = y * mask
            return {"y": y, "mask": mask, "none": None, "n": 3, "all": (y.argmax(-1), [name])}

    graphed, eager = pair_of(Model, device)

    def batch() -> Any:
        return {"x": rand(device, 6, 8), "more": [rand(device, 4, grad=True), None]}

    mask = rand(device, 4) > 0
    gw.make_graphed_callables(graphed, (batch(), 0.5), sample_kwargs={"mask": mask, "name": "b"})
    for _ in range(3):
        both(graphed, eager, batch(), 0.5, name="b", mask=rand(device, 4) > 0)
    same_state(graphed, eager)
    assert statistics(graphed).captures == 1
    both(graphed, eager, batch(), 0.25, name="b")
    same_state(graphed, eager)
    assert statistics(graphed).captures == 2


def test_a_function_returns_a_function(device: torch.device) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """What it says."""
        return x * y.sin()

    graphed = gw.make_graphed_callables(fn, (rand(device, 4, grad=True), rand(device, 4)))
    assert graphed is not fn
    assert graphed.__doc__ == fn.__doc__
    both(graphed, fn, rand(device, 4, grad=True), rand(device, 4))


def test_pools_and_handles_of_pytorch(device: torch.device) -> None:
    pool = gw.MemoryPool()
    layers = [nn.Linear(8, 4).to(device) for _ in range(3)]
    x = rand(device, 6, 8)
    gw.make_graphed_callables(layers[0], (x,), 3, False, pool)
    gw.make_graphed_callables(layers[1], (x,), pool=pool)
    assert len(pool.graphs) == 2
    gw.make_graphed_callables(layers[2], (x,), pool=(0, 1))
    assert len(pool.graphs) == 2
    y = layers[0](x)
    pool.release()
    with pytest.raises(gw.CaptureError, match="closed before its backward"):
        y.sum().backward()
    both(layers[0], copy.deepcopy(layers[0]), rand(device, 6, 8))


# Which gradients there are.


def test_a_function_s_modules_and_tensors_get_gradients(device: torch.device) -> None:
    layer = nn.Linear(8, 4).to(device)
    scale = torch.ones(4, device=device, requires_grad=True)
    hidden = [torch.ones(4, device=device, requires_grad=True)]

    def fn(x: torch.Tensor) -> torch.Tensor:
        return layer(x) * scale + hidden[0]

    leaves = [*layer.parameters(), scale, hidden[0]]
    graphed = gw.make_graphed_callables(fn, (rand(device, 6, 8),))
    for _ in range(3):
        x = rand(device, 6, 8)
        mine, theirs = (torch.autograd.grad(f(x).pow(2).sum(), leaves) for f in (graphed, fn))
        same(mine, theirs)
        with torch.no_grad():
            for leaf in leaves:
                leaf.mul_(1.1)


def test_a_tensor_computed_before_is_refused(device: torch.device) -> None:
    weight = rand(device, 4, grad=True)
    doubled = weight * 2
    with pytest.raises(gw.CaptureError, match="computed before it"):
        gw.make_graphed_callables(lambda x: x * doubled, (rand(device, 4),))


class Scale(torch.autograd.Function):
    """Takes a weight past PyTorch's own functions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] * weight, (grads[0] * x).sum(0)


def test_functions_of_the_user_s_own_and_tied_weights(device: torch.device) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
            self.two.weight = self.one.weight
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Scale.apply(self.two(self.one(x)), self.scale)

    graphed, eager = pair_of(Model, device)
    gw.make_graphed_callables(graphed, (rand(device, 6, 8),))
    both(graphed, eager, rand(device, 6, 8))
    same_state(graphed, eager)
    weight = rand(device, 8, grad=True)
    fn = gw.make_graphed_callables(lambda x: Scale.apply(x, weight), (rand(device, 6, 8),))
    x = rand(device, 6, 8)
    same(
        torch.autograd.grad(fn(x).sum(), [weight]),
        torch.autograd.grad(Scale.apply(x, weight).sum(), [weight]),
    )


def test_an_old_graph_of_autograd_may_be_alive(device: torch.device) -> None:
    layer, eager = pair_of(lambda: nn.Linear(8, 4), device)
    kept = layer(rand(device, 6, 8)).sum()
    gw.make_graphed_callables(layer, (rand(device, 6, 8),))
    both(layer, eager, rand(device, 6, 8))
    both(layer, eager, rand(device, 3, 8))  # Captured while the other graph is alive.
    same_state(layer, eager)
    kept.backward()


def test_freezing_is_noticed(device: torch.device) -> None:
    graphed, eager = pair_of(mlp, device)
    gw.make_graphed_callables(graphed, (rand(device, 6, 8),))
    for module in (graphed, eager):
        module[0].requires_grad_(False)
    both(graphed, eager, rand(device, 6, 8))
    same_state(graphed, eager)
    assert graphed[0].weight.grad is None
    for module in (graphed, eager):
        module[0].requires_grad_(True)
    both(graphed, eager, rand(device, 6, 8))
    same_state(graphed, eager)
    assert statistics(graphed).captures == 2


def test_an_output_without_gradient_back(device: torch.device) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.one(x), self.two(x)

    graphed, eager = pair_of(Two, device)
    gw.make_graphed_callables(graphed, (rand(device, 6, 8),))
    x = rand(device, 6, 8)
    for module in (graphed, eager):
        module(x)[0].sum().backward()
    assert graphed.two.weight.grad is None
    same_state(graphed, eager)
    for module in (graphed, eager):
        module(x)[1].sum().backward()
    same_state(graphed, eager)


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise RuntimeError("only in training")


def test_a_forward_whose_backward_cannot_be_had(device: torch.device) -> None:
    graphed = gw.make_graphed_callables(NoBackward.apply, (rand(device, 4, grad=True),))
    x = rand(device, 4, grad=True)
    y = graphed(x)
    same(y, NoBackward.apply(x))
    with pytest.raises(gw.CaptureError, match=r"no backward .* only in training"):
        y.sum().backward()


@pytest.mark.gpu
def test_rnns_in_eval_mode_have_a_forward() -> None:
    device = torch.device("cuda")
    rnn = nn.LSTM(8, 12).to(device).eval()
    eager = copied(rnn)
    gw.make_graphed_callables(rnn, (rand(device, 5, 4, 8),))
    x = rand(device, 5, 4, 8)
    same(rnn(x)[0], eager(x)[0])
    with pytest.raises(gw.CaptureError, match="no backward"):
        rnn(x)[0].sum().backward()
    rnn = nn.LSTM(8, 12).to(device).eval()
    with pytest.raises(RuntimeError, match="training mode"):
        torch.cuda.make_graphed_callables(rnn, (rand(device, 5, 4, 8),))


def test_gradients_of_gradients_are_refused(device: torch.device) -> None:
    layer = gw.make_graphed_callables(nn.Linear(8, 4).to(device), (rand(device, 6, 8, grad=True),))
    x = rand(device, 6, 8, grad=True)
    with pytest.raises(gw.CaptureError, match="create_graph"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    y, units = layer(x), torch.eye(4, device=device).unsqueeze(1).expand(4, 6, 4)
    with pytest.raises(gw.CaptureError, match="one by one"):
        torch.autograd.grad(y, x, units, is_grads_batched=True)


def test_kinds_that_were_not_used_for_long_give_way(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphwright.training.callables.graphed_forward._MAX_PAIRS", 2)
    layer, eager = pair_of(lambda: nn.Linear(8, 4), device)
    gw.make_graphed_callables(layer, (rand(device, 1, 8),))
    waiting = layer(rand(device, 1, 8)).sum()
    for n in (2, 3, 4, 2):
        both(layer, eager, rand(device, n, 8))
    assert len(layer.forward.pool.graphs) == 2
    waiting.backward()
    eager(rand(device, 1, 8)).sum().backward()
    assert statistics(layer).captures == 5


# Several forwards, several backwards.


class Stop(BaseException):
    """Stands for KeyboardInterrupt where pytest would take that for its own."""


ALL_WAIT = "all activation sets wait for their backwards"


def waiting_net() -> nn.Module:
    """Its forward and backward depend on random numbers, and its buffers on every call."""
    return nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4)
    )


def test_a_forward_too_many_is_eager_and_counted(device: torch.device) -> None:
    graphed, eager = pair_of(waiting_net, device)
    gw.make_graphed_callables(graphed, (rand(device, 6, 8),), activation_sets=2)
    for turn in range(2):
        xs = [rand(device, 6, 8) for _ in range(4)]
        torch.manual_seed(turn)
        mine = [graphed(x) for x in xs[:2]]
        if turn:
            mine += [graphed(x) for x in xs[2:]]
        else:
            with pytest.warns(gw.FallbackWarning, match="activation_sets=3"):
                mine.append(graphed(xs[2]))
            mine.append(graphed(xs[3]))  # That is said once.
        torch.manual_seed(turn)
        theirs = [eager(x) for x in xs]
        same(mine, theirs)
        for made in (mine, theirs):
            for y in made:
                y.pow(2).sum().backward()
        same_state(graphed, eager)
        del mine, theirs, made, y
    assert statistics(graphed) == TrainingCallStatistics(
        replays=4, captures=1, added_sets=1, eager={ALL_WAIT: 4}
    )
    with torch.no_grad():
        graphed(xs[0])
    assert statistics(graphed).replays == 5


@pytest.mark.filterwarnings("ignore:.*runs eagerly:graphwright.FallbackWarning")
def test_calls_without_gradients_overwrite_nothing_that_waits(device: torch.device) -> None:
    for sets, replays in ((2, 3), (1, 1)):
        graphed, eager = pair_of(mlp, device)
        gw.make_graphed_callables(graphed, (rand(device, 6, 8),), activation_sets=sets)
        xs, losses = [rand(device, 6, 8) for _ in range(3)], []
        for module in (graphed, eager):
            torch.manual_seed(1)
            losses.append(module(xs[0]).pow(2).sum())
            with torch.no_grad():
                for x in xs[1:]:
                    losses.append(module(x))
        same(losses[:3], losses[3:])
        for loss in losses[::3]:
            loss.backward()
        same_state(graphed, eager)
        assert statistics(graphed).replays == replays
        assert statistics(graphed).eager[ALL_WAIT] == 3 - replays


@pytest.mark.parametrize("order", ["in turn", "reversed", "shuffled"])
def test_sets_are_added_where_forwards_wait(order: str, device: torch.device) -> None:
    graphed, eager = pair_of(waiting_net, device)
    gw.make_graphed_callables(graphed, (rand(device, 6, 8, grad=True),))
    places = list(range(3))
    for step in range(3):
        if order == "reversed":
            places.reverse()
        elif order == "shuffled":
            Random(step).shuffle(places)
        xs, found = [rand(device, 6, 8, grad=True) for _ in range(3)], []
        for module in (graphed, eager):
            torch.manual_seed(step)
            losses = [module(x).pow(2).sum() for x in xs]
            found.append(
                [torch.autograd.grad(losses[i], xs[i], retain_graph=True)[0] for i in places]
            )
            for i in places:
                losses[i].backward(inputs=list(module.parameters()))
            del losses
        same(*found)
        same_state(graphed, eager)
    assert statistics(graphed) == TrainingCallStatistics(replays=9, captures=1, added_sets=2)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_outputs_may_be_held_where_no_input_was_trained(
    autocast: bool, trained: bool, device: torch.device
) -> None:
    # As PyTorch's test_graph_make_graphed_callables_parameterless_nograd_module.
    class Picks(nn.Module):
        def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            x = batch["x"]
            rows = torch.arange(x.size(0), device=x.device).view(-1, 1).repeat(1, x.size(1))
            return {"output": torch.gather(x, 0, rows)}

    head, other_head = pair_of(lambda: nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.2)), device)
    graphed, eager = nn.Sequential(Picks()), nn.Sequential(Picks())
    x, unused = rand(device, 6, 8, grad=trained), rand(device, 6, 4)
    amp = functools.partial(torch.autocast, device.type, torch.bfloat16, enabled=autocast)
    with amp():
        graphed[0], head = gw.make_graphed_callables(
            (graphed[0], head),
            (({"x": x, "unused": unused},), (rand(device, 6, 8, grad=True),)),
            allow_unused_input=True,
        )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (head, other_head)]
    xs = [rand(device, 6, 8, grad=True) for _ in range(5)]
    found: list[list[Any]] = [[], []]
    for parts, optimizer, kept in zip(
        ((graphed, head), (eager, other_head)), optimizers, found, strict=True
    ):
        torch.manual_seed(5)
        for data in xs:
            optimizer.zero_grad()
            with amp():
                y = parts[0]({"x": data, "unused": unused})["output"]
                loss = parts[1](y).float().pow(2).mean()
            loss.backward()
            optimizer.step()
            kept += [y, loss, data.grad]
            data.grad = None
        with amp():
            for data in xs[:3]:
                y = parts[0]({"x": data, "unused": unused})["output"]  # The one before is held.
            kept.append(torch.autograd.grad(y.float().sum(), data)[0])
    same(*found)
    same_state(head, other_head)
    assert not statistics(graphed[0]).eager
    graphed.eval()
    with amp():
        same(graphed({"x": xs[0]}), eager({"x": xs[0]}))


def test_two_losses_of_one_forward(device: torch.device) -> None:
    graphed, eager = pair_of(waiting_net, device)
    gw.make_graphed_callables(graphed, (rand(device, 6, 8, grad=True),))
    for step in range(3):
        x = rand(device, 6, 8, grad=True)
        for module in (graphed, eager):
            torch.manual_seed(step)
            y, other = module(x), module(x * 2)
            y.pow(2).sum().backward(retain_graph=True)
            (y.abs().sum() + (other * y).sum()).backward()
        same_state(graphed, eager)
    # The last step's outputs are held, but nobody can ask for their gradients again.
    assert statistics(graphed) == TrainingCallStatistics(replays=6, captures=1, added_sets=1)


def test_a_forward_that_nothing_came_of_frees_its_set(device: torch.device) -> None:
    graphed, eager = pair_of(mlp, device)
    gw.make_graphed_callables(graphed, (rand(device, 6, 8),), activation_sets=1)

    def interrupted(module: nn.Module) -> None:
        y = module(rand(device, 6, 8))
        raise ValueError(y.shape)

    for _ in range(3):
        with pytest.raises(ValueError, match="6, 4"):
            interrupted(graphed)
        both(graphed, eager, rand(device, 6, 8))
        same_state(graphed, eager)
    y = graphed(rand(device, 6, 8))
    with pytest.raises(RuntimeError, match="shape"):
        y.backward(rand(device, 5))
    y.sum().backward()
    graphed(rand(device, 6, 8))  # `y` is held, but its backward has run.
    assert statistics(graphed) == TrainingCallStatistics(replays=8, captures=1)


@pytest.mark.filterwarnings("ignore:.*runs eagerly:graphwright.FallbackWarning")
def test_a_forward_in_a_backward_adds_no_set(device: torch.device) -> None:
    graphed, eager = pair_of(mlp, device)
    sample = rand(device, 6, 8, grad=True)
    gw.make_graphed_callables(graphed, (sample,))
    for module in (graphed, eager):
        torch.manual_seed(1)
        waits = module(sample)
        made = checkpoint(module, sample, use_reentrant=True)
        made.sum().backward()
        waits.sum().backward()
    same_state(graphed, eager)
    found = statistics(graphed)
    assert found == TrainingCallStatistics(replays=3, captures=1, added_sets=1)
    for module in (graphed, eager):
        torch.manual_seed(2)
        held = [module(sample), module(sample)]
        made = checkpoint(module, sample, use_reentrant=True)
        held.append(module(sample))
        made.sum().backward()
        sum(y.sum() for y in held).backward()
    same_state(graphed, eager)
    assert found.eager == {"in a backward, where no activation set is added": 1}


def test_a_limit_of_the_pool_leaves_forwards_eager(device: torch.device) -> None:
    size, pool = 1 << 12, gw.MemoryPool()

    def fn(x: torch.Tensor) -> torch.Tensor:
        return ((x * 2).sin() * x).cos()

    x = rand(device, 16, size, grad=True)
    other = gw.make_graphed_callables(lambda x: x * 2, (x,), pool=pool)
    graphed = gw.make_graphed_callables(fn, (x,), pool=pool)
    full = pool.reserved
    pool.limit = full + 1000

    def check(count: int) -> None:
        found = []
        for call in (graphed, fn):
            losses = [call(x * n).sum() for n in range(count)]
            found.append([torch.autograd.grad(loss, x)[0] for loss in losses])
        same(*found)

    with pytest.warns(gw.FallbackWarning, match=r"(?s)runs eagerly.*limit"):
        check(2)
    check(3)
    why = "another activation set does not fit under the pool's limit"
    assert statistics(graphed) == TrainingCallStatistics(replays=2, captures=1, eager={why: 3})
    assert pool.reserved == full
    other.close()
    pool.limit = None
    check(2)
    assert statistics(graphed).added_sets == 1
    assert pool.graphs[-1].nbytes > 0


def test_all_sets_are_given_back(device: torch.device) -> None:
    pool = gw.MemoryPool()
    layers = [mlp().to(device) for _ in range(2)]
    x = rand(device, 6, 8)
    gw.make_graphed_callables(tuple(layers), ((x,), (x,)), pool=pool)
    before = [graph.nbytes for graph in pool.graphs]
    held = [layer(x) for layer in layers for _ in range(3)]
    after = [graph.nbytes for graph in pool.graphs]
    assert all(a > b for a, b in zip(after, before, strict=True))
    assert [statistics(layer).added_sets for layer in layers] == [2, 2]
    pool.release()
    assert (pool.reserved, pool.in_use, len(pool.graphs)) == (0, 0, 0)
    for y in held:
        with pytest.raises(gw.CaptureError, match="closed before its backward"):
            y.sum().backward()
    both(layers[0], copied(layers[0]), x)


def settled(pool: gw.MemoryPool) -> int:
    """Bytes in use, once autograd's thread for the device has let go of the last backward."""
    found = -1
    while found != pool.in_use:
        gc.collect()
        found = pool.in_use
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("at", [1, 7, 8])
@pytest.mark.parametrize("error", [ValueError("mine"), Stop()])
def test_a_set_that_cannot_be_added_changes_nothing(
    at: int, error: BaseException, device: torch.device
) -> None:
    fails = Mock(return_value=0)  # No state that a watch sees.

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            if fails() == at:
                raise error
            return grads[0]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = waiting_net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = Breaks.apply(self.inner(x))
            return made

    graphed, eager = pair_of(Model, device)
    pool, xs = gw.MemoryPool(), [rand(device, 6, 8) for _ in range(3)]
    gw.make_graphed_callables(graphed, (xs[0],), pool=pool)
    before = settled(pool), pool.reserved
    losses = []
    for module in (graphed, eager):
        torch.manual_seed(1)
        losses.append([module(xs[0])])
        state = torch.get_rng_state()
        if module is graphed:
            fails.side_effect = itertools.count(1)
            if isinstance(error, Stop):
                with pytest.raises(Stop):
                    module(xs[1])
                assert torch.equal(torch.get_rng_state(), state)
            else:
                with pytest.warns(gw.FallbackWarning, match="could not be captured"):
                    losses[-1].append(module(xs[1]))
            fails.side_effect = None
            assert settled(pool) == before[0]
            assert device.type == "cuda" or pool.reserved == before[1]
        losses[-1] += [module(x) for x in xs[len(losses[-1]) :]]
    same(*losses)
    for made in losses:
        for y in made:
            y.pow(2).sum().backward()
    same_state(graphed, eager)
    found = statistics(graphed)
    if isinstance(error, Stop):
        assert found == TrainingCallStatistics(replays=3, captures=1, added_sets=2)
    else:
        why = "another activation set could not be captured"
        assert found == TrainingCallStatistics(replays=1, captures=1, eager={why: 2})


@pytest.mark.filterwarnings("ignore:.*runs eagerly:graphwright.FallbackWarning")
def test_forwards_beyond_the_sets_seldom_collect_garbage(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, eager = pair_of(lambda: nn.Linear(8, 4), device)
    gw.make_graphed_callables(layer, (rand(device, 6, 8),), activation_sets=1)
    x, collected, collect = rand(device, 6, 8), [], gc.collect
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1) or collect())
    held = layer(x)
    for _ in range(64):
        same(layer(x), eager(x))
    assert 1 <= len(collected) <= 7
    assert statistics(layer) == TrainingCallStatistics(replays=1, captures=1, eager={ALL_WAIT: 64})
    ring: list[Any] = [held]
    ring.append(ring)
    del held, ring
    collected.clear()
    while not collected:
        same(layer(x), eager(x))
    same(layer(x), eager(x))
    assert statistics(layer).replays == 3


def test_a_set_is_added_without_autograd_s_own_threads(device: torch.device) -> None:
    # Another thread's backward may occupy them, and wait for this capture.
    looks = Mock()  # No state that a watch sees.

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            looks(threading.get_ident(), torch._C._is_multithreading_enabled())
            return grads[0]

    x = rand(device, 4, grad=True)
    graphed = gw.make_graphed_callables(Looks.apply, (x,))
    looks.reset_mock()
    both(lambda x: graphed(x) * graphed(x), lambda x: x * x, x)
    assert {each.args for each in looks.call_args_list} == {(threading.get_ident(), False)}
    assert statistics(graphed).added_sets == 1
    assert torch._C._is_multithreading_enabled()


def test_threads_may_hold_what_they_have_made(device: torch.device) -> None:
    from concurrent.futures import ThreadPoolExecutor

    graphed, eager = pair_of(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()), device)
    gw.make_graphed_callables(graphed, (rand(device, 6, 8, grad=True),), activation_sets=8)
    start = threading.Barrier(3)

    def work(seed: int) -> None:
        start.wait(30)
        generator = torch.Generator(device).manual_seed(seed)
        for _ in range(10):
            xs = [
                torch.randn(6, 8, device=device, generator=generator).requires_grad_()
                for _ in range(2)
            ]
            found = []
            for module in (graphed, eager):
                losses = [module(x).pow(2).sum() for x in xs]
                found.append(
                    [torch.autograd.grad(y, x)[0] for y, x in zip(losses, xs, strict=True)]
                )
            same(*found)

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(work, seed) for seed in range(3)]:
            done.result()
    found = statistics(graphed)
    assert found.replays + found.eager.total() == 60
    assert found.eager.keys() <= {"another thread captures in the same pool"}
    assert 1 <= found.added_sets <= 7


def test_a_module_used_twice_in_a_step(device: torch.device) -> None:
    graphed, eager = pair_of(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()), device)
    gw.make_graphed_callables(graphed, (rand(device, 6, 8, grad=True),))
    both(lambda x: graphed(graphed(x)), lambda x: eager(eager(x)), rand(device, 6, 8, grad=True))
    same_state(graphed, eager)


def test_forwards_that_were_dropped_free_their_activations(device: torch.device) -> None:
    layer, eager = pair_of(lambda: nn.Linear(8, 4), device)
    gw.make_graphed_callables(layer, (rand(device, 6, 8),))
    for _ in range(3):
        layer(rand(device, 6, 8))
    y = layer(rand(device, 6, 8))
    ring: list[Any] = [y]
    ring.append(ring)
    del y, ring
    with torch.no_grad():
        for _ in range(2):
            x = rand(device, 6, 8)
            same(layer(x), eager(x))
    both(layer, eager, rand(device, 6, 8))
    same_state(layer, eager)
    assert statistics(layer) == TrainingCallStatistics(replays=7, captures=1)


def test_a_second_backward(device: torch.device) -> None:
    graphed, eager = pair_of(mlp, device)
    gw.make_graphed_callables(graphed, (rand(device, 6, 8),))
    x = rand(device, 6, 8)
    for module in (graphed, eager):
        torch.manual_seed(1)
        loss = module(x).pow(2).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    same_state(graphed, eager)
    for module in (graphed, eager):
        torch.manual_seed(2)
        loss = module(x).sum()
        loss.backward(retain_graph=True)
        module(x * 2).sum().backward()
        loss.backward()
    same_state(graphed, eager)
    assert statistics(graphed) == TrainingCallStatistics(replays=3, captures=1, added_sets=1)


def test_a_step_between_forward_and_backward_is_an_error(device: torch.device) -> None:
    graphed, eager = pair_of(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), device)
    gw.make_graphed_callables(graphed, (rand(device, 6, 8),))
    for module in (graphed, eager):
        loss = module(rand(device, 6, 8)).sum()
        with torch.no_grad():
            module[1].weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del loss
        loss = module(rand(device, 6, 8)).sum()
        with torch.no_grad():
            module[1].bias.add_(1)  # No backward reads it.
        loss.backward()


@pytest.mark.filterwarnings("ignore:.*runs eagerly:graphwright.FallbackWarning")
@pytest.mark.parametrize("most", [2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_random_orders_equal_eager(seed: int, most: int, device: torch.device) -> None:
    random = Random(seed)
    makes = [
        lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()),
        lambda: nn.Sequential(nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.LayerNorm(8)),
    ]
    twins = [pair_of(make, device) for make in makes]
    sample = (rand(device, 6, 8, grad=True),)
    gw.make_graphed_callables(tuple(g for g, _ in twins), (sample, sample), activation_sets=2)
    waiting: list[Any] = []
    for step in range(40):
        index = random.randrange(2)
        graphed, eager = twins[index]
        act = random.choice(["forward", "backward", "no_grad", "rebind"])
        free = [i for i, *_ in waiting].count(index) < most
        if act == "forward" and free:
            x, results = rand(device, random.choice([6, 6, 3]), 8, grad=True), []
            for module in twins[index]:
                torch.manual_seed(step)
                results.append(module(x))
            same(*results)
            waiting.append((index, x, results, [list(m.parameters()) for m in twins[index]]))
        elif act == "backward" and waiting:
            _, x, results, parameters = waiting.pop(random.randrange(len(waiting)))
            found = [
                torch.autograd.grad(y.pow(2).sum(), [x, *p])
                for y, p in zip(results, parameters, strict=True)
            ]
            same(*found)
            del results
        elif act == "no_grad" and free:
            x, made = rand(device, 6, 8), []
            with torch.no_grad():
                for module in twins[index]:
                    torch.manual_seed(step)
                    made.append(module(x))
            same(*made)
        elif act == "rebind" and free and step % 3 == 0:
            weight = rand(device, 8, 8)
            for module in twins[index]:
                at = next(i for i, m in enumerate(module) if isinstance(m, nn.Linear))
                module[at].weight = nn.Parameter(weight.clone())
        same_state(graphed, eager)
    if most == 2:
        assert not any(statistics(graphed).eager[ALL_WAIT] for graphed, _ in twins)


# Calls of other kinds.


def other_calls(device: torch.device) -> list[tuple[torch.Tensor, ...]]:
    square = rand(device, 8, 8)
    return [(square[:1],), (square.double(),), (square.t(),), (square[:4],)]


def test_another_kind_of_call_is_captured(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).cumsum(0)

    graphed = gw.make_graphed_callables(fn, (rand(device, 8, 8),))
    for _ in range(2):
        for (x,) in other_calls(device):
            both(graphed, fn, x)
            both(graphed, fn, x.detach().requires_grad_())
    x = rand(device, 8, 8)
    same(graphed(x), fn(x))
    same(graphed(x.t()), fn(x.t()))  # at the same address
    assert statistics(graphed).captures == 9
    assert not statistics(graphed).eager


def test_another_kind_of_call_is_eager_or_an_error(device: torch.device) -> None:
    layer, eager = pair_of(lambda: nn.Linear(8, 4), device)
    gw.make_graphed_callables(layer, (rand(device, 8, 8),), on_miss="eager")
    told = "runs eagerly for this kind of call, since no graph fits: args.0. is .* Its statistics"
    with pytest.warns(gw.FallbackWarning, match=told):
        both(layer, eager, rand(device, 1, 8))
    same_state(layer, eager)
    assert statistics(layer).eager == {"no graph fits": 1}
    strict = gw.make_graphed_callables(lambda x: x * 2, (rand(device, 8, 8),), on_miss="error")
    for (x,) in other_calls(device):
        with pytest.raises(gw.SignatureError, match=r"args\[0\] is"):
            strict(x)
    with pytest.raises(gw.SignatureError, match=r"args\[1\], a tensor .*; captured without it"):
        strict(rand(device, 8, 8), rand(device, 8, 8))


def test_surplus_arguments_are_errors(device: torch.device) -> None:
    layers = tuple(nn.Linear(8, 4).to(device) for _ in range(2))
    x = rand(device, 6, 8)
    for wrong in (((x,),), ((x,), (x,), (x,)), (x, x)):
        with pytest.raises(gw.OptionError, match="sample_args"):
            gw.make_graphed_callables(layers, wrong)
    with pytest.raises(gw.OptionError, match="sample_args"):
        gw.make_graphed_callables(layers[0], x)
    gw.make_graphed_callables(layers[0], (x,))
    with pytest.raises(TypeError, match="positional"):
        layers[0](x, x)
    same(layers[0](x), F.linear(x, layers[0].weight, layers[0].bias))


def test_a_kind_that_cannot_be_captured_is_eager(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 2 else x * x.sum().item()

    graphed = gw.make_graphed_callables(fn, (rand(device, 4, grad=True),))
    x = rand(device, 2, grad=True)
    with pytest.warns(gw.FallbackWarning, match=r"it cannot be captured: .*(item|_local_scalar)"):
        same(graphed(x), fn(x))
    both(graphed, fn, x)
    assert statistics(graphed).eager == {"it cannot be captured": 2}


def test_train_and_eval(device: torch.device) -> None:
    graphed, eager = pair_of(cnn, device)
    gw.make_graphed_callables(graphed, (rand(device, 4, 3, 8, 8),))
    for mode in (True, False, True, False):
        graphed.train(mode)
        eager.train(mode)
        both(graphed, eager, rand(device, 4, 3, 8, 8))
        same_state(graphed, eager)
    assert statistics(graphed).eager == {"the module is in eval mode": 2}
    graphed.train()[1].eval()
    eager.train()[1].eval()
    both(graphed, eager, rand(device, 4, 3, 8, 8))
    same_state(graphed, eager)
    assert statistics(graphed).captures == 2


def test_rebound_parameters_are_noticed(device: torch.device) -> None:
    graphed, eager = pair_of(mlp, device)
    gw.make_graphed_callables(graphed, (rand(device, 6, 8),))
    weight = rand(device, 16, 8)
    for module in (graphed, eager):
        module[0].weight.data = weight.clone()
    both(graphed, eager, rand(device, 6, 8))
    same_state(graphed, eager)
    state = {name: value + 0.5 for name, value in eager.state_dict().items()}
    for module in (graphed, eager):
        module.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True)
    both(graphed, eager, rand(device, 6, 8))
    same_state(graphed, eager)
    for module in (graphed, eager):
        module.load_state_dict({k: v * 2 for k, v in state.items()})
    both(graphed, eager, rand(device, 6, 8))
    same_state(graphed, eager)
    assert statistics(graphed).captures == 3


def test_rebinding_between_forward_and_backward(device: torch.device) -> None:
    layer, eager = pair_of(lambda: nn.Linear(8, 4), device)
    gw.make_graphed_callables(layer, (rand(device, 6, 8, grad=True),))
    x, y = rand(device, 6, 8, grad=True), rand(device, 6, 8, grad=True)
    results = []
    for module in (layer, eager):
        first = module(x).pow(2).sum()
        kept = module.weight
        module.weight = nn.Parameter(kept.detach() * 2)
        second = module(y).pow(2).sum()
        gc.collect()
        results.append((*torch.autograd.grad(first, [x, kept]), *torch.autograd.grad(second, [y])))
    same(*results)


# Hooks.


def test_hooks_of_the_module_run_every_time(device: torch.device) -> None:
    layer, eager = pair_of(lambda: nn.Linear(8, 4), device)
    calls: list[str] = []
    for module in (layer, eager):
        module.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        module.register_forward_hook(lambda m, args, out: calls.append("forward"))
        module.register_full_backward_hook(lambda m, into, out: calls.append("backward"))
    gw.make_graphed_callables(layer, (rand(device, 6, 8, grad=True),))
    calls.clear()
    both(layer, eager, rand(device, 6, 8, grad=True))
    same_state(layer, eager)
    assert calls == ["forward", "backward"] * 2
    layer.register_forward_hook(lambda m, args, out: out + 1)
    eager.register_forward_hook(lambda m, args, out: out + 1)
    both(layer, eager, rand(device, 6, 8, grad=True))
    same_state(layer, eager)
    assert statistics(layer).captures == 1


def test_hooks_of_submodules_are_part_of_the_graph(device: torch.device) -> None:
    graphed, eager = pair_of(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), device)

    def add(kind: str, hook: Any) -> None:
        for module in (graphed, eager):
            getattr(module[1], kind)(hook)

    add("register_forward_hook", lambda m, args, out: out * 2)
    gw.make_graphed_callables(graphed, (rand(device, 6, 8),))
    both(graphed, eager, rand(device, 6, 8))
    add("register_forward_pre_hook", lambda m, args: (args[0] + 1,))
    both(graphed, eager, rand(device, 6, 8))
    add("register_full_backward_hook", lambda m, into, out: (into[0] * 3,))
    both(graphed, eager, rand(device, 6, 8))
    same_state(graphed, eager)
    assert statistics(graphed).captures == 3


def test_hooks_of_submodules_that_keep_state_are_refused(device: torch.device) -> None:
    seen: list[torch.Tensor] = []
    model = mlp().to(device)
    handle = model[0].register_forward_hook(lambda m, args, out: seen.append(out))
    with pytest.raises(gw.CaptureError, match="variable seen changes"):
        gw.make_graphed_callables(model, (rand(device, 6, 8),))
    handle.remove()
    model[0].register_full_backward_hook(lambda m, into, out: seen.append(out[0]))
    with pytest.raises(gw.CaptureError, match="variable seen changes"):
        gw.make_graphed_callables(model, (rand(device, 6, 8, grad=True),))


def test_hooks_of_tensors_run_once(device: torch.device) -> None:
    layer, eager = pair_of(lambda: nn.Linear(8, 4), device)
    for module in (layer, eager):
        module.weight.register_hook(lambda grad: grad * 2)
    gw.make_graphed_callables(layer, (rand(device, 6, 8),))
    both(layer, eager, rand(device, 6, 8))
    same_state(layer, eager)


# Memory that is shared or written to.


def test_an_input_written_to_is_written_back(device: torch.device) -> None:
    def fn(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.mul_(0.5).add_(1)
        return x * state

    graphed = gw.make_graphed_callables(fn, (rand(device, 4, grad=True), rand(device, 4)))
    x, mine = rand(device, 4, grad=True), rand(device, 4)
    theirs = mine.clone()
    for _ in range(3):
        version = mine._version
        same(graphed(x, mine), fn(x, theirs))
        same(mine, theirs)
        assert mine._version > version
    wide = rand(device, 4, 2)
    graphed = gw.make_graphed_callables(fn, (rand(device, 4, grad=True), wide[:, 0]))
    theirs = wide.clone()
    same(graphed(x, wide[:, 0]), fn(x, theirs[:, 0]))
    same(wide, theirs)


def test_writing_to_an_input_with_gradient_is_refused(device: torch.device) -> None:
    leaf = rand(device, 4, grad=True)

    def writes(x: torch.Tensor) -> torch.Tensor:
        y = x.detach()
        y.mul_(2)
        return x * 2

    with pytest.raises(gw.CaptureError, match="requires grad"):
        gw.make_graphed_callables(writes, (leaf,))
    with pytest.raises(gw.CaptureError, match="requires grad"):
        gw.make_graphed_callables(lambda x, y: y.mul_(x).sum(), (leaf, rand(device, 4)))


def test_outputs_that_share_memory_do_so_again(device: torch.device) -> None:
    def fn(x: torch.Tensor, plain: torch.Tensor) -> Any:
        y = x * 2
        return y, y, y[1:], y.t(), y.detach(), plain, plain[0], torch.chunk(x * 3, 2)

    args = rand(device, 4, 4, grad=True), rand(device, 4)
    graphed = gw.make_graphed_callables(fn, args, activation_sets=2)
    both(graphed, fn, *args)
    plain = rand(device, 4)
    y, again, rows, turned, detached, same_plain, first, chunks = graphed(args[0], plain)
    assert again is y
    assert same_plain is plain
    assert first.data_ptr() == plain.data_ptr()
    assert detached.data_ptr() == y.data_ptr()
    for made in (graphed(args[0], plain), fn(args[0], plain)):
        made[0].mul_(3)
        args[0].grad = None
        (made[2].sum() + made[3].pow(2).sum() + made[7][0].sum()).backward()
        same(made[2].detach(), (args[0] * 6)[1:].detach())
    wanted = args[0].grad
    both(lambda *a: graphed(*a)[7], lambda *a: fn(*a)[7], *args)
    made = graphed(args[0], plain)
    made[0].mul_(3)
    args[0].grad = None
    (made[2].sum() + made[3].pow(2).sum() + made[7][0].sum()).backward()
    same(args[0].grad, wanted)
    del rows, turned, chunks


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x,
        lambda x: x[1:],
        lambda x: (lambda y: (y[:3], y[1:]))(x * 2),
    ],
)
def test_outputs_that_cannot_share_memory_again_are_refused(fn: Any, device: torch.device) -> None:
    with pytest.raises(gw.CaptureError, match=r"clone\(\)"):
        gw.make_graphed_callables(fn, (rand(device, 4, 4, grad=True),))


def test_a_returned_parameter_is_refused(device: torch.device) -> None:
    layer = nn.Linear(8, 4).to(device)
    with pytest.raises(gw.CaptureError, match=r"clone\(\)"):
        gw.make_graphed_callables(lambda x: (layer(x), layer.weight), (rand(device, 6, 8),))


def test_the_same_tensor_twice_is_another_call(device: torch.device) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * b.sin()

    x, y = rand(device, 4, grad=True), rand(device, 4, grad=True)
    graphed = gw.make_graphed_callables(fn, (x, y))
    for args in ((x, y), (x, x), (y, x)):
        mine, theirs = (
            torch.autograd.grad(f(*args).sum(), list(dict.fromkeys(args))) for f in (graphed, fn)
        )
        same(mine, theirs)


# Failures and options.


def test_a_failure_leaves_the_modules_as_they_were(device: torch.device) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * x.sum().item()

    pool = gw.MemoryPool()
    good, bad = nn.Linear(8, 4).to(device), Reads().to(device)
    x = rand(device, 6, 8)
    with pytest.raises(gw.CaptureError, match=r"test_graphed_callables.py"):
        gw.make_graphed_callables((good, bad), ((x,), (x,)), pool=pool)
    assert "forward" not in vars(good)
    assert not pool.graphs
    gc.collect()
    assert pool.in_use == 0
    with pytest.raises(gw.MemoryBudgetExceeded):
        gw.make_graphed_callables(good, (x,), pool=gw.MemoryPool("1KiB"))
    gw.make_graphed_callables(good, (x,), pool=pool)
    both(good, copy.deepcopy(good), x)


@pytest.mark.parametrize("at", [1, 2, 7, 8, 9])
@pytest.mark.parametrize("error", [ValueError("mine"), Stop()])
def test_a_failure_at_any_time_changes_nothing(
    at: int, error: BaseException, device: torch.device
) -> None:
    counts = functools.cache(itertools.count)  # a counter that nobody can reach
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).to(device)
    before = copy.deepcopy(model.state_dict())

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            if next(counts(1)) == at:
                raise error
            return grads[0]

    def fn(x: torch.Tensor) -> torch.Tensor:
        return Breaks.apply(F.dropout(model(x)))

    pool, x = gw.MemoryPool(), rand(device, 6, 8)
    state = torch.get_rng_state()
    with pytest.raises((gw.CaptureError, Stop)):
        gw.make_graphed_callables(fn, (x,), 4, pool=pool, activation_sets=2)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    gc.collect()
    assert (pool.in_use, len(pool.graphs)) == (0, 0)
    graphed = gw.make_graphed_callables(fn, (x,), pool=pool)
    both(graphed, fn, x)


def test_other_threads_do_not_wait_for_a_capture(device: torch.device) -> None:
    pool, x = gw.MemoryPool(), rand(device, 4)
    inner = gw.make_graphed_callables(lambda x: x * 2, (x,), pool=pool)

    def fn(y: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=inner, args=(x,), daemon=True)
        thread.start()
        thread.join(20)
        if thread.is_alive():
            raise ValueError("waits for ever")
        return y * 3

    both(gw.make_graphed_callables(fn, (x,), pool=pool), fn, rand(device, 4))
    assert statistics(inner).eager["another thread captures in the same pool"] > 3


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"num_warmup_iters": -1}, "num_warmup_iters"),
        ({"activation_sets": 0}, "activation_sets"),
        ({"on_miss": "guess"}, "on_miss"),
        ({"pool": "1GiB"}, "pool"),
        ({"sample_kwargs": 3}, "sample_kwargs"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], what: str) -> None:
    with pytest.raises(gw.OptionError, match=what):
        gw.make_graphed_callables(nn.Linear(8, 4), (torch.ones(2, 8),), **options)


def test_modules_that_cannot_be_graphed_are_named(device: torch.device) -> None:
    x = (rand(device, 2, 8),)
    with pytest.raises(gw.CaptureError, match="DataParallel"):
        gw.make_graphed_callables(nn.Sequential(nn.DataParallel(nn.Linear(8, 4))), x)
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    with pytest.raises(gw.CaptureError, match="DistributedDataParallel"):
        gw.make_graphed_callables(wrapped, x)
    layer = nn.Linear(8, 4)
    layer.register_buffer("b", torch.ones(4, requires_grad=True))
    with pytest.raises(gw.OptionError, match=r"Buffers .* require grad: b"):
        gw.make_graphed_callables(layer, x)
    with pytest.raises(gw.OptionError, match="twice"):
        gw.make_graphed_callables((torch.sin, torch.sin), (x, x))
    with pytest.raises(gw.OptionError, match="TorchScript"):
        gw.make_graphed_callables(torch.jit.trace(nn.Linear(8, 4), x[0].cpu()), x)
    with pytest.raises(gw.OptionError, match="pass an instance"):
        gw.make_graphed_callables(nn.Linear, x)


def test_sparse_gradients_are_refused(device: torch.device) -> None:
    table = nn.Embedding(8, 4, sparse=True).to(device)
    with pytest.raises(gw.CaptureError):
        gw.make_graphed_callables(table, (torch.zeros(3, dtype=torch.long, device=device),))


def test_constants_made_anew_are_refused() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * torch.frombuffer(bytearray(16), dtype=torch.float32)

    with pytest.raises(gw.CaptureError, match="made anew"):
        gw.make_graphed_callables(fn, (torch.ones(4, requires_grad=True),))


# A graphed module is the module.


def test_copies_are_independent(device: torch.device) -> None:
    model = mlp().to(device).eval()
    eager = copy.deepcopy(model)
    gw.make_graphed_callables(model, (rand(device, 6, 8),))
    x = rand(device, 6, 8)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        same(other(x), eager(x))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert not other(x).any()
        with torch.no_grad():
            same(model(x), eager(x).detach())
    assert list(model.state_dict()) == list(eager.state_dict())


def test_graphs_within_captures_and_modes(device: torch.device) -> None:
    model = mlp().to(device).eval()
    eager = copy.deepcopy(model)
    gw.make_graphed_callables(model, (rand(device, 6, 8),))
    x = rand(device, 6, 8)
    with torch.no_grad():
        same(gw.capture(model, x)(x), eager(x))
    outer = gw.make_graphed_callables(lambda x: model(x) * 2, (x,))
    same(outer(x), eager(x) * 2)
    with torch.inference_mode():
        assert torch.equal(model(x), eager(x))
        y = rand(device, 3, 8)  # Of inference mode, and captured there.
        assert torch.equal(model(y), eager(y))
    mapped = torch.func.vmap(model, randomness="different")(x)
    torch.testing.assert_close(mapped, eager(x))
    gw.make_graphed_callables(model, (x,))  # once more
    both(model, eager, x)


def test_threads_take_turns(device: torch.device) -> None:
    from concurrent.futures import ThreadPoolExecutor

    layer, eager = pair_of(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()), device)
    gw.make_graphed_callables(layer, (rand(device, 6, 8, grad=True),), activation_sets=4)

    def work(seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        for _ in range(20):
            x = torch.randn(6, 8, device=device, generator=generator).requires_grad_()
            mine, theirs = (torch.autograd.grad(m(x).sum(), x) for m in (layer, eager))
            same(mine, theirs)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, seed) for seed in range(4)]:
            done.result()


# Kinds of work.


def images(device: torch.device) -> torch.Tensor:
    return rand(device, 2, 3, 8, 8).to(memory_format=torch.channels_last).requires_grad_()


WORK: dict[str, tuple[Callable[..., Any], Callable[[torch.device], torch.Tensor]]] = {
    "a scalar": (lambda x: x.sum(), lambda d: rand(d, 4, grad=True)),
    "an expanded output": (lambda x: (x * 2).expand(3, 4), lambda d: rand(d, 4, grad=True)),
    "nothing in it": (lambda x: x * 2, lambda d: rand(d, 0, 4, grad=True)),
    "an expanded input": (lambda x: x * 2, lambda d: rand(d, 1, 4).expand(3, 4).requires_grad_()),
    "an input with gaps": (lambda x: x + 1, lambda d: rand(d, 100, 4)[::30].requires_grad_()),
    "channels last": (lambda x: F.avg_pool2d(x, 2).relu(), images),
    "a named tuple": (lambda x: tuple(x.sort(0)), lambda d: rand(d, 5, 4, grad=True)),
    "a list": (lambda x: [x * i for i in range(3)], lambda d: rand(d, 5, 4, grad=True)),
    "half precision": (lambda x: x.half() * 2, lambda d: rand(d, 3, 4, grad=True)),
    "no gradient": (lambda x: (x * 2).detach(), lambda d: rand(d, 4, grad=True)),
    "attention": (
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.2),
        lambda d: rand(d, 2, 2, 5, 8, grad=True),
    ),
}


@pytest.mark.parametrize("name", WORK)
def test_work_equals_eager(name: str, device: torch.device) -> None:
    fn, sample = WORK[name]
    graphed = gw.make_graphed_callables(fn, (sample(device),))
    for seed in range(3):
        x = sample(device)
        mine, theirs = [], []
        for call, results in ((graphed, mine), (fn, theirs)):
            torch.manual_seed(seed)
            made = call(x)
            leaves = made if isinstance(made, tuple | list) else (made,)
            results.append(made)
            if any(leaf.requires_grad for leaf in leaves):
                total = sum(leaf.float().pow(2).sum() for leaf in leaves if leaf.requires_grad)
                results += torch.autograd.grad(total, x)
        same(mine, theirs)
    assert statistics(graphed) == TrainingCallStatistics(replays=3, captures=1)


LAYERS: dict[str, tuple[Make, Callable[[torch.device], tuple[torch.Tensor, ...]]]] = {
    "transformer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        lambda d: (rand(d, 3, 5, 8),),
    ),
    "gru": (lambda: nn.GRU(8, 4, bidirectional=True), lambda d: (rand(d, 3, 5, 8),)),
    "lstm": (lambda: nn.LSTM(8, 4), lambda d: (rand(d, 3, 5, 8),)),
    "lstm cell": (lambda: nn.LSTMCell(8, 4), lambda d: (rand(d, 3, 8),)),
    "weight norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)),
        lambda d: (rand(d, 3, 8),),
    ),
    "spectral norm": (
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)),
        lambda d: (rand(d, 3, 8),),
    ),
    "embedding": (
        lambda: nn.Embedding(10, 4),
        lambda d: (torch.tensor([1, 2, 1], device=d),),
    ),
    "frozen batch norm": (
        lambda: nn.Sequential(nn.BatchNorm1d(8).eval(), nn.Linear(8, 4)),
        lambda d: (rand(d, 3, 8, grad=True),),
    ),
    "loss": (
        nn.CrossEntropyLoss,
        lambda d: (rand(d, 3, 4, grad=True), torch.tensor([0, 2, 1], device=d)),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_equal_eager(name: str, device: torch.device) -> None:
    make, sample = LAYERS[name]
    graphed, eager = pair_of(make, device)
    gw.make_graphed_callables(graphed, sample(device))
    for seed in range(3):
        both(graphed, eager, *sample(device), seed=seed)
    same_state(graphed, eager)
    assert statistics(graphed) == TrainingCallStatistics(replays=3, captures=1)


def test_checkpointing_inside_and_around(device: torch.device) -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = checkpoint(self.one, x, use_reentrant=False, preserve_rng_state=False)
            return self.two(kept.relu())

    graphed, eager = pair_of(Inside, device)
    gw.make_graphed_callables(graphed, (rand(device, 6, 8, grad=True),))
    both(graphed, eager, rand(device, 6, 8, grad=True))
    same_state(graphed, eager)
    graphed, eager = pair_of(lambda: nn.Linear(8, 4), device)
    gw.make_graphed_callables(graphed, (rand(device, 6, 8, grad=True),), activation_sets=2)
    for reentrant in (True, False):
        mine, theirs = (
            functools.partial(checkpoint, module, use_reentrant=reentrant)
            for module in (graphed, eager)
        )
        both(mine, theirs, rand(device, 6, 8, grad=True))
        same_state(graphed, eager)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute:UserWarning"
)  # Dynamo's, without graphs too
def test_compiled_parts_are_compiled_once(device: torch.device) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(8, 8)
            self.two = nn.Sequential(nn.Linear(8, 8), nn.GELU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return compiled(self.two, self.one(x))

    @torch.compile(backend="aot_eager")
    def compiled(layers: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layers(x)

    graphed, eager = pair_of(Partly, device)
    torch._dynamo.reset()
    counts = torch._dynamo.utils.counters["stats"]
    counts.clear()
    gw.make_graphed_callables(graphed, (rand(device, 6, 8),))
    # A tape of the CPU repeats eager's operations, and nothing is compiled for it.
    assert counts["unique_graphs"] == (device.type == "cuda")
    both(graphed, eager, rand(device, 6, 8))
    same_state(graphed, eager)


def test_a_graphed_module_may_be_compiled(device: torch.device) -> None:
    graphed, eager = pair_of(lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU()), device)
    gw.make_graphed_callables(graphed, (rand(device, 6, 8),))
    torch._dynamo.reset()
    both(torch.compile(graphed, backend="eager"), eager, rand(device, 6, 8))
    same_state(graphed, eager)
    assert statistics(graphed).replays == 1  # TorchDynamo leaves it as it is.


def test_memory_stays_flat(device: torch.device) -> None:
    pool, held = gw.MemoryPool(), []
    for turn in range(12):
        model = mlp().to(device)
        gw.make_graphed_callables(model, (rand(device, 6, 8),), pool=pool)
        for _ in range(2):
            model(rand(device, 6, 8)).sum().backward()
            model[0].weight.data = rand(device, 16, 8)
        if turn % 2:
            model.forward.close()
        del model
        gc.collect()
        held.append((pool.reserved, pool.in_use, len(pool.graphs)))
    assert held[-1][1:] == (0, 0)
    assert held[2:] == [held[2]] * 10


# What torch.cuda.make_graphed_callables does with the same.


def torch_s(fn: Any, sample: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.cuda.make_graphed_callables(fn, sample, **options)


@pytest.mark.gpu
def test_torch_s_broadcasts_and_casts() -> None:
    device = torch.device("cuda")
    theirs = torch_s(lambda x: x * 2, (rand(device, 4, 8, grad=True),))
    mine = gw.make_graphed_callables(lambda x: x * 2, (rand(device, 4, 8, grad=True),))
    for x in (rand(device, 1, 8), rand(device, 4, 8).double()):
        same(mine(x), x * 2)
        wrong = theirs(x)
        assert wrong.shape != x.shape or wrong.dtype != x.dtype


@pytest.mark.gpu
def test_torch_s_pollutes_statistics_and_forgets_writes() -> None:
    device = torch.device("cuda")
    x = rand(device, 8, 4)
    mine, theirs = pair_of(lambda: nn.BatchNorm1d(4), device)
    gw.make_graphed_callables(mine, (x,))
    torch_s(theirs, (x,))
    assert not mine.running_mean.any()
    assert theirs.running_mean.any()

    def writes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y.add_(1)

    args = rand(device, 4, grad=True), rand(device, 4)
    for make, right in ((gw.make_graphed_callables, True), (torch_s, False)):
        y = torch.zeros(4, device=device)
        make(writes, args)(rand(device, 4, grad=True), y)
        assert bool((y == 1).all()) is right


@pytest.mark.gpu
def test_torch_s_overwrites_activations_and_gradients() -> None:
    device = torch.device("cuda")
    xs = [rand(device, 6, 8) for _ in range(2)]
    for make, right in ((gw.make_graphed_callables, True), (torch_s, False)):
        layer, eager = pair_of(lambda: nn.Linear(8, 4), device)
        options = {"activation_sets": 2} if right else {}
        make(layer, (rand(device, 6, 8),), **options)
        for module in (layer, eager):
            for loss in [module(x).pow(2).sum() for x in xs]:
                loss.backward()
        assert torch.allclose(layer.weight.grad, eager.weight.grad) is right
        first = torch.autograd.grad(layer(xs[0]).sum(), [layer.weight])[0]
        kept = first.clone()
        torch.autograd.grad(layer(xs[1]).sum(), [layer.weight])
        assert torch.equal(first, kept) is right


@pytest.mark.gpu
def test_torch_s_keeps_old_parameters() -> None:
    device = torch.device("cuda")
    x = rand(device, 6, 8)
    for make, right in ((gw.make_graphed_callables, True), (torch_s, False)):
        layer, eager = pair_of(lambda: nn.Linear(8, 4), device)
        make(layer, (rand(device, 6, 8),))
        held = [module.weight.detach() for module in (layer, eager)]  # Nothing else comes there.
        for module in (layer, eager):
            module.weight.data = torch.ones(4, 8, device=device)
        assert torch.allclose(layer(x), eager(x)) is right
        del held


@pytest.mark.gpu
def test_torch_s_ignores_surplus_samples() -> None:
    device = torch.device("cuda")
    x = rand(device, 6, 8)
    layers = (nn.Linear(8, 4).to(device),)
    torch_s(layers, ((x,), (x,)))
    with pytest.raises(gw.OptionError):
        gw.make_graphed_callables(layers, ((x,), (x,)))


def test_what_is_frozen_and_thawed_out_of_sight_gets_its_gradient(device: torch.device) -> None:
    nets = {"judge": nn.Linear(4, 1).to(device), "maker": nn.Linear(4, 4).to(device)}

    def chained(z: torch.Tensor) -> torch.Tensor:
        return nets["judge"](nets["maker"](z))

    graphed = gw.make_graphed_callables(chained, (rand(device, 6, 4),))
    for frozen in (True, False, True, False):
        nets["judge"].requires_grad_(not frozen)
        nets["judge"].zero_grad()
        graphed(rand(device, 6, 4)).sum().backward()
        assert (nets["judge"].weight.grad is None) is frozen


def test_forward_mode_and_hooks_for_saved_tensors_see_the_original(device: torch.device) -> None:
    layer = nn.Linear(4, 4).to(device)
    x = rand(device, 6, 4)
    gw.make_graphed_callables(layer, (x,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent is not None
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(1) or t, lambda t: t):
        layer(x.clone().requires_grad_()).sum().backward()
    assert saved


class Decaying(nn.Module):
    """A factor that decays with every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("factor", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.factor.mul_(0.9)
        made: torch.Tensor = self.layer(x) * self.factor
        return made


def test_a_buffer_that_a_later_forward_has_written_is_missed(device: torch.device) -> None:
    for graphs in (False, True):
        module = Decaying().to(device)
        if graphs:
            gw.make_graphed_callables(module, (rand(device, 6, 4),), activation_sets=2)
        first, second = module(rand(device, 6, 4)), module(rand(device, 6, 4))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (first.sum() + second.sum()).backward()


def test_statistics_of_batch_norms_are_no_such_buffers(device: torch.device) -> None:
    layer = nn.BatchNorm1d(4).to(device)
    reference = copy.deepcopy(layer)
    graphed = gw.make_graphed_callables(layer, (rand(device, 6, 4),))
    for module in (reference, graphed):
        x = torch.ones(6, 4, device=device, requires_grad=True)
        module.eval()
        before = module(x)
        module.train()
        module(torch.ones(6, 4, device=device))
        before.sum().backward()
