"""Arguments on the host of calls that run on a GPU: time steps, lengths, rewards.

Where there is no GPU, tensors of int64 and float64 stand for those on the host: they are sent to
the static inputs as such tensors are, although both are on the CPU.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the field's name for it

import graphwright as gw
from graphwright.graphs import staging, static_inputs
from graphwright.graphs.call_spec import device_of
from graphwright.graphs.captured_call import CapturedCall
from graphwright.graphs.memory import MemoryPool
from graphwright.graphs.static_inputs import StaticInputs
from graphwright.training.step.components import device_of_training

_ON_HOST = (torch.int64, torch.float64)


@pytest.fixture(autouse=True)
def marked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, take tensors of some dtypes for those on the host."""
    if request.node.get_closest_marker("gpu") is None:
        mark_host_tensors(monkeypatch)


def mark_host_tensors(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(static_inputs, "is_on_host", lambda tensor, device: tensor.dtype in _ON_HOST)


class TimeStep(nn.Module):
    """Uses a time step as UNet2DConditionModel does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        if t.dim() == 0:
            t = t[None].to(x.device)
        t = t.expand(x.shape[0])
        emb = torch.sin(t[:, None].float() * torch.arange(8, device=t.device).float())
        made: torch.Tensor = self.inner(x) * emb
        return made


def moved(args: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    return tuple(a.to(device) if isinstance(a, torch.Tensor) else a for a in args)


def model_and_input(device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    return TimeStep().to(device).eval(), torch.randn(3, 8, device=device)


@torch.no_grad()
def test_each_call_gets_its_own_value(device: torch.device) -> None:
    model, x = model_and_input(device)
    graphed = gw.graph(model)
    for value in (1, 2, 500, 1, 999, 0):
        t = torch.tensor(value)
        assert torch.equal(graphed(x, t), model(x, t))
    assert graphed.statistics.captures == 1
    assert graphed.statistics.hits == 6


@torch.no_grad()
def test_a_captured_call_takes_it_too(device: torch.device) -> None:
    model, x = model_and_input(device)
    graph = gw.capture(model, x, torch.tensor(5))
    made = [graph(x, torch.tensor(value)) for value in range(12)]
    for value, each in enumerate(made):
        assert torch.equal(each, model(x, torch.tensor(value)))


@torch.no_grad()
def test_a_keyword_beside_a_plain_value(device: torch.device) -> None:
    def scaled(x: torch.Tensor, flag: bool, *, steps: torch.Tensor) -> torch.Tensor:
        return x * steps.to(x.device).float() if flag else x

    graphed, x = gw.graph(scaled), torch.randn(4, device=device)
    for value in (3, 4, 5):
        steps = torch.full((4,), value)
        assert torch.equal(graphed(x, True, steps=steps), scaled(x, True, steps=steps))
    assert graphed.statistics.captures == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda n: torch.tensor(n),
        lambda n: torch.arange(n, n + 6),
        lambda n: torch.arange(n, n + 12)[::2],
        lambda n: torch.tensor([n]).expand(6),
        lambda n: torch.arange(n, n + 200)[:120:20],
        lambda n: torch.arange(0, dtype=torch.int64)[:0].sum() + n,
    ],
    ids=["0-d", "1-d", "strided", "expanded", "gaps", "computed"],
)
@torch.no_grad()
def test_shapes_and_strides(device: torch.device, make: Callable[[int], torch.Tensor]) -> None:
    def scaled(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return x * t.to(x.device).float() + 1

    graphed, x = gw.graph(scaled), torch.randn(2, 6, device=device)
    for n in range(5):
        assert torch.equal(graphed(x, make(n)), scaled(x, make(n)))
    assert graphed.statistics.captures == 1


@torch.no_grad()
def test_two_views_of_one_tensor(device: torch.device) -> None:
    def both(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return x * a.to(x.device).float() + b.to(x.device).float()

    graphed, x = gw.graph(both), torch.randn(4, device=device)
    for n in range(4):
        whole = torch.arange(n, n + 6)
        assert torch.equal(graphed(x, whole[:4], whole[2:]), both(x, whole[:4], whole[2:]))
    assert graphed.statistics.captures == 1


@torch.no_grad()
def test_the_caller_may_change_it_after_the_call(device: torch.device) -> None:
    model, x = model_and_input(device)
    graphed, t = gw.graph(model), torch.tensor(0)
    made = []
    for value in range(10):
        t.fill_(value)
        made.append(graphed(x, t))
    for value, each in enumerate(made):
        assert torch.equal(each, model(x, torch.tensor(value)))


@torch.no_grad()
def test_a_result_that_is_a_copy_on_the_device_stays_what_it_is(device: torch.device) -> None:
    def with_copy(x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, t.to(x.device)

    graphed, x = gw.graph(with_copy), torch.randn(4, device=device)
    made = [graphed(x, torch.tensor(value))[1] for value in range(5)]
    assert [int(each) for each in made] == [0, 1, 2, 3, 4]
    assert all(each.device.type == device.type for each in made)


@torch.no_grad()
def test_what_the_call_writes_to_it_is_written_back(device: torch.device) -> None:
    def counts(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        made = x * t.to(x.device).float()
        t.add_(1)
        return made

    graphed, x, t = gw.graph(counts), torch.randn(4, device=device), torch.tensor(1)
    for value in range(1, 6):
        assert torch.equal(graphed(x, t), x * value)
        assert int(t) == value + 1


@torch.no_grad()
def test_a_value_that_the_host_reads_is_guarded(device: torch.device) -> None:
    def branches(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        y = x * t.to(x.device).float()
        if t > 2:
            return y + 1
        return y - 1

    graphed, x = gw.graph(branches), torch.randn(4, device=device)
    for value in (1, 5, 2, 3, 7, 0, 5):
        t = torch.tensor(value)
        assert torch.equal(graphed(x, t), branches(x, t))


@torch.no_grad()
def test_a_value_that_the_host_reads_beside_other_copies(device: torch.device) -> None:
    def reads(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(8, device=x.device)[None] < lengths.to(x.device)[:, None]
        return (x * mask)[:, : int(lengths.max())]

    graphed, x = gw.graph(reads), torch.randn(3, 8, device=device)
    for lengths in ([3, 5, 2], [1, 5, 5], [4, 4, 4], [3, 5, 2]):
        given = torch.tensor(lengths)
        assert torch.equal(graphed(x, given), reads(x, given))
    assert graphed.statistics.hits >= 1


@torch.no_grad()
def test_it_works_with_threads(device: torch.device) -> None:
    model, x = model_and_input(device)
    graphed, wrong = gw.graph(model), list[int]()
    graphed(x, torch.tensor(0))
    expected = {value: model(x, torch.tensor(value)) for value in range(40)}

    def run(first: int) -> None:
        with torch.no_grad():
            for value in range(first, 40, 4):
                made = graphed(x, torch.tensor(value))
                if not torch.equal(made, expected[value]):
                    wrong.append(value)

    threads = [threading.Thread(target=run, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert graphed.statistics.captures == 1


@torch.no_grad()
def test_buffers_are_used_again(device: torch.device) -> None:
    model, x = model_and_input(device)
    graph = gw.capture(model, x, torch.tensor(5))
    assert isinstance(graph, CapturedCall)
    for value in range(30):
        graph(x, torch.tensor(value))
    inputs = graph.recorded.inputs
    assert inputs._staging is not None
    held = [*inputs._staging._buffers]
    assert 1 <= len(held) <= staging._MOST_BUFFERS
    for value in range(30):
        graph(x, torch.tensor(value))
    assert {*map(id, held)} <= {*map(id, inputs._staging._buffers)}


def test_training_takes_lengths(device: torch.device) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            mask = torch.arange(8, device=x.device)[None] < lengths.to(x.device)[:, None]
            made: torch.Tensor = self.inner(x) * mask
            return made

    model = Masked().to(device)
    x = torch.randn(3, 8, device=device, requires_grad=True)
    graphed = gw.make_graphed_callables(model, (x, torch.tensor([1, 2, 3])))
    for lengths in ([8, 1, 4], [2, 2, 7], [0, 8, 8]):
        given, grads = torch.tensor(lengths), []
        for call in (graphed, Masked.forward.__get__(model)):
            x.grad = model.inner.weight.grad = None
            call(x, given).square().sum().backward()
            assert model.inner.weight.grad is not None
            assert x.grad is not None
            grads.append((x.grad.clone(), model.inner.weight.grad.clone()))
        for mine, its in zip(*grads, strict=True):
            torch.testing.assert_close(mine, its)


def test_a_step_takes_rewards(device: torch.device) -> None:
    models = [nn.Linear(4, 1).to(device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def step_of(model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x)[:, 0], rewards.to(x.device).float())
            loss.backward()
            optimizer.step()
            return loss

        return step

    x = torch.randn(6, 4, device=device)
    first = torch.randn(6, dtype=torch.float64)
    graphed = gw.graph_step(step_of(models[0]), (x, first))
    eager = step_of(models[1])
    for _ in range(6):
        rewards = torch.randn(6, dtype=torch.float64)
        torch.testing.assert_close(graphed(x, rewards), eager(x, rewards))
    for mine, its in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(mine, its)


@pytest.mark.long
@torch.no_grad()
def test_the_unet_takes_time_steps_of_the_scheduler(device: torch.device) -> None:
    diffusers = pytest.importorskip("diffusers")
    unet = tiny_unet(diffusers).to(device).eval()
    rand = functools.partial(torch.randn, device=device)
    graphed, x, context = gw.graph(unet), rand(2, 4, 8, 8), rand(2, 7, 16)
    scheduler = diffusers.DDIMScheduler()
    scheduler.set_timesteps(10)
    assert scheduler.timesteps.dtype is torch.int64
    assert scheduler.timesteps.device.type == "cpu"
    made = [graphed(x, t, context).sample for t in scheduler.timesteps]
    for t, each in zip(scheduler.timesteps, made, strict=True):
        torch.testing.assert_close(each, unet(x, t, context).sample)
    assert graphed.statistics.captures == 1
    assert graphed.statistics.hits == 10


def tiny_unet(diffusers: Any) -> nn.Module:
    made: nn.Module = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16,),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        cross_attention_dim=16,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    return made


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `as_given` know tensors that are where the caller has them."""
    init = StaticInputs.__init__

    def noted(self: StaticInputs, sample: Any, allocate: Any, **options: Any) -> None:
        init(self, sample, allocate, **options)
        for slot in self.hosts if options.get("as_given") else ():
            vars(self.tensor(slot))["as_given"] = True

    monkeypatch.setattr(StaticInputs, "__init__", noted)


def as_given(tensor: torch.Tensor) -> bool:
    """Whether a run has a tensor where the caller has it: on the host, and no copy."""
    return "as_given" in vars(tensor)


@pytest.mark.usefixtures("told")
@torch.no_grad()
def test_a_call_that_needs_it_on_the_host_is_refused_by_name() -> None:
    def computes(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return x * t if as_given(t) else x - t

    def returns(x: torch.Tensor, t: torch.Tensor) -> Any:
        return x * t if as_given(t) else (x * t, t)

    def writes(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return x * (t.clone() if as_given(t) else t).add_(1)

    for call in (computes, returns, writes):
        with pytest.raises(gw.CaptureError, match=r"args\[1\] on the host: the call computes or"):
            gw.capture(call, torch.randn(4), torch.arange(4))


@pytest.mark.usefixtures("told")
@torch.no_grad()
def test_a_call_that_fails_with_a_copy_is_refused_by_name() -> None:
    def packs(x: torch.Tensor, *, lengths: torch.Tensor) -> torch.Tensor:
        if not as_given(lengths):
            raise RuntimeError("'lengths' argument should be a 1D CPU int64 tensor")
        return x * lengths

    with pytest.raises(gw.CaptureError, match=r"lengths on the host: the call fails .* 1D CPU"):
        gw.capture(packs, torch.randn(4), lengths=torch.arange(4))


@torch.no_grad()
def test_an_error_of_the_call_itself_stays_what_it_is(device: torch.device) -> None:
    def fails(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("its own")

    with pytest.raises(gw.CaptureError) as caught:
        gw.capture(fails, torch.randn(4, device=device), torch.arange(4))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "on the host" not in str(caught.value)


# Where a call runs; the meta device stands for a GPU.


def test_the_device_is_that_of_the_others() -> None:
    x, t = torch.empty(2, device="meta"), torch.tensor(1)
    nothing, pool = nn.Module(), MemoryPool()
    for args in ((x, t), (t, x)):
        assert device_of(args, {}, nothing, pool).type == "meta"
    assert device_of((t,), {}, nn.Linear(1, 1, device="meta"), pool).type == "meta"
    assert device_of((t,), {}, nn.Linear(1, 1), pool).type == "cpu"


def test_the_device_of_a_step_is_that_of_its_parameters() -> None:
    t, batch = torch.tensor(1.0), torch.empty(2, device="meta")
    parameters = [*nn.Linear(1, 1, device="meta").parameters()]
    assert device_of_training(parameters, (t,)).type == "meta"
    assert device_of_training(parameters, (t, batch)).type == "meta"
    with pytest.raises(gw.CaptureError, match="the batch on meta"):
        device_of_training([*nn.Linear(1, 1).parameters()], (batch,))


def test_host_tensors_go_to_the_memory_of_the_device() -> None:
    given = [torch.arange(4), torch.randn(3)]
    inputs = StaticInputs(given, lambda n: torch.empty(n, dtype=torch.uint8))
    assert inputs.hosts == [0]
    assert inputs.sources == [1]
    assert inputs.back([0, 1]) == [1]
    inputs.send([torch.arange(4) + 7, given[1]])
    assert torch.equal(inputs.tensor(0), torch.arange(7, 11))


# What only a GPU shows.


def on_gpu(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda")


@pytest.mark.gpu
@torch.no_grad()
def test_calls_that_follow_each_other_at_once() -> None:
    def slow(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(2_000_000)
        return x * t.to(x.device).float()

    graphed, x = gw.graph(slow), torch.ones(8, device="cuda")
    graphed(x, torch.tensor(0))
    torch.cuda.synchronize()
    made = [graphed(x, torch.tensor(value)) for value in range(50)]
    assert [int(each[0]) for each in made] == [*range(50)]


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("pinned", [False, True])
def test_the_callers_memory_is_free_after_the_call(pinned: bool) -> None:
    def slow(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(2_000_000)
        return x * t.to(x.device)

    t = torch.zeros(1000)
    t = t.pin_memory() if pinned else t
    graphed, x, made = gw.graph(slow), torch.ones(1000, device="cuda"), []
    for value in range(20):
        t.fill_(value)
        made.append(graphed(x, t))
    assert [int(each[-1]) for each in made] == [*range(20)]


@pytest.mark.gpu
@torch.no_grad()
def test_two_streams() -> None:
    model, x = model_and_input(torch.device("cuda"))
    graphed, made = gw.graph(model), []
    graphed(x, torch.tensor(0))
    streams = [torch.cuda.Stream() for _ in range(2)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for value in range(20):
        with torch.cuda.stream(streams[value % 2]):
            made.append(graphed(x, torch.tensor(value)))
    torch.cuda.synchronize()
    for value, each in enumerate(made):
        assert torch.equal(each, model(x, torch.tensor(value)))


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("number", [torch.float32, torch.float64, torch.int64])
def test_a_number_on_the_host_in_arithmetic(dtype: torch.dtype, number: torch.dtype) -> None:
    """Kernels read it from the device, so that it is rounded to their dtype first."""

    def uses(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (x * t + t) / (t + 1)

    graphed, x = gw.graph(uses), on_gpu(64).to(dtype)
    for value in (0.3, 7.1, 250.7):
        t = torch.tensor(value).to(number)
        made, expected = graphed(x, t), uses(x, t)
        assert made.dtype is expected.dtype
        rounding = 8 * torch.finfo(dtype).eps * float(expected.abs().max())
        torch.testing.assert_close(made, expected, rtol=0, atol=rounding)
    assert graphed.statistics.captures == 1


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize(
    "call",
    [
        lambda x, t: x * (torch.arange(4) * t).to(x.device),
        lambda x, t: (x * t.to(x.device), t * 2),
        lambda x, t: x * t.to(x.device).add_(1),
        lambda x, t: x * torch.from_numpy(t.numpy()).to(x.device),
    ],
    ids=["computes there", "returns it there", "writes to the copy", "numpy"],
)
def test_calls_that_need_it_on_the_host_go_eager(call: Callable[..., Any]) -> None:
    graphed, x = gw.graph(call), on_gpu(4)
    for value in range(3):
        t = torch.full((4,), value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gw.FallbackWarning)
            made = graphed(x, t)
        torch.testing.assert_close(made, call(x, torch.full((4,), value)))
    with pytest.raises(gw.CaptureError, match=r"args\[1\] on the host"):
        gw.capture(call, x, torch.full((4,), 1))


@pytest.mark.gpu
def test_a_gradient_on_the_host_is_refused() -> None:
    model, x = nn.Linear(4, 4).cuda(), on_gpu(4)

    def forward(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = model(x) * t.to(x.device)
        return made

    with pytest.raises(gw.CaptureError, match=r"args\[1\] requires grad and is on the host"):
        gw.make_graphed_callables(forward, (x, torch.ones(4, requires_grad=True)))


@pytest.mark.gpu
@torch.no_grad()
def test_tune_has_graphs_of_it() -> None:
    model, x = model_and_input(torch.device("cuda"))
    report = gw.tune(model, (x, torch.tensor(3)), strategies="eager,eager+graph").report
    (row,) = [row for row in report.rows if row.strategy == "eager+graph"]
    assert row.status.value in ("ok", "slower")


@pytest.mark.gpu
@torch.no_grad()
def test_tune_takes_lengths_on_the_host() -> None:
    def masked(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return x * (torch.arange(8, device=x.device)[None] < lengths.to(x.device)[:, None])

    call = on_gpu(3, 8), torch.tensor([3, 5, 2])
    report = gw.tune(masked, call, strategies="eager,eager+graph").report
    (row,) = [row for row in report.rows if row.strategy == "eager+graph"]
    assert row.status.value in ("ok", "slower")


@pytest.mark.gpu
@torch.no_grad()
def test_compiled_code_is_captured_with_it() -> None:
    model, x = model_and_input(torch.device("cuda"))
    graphed = gw.graph(torch.compile(model))
    for value in (1, 2, 500):
        t = torch.tensor(value)
        torch.testing.assert_close(graphed(x, t), model(x, t))
    assert graphed.statistics.captures == 1
