"""Draws from the host's generator: made again where nobody looks at them, else refused.

On the CPU they are made foreign to the recorder, as they are to a CUDA graph.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from foreign_draws import make_foreign
from torch import nn

import graphwright as gw
from graphwright.calls import host_generators, threads
from graphwright.graphs import captured_call, host_draws, observed_runs, warmup
from graphwright.graphs.captured_call import CapturedCall
from graphwright.graphs.host_draws import HostDraws
from graphwright.graphs.observed_runs import ObservedRuns
from graphwright.graphs.segments import tree
from graphwright.shapes import eligibility
from graphwright.shapes.family import ShapeFamily
from graphwright.training.callables import captured_pair

Fn = Callable[..., Any]
Switch = Callable[[pytest.MonkeyPatch], None]
REFUSED = "random numbers from a generator on the cpu; a graph would keep them"


@pytest.fixture(autouse=True)
def foreign(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        make_foreign(monkeypatch)


class LayerDrop(nn.Module):
    """Draws a number for each layer, as models of transformers do, and uses it in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            chance = torch.rand([])
            if self.training and chance < 0.5:
                continue
            x = layer(x)
        return x * self.scale


class Branching(LayerDrop):
    """Goes by a value between its layers, and draws more on one way than on the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if x.sum() > 0:
            torch.randn(3)
            torch.randperm(5)
            return x * 2
        x = x - 1
        torch.randint(7, (2,))
        if x.mean() > 100:
            return x
        torch.rand(2, dtype=torch.float64)
        return super().forward(x)


def keep_pace(graphed: Fn, fn: Fn, *inputs: torch.Tensor) -> None:
    """Check some calls against the function, and where they leave the host's generator."""
    with torch.no_grad():
        torch.manual_seed(3)
        expected = [(fn(x), torch.get_rng_state()) for x in inputs]
        torch.manual_seed(3)
        for x, (wanted, state) in zip(inputs, expected, strict=True):
            torch.testing.assert_close(graphed(x), wanted)
            assert torch.equal(torch.get_rng_state(), state), "the generator is elsewhere"


def inputs(device: torch.device, count: int = 4) -> list[torch.Tensor]:
    return [torch.randn(3, 4, device=device) for _ in range(count)]


def layer_drop(device: torch.device) -> LayerDrop:
    return LayerDrop().to(device).eval()


# What is made again.


@pytest.mark.parametrize("outputs", ["fresh", "static"])
def test_a_captured_call_draws(outputs: Any, device: torch.device) -> None:
    model = layer_drop(device)
    x, *others = inputs(device)
    before = torch.get_rng_state()
    graph = gw.capture(model, x, outputs=outputs)
    assert torch.equal(torch.get_rng_state(), before)
    assert graph.random
    keep_pace(graph, model, x, *others)


def test_a_replay_draws(device: torch.device) -> None:
    model, x = layer_drop(device), inputs(device)[0]
    graph = gw.capture(model, x)

    def replay(x: torch.Tensor) -> torch.Tensor:
        graph.inputs[0].copy_(x)
        graph.replay()
        return graph.outputs.clone()

    keep_pace(replay, model, *inputs(device))


def test_a_launcher_draws(device: torch.device) -> None:
    model, x = layer_drop(device), inputs(device)[0]
    graph = gw.capture(model, x)
    assert isinstance(graph, CapturedCall)
    launch = graph.launcher()
    assert launch is not None
    keep_pace(lambda x: launch((x,)), model, *inputs(device))


@pytest.mark.parametrize("breaks", ["auto", "never"])
@pytest.mark.parametrize("checks", ["full", "signature", "none"])
def test_a_graphed_module_draws(checks: Any, breaks: Any, device: torch.device) -> None:
    model = layer_drop(device)
    graphed = gw.graph(model, checks=checks, breaks=breaks)
    keep_pace(graphed, model, *inputs(device, 6))
    assert graphed.statistics.eager == {}
    assert graphed.statistics.captures == 1


def test_a_call_in_segments_draws_once_on_each_way(device: torch.device) -> None:
    model = Branching().to(device).eval()
    with torch.no_grad():
        for layer in model.layers:
            layer.weight.copy_(torch.eye(4))
            layer.bias.zero_()
    x = inputs(device)[0].abs()
    graphed = gw.graph(model)
    keep_pace(graphed, model, x, x + 1, -x, x, -x, x + 300, -x - 1, -x, x + 2)
    assert graphed.statistics.eager == {}


def test_a_call_with_a_hoisted_constant_draws(device: torch.device) -> None:
    table = torch.arange(4.0)  # On the host.

    def fn(x: torch.Tensor) -> torch.Tensor:
        torch.rand([])
        return x + table.to(x.device)

    graphed = gw.graph(fn)
    keep_pace(graphed, fn, *inputs(device))
    assert graphed.statistics.eager == {}


def test_dropout_on_the_device_goes_on_beside_draws_on_the_host(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("both are the host's")

    def fn(x: torch.Tensor) -> torch.Tensor:
        torch.rand([])
        return nn.functional.dropout(x, 0.5)

    graph = gw.capture(fn, inputs(device)[0])
    keep_pace(graph, fn, *inputs(device))


def test_a_capture_beside_other_threads_draws_nothing(device: torch.device) -> None:
    model, x = layer_drop(device), inputs(device)[0]
    before = torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        # Then nobody can tell who has drawn, and the state is not put back as a whole.
        patch.setattr(host_generators, "others_run", lambda: True)
        graph = gw.capture(model, x)
    assert torch.equal(torch.get_rng_state(), before), "the generator is elsewhere"
    keep_pace(graph, model, x)


def test_a_dropped_result_draws_nothing(device: torch.device) -> None:
    model = layer_drop(device)
    graphed = gw.graph(model)
    keep_pace(graphed, model, *inputs(device))
    model.scale = 2.0
    keep_pace(graphed, model, *inputs(device))


def test_padded_calls_draw_as_their_own_sizes_do(device: torch.device) -> None:
    model = layer_drop(device)
    graphed = gw.graph(model, buckets=gw.Buckets(batch=[4, 8]))
    xs = [torch.randn(n, 4, device=device) for n in (3, 4, 2, 3, 7, 8)]
    keep_pace(graphed, model, *xs)
    assert graphed.statistics.eager == {}
    assert graphed.statistics.padded == 4


def draws_a_row_each(x: torch.Tensor) -> torch.Tensor:
    torch.rand(x.shape[0])
    return x * 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_calls_that_draw_by_their_size_are_not_padded(device: torch.device) -> None:
    graphed = gw.graph(draws_a_row_each, buckets=gw.Buckets(batch=[4]))
    xs = [torch.randn(n, 4, device=device) for n in (3, 4, 2, 3, 4)]
    keep_pace(graphed, draws_a_row_each, *xs)
    assert graphed.statistics.padded == 0
    with pytest.raises(gw.PaddingError, match="that depend on the input sizes"):
        graphed.prepare([(xs[0],)])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_calls_that_draw_are_not_split(device: torch.device) -> None:
    model = layer_drop(device)
    graphed = gw.graph(model, buckets=gw.Buckets(batch=[4]), split=True)
    keep_pace(graphed, model, *[torch.randn(n, 4, device=device) for n in (4, 3, 8, 9)])
    assert graphed.statistics.split == 0


# What is refused.


def by_arithmetic(x: torch.Tensor) -> Any:
    return x * torch.rand(()).to(x.device)


def by_item(x: torch.Tensor) -> Any:
    return x * torch.rand(()).item()


def by_a_condition(x: torch.Tensor) -> Any:
    return x * 2 if torch.rand(()) < 2 else x


def by_tolist(x: torch.Tensor) -> Any:
    return x * max(torch.rand(2).tolist())


def by_a_list_that_matters_to_nobody(x: torch.Tensor) -> Any:
    torch.rand(2).tolist()
    return x * 2


def by_numpy(x: torch.Tensor) -> Any:
    return x * float(torch.rand(2).numpy()[0])


def by_its_address(x: torch.Tensor) -> Any:
    return x if torch.rand(2).data_ptr() else x * 2


def by_printing(x: torch.Tensor) -> Any:
    return x * len(f"{torch.rand(2)}")


def by_a_capsule(x: torch.Tensor) -> Any:
    capsule = torch._C._to_dlpack(torch.rand(2))
    return x * float(torch._C._from_dlpack(capsule)[0])


def by_c(x: torch.Tensor) -> Any:
    drawn = torch.rand(2)
    address = torch._C._data_address(drawn)  # No mode of PyTorch's sees this.
    return x * ctypes.c_float.from_address(address).value


def by_an_operation_alone(x: torch.Tensor) -> Any:
    with torch._C.DisableTorchFunction():  # As TorchScript runs them.
        torch.rand(2) + 1
    return x * 2


def by_returning_it(x: torch.Tensor) -> Any:
    return x * 2, torch.rand(2)


def by_drawing_into_memory(x: torch.Tensor) -> Any:
    torch.empty(2).uniform_()
    return x * 2


OTHER = torch.Generator().manual_seed(1)


def by_another_generator(x: torch.Tensor) -> Any:
    torch.rand(2, generator=OTHER)
    return x * 2


@functools.cache
def unseen() -> list[torch.Tensor]:
    return [torch.zeros(2)]


def by_keeping_it_unseen(x: torch.Tensor) -> Any:
    unseen()[0] = torch.rand(2)
    return x * 2


# What depends on these is found otherwise: by its values, or on the CPU as a read.
ELSEWHERE = (by_c, by_tolist)
USED = [
    by_arithmetic,
    by_item,
    by_a_condition,
    by_tolist,
    by_a_list_that_matters_to_nobody,
    by_numpy,
    by_its_address,
    by_printing,
    by_a_capsule,
    by_c,
    by_an_operation_alone,
    by_returning_it,
    by_drawing_into_memory,
    by_another_generator,
    by_keeping_it_unseen,
]


@pytest.mark.parametrize("fn", USED, ids=lambda fn: fn.__name__)
def test_a_call_that_looks_at_what_it_draws_is_refused(fn: Fn, device: torch.device) -> None:
    x = inputs(device)[0]
    before = torch.get_rng_state()
    with torch.no_grad(), pytest.raises(gw.CaptureError, match=REFUSED):
        gw.capture(fn, x)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("fn", USED, ids=lambda fn: fn.__name__)
def test_such_a_call_of_a_graphed_function_is_eager(fn: Fn, device: torch.device) -> None:
    graphed = gw.graph(fn)
    keep_pace(graphed, fn, *inputs(device))
    assert graphed.statistics.captures == 0
    assert REFUSED in graphed.explain()


class Keeping(nn.Module):
    """Keeps what it draws."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.drawn = torch.rand(2)
        return x * 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_kept_on_the_module_is_new_in_each_call(device: torch.device) -> None:
    mine, its = Keeping().eval(), Keeping().eval()
    graphed = gw.graph(mine)
    kept: list[torch.Tensor] = []
    wanted: list[torch.Tensor] = []

    def graphed_and_kept(x: torch.Tensor) -> torch.Tensor:
        result = graphed(x)
        kept.append(mine.drawn)
        return result

    def eager_and_kept(x: torch.Tensor) -> torch.Tensor:
        result = its(x)
        wanted.append(its.drawn)
        return result

    keep_pace(graphed_and_kept, eager_and_kept, *inputs(device))
    for a, b in zip(kept, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("uses", USED, ids=lambda fn: fn.__name__)
def test_a_way_on_which_a_draw_is_used_is_eager(uses: Fn, device: torch.device) -> None:
    def fn(x: torch.Tensor) -> Any:
        torch.rand(2)
        return x * 2 if x.sum() > 0 else uses(x)

    x = inputs(device)[0].abs()
    graphed = gw.graph(fn)
    keep_pace(graphed, fn, x, x, *[-x] * 10, x, -x)
    assert graphed.statistics.graphs == 0
    assert "random numbers from" in graphed.explain() or uses in ELSEWHERE


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_way_on_which_a_draw_is_kept_is_eager(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            torch.rand(2)
        else:
            unseen()[0] = torch.rand(2)
        return x * 2

    def with_kept(call: Fn) -> Fn:
        def both(x: torch.Tensor) -> torch.Tensor:
            unseen()[0] = torch.zeros(2)
            return torch.cat([call(x).flatten().cpu(), unseen()[0]])

        return both

    x = inputs(device)[0].abs()
    keep_pace(with_kept(gw.graph(fn)), with_kept(fn), x, x, -x, -x, x, -x)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_way_with_other_operations_before_it_is_eager(device: torch.device) -> None:
    calls.cache_clear()

    def fn(x: torch.Tensor) -> torch.Tensor:
        torch.rand([])
        y = x * 2 if next(calls()) % 1000 < 500 else x + x
        return y + 1 if y.sum() > 0 else y - 1

    x = inputs(device)[0].abs()
    graphed = gw.graph(fn)
    with torch.no_grad():
        graphed(x)
    for _ in range(500):
        next(calls())
    keep_pace(graphed, fn, x, -x, -x, x)


class Counting(LayerDrop):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def test_draws_and_buffers_go_on_together(device: torch.device) -> None:
    model, other = Counting().to(device).eval(), Counting().to(device).eval()
    other.load_state_dict(model.state_dict())
    graphed = gw.graph(model)
    keep_pace(graphed, other, *inputs(device))
    assert graphed.statistics.eager == {}


@functools.cache
def calls() -> Iterator[int]:
    return itertools.count()


def draws_more_at_first(x: torch.Tensor) -> torch.Tensor:
    torch.rand(2 if next(calls()) == 0 else 1)
    return x * 2


def test_a_call_that_draws_otherwise_in_another_run_is_refused(device: torch.device) -> None:
    calls.cache_clear()
    with torch.no_grad(), pytest.raises(gw.CaptureError, match=REFUSED):
        gw.capture(draws_more_at_first, inputs(device)[0])


def test_a_call_that_draws_otherwise_with_other_seeds_is_refused(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        torch.rand(1 if next(calls()) < 2 else 2)
        return x * 2

    calls.cache_clear()
    with torch.no_grad(), pytest.raises(gw.CaptureError, match=REFUSED):
        gw.capture(fn, inputs(device)[0])


def captured_in_segments(draws_more_from: float, x: torch.Tensor) -> None:
    """Capture a call that draws more from some run on."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        torch.rand(1 if next(calls()) < draws_more_from else 2)
        return x * 2 if x.sum() > 0 else x - 1

    calls.cache_clear()
    with torch.no_grad(), CapturedCall(fn, (x,), {}, breaks="auto") as graph:
        graph.warm()
        graph.record()


def test_all_runs_of_a_capture_in_segments_draw_the_same(device: torch.device) -> None:
    x = inputs(device)[0]
    captured_in_segments(math.inf, x)
    runs = next(calls())
    assert runs > 5
    for run in range(1, runs):
        with pytest.raises(gw.CaptureError):
            captured_in_segments(run, x)


def test_seeding_and_python_s_random_numbers_are_refused_as_ever(device: torch.device) -> None:
    def seeds(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        torch.rand([])
        return x * 2

    def draws_in_python(x: torch.Tensor) -> torch.Tensor:
        torch.rand([])
        random.random()
        return x * 2

    x = inputs(device)[0]
    with torch.no_grad():
        with pytest.raises(gw.CaptureError, match="seeds its random numbers"):
            gw.capture(seeds, x)
        if not threads.others_run():
            with pytest.raises(gw.CaptureError, match="Python's random"):
                gw.capture(draws_in_python, x)


def test_training_refuses_any_draw_on_the_host(device: torch.device) -> None:
    model = LayerDrop().to(device).eval()
    x = inputs(device)[0]
    with pytest.raises(gw.CaptureError, match=REFUSED):
        gw.make_graphed_callables(model, (x,))


# Each protection is needed.


def nothing_is_drawn_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(host_draws, "repeat", lambda draws: None)
    patch.setattr(tree, "repeat", lambda draws: None)


def uses_are_not_seen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostDraws, "use", lambda self, tree: None)
    other_numbers_are_not_tried(patch)


def functions_are_not_seen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(observed_runs, "UsesOf", lambda draws: contextlib.nullcontext())
    other_numbers_are_not_tried(patch)


def other_numbers_are_not_tried(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ObservedRuns, "_gives", lambda *args: True)


def what_lives_on_is_not_seen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostDraws, "used", lambda self: self._used)


def no_use_is_seen(patch: pytest.MonkeyPatch) -> None:
    uses_are_not_seen(patch)
    what_lives_on_is_not_seen(patch)


def ways_are_recorded_with_the_same_numbers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tree, "draw_others", lambda draws: None)


def draws_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(host_draws.Draw, "__eq__", lambda self, other: True)


def the_generator_is_not_put_back(patch: pytest.MonkeyPatch) -> None:
    for module in (warmup, captured_call):
        patch.setattr(module, "generator_kept", lambda draws: contextlib.nullcontext())


def graphs_that_draw_count_as_pure(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CapturedCall, "random", property(lambda s: False, lambda s, v: None), False)


def sizes_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShapeFamily, "_draws", lambda self, sizes: [])


def draws_are_split(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(eligibility, "is_foreign", lambda generator, device: False)


def training_draws_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(captured_pair, "warm", functools.partial(warmup.warm, draws_again=True))


def refused(fn: Fn) -> Fn:
    return functools.partial(test_a_call_that_looks_at_what_it_draws_is_refused, fn)


def way_with(fn: Fn) -> Fn:
    return functools.partial(test_a_way_on_which_a_draw_is_used_is_eager, fn)


PROTECTIONS: list[tuple[Switch, Fn]] = [
    (nothing_is_drawn_again, functools.partial(test_a_captured_call_draws, "fresh")),
    (nothing_is_drawn_again, test_a_replay_draws),
    (nothing_is_drawn_again, test_a_launcher_draws),
    (nothing_is_drawn_again, test_a_call_in_segments_draws_once_on_each_way),
    (nothing_is_drawn_again, test_a_call_with_a_hoisted_constant_draws),
    (uses_are_not_seen, refused(by_an_operation_alone)),
    (uses_are_not_seen, refused(by_arithmetic)),
    (uses_are_not_seen, refused(by_item)),
    (what_lives_on_is_not_seen, test_a_way_on_which_a_draw_is_kept_is_eager),
    (uses_are_not_seen, way_with(by_its_address)),
    (no_use_is_seen, way_with(by_returning_it)),
    (ways_are_recorded_with_the_same_numbers, way_with(by_c)),
    (functions_are_not_seen, refused(by_tolist)),
    (functions_are_not_seen, refused(by_its_address)),
    (other_numbers_are_not_tried, refused(by_c)),
    (what_lives_on_is_not_seen, refused(by_keeping_it_unseen)),
    (draws_are_not_compared, test_a_call_that_draws_otherwise_in_another_run_is_refused),
    (draws_are_not_compared, test_a_call_that_draws_otherwise_with_other_seeds_is_refused),
    (draws_are_not_compared, test_all_runs_of_a_capture_in_segments_draw_the_same),
    (the_generator_is_not_put_back, test_a_capture_beside_other_threads_draws_nothing),
    (graphs_that_draw_count_as_pure, test_a_dropped_result_draws_nothing),
    (sizes_are_not_compared, test_calls_that_draw_by_their_size_are_not_padded),
    (draws_are_split, test_calls_that_draw_are_not_split),
    (training_draws_again, test_training_refuses_any_draw_on_the_host),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("off", "check"), PROTECTIONS, ids=lambda each: getattr(each, "__name__", None)
)
def test_it_shows_without_its_protection(
    off: Switch, check: Fn, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    off(monkeypatch)
    try:
        check(device)
    except (Exception, pytest.fail.Exception) as error:
        print(f"{error!r}"[:300])
    else:
        pytest.fail("the check passes without its protection")
