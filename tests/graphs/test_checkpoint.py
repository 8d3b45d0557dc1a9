"""torch.utils.checkpoint inside of what is captured: right gradients, or refused by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import graphwright as gw
from graphwright.graphs.capture_budget import Looks

SIZE = 64
REFUSED = r"torch\.utils\.checkpoint sets the random numbers back"


def dropping(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.5, True) * 1.0


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


class Checkpointed(nn.Module):
    """Computes a part by way of checkpoint, with dropout around it if wanted."""

    def __init__(
        self, part: Callable[..., Any], reentrant: bool, around: float = 0.0, **options: Any
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))
        self._part = part
        self._around = around
        self._options = {"use_reentrant": reentrant, **options}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = F.dropout(self.weight * x, self._around)
        y = checkpoint(self._part, y, **self._options)
        return F.dropout(y, self._around)


def step_of(module: nn.Module) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """A function that gives the output and the gradient of a module's weight."""

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            module.weight.grad.zero_()
            y = module(x)
            y.sum().backward()
        return y.detach(), module.weight.grad

    module.weight.grad = torch.zeros_like(module.weight)
    return step


def state_of(device: torch.device) -> torch.Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def put(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


def captured(module: nn.Module, x: torch.Tensor) -> tuple[gw.Graph, torch.Tensor, torch.Tensor]:
    """A block with forward and backward as a graph, its output and its gradient."""
    step, outs = step_of(module), [torch.zeros_like(x) for _ in range(2)]
    side = torch.cuda.Stream() if x.is_cuda else None
    if side is not None:
        # The gradient may lie where an earlier one was, which the default stream may yet read.
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # type: ignore[arg-type]
        step(x)
    if side is not None:
        torch.cuda.synchronize()
    with gw.capturing() as graph:
        for out, value in zip(outs, step(x), strict=True):
            out.copy_(value)
    return graph, outs[0], outs[1]


def through_capture(module: nn.Module, x: torch.Tensor) -> Callable[..., Any]:
    with torch.no_grad():
        return gw.capture(step_of(module), x)


def through_graph_step(module: nn.Module, x: torch.Tensor) -> Callable[..., Any]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        y = module(batch)
        y.sum().backward()
        optimizer.step()
        return y.detach()

    return gw.graph_step(step, x)


def through_graphed_callables(module: nn.Module, x: torch.Tensor) -> Callable[..., Any]:
    graphed: Any = gw.make_graphed_callables(module, (x,))
    return graphed  # type: ignore[no-any-return]


def replays_drop_the_same_twice(module: nn.Module, x: torch.Tensor) -> None:
    """A CUDA graph can go back to where its random numbers stood."""
    graph, out, grad = captured(module, x)
    masks = []
    for seed in (1, 2, 2):
        torch.manual_seed(seed)
        graph.replay()
        assert torch.equal(out != 0, grad != 0)
        masks.append(out != 0)
    assert torch.equal(masks[1], masks[2])
    assert not torch.equal(masks[0], masks[1])


@contextlib.contextmanager
def refused_on_a_gpu_at_most(device: torch.device) -> Iterator[None]:
    """Some PyTorch let nobody touch a GPU's random state while it is captured."""
    try:
        yield
    except gw.CaptureError as error:
        if device.type != "cuda" or "preserve_rng_state=False" not in str(error):
            raise


@pytest.mark.parametrize("reentrant", [False, True])
def test_block_that_recomputes_dropout_is_right_or_refused(
    device: torch.device, reentrant: bool
) -> None:
    module = Checkpointed(dropping, reentrant).to(device)
    x = torch.ones(SIZE, device=device)
    if device.type == "cuda":
        with refused_on_a_gpu_at_most(device):
            replays_drop_the_same_twice(module, x)
    else:
        with pytest.raises(gw.CaptureError, match="random numbers") as raised:
            captured(module, x)
        assert "checkpoint" in str(raised.value)
    # Nothing is left behind: what draws outside of a checkpoint can be captured afterwards.
    preserve = device.type == "cpu"
    outside = Checkpointed(plain, reentrant, 0.5, preserve_rng_state=preserve).to(device)
    graph, out, grad = captured(outside, x)
    graph.replay()
    assert out.any()
    assert grad.any()


@pytest.mark.parametrize(
    ("way", "reentrant"),
    [
        (through_capture, False),
        (through_capture, True),
        (through_graph_step, False),
        (through_graph_step, True),
        (through_graphed_callables, False),  # The other kind has no gradients by argument.
    ],
)
def test_call_that_recomputes_dropout_is_refused(
    device: torch.device, way: Callable[..., Any], reentrant: bool
) -> None:
    module = Checkpointed(dropping, reentrant).to(device)
    with pytest.raises(gw.CaptureError, match=REFUSED):
        way(module, torch.ones(SIZE, device=device))


@pytest.mark.parametrize("reentrant", [False, True])
def test_graphed_call_that_recomputes_dropout_goes_eager(
    device: torch.device, reentrant: bool
) -> None:
    step = step_of(Checkpointed(dropping, reentrant).to(device))
    graphed, x = gw.graph(step), torch.ones(SIZE, device=device)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match=REFUSED):
        graphed(x)
    for _ in range(3):
        with torch.no_grad():
            out, grad = graphed(x)
        assert torch.equal(out != 0, grad != 0)
    assert "torch.utils.checkpoint" in graphed.explain()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("around", [0.0, 0.5])
def test_block_with_checkpoint_of_what_draws_nothing_equals_eager(
    device: torch.device, reentrant: bool, around: float
) -> None:
    # Some PyTorch let nobody set a GPU's random state while it is captured.
    preserve = device.type == "cpu"
    module = Checkpointed(plain, reentrant, around, preserve_rng_state=preserve).to(device)
    x = torch.rand(SIZE, device=device) + 0.5
    graph, out, grad = captured(module, x)
    for _ in range(3):
        state = state_of(device)
        graph.replay()
        after = state_of(device)
        put(device, state)
        expected = step_of(module)(x)
        assert torch.equal(out, expected[0])
        assert torch.equal(grad, expected[1])
        assert torch.equal(after, state_of(device))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("around", [0.0, 0.5])
def test_step_with_checkpoint_of_what_draws_nothing_equals_eager(
    device: torch.device, reentrant: bool, around: float
) -> None:
    preserve = device.type == "cpu"
    module = Checkpointed(plain, reentrant, around, preserve_rng_state=preserve).to(device)
    x = torch.rand(SIZE, device=device) + 0.5
    step = through_graph_step(module, x)
    eager = step_of(module)
    for _ in range(3):
        state = state_of(device)
        out = step(x).clone()
        assert module.weight.grad is not None
        grad = module.weight.grad.clone()
        put(device, state)
        module.weight.grad.zero_()
        expected = eager(x)
        assert torch.equal(out, expected[0])
        assert torch.equal(grad, expected[1])


def seeds(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return F.dropout(x, 0.5, True)


def forks(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        return F.dropout(x, 0.5, True)


def seeds_afterwards(x: torch.Tensor) -> torch.Tensor:
    y = F.dropout(x, 0.5, True)
    torch.manual_seed(3)
    return y


def seeds_another_time(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.5, True) + seeds(x)


@pytest.mark.parametrize("work", [seeds, forks, seeds_afterwards, seeds_another_time])
def test_block_that_moves_the_random_state_by_itself_is_refused(
    device: torch.device, work: Callable[[torch.Tensor], torch.Tensor], one_thread: None
) -> None:
    x = torch.ones(SIZE, device=device)
    work(x)
    state = state_of(device)
    with pytest.raises(gw.CaptureError), gw.capturing():
        work(x)
    assert torch.equal(state, state_of(device))


def test_block_that_draws_again_and_again_is_captured(device: torch.device) -> None:
    x, out = torch.ones(SIZE, device=device), torch.zeros(SIZE, device=device)
    dropping(x)
    with gw.capturing() as graph:
        out.copy_(dropping(dropping(x)) + torch.rand(SIZE, device=device))
    state = state_of(device)
    graph.replay()
    put(device, state)
    assert torch.equal(out, dropping(dropping(x)) + torch.rand(SIZE, device=device))


def test_refusal_by_pytorch_to_move_a_gpu_s_random_state_is_explained() -> None:
    with pytest.raises(gw.CaptureError, match="preserve_rng_state=False"), gw.capturing():
        raise RuntimeError("Cannot call CUDAGeneratorImpl::set_offset during CUDA graph capture.")


def test_checkpoint_of_what_draws_nothing_need_not_leave_the_random_state_alone(
    device: torch.device,
) -> None:
    module = Checkpointed(plain, False).to(device)
    x = torch.rand(SIZE, device=device)
    out, grad = (value.clone() for value in step_of(module)(x))
    with refused_on_a_gpu_at_most(device):
        graph, *found = captured(module, x)
        graph.replay()
        assert torch.equal(found[0], out)
        assert torch.equal(found[1], grad)
    with refused_on_a_gpu_at_most(device):
        step = through_graph_step(module, x)
        assert torch.equal(step(x), out)
        assert torch.equal(module.weight.grad, grad)


@pytest.mark.parametrize("waits_first", [True, False])
def test_checkpoint_around_sees_the_same_of_each_eager_call(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, waits_first: bool
) -> None:
    """One that waits to be captured has gradients on inside of it, one that was looked at off."""
    weight = torch.ones(SIZE, device=device, requires_grad=True)

    def refused(x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(torch.sin, x * weight, use_reentrant=False)
        with torch.enable_grad():
            (x.detach().requires_grad_().exp() * x.exp()).sum().backward()
        return y * x.sum().item()

    graphed = gw.graph(refused, breaks="never")
    x = torch.ones(SIZE, device=device)
    with pytest.warns(RuntimeWarning, match="runs eagerly"), torch.no_grad():
        graphed(x)
    waits = waits_first
    monkeypatch.setattr(Looks, "rests", property(lambda self: waits))
    y = checkpoint(lambda x: graphed(x) * weight, x, use_reentrant=False)
    waits = not waits
    y.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, refused(x).detach())
