"""Calls that the host has a say in: hoisted constants, and segments with guarded breaks."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import graphwright as gw
from graphwright.graphs.captured_call import CapturedCall
from graphwright.graphs.cuda.recorder import _CudaSegment
from graphwright.graphs.segments.recording import RecordingTracer
from graphwright.graphs.segments.tree import SegmentTree
from graphwright.strategies.base import Built
from graphwright.strategies.runners import GRAPH

Fn = Callable[..., Any]


@pytest.fixture(autouse=True)
def no_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", gw.FallbackWarning)
        yield


def tree_of(graphed: Any) -> SegmentTree:
    """The segments of the only graph that is ready."""
    (entry,) = graphed._entries.ready()
    found: SegmentTree = entry.graph.tree
    assert found is not None
    return found


def agree(graphed: Any, fn: Fn, *args: Any, **kwargs: Any) -> None:
    """Check that a call gives what the function gives, and changes its arguments as it does."""
    mine, its = (pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs)) for _ in range(2))
    state = torch.random.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    with torch.no_grad():
        expected = fn(*its[0], **its[1])
    torch.random.set_rng_state(state)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)
    same(graphed(*mine[0], **mine[1]), expected)
    same(mine, its)


def same(actual: Any, expected: Any) -> None:
    a, spec = pytree.tree_flatten(actual)
    b, other = pytree.tree_flatten(expected)
    assert spec == other
    for x, y in zip(a, b, strict=True):
        if isinstance(y, torch.Tensor):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
        else:
            assert type(x) is type(y)
            assert x == y or (x != x and y != y)


# Functions of a tensor (3, 4), and what they are an example of.


def decides(x: torch.Tensor) -> Any:
    y = x * 2
    return y.relu() + 1 if y.sum() > 0 else y.neg()


def goes_on_until(x: torch.Tensor) -> Any:
    n = 0
    y = x.clone()
    while y.abs().max().item() > 0.5:
        y, n = y * 0.5, n + 1
    return y, n


def masks(x: torch.Tensor) -> Any:
    y = x.exp()
    return y[x > 0] * 2, y.sum()


def finds_places(x: torch.Tensor) -> Any:
    where = (x > 0).nonzero()
    return where + 1, x[where[:, 0], where[:, 1]]


def has_what_is_unique(x: torch.Tensor) -> Any:
    values, counts = torch.unique((x * 2).round(), return_counts=True)
    return values.exp(), counts


def writes_by_a_mask(x: torch.Tensor) -> Any:
    y = x * 2
    y[x > 0] = y[x > 0].sin()
    return y + 1


def lists(x: torch.Tensor) -> Any:
    signs = (x[0] > 0).tolist()
    return sum(row * (i + 1) for i, row in enumerate(x.T) if signs[i]) + x.mean()


def goes_by_numpy(x: torch.Tensor) -> Any:
    signs = (x.cpu().numpy() > 0).astype("f")
    return x * torch.from_numpy(signs).to(x.device) + 1


def gathers_numbers(x: torch.Tensor) -> Any:
    signs = (x > 0).sum(1)
    return torch.tensor([signs[0], signs[1], 7], device=x.device) + signs


def has_constants(x: torch.Tensor) -> Any:
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)
    y = x.new_tensor([[1.0], [2.0], [3.0]]) * x * weights
    y[[0, 2]] = 1.0
    y[torch.tensor([1], device=x.device), torch.tensor([0], device=x.device)] = 5
    return torch.where(x > 0, y, torch.tensor(0.5, device=x.device)) + torch.as_tensor(
        np.arange(4, dtype="f"), device=x.device
    )


def writes_to_a_constant(x: torch.Tensor) -> Any:
    total = torch.tensor([0.0, 1.0, 2.0, 3.0], device=x.device)
    total += x.sum(0)
    return total, total * 2


def reads_twice(x: torch.Tensor) -> Any:
    low, high = x.min().item() > -1, x.max().item() > 1
    return x * (2 if low else 3) + (1 if high else 0), low, high


def returns_what_it_read(x: torch.Tensor) -> Any:
    return (x > 0).sum().item(), x + 1


def returns_its_argument(x: torch.Tensor) -> Any:
    y = x.reshape(-1)
    return (x, y[2:5]) if x.sum() > 0 else (y, x.T)


def returns_an_early_result(x: torch.Tensor) -> Any:
    y = x + 1
    if x[0, 0] > 0:
        return y, y[0]
    z = y * 2
    return (z, y) if x[0, 1] > 0 else (z.T, x)


def writes_to_its_argument_on_one_way(x: torch.Tensor) -> Any:
    if x.sum() > 0:
        x.mul_(2)
    return x + 1


def writes_before_and_after(x: torch.Tensor) -> Any:
    x += 1
    if (x[0] > 1).all():
        x[1] = 7
    x -= 0.5
    return x.sum()


def keeps_a_tensor_over_breaks(x: torch.Tensor) -> Any:
    kept = [x + i for i in range(3)]
    for i in range(3):
        if x[i, i] > 0:
            kept[i] = kept[i] * kept[(i + 1) % 3]
            kept.append(torch.ones_like(x) * i)
    return torch.stack(kept).sum(0), len(kept)


def repeats(x: torch.Tensor) -> Any:
    times = (x[:, 0] > 0).long() + 1
    return torch.repeat_interleave(x, times, dim=0).cumsum(0)


def splits(x: torch.Tensor) -> Any:
    first = (x[0] > 0).sum()
    return [part.sum(0) for part in x.tensor_split([int(first) % 3])]


def draws_around_a_break(x: torch.Tensor) -> Any:
    y = torch.dropout(x, 0.5, train=True)
    y = y * 2 if y.sum() > 0 else y
    return torch.dropout(y, 0.5, train=True) + torch.rand_like(x)


def asserts(x: torch.Tensor) -> Any:
    assert x.isfinite().all()
    return x.exp()


def routes(x: torch.Tensor) -> Any:
    """A mixture of experts, each of which sees its own rows."""
    expert = (x.sum(1) > 0).long() + (x[:, 0] > 0.5).long()
    result = torch.zeros_like(x)
    for number in range(3):
        rows = torch.where(expert == number)[0]
        if rows.numel():
            result.index_add_(0, rows, torch.tanh(x[rows] * (number + 1)))
    return result


def nothing_between(x: torch.Tensor) -> Any:
    values = [x[0, i].item() > 0 for i in range(4)]
    return x * sum(values)


def inference_inside(x: torch.Tensor) -> Any:
    with torch.inference_mode():
        y = x * 2
        y = y + 1 if y.sum() > 0 else y - 1
    return y * 3


def no_grad_inside(x: torch.Tensor) -> Any:
    with torch.no_grad():
        y = x * 2
        y = y + 1 if y.sum() > 0 else y - 1
    return y * 3


def views_over_a_break(x: torch.Tensor) -> Any:
    y = x * 2
    rows, column = y.unbind(0), y[:, 1]
    if x.sum() > 0:
        column += 1
    return rows[0] + rows[2], y.T.contiguous()


def casts_by_hand(x: torch.Tensor) -> Any:
    y = x.double()
    return (y.half() if y.sum() > 0 else y.int()), y


WAYS = [
    decides,
    goes_on_until,
    masks,
    finds_places,
    has_what_is_unique,
    writes_by_a_mask,
    lists,
    goes_by_numpy,
    gathers_numbers,
    reads_twice,
    returns_what_it_read,
    returns_its_argument,
    returns_an_early_result,
    writes_to_its_argument_on_one_way,
    writes_before_and_after,
    keeps_a_tensor_over_breaks,
    repeats,
    splits,
    draws_around_a_break,
    asserts,
    routes,
    nothing_between,
    inference_inside,
    no_grad_inside,
    views_over_a_break,
    casts_by_hand,
]
CONSTANTS = [has_constants, writes_to_a_constant]


@pytest.mark.parametrize("fn", WAYS, ids=lambda fn: fn.__name__)
def test_a_call_that_breaks_is_right_whichever_way_it_goes(fn: Fn, device: torch.device) -> None:
    graphed = gw.graph(fn)
    inputs = [torch.randn(3, 4, device=device) for _ in range(12)]
    held = []
    for x in [*inputs, *inputs]:
        agree(graphed, fn, x)
        held.append((x.clone(), graphed(x.clone())))
    assert graphed.statistics.eager == {}
    found = tree_of(graphed)
    assert found.paths >= 1
    ends = [node.hits for node in found.root.below() if node.break_ is None]
    assert sum(ends) == 48
    assert len(ends) == found.paths
    if fn is not draws_around_a_break:
        for x, result in held:
            same(result, fn(x))


@pytest.mark.parametrize("fn", CONSTANTS, ids=lambda fn: fn.__name__)
def test_constants_of_the_host_are_hoisted_into_one_graph(fn: Fn, device: torch.device) -> None:
    graphed = gw.graph(fn)
    for _ in range(4):
        agree(graphed, fn, torch.randn(3, 4, device=device))
    assert graphed.statistics.hits == 4
    (entry,) = graphed._entries.ready()
    assert entry.graph.tree is None
    if device.type == "cuda":
        assert "constants kept on the device: " in graphed.explain()
        assert "test_breaks.py:" in graphed.explain()
    assert entry.pure or fn is writes_to_a_constant


def test_a_guard_may_flip_at_every_call(device: torch.device) -> None:
    graphed = gw.graph(decides)
    for i in range(20):
        agree(graphed, decides, torch.full((3, 4), 1.0 if i % 2 else -1.0, device=device))
    found = tree_of(graphed)
    assert found.paths == 2
    assert found.root.break_.place.startswith(__file__)
    assert [node.hits for node in found.root.break_.after.values()] == [10, 10]
    text = graphed.explain()
    assert "break at test_breaks.py:" in text
    assert "item: False 10×, True 10×" in text
    assert text.count("graph of ") == 3
    assert len(re.findall(r"graph of \d+ nodes?, [\d.]+ µs", text)) == 3


def test_nan_and_the_sign_of_zero_are_values_of_their_own(device: torch.device) -> None:
    def signs(x: torch.Tensor) -> Any:
        value = x[0].item()
        return x + (math.copysign(1, value) if value == value else 100)

    graphed = gw.graph(signs)
    for value in (0.0, -0.0, math.nan, 1.0, -0.0, math.nan, 0.0, math.inf, -math.inf):
        agree(graphed, signs, torch.tensor([value, 2.0], device=device))
    assert tree_of(graphed).paths == 6


def test_values_that_are_new_at_every_call_are_given_up(device: torch.device) -> None:
    def scales(x: torch.Tensor) -> Any:
        return x * x.sum().item()

    graphed = gw.graph(scales)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(40):
            agree(graphed, scales, torch.randn(3, 4, device=device))
    (warning,) = warned
    assert "test_breaks.py" in str(warning.message)
    assert "paths" in str(warning.message)
    assert 20 <= sum(graphed.statistics.eager.values()) < 40
    assert graphed._entries.ready() == []
    before = graphed.pool.in_use
    gc.collect()
    assert before == graphed.pool.in_use == 0


def test_a_loop_of_a_thousand_reads_is_eager_and_says_why(device: torch.device) -> None:
    def loops(x: torch.Tensor) -> Any:
        for _ in range(1000):
            x = x * 0.99
            if x.max() < 0.01:
                break
        return x

    graphed = gw.graph(loops)
    with pytest.warns(RuntimeWarning, match="256 segments"):
        agree(graphed, loops, torch.full((2,), 1e9, device=device))
    agree(graphed, loops, torch.full((2,), 1.0, device=device))


def test_a_loop_with_many_reads_is_right(device: torch.device) -> None:
    def loops(x: torch.Tensor) -> Any:
        for i in range(100):
            x = x * 0.9 + 0.001 * i
            if x.max() < 0.5:
                return x, i
        return x, None

    graphed = gw.graph(loops)
    for scale in (1e9, 1.0, 5.0, 1e9, 1e4, 1.0):
        agree(graphed, loops, torch.full((2,), scale, device=device))
    assert tree_of(graphed).paths >= 3


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.layer(x)
        if y.sum() > 0:
            self.total += y.sum(0)
            return y * self.calls
        self.total -= 1
        return y - self.total


def test_a_buffer_is_written_to_once_a_call(device: torch.device) -> None:
    torch.manual_seed(3)
    plain, module = Counting().to(device), Counting().to(device)
    module.load_state_dict(plain.state_dict())
    graphed = gw.graph(module.eval())
    for _ in range(12):
        agree(graphed, plain.eval(), torch.randn(3, 4, device=device))
        same(module.total, plain.total)
        same(module.calls, plain.calls)
    found = tree_of(graphed._graphs)
    assert found.paths == 2
    graphed.release()
    agree(graphed, plain, torch.randn(3, 4, device=device))
    same(module.total, plain.total)


def test_an_exception_after_a_break_is_the_caller_s_own(device: torch.device) -> None:
    module = Counting().to(device).eval()
    plain = Counting().to(device).eval()
    plain.load_state_dict(module.state_dict())

    def strict(net: Counting) -> Fn:
        def call(x: torch.Tensor) -> torch.Tensor:
            net.calls += 1
            if x.sum() < 0:
                net.total += 1
                raise KeyError("negative")
            return net.layer(x)

        return call

    graphed, fn = gw.graph(strict(module)), strict(plain)
    agree(graphed, fn, torch.ones(3, 4, device=device))
    for _ in range(3):
        for call in (graphed, fn):
            with pytest.raises(KeyError, match="negative"):
                call(-torch.ones(3, 4, device=device))
        agree(graphed, fn, torch.ones(3, 4, device=device))
        same(module.total, plain.total)
        same(module.calls, plain.calls)


def test_a_module_s_own_tensors_on_the_host_are_followed(device: torch.device) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.tensor([1.0, 2.0, 3.0, 4.0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale.to(x.device)

    module = Scaled().eval()
    graphed = gw.graph(module)
    for i in range(6):
        agree(graphed, module, torch.randn(3, 4, device=device))
        if i == 2:
            module.scale[0] = 10
        if i == 4:
            module.scale.numpy()[1] = -3  # The tensor's version does not tell.


def test_python_s_state_on_a_new_way_is_no_way_for_a_graph(device: torch.device) -> None:
    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0:
                self.seen.append(len(self.seen))
                return x * 2
            return x + 1

    module, plain = Noting().eval(), Noting().eval()
    graphed = gw.graph(module)
    agree(graphed, plain, -torch.ones(3, device=device))
    agree(graphed, plain, torch.ones(3, device=device))
    with pytest.warns(RuntimeWarning, match="seen of Noting changes with every call"):
        agree(graphed, plain, torch.ones(3, device=device))
    agree(graphed, plain, torch.ones(3, device=device))
    assert module.seen == plain.seen


def test_what_differs_from_run_to_run_is_not_captured(device: torch.device) -> None:
    turns = functools.cache(itertools.count)  # nobody can reach it

    def turns_about(x: torch.Tensor) -> torch.Tensor:
        y = x * 2 if x.sum() > 0 else x
        return y.exp() if next(turns()) % 2 else y.sin()

    graphed = gw.graph(turns_about)
    with pytest.warns(RuntimeWarning, match="runs eagerly"):
        graphed(torch.ones(3, device=device))


@pytest.mark.usefixtures("one_thread")
def test_python_s_random_numbers_on_a_new_way_are_no_constant(device: torch.device) -> None:
    def draws(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x * float(np.random.rand())
        return x

    graphed = gw.graph(draws)
    agree(graphed, draws, -torch.ones(3, device=device))
    with pytest.warns(RuntimeWarning, match="runs eagerly"):
        results = [graphed(torch.ones(3, device=device)) for _ in range(12)]
    assert len({float(r[0]) for r in results}) == 12
    assert graphed._recent is None  # Given up, it is not looked at again.


def test_two_threads_get_their_own_answers(device: torch.device) -> None:
    graphed = gw.graph(keeps_a_tensor_over_breaks)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(30):
            x = torch.randn(3, 4, generator=generator).to(device)
            try:
                same(graphed(x.clone()), keeps_a_tensor_over_breaks(x))
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_graphs_of_one_pool_leave_each_other_s_memory_alone(device: torch.device) -> None:
    pool = gw.MemoryPool()
    fns = [keeps_a_tensor_over_breaks, returns_an_early_result, masks, decides, goes_on_until]
    graphed = [gw.graph(fn, pool=pool) for fn in fns]
    for _ in range(12):
        for fn, its in zip(fns, graphed, strict=True):
            agree(its, fn, torch.randn(3, 4, device=device))


def test_static_outputs_are_right_until_the_next_call(device: torch.device) -> None:
    graphed = gw.graph(returns_an_early_result, outputs="static")
    for _ in range(12):
        agree(graphed, returns_an_early_result, torch.randn(3, 4, device=device))
    assert tree_of(graphed).paths == 3


def test_a_pool_s_limit_holds_for_new_ways_too(device: torch.device) -> None:
    def grows(x: torch.Tensor) -> torch.Tensor:
        times = int(x[0].item())
        return torch.cat([x.expand(1 << 20, 4).contiguous() * i for i in range(times)]).sum(0)

    pool = gw.MemoryPool("128MiB")
    graphed = gw.graph(grows, pool=pool)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for times in (1, 2, 5, 1, 2, 5):
            agree(graphed, grows, torch.full((4,), float(times), device=device))
    assert any("limit" in str(warning.message) for warning in warned)
    assert 0 < pool.high_water <= 128 << 20
    assert pool.reserved <= 128 << 20


def test_many_graphs_in_segments_leave_memory_flat(device: torch.device) -> None:
    pool = gw.MemoryPool()
    seen = set()
    for _ in range(12):
        graphed = gw.graph(keeps_a_tensor_over_breaks, pool=pool)
        for i in range(6):
            torch.manual_seed(i)
            agree(graphed, keeps_a_tensor_over_breaks, torch.randn(3, 4, device=device))
        graphed.close()
        seen.add(pool.in_use)
    assert seen == {0}


def test_never_means_never(device: torch.device) -> None:
    graphed = gw.graph(decides, breaks="never")
    with pytest.warns(RuntimeWarning, match="runs eagerly"):
        graphed(torch.ones(3, 4, device=device))
    with pytest.raises(gw.OptionError, match="breaks is 'auto' or 'never'"):
        gw.graph(decides, breaks="always")  # type: ignore[call-overload]  # wrong on purpose


def test_a_captured_call_in_segments_has_no_replay(device: torch.device) -> None:
    graph = CapturedCall(decides, (torch.ones(3, 4, device=device),), {}, breaks="auto")
    graph.warm()
    graph.record()
    same(graph(torch.ones(3, 4, device=device)), decides(torch.ones(3, 4, device=device)))
    for use in (graph.replay, lambda: graph.outputs):
        with pytest.raises(gw.CaptureError, match="in segments"):
            use()
    with pytest.raises(gw.SignatureError):
        graph(torch.ones(3, 5, device=device))
    graph.close()
    with pytest.raises(gw.CaptureError, match="closed"):
        graph(torch.ones(3, 4, device=device))


def test_the_runner_of_tune_divides_what_runs_as_it_is_written(device: torch.device) -> None:
    class Early(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x.sum().item() if x[0] < 0 else decides(x)

    model, x = Early().eval(), torch.ones(4, device=device)
    built = GRAPH.wrap(Built(model, plain=True), (x,), {})
    assert "test_breaks.py" in built.notes[0]
    for _ in range(4):
        agree(built.call, model, torch.rand(4, device=device))

    def often() -> None:
        for _ in range(30):
            agree(built.call, model, -torch.rand(4, device=device))

    with pytest.warns(RuntimeWarning, match="runs eagerly by now"):
        often()
    agree(built.call, model, -torch.rand(4, device=device))
    with pytest.raises(gw.CaptureError):
        GRAPH.wrap(Built(model), (x,), {})  # A compiler's code cannot be looked into.


def test_autocast_casts_weights_once_a_call(device: torch.device) -> None:
    layer = nn.Linear(4, 4).to(device).eval()

    def twice(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        return layer(y.float()) if y.sum() > 0 else y

    graphed = gw.graph(twice)
    for i in range(8):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            agree(graphed, twice, torch.randn(3, 4, device=device))
        if i == 4:
            with torch.no_grad():
                layer.weight.mul_(2)
    assert tree_of(graphed).paths == 2


def test_new_weights_are_noticed_in_segments(device: torch.device) -> None:
    module = Counting().to(device).eval()
    plain = Counting().to(device).eval()
    graphed = gw.graph(module)
    for _ in range(4):
        plain.load_state_dict({k: v.clone() for k, v in module.state_dict().items()})
        for _ in range(4):
            agree(graphed, plain, torch.randn(3, 4, device=device))
        module.layer = nn.Linear(4, 4).to(device)


def test_overlapping_memory_is_refused_before_anything_happens(device: torch.device) -> None:
    shared = torch.zeros(4, device=device)

    def writes(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            x += shared
        return x * 2

    graphed = gw.graph(writes)
    agree(graphed, writes, -torch.ones(4, device=device))
    agree(graphed, writes, torch.ones(4, device=device))
    shared.fill_(1)
    expected = shared.clone()
    expected += expected
    result = graphed(shared)
    same(result, expected * 2)
    same(shared, expected)
    assert "shares memory" in graphed.explain()


def test_keyword_arguments_and_containers(device: torch.device) -> None:
    def mixes(x: torch.Tensor, *, pair: tuple[torch.Tensor, int], flag: bool) -> Any:
        y, n = pair
        chosen = x if (x > y).any() and flag else y
        return {"sum": chosen.sum(), "n": n, "both": [x + y, chosen]}

    graphed = gw.graph(mixes)
    for i in range(6):
        x, y = torch.randn(2, 3, device=device)
        agree(graphed, mixes, x, pair=(y - 3 * (i % 2), 7), flag=True)


@pytest.mark.parametrize("fn", WAYS, ids=lambda fn: fn.__name__)
def test_what_is_not_contiguous_is_right_too(fn: Fn, device: torch.device) -> None:
    graphed = gw.graph(fn)
    for _ in range(6):
        agree(graphed, fn, torch.randn(4, 3, device=device).T)


def views_by_another_name(x: torch.Tensor) -> Any:
    a = x.unsafe_chunk(2)[0]
    return a * 2 if x.sum() > 0 else a * 3


def writes_on_a_way_of_its_own(x: torch.Tensor) -> Any:
    if torch.rand((), device=x.device) > 0.5:
        x.mul_(2)
    return x + 1


def counts_a_list(x: torch.Tensor) -> Any:
    return x * len(x[0, :1].tolist()) if x.sum() > 0 else x


@pytest.mark.parametrize(
    "fn",
    [views_by_another_name, writes_on_a_way_of_its_own, counts_a_list],
    ids=lambda fn: fn.__name__,
)
def test_ways_that_are_easily_mistaken(fn: Fn, device: torch.device) -> None:
    graphed = gw.graph(fn)
    for _ in range(12):
        agree(graphed, fn, torch.randn(4, 3, device=device).T)


def test_warm_up_takes_one_way_only(device: torch.device) -> None:
    class Third(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("late", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls > 3:
                self.late += 1
                x.mul_(2)
            return x + 1

    module, plain = Third().to(device).eval(), Third().to(device).eval()
    graphed = gw.graph(module)
    for _ in range(6):
        agree(graphed, plain, torch.ones(3, device=device))
        same(module.late, plain.late)


def writes_through_numpy(x: torch.Tensor) -> Any:
    y = x * 2
    y.numpy()[0] = 7
    return y + 1


def goes_on_after_numpy(x: torch.Tensor) -> Any:
    y = x * 2
    v = y.numpy()
    y += 1
    return torch.from_numpy(v) + 0


def writes_through_dlpack(x: torch.Tensor) -> Any:
    y = x * 2
    torch.from_dlpack(y).add_(1)
    return y


@pytest.mark.parametrize("fn", [writes_through_numpy, goes_on_after_numpy, writes_through_dlpack])
@pytest.mark.parametrize("later", [False, True])
def test_memory_that_numpy_shares_is_not_written_to_in_a_graph(fn: Fn, later: bool) -> None:
    def call(x: torch.Tensor) -> Any:
        return x if later and x.sum() < 0 else fn(x)

    graphed = gw.graph(call)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for value in (-1, 1, 2, -1, 3):
            agree(graphed, call, torch.full((3,), float(value)))


def test_memory_of_other_code_is_not_taken_for_a_constant() -> None:
    settings = [1.0]

    def fn(x: torch.Tensor) -> torch.Tensor:
        made = torch.from_dlpack(np.full(3, settings[0], "f"))
        return x + made if x.sum() > 0 else x

    graphed = gw.graph(fn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for value in (-1, 1, 2, 3):
            settings[0] = float(value)
            agree(graphed, fn, torch.full((3,), float(value)))


def test_what_a_new_way_keeps_is_the_caller_s(device: torch.device) -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache: dict[str, torch.Tensor] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            if x.sum() > 0:
                return self.cache.setdefault("first", y) + x
            return x

    module, plain = Caching().eval(), Caching().eval()
    graphed = gw.graph(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for value in (-1, 1, 2, 3, 4):
            agree(graphed, plain, torch.full((3,), float(value), device=device))

    def fails(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if x.sum() > 0:
            raise KeyError(y)
        return y

    graphed, held = gw.graph(fails), []
    graphed(-torch.ones(3, device=device))
    for value in (1.0, 2.0, 3.0):
        with pytest.raises(KeyError) as raised:
            graphed(torch.full((3,), value, device=device))
        held.append(raised.value.args[0])
    assert [float(y[0]) for y in held] == [2.0, 4.0, 6.0]


def test_an_argument_that_is_memory_of_a_new_way_s_own(device: torch.device) -> None:
    shared = torch.ones(4, device=device)

    def fn(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            x += 1
            return x * shared
        return x * 2

    graphed = gw.graph(fn)
    agree(graphed, fn, -torch.ones(4, device=device))
    same(graphed(shared), torch.full((4,), 4.0, device=device))


def test_code_that_asks_for_a_capture_on_a_new_way(device: torch.device) -> None:
    def seems_captured() -> bool:
        try:
            return torch.cuda.is_current_stream_capturing()
        except RuntimeError:
            return False

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if seems_captured() else 3) if x.sum() > 0 else x

    graphed = gw.graph(fn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for value in (-1, 1, 1, -1, 2):
            agree(graphed, fn, torch.full((3,), float(value), device=device))


def test_what_no_graph_can_hold_on_a_new_way_is_eager(device: torch.device) -> None:
    class Opaque:
        def __init__(self, x: torch.Tensor) -> None:
            self.x, self.lock = x, threading.Lock()

    def opaque(x: torch.Tensor) -> Any:
        x += 1
        return Opaque(x) if x.sum() > 0 else x

    def sparse(x: torch.Tensor) -> Any:
        y = torch.sparse.mm(x.diag().to_sparse(), x[:, None])
        return y if x.sum() > 0 else x

    def late_sparse(x: torch.Tensor) -> Any:
        return torch.sparse.mm(x.diag().to_sparse(), x[:, None]) if x.sum() > 0 else x

    def reshapes(x: torch.Tensor) -> Any:
        if x.sum() > 0:
            x.unsqueeze_(0)
        return x + 1

    def branches(x: torch.Tensor) -> Any:
        if x.sum() > 0:
            return torch.cond(x[0] > 0, torch.sin, torch.cos, (x,))
        return x

    for fn in (opaque, sparse, late_sparse, reshapes, branches):
        graphed = gw.graph(fn)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graphed(torch.full((3,), -5.0, device=device))
            for _ in range(3):
                x, y = torch.ones(3, device=device), torch.ones(3, device=device)
                mine, its = graphed(x), fn(y)
                if isinstance(its, Opaque):
                    mine, its = mine.x, its.x
                same(mine, its)
                same(x, y)
        assert sum(graphed.statistics.eager.values()) >= 1, fn


def test_a_buffer_that_a_way_returns_is_the_buffer(device: torch.device) -> None:
    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("b", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b if x.sum() > 0 else x

    module = Returning().to(device).eval()
    graphed = gw.graph(module)
    for value in (-1.0, 1.0, 1.0, 1.0):
        result = graphed(torch.full((3,), value, device=device))
        if value > 0:
            result.add_(1)
    assert module.b.tolist() == [3.0, 3.0, 3.0]


def test_a_model_of_inference_mode_is_right(device: torch.device) -> None:
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, plain = Counting().to(device).eval(), Counting().to(device).eval()
        plain.load_state_dict(module.state_dict())
        graphed = gw.graph(module)
        for _ in range(6):
            agree(graphed, plain, torch.randn(3, 4, device=device))
            same(module.total, plain.total)


def test_what_a_way_has_set_up_once_is_no_state(device: torch.device) -> None:
    tables: dict[int, torch.Tensor] = {}

    def fn(x: torch.Tensor) -> torch.Tensor:
        if x.sum() < 0:
            return x
        if 3 not in tables:
            tables[3] = torch.arange(3, device=x.device).float()
        return x + tables[3]

    graphed = gw.graph(fn)
    for value in (-1.0, 1.0, 2.0, 3.0, -2.0, 4.0):
        agree(graphed, fn, torch.full((3,), value, device=device))
    assert graphed.statistics.eager == {}
    # What the new way has set up belongs to another state, in which both ways are recorded anew.
    assert graphed.statistics.captures == 2
    *_, last = graphed._entries.ready()
    assert last.graph.tree.paths == 2


def test_a_function_that_releases_its_graphs_on_a_new_way(device: torch.device) -> None:
    pool = gw.MemoryPool()

    def fn(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            pool.release()
        return x * 2

    graphed = gw.graph(fn, pool=pool)
    for value in (-1.0, 1.0, -1.0, 1.0):
        same(
            graphed(torch.full((3,), value, device=device)), torch.full((3,), 2 * value).to(device)
        )


def test_calls_with_breaks_are_audited_and_counted(device: torch.device) -> None:
    graphed = gw.graph(decides, audit=2)
    for i in range(8):
        agree(graphed, decides, torch.full((3, 4), 1.0 - 2 * (i % 3 == 0), device=device))
    assert graphed.statistics.audits == 4

    module, plain = Counting().to(device).eval(), Counting().to(device).eval()
    plain.load_state_dict(module.state_dict())

    def late(net: Counting) -> Fn:
        def call(x: torch.Tensor) -> torch.Tensor:
            y = net.layer(x)
            if x.sum() > 0:
                net.total += 1
                y = y + torch.rand_like(y)
            return y

        return call

    graphed = gw.graph(late(module), audit=1)
    for value in (-1.0, 1.0, 1.0, -1.0, 1.0):
        agree(graphed, late(plain), torch.full((3, 4), value, device=device))
        same(module.total, plain.total)

    one = numpy.zeros(2_000)  # which is too long to be watched

    def turns(x: torch.Tensor) -> torch.Tensor:
        y = x * 2 if float(one[0]) else x
        return y + 1 if y.sum() > 0 else y

    graphed = gw.graph(turns)
    graphed(torch.ones(3, device=device))
    one[0] = 1
    agree(graphed, turns, -torch.ones(3, device=device))
    assert graphed.statistics.hits == 1
    assert sum(graphed.statistics.eager.values()) == 1
    assert graphed.pool.in_use == 0


def test_seeding_on_a_new_way_is_no_way_for_a_graph(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(3, device=device)
        if x.sum() > 0:
            torch.manual_seed(5)
        return x + noise

    graphed = gw.graph(fn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for value in (-1.0, -1.0, 1.0, 1.0, 1.0):
            x = torch.full((3,), value, device=device)
            torch.manual_seed(1)
            expected = fn(x), torch.randn(2, device=device)
            torch.manual_seed(1)
            same((graphed(x), torch.randn(2, device=device)), expected)


def test_a_way_that_can_never_fit_evicts_nothing(device: torch.device) -> None:
    pool = gw.MemoryPool("64MiB", evict=True)

    def small(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def grows(x: torch.Tensor) -> torch.Tensor:
        if x[0] > 0:
            return torch.cat([x.expand(1 << 20, 4).contiguous() * i for i in range(5)]).sum(0)
        return x

    other, graphed = gw.graph(small, pool=pool), gw.graph(grows, pool=pool)
    other(torch.ones(4, device=device))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for value in (-1.0, 1.0, 1.0):
            agree(graphed, grows, torch.full((4,), value, device=device))
    assert other.statistics.graphs == 1


@pytest.mark.gpu
def test_a_copy_that_is_under_way_is_waited_for() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(20):
            y = (y @ y).clamp(-1, 1)
        h = (x.sum() + 0 * y.sum()).to("cpu", non_blocking=True)
        torch.cuda.synchronize()
        return y * 2 if h > 0 else y - 1

    graphed = gw.graph(fn)
    for i in range(8):
        x = torch.eye(512, device="cuda") * (1 if i % 2 else -1)
        agree(graphed, fn, x)


@pytest.mark.gpu
def test_what_the_host_computes_with_its_own_tensors_is_followed() -> None:
    class Host(nn.Module):
        def __init__(self, number: torch.Tensor, before: bool) -> None:
            super().__init__()
            self.number, self.before = number, before

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (self.number * 2).to(x.device) if self.before else x * self.number

    for shape, before in (((4,), True), ((), False), ((1,), True)):
        if shape == (4,) and not before:
            continue
        module = Host(torch.ones(shape), before).eval()
        graphed = gw.graph(module)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(4):
                agree(graphed, module, torch.randn(3, 4, device="cuda"))
                module.number.add_(1)


def test_no_garbage_is_collected_while_a_segment_is_recorded(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    end, found = RecordingTracer._end, []

    def noted(tracer: RecordingTracer, **given: Any) -> None:
        found.append(gc.isenabled())
        end(tracer, **given)

    monkeypatch.setattr(RecordingTracer, "_end", noted)
    agree(gw.graph(decides), decides, torch.randn(3, 4, device=device))
    assert found
    assert not any(found)
    assert gc.isenabled()


@pytest.mark.gpu
def test_a_capture_that_another_thread_has_broken_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, left = _CudaSegment.run, [2]

    def disturbed(segment: Any, func: Any, args: Any, kwargs: Any) -> Any:
        if left[0]:
            left[0] -= 1

            def synchronise() -> None:
                with contextlib.suppress(RuntimeError):
                    torch._C._cuda_synchronize()

            other = threading.Thread(target=synchronise)
            other.start()
            other.join()
        return plain(segment, func, args, kwargs)

    monkeypatch.setattr(_CudaSegment, "run", disturbed)
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).cuda().eval()

    def fn(x: torch.Tensor) -> torch.Tensor:
        return module(x) * 2 if x.sum() > 0 else module(x) - 1

    graphed = gw.graph(fn)
    for _ in range(6):
        agree(graphed, fn, torch.randn(3, 4, device="cuda"))
    assert left == [0]
    tree = tree_of(graphed)
    assert tree.given_up is None
    assert tree.root is not None
    assert len(list(tree.root.below())) == 3
