"""What keeps a call from being captured is found at its line; where nothing does, nothing is."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the field's name for it

import graphwright as gw
from graphwright.calls.threads import others_run
from graphwright.checker import Severity
from graphwright.checker.rendering import summary, to_json, to_lines
from graphwright.checker.suggestions import chosen_on_the_gpu, made_once

Fn = Callable[..., Any]


def decides(x: torch.Tensor) -> Any:
    if x.sum() > 0:  # here
        return x * 2
    return x + 1


def waits_in_a_loop(x: torch.Tensor) -> Any:
    while x.abs().max() > 1:  # here
        x = x / 2
    return x


def asserts(x: torch.Tensor) -> Any:
    assert torch.isfinite(x).all(), "bad"  # here
    return x * 2


def reads_an_item(x: torch.Tensor) -> Any:
    return x * x.max().item()  # here


def reads_a_number(x: torch.Tensor) -> Any:
    return x * float(x[0, 0])  # here


def cuts_by_a_value(x: torch.Tensor) -> Any:
    n = (x[0] > 0).sum()
    return x[:, :n]  # here


def counts_by_a_value(x: torch.Tensor) -> Any:
    return torch.zeros(int(x[0, 0].abs()) + 1, device=x.device) + x[0, 0]  # here


def lists(x: torch.Tensor) -> Any:
    return x * len(x.tolist())  # here


def gathers(x: torch.Tensor) -> Any:
    return x * torch.tensor([x[0, 0], x[0, 1], 1.0, 2.0]).sum()  # here


def goes_to_the_host(x: torch.Tensor) -> Any:
    y = x.cpu()  # here
    return x, y


def goes_to_the_host_by_name(x: torch.Tensor) -> Any:
    y = x.to("cpu", torch.float64)  # here
    return x, y


def prints(x: torch.Tensor) -> Any:
    told = f"{x}"  # here
    return x * len(told)


def looks_for(x: torch.Tensor) -> Any:
    return x * (0.5 in x)  # here


def are_equal(x: torch.Tensor) -> Any:
    return x * torch.equal(x, x + 1)  # here


def masks(x: torch.Tensor) -> Any:
    return x[x > 0]  # here


def finds_places(x: torch.Tensor) -> Any:
    return torch.nonzero(x > 0)  # here


def finds_places_by_where(x: torch.Tensor) -> Any:
    return torch.where(x > 0)[0]  # here


def selects(x: torch.Tensor) -> Any:
    return torch.masked_select(x, x > 0)  # here


def is_unique(x: torch.Tensor) -> Any:
    return x.long().unique()  # here


def counts(x: torch.Tensor) -> Any:
    return torch.bincount(x.long().abs().flatten())  # here


def repeats(x: torch.Tensor) -> Any:
    n = torch.ones(x.shape[0], dtype=torch.long, device=x.device)
    return torch.repeat_interleave(x, n, dim=0)  # here


def writes_by_a_mask(x: torch.Tensor) -> Any:
    y, mask = x * 2, torch.zeros_like(x, dtype=torch.bool)
    mask[0] = True
    y[mask] = x[1]  # here
    return y


def makes_a_constant(x: torch.Tensor) -> Any:
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)  # here


def makes_a_number(x: torch.Tensor) -> Any:
    return x * torch.tensor(2.0, device=x.device)  # here


def makes_a_constant_by_name(x: torch.Tensor) -> Any:
    return x * torch.tensor(data=[1.0, 2.0, 3.0, 4.0], device=x.device)  # here


def moves_a_constant(x: torch.Tensor) -> Any:
    return x + torch.arange(4).to(x.device)  # here


def moves_a_constant_like(x: torch.Tensor) -> Any:
    return x + torch.linspace(0, 1, 4).to(x)  # here


def copies_a_constant(x: torch.Tensor) -> Any:
    y = torch.empty_like(x)
    y.copy_(torch.ones(4))  # here
    return x + y


def indexes_by_the_host(x: torch.Tensor) -> Any:
    return x[:, torch.arange(2)]  # here


def moves_what_the_host_has_drawn(x: torch.Tensor) -> Any:
    return x + torch.as_tensor(np.random.rand(4), dtype=x.dtype, device=x.device)  # here


def moves_what_came_from_there(x: torch.Tensor) -> Any:
    y = x.cpu()
    return x + (y + 1).to(x.device)  # here


def waits(x: torch.Tensor) -> Any:
    y = x * 2
    torch.cuda.synchronize()  # here
    return y


def uses_an_event(x: torch.Tensor) -> Any:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()  # here
    return x * 2


def draws_with_python(x: torch.Tensor) -> Any:
    return x * random.random()  # here


def draws_with_torch_on_the_host(x: torch.Tensor) -> Any:
    return x + torch.rand(()) * 2  # here


def asks_the_clock(x: torch.Tensor) -> Any:
    return x * (1 + 0 * time.perf_counter())  # here


def writes_to_its_argument(x: torch.Tensor) -> Any:
    x.add_(1)  # here
    return x * 2


def is_sparse(x: torch.Tensor) -> Any:
    return torch.sparse.mm(x.to_sparse(), x.T)  # here


def indexes_by_a_list(x: torch.Tensor) -> Any:
    return x[[0, 2]].exp()  # here


def writes_a_number_by_indices(x: torch.Tensor) -> Any:
    y, n = x * 2, torch.arange(3, device=x.device)
    y[n, n] = 1  # here
    return y


def multiplies_groups(x: torch.Tensor) -> Any:
    ends = torch.arange(1, 3, device=x.device, dtype=torch.int32)
    w = torch.ones(2, 4, 8, device=x.device)
    return F.grouped_mm(x, w, offs=ends)  # here


def moves_from_numpy(x: torch.Tensor) -> Any:
    return x + torch.from_numpy(np.ones(4, "f")).to(x.device)  # here


def moves_by_type(x: torch.Tensor) -> Any:
    return x * torch.arange(4).type_as(x)  # here


def chooses_a_number_of_the_host(x: torch.Tensor) -> Any:
    return torch.where(x > 0, x, torch.tensor(-1e9))  # here


def writes_a_mean_by_a_mask(x: torch.Tensor) -> Any:
    y = x * 2
    y[x > 0] = x.mean()  # here
    return y


def decomposes(x: torch.Tensor) -> Any:
    return torch.linalg.eigh(x.T @ x)[0]  # here


def seeds(x: torch.Tensor) -> Any:
    torch.manual_seed(torch.initial_seed() % 1000 + 1)  # here
    return x + torch.rand_like(x)


OBSTACLES: dict[Fn, tuple[str, Severity]] = {
    **dict.fromkeys(
        (
            decides,
            waits_in_a_loop,
            asserts,
            reads_an_item,
            reads_a_number,
            cuts_by_a_value,
            counts_by_a_value,
            lists,
            prints,
            gathers,
            looks_for,
            are_equal,
            multiplies_groups,
            decomposes,
        ),
        ("read", Severity.BREAKS),
    ),
    **dict.fromkeys(
        (goes_to_the_host, goes_to_the_host_by_name), ("copy to the host", Severity.BREAKS)
    ),
    **dict.fromkeys(
        (
            masks,
            finds_places,
            finds_places_by_where,
            selects,
            is_unique,
            counts,
            repeats,
            writes_by_a_mask,
            writes_a_mean_by_a_mask,
        ),
        ("dynamic shape", Severity.BREAKS),
    ),
    **dict.fromkeys(
        (
            makes_a_constant,
            makes_a_number,
            makes_a_constant_by_name,
            moves_a_constant,
            moves_a_constant_like,
            copies_a_constant,
            indexes_by_the_host,
            indexes_by_a_list,
            writes_a_number_by_indices,
            moves_from_numpy,
            moves_by_type,
            chooses_a_number_of_the_host,
        ),
        ("copy of a constant", Severity.HOISTED),
    ),
    **dict.fromkeys(
        (moves_what_the_host_has_drawn, moves_what_came_from_there),
        ("copy of a host value", Severity.BREAKS),
    ),
    **dict.fromkeys((waits, uses_an_event), ("synchronisation", Severity.BLOCKS)),
    **dict.fromkeys(
        (draws_with_python, draws_with_torch_on_the_host), ("host randomness", Severity.BLOCKS)
    ),
    seeds: ("seeding", Severity.BLOCKS),
    asks_the_clock: ("clock", Severity.FROZEN),
    writes_to_its_argument: ("in-place change", Severity.SLOW),
    is_sparse: ("memory", Severity.BLOCKS),
}


def marked(fn: Fn) -> tuple[int, str]:
    """The line that a function marks, and its text."""
    lines, first = inspect.getsourcelines(fn)
    (offset,) = [n for n, line in enumerate(lines) if "# here" in line]
    return first + offset, lines[offset].strip()


@pytest.mark.parametrize("fn", OBSTACLES, ids=lambda fn: fn.__name__)
def test_an_obstacle_is_found_at_its_line(fn: Fn, device: torch.device) -> None:
    x = torch.randn(3, 4, device=device)
    x[0, 0] = 0.5
    kept = x.clone()
    kind, severity = OBSTACLES[fn]
    line, source = marked(fn)
    torch.manual_seed(1)
    before = torch.random.get_rng_state(), random.getstate()
    found = gw.check(fn, (x,))
    here = [f for f in found if f.kind == kind and f.place.line == line]
    assert here, found
    assert here[0].severity is severity
    assert here[0].place.file.endswith("test_check.py")
    assert here[0].place.source == source
    assert here[0].fix
    assert "torch/" not in "".join(f.place.file for f in found)
    assert torch.equal(x, kept)
    assert torch.equal(before[0], torch.random.get_rng_state())
    if not others_run():  # Else nobody can tell who has drawn.
        assert before[1] == random.getstate()
    if severity.stops:
        stops = [f for f in found if f.severity.stops]
        assert stops[0].place.line <= line


@functools.cache
def calls() -> Iterator[int]:
    return itertools.count()


def test_draws_that_other_runs_do_not_make_cannot_be_made_again(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> Any:
        torch.rand(2 if next(calls()) == 0 else 1)
        return x.exp() * 2 + 1

    calls.cache_clear()
    found = gw.check(fn, (torch.randn(3, 4, device=device),))
    assert [f.kind for f in found if f.severity.stops] == ["host randomness"]
    assert not gw.check(fn, (torch.randn(3, 4, device=device),))


@pytest.mark.gpu
@pytest.mark.parametrize("fn", OBSTACLES, ids=lambda fn: fn.__name__)
def test_what_stops_a_capture_does_and_the_rest_does_not(fn: Fn) -> None:
    x = torch.randn(3, 4, device="cuda")
    x[0, 0] = 0.5
    # A block is not warmed up, which is where capture() refuses these.
    of_warm_up = ("host randomness", "changing state")
    found = gw.check(fn, (x.cpu(),))
    stops = [f for f in found if f.severity.stops and f.kind not in of_warm_up]
    fn(x.clone())
    try:
        with gw.capturing():
            fn(x.clone())
        raised = None
    except gw.CaptureError as error:
        raised = error
    assert (raised is not None) == bool(stops), raised
    if raised is not None and raised.where is not None:
        assert raised.where.endswith(f"test_check.py:{stops[0].place.line}")


def masked_fill(x: torch.Tensor) -> Any:
    y = x * 2
    y[x > 0] = 0.0
    return torch.where(x > 0, x, y) + F.one_hot(torch.zeros_like(x, dtype=torch.long), 3)[..., 0]


def made_there(x: torch.Tensor) -> Any:
    y = torch.arange(4, device=x.device) + x.new_zeros(4) + torch.zeros_like(x)
    y = y + torch.as_tensor(x, dtype=torch.float32) + torch.asarray(obj=x)
    return F.dropout(y, 0.5) + torch.rand(4, device=x.device) + torch.full_like(x, 2.0)


def sized(x: torch.Tensor) -> Any:
    n = torch.ones(x.shape[0], dtype=torch.long, device=x.device)
    return torch.repeat_interleave(x, n, dim=0, output_size=3) * len(x) * x.shape[1]


def on_its_device(x: torch.Tensor) -> Any:
    with torch.device(x.device):
        y = torch.ones(4) * torch.eye(4)
    if x.is_cuda and x.device.type == "cuda":
        y = y * 2
    return (x.to(x.device) @ y.to(torch.float32)).contiguous()


def branches_on_the_host(x: torch.Tensor) -> Any:
    n = torch.tensor([2, 1]).max()
    return x * 2 if n > 1 else x[: int(n)] * 1


def warned(x: torch.Tensor) -> Any:
    y = F.scaled_dot_product_attention(x[None], x[None], x[None])
    return y, F.layer_norm(x, (4,)), x.flatten()[torch.zeros(2, dtype=torch.long, device=x.device)]


def mapped(x: torch.Tensor) -> Any:
    return torch.vmap(lambda row: row * row.sum())(x).exp() + x


def joins_nothing(x: torch.Tensor) -> Any:
    return torch.cat([torch.tensor([], device=x.device), x.flatten()]).exp() + 1


@torch.jit.script
def script(x: torch.Tensor) -> torch.Tensor:
    return x.exp() + torch.arange(4, device=x.device)


def scripted(x: torch.Tensor) -> Any:
    return script(x) * 2


@functools.lru_cache
def table(n: int, device: torch.device) -> torch.Tensor:
    return torch.arange(n, device=device).float()


def looks_up(x: torch.Tensor) -> Any:
    return x.exp() + table(4, x.device)


CLEAN = (
    mapped,
    joins_nothing,
    scripted,
    looks_up,
    masked_fill,
    made_there,
    sized,
    on_its_device,
    branches_on_the_host,
    warned,
)


@pytest.mark.parametrize("fn", CLEAN, ids=lambda fn: fn.__name__)
def test_what_can_be_captured_is_no_finding(fn: Fn, device: torch.device) -> None:
    found = gw.check(fn, (torch.randn(3, 4, device=device),))
    assert [f for f in found if f.kind != "small"] == []


@pytest.mark.gpu
@pytest.mark.parametrize("fn", CLEAN, ids=lambda fn: fn.__name__)
def test_what_is_no_finding_is_captured(fn: Fn) -> None:
    x = torch.randn(3, 4, device="cuda")
    fn(x)
    with gw.capturing():
        fn(x)


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0
        self.seen: list[int] = []
        self.scale = torch.tensor(2.0)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor, *, count: bool = False, scale: bool = False) -> Any:
        if count:
            self.calls += 1
            self.seen.append(self.calls)
            return self.linear(x) * self.calls
        if scale:
            return self.linear(x) * self.scale.to(x.device)
        self.count += 1
        return self.linear(x).relu() + self.count


def kinds(found: list[gw.Finding], *, small: bool = False) -> list[str]:
    return [f"{f.severity} {f.kind}" for f in found if small or f.kind != "small"]


def test_state_that_changes_is_named_and_put_back(device: torch.device) -> None:
    model = Stateful().eval().to(device)
    x = torch.randn(3, 4, device=device)
    found = gw.check(model, (x,), {"count": True})
    assert kinds(found) == ["blocks changing state", "frozen changing number"]
    assert "attribute seen of Stateful" in found[0].what
    assert "self.linear(x) * self.calls" in found[1].place.source
    assert (model.calls, model.seen) == (0, [])
    found = gw.check(model, (x,))
    assert kinds(found) == ["slow in-place change"]
    assert "the buffer count" in found[0].what
    assert float(model.count) == 0


def test_a_tensor_that_is_no_buffer_stays_on_the_host(device: torch.device) -> None:
    model = Stateful().eval().to(device)
    found = gw.check(model, (torch.randn(3, 4, device=device),), {"scale": True})
    assert kinds(found) == ["hoisted copy of a constant"]
    assert found[0].place.expression == "self.scale.to(x.device)"


def test_what_is_kept_on_the_gpu_is_there_in_later_runs(device: torch.device) -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.table: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> Any:
            if self.table is None:
                self.table = torch.arange(4, device=x.device).float().cos()
            return (self.linear(x) * self.table).exp()

    model = Rotary().eval().to(device)
    assert kinds(gw.check(model, (torch.randn(3, 4, device=device),))) == []
    assert model.table is None


def test_caches_keep_nothing_that_was_said_to_be_on_a_gpu() -> None:
    @functools.lru_cache
    def kept(n: int, device: torch.device) -> torch.Tensor:
        return torch.arange(n, device=device).float()

    found = gw.check(lambda x: x.exp() + kept(4, x.device) + 1, (torch.randn(3, 4),))
    assert kinds(found) == []
    assert kept.cache_info().currsize == 0


def test_packed_sequences_belong_half_on_the_host(device: torch.device) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(4, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> Any:
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True)
            return self.rnn(packed)[1]

    found = gw.check(Packed().eval().to(device), (torch.randn(2, 3, 4, device=device),))
    assert [f for f in found if f.severity is Severity.BLOCKS] == []


@pytest.mark.parametrize(
    ("expression", "source", "code"),
    [
        ("mask.all()", "if mask.all():", "torch.where(mask.all(), a, b)"),
        ("ok.all()", "assert ok.all()", "torch._assert_async(ok.all())"),
        ("a.any() and b.any()", "if a.any() and b.any():", ""),
        ("max([a, b])", "c = max([a, b])", ""),
        ("a in b", "if a in b:", ""),
        ("if x", "if x", ""),
    ],
)
def test_conditions_get_code_only_where_it_would_run(
    expression: str, source: str, code: str
) -> None:
    assert chosen_on_the_gpu(expression, source) == code


@pytest.mark.parametrize(
    ("expression", "made"),
    [
        ("torch.tensor([1.0], device=x.device)", "torch.tensor([1.0])"),
        ("torch.arange(4).to(x)", "torch.arange(4)"),
        ("torch.arange(n).to(x)", None),
        ("y[[2, 0]]", None),
        ("z.copy_(torch.ones(8))", None),
        ("self.scale.to(x.device)", None),
    ],
)
def test_constants_get_code_only_where_it_would_run(expression: str, made: str | None) -> None:
    code = made_once(expression)
    assert code == ("" if made is None else code)
    assert made is None or f'"constant", {made}, persistent' in code


def test_an_argument_on_the_host_beside_others_on_the_gpu() -> None:
    def mixed(x: torch.Tensor) -> Any:
        return x * 2 + x.exp() + torch.arange(4)

    found = gw.check(mixed, (torch.randn(3, 4),))
    assert kinds(found) == ["blocks mixed devices"]


@pytest.mark.gpu
def test_an_argument_that_is_copied_to_the_gpu() -> None:
    def moves(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x * 2 + x.exp() + y.to(x.device)

    found = gw.check(moves, (torch.randn(3, 4, device="cuda"), torch.randn(4)))
    assert kinds(found) == ["slow copy of an input"]
    found = gw.check(moves, (torch.randn(3, 4, device="cuda"), torch.randn(4).pin_memory()))
    assert kinds(found) == ["slow copy of an input"]


def test_other_operations_in_another_run_are_found(device: torch.device) -> None:
    turns = [0]

    def alternates(x: torch.Tensor) -> Any:
        turns[0] += 1
        y = x.exp() if turns[0] % 2 else x.log()
        return y * 2 + x

    found = gw.check(alternates, (torch.rand(3, 4, device=device) + 1,))
    assert "blocks other operations" in kinds(found)
    (finding,) = [f for f in found if f.kind == "other operations"]
    assert "y = x.exp() if" in finding.place.source


def test_a_generator_of_its_own_is_followed(device: torch.device) -> None:
    generator = torch.Generator(device)

    def draws(x: torch.Tensor) -> Any:
        y = torch.empty_like(x)
        return x.exp() * 2 + y.normal_(generator=generator)

    assert kinds(gw.check(draws, (torch.randn(3, 4, device=device),))) == []


def test_hooks_and_graphs_inside_and_little_work(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval().to(device)
    model[1].register_forward_hook(lambda module, args, out: out * 2)
    x = torch.randn(3, 4, device=device)
    (finding,) = gw.check(model, (x,))
    assert (finding.kind, finding.severity) == ("hook", Severity.FROZEN)
    assert "register_forward_hook" in finding.place.source
    inner = gw.capture(nn.Linear(4, 4).eval().to(device), x)
    found = gw.check(lambda x: inner(x).exp() * 2 + 1, (x,))
    assert kinds(found) == ["blocks nested capture"]
    graphed = gw.graph(nn.Linear(4, 4).eval().to(device))
    assert kinds(gw.check(lambda x: graphed(x).exp() * 2 + 1, (x,))) == []
    assert kinds(gw.check(torch.relu, (x,)), small=True) == ["slow small"]


def test_what_asks_whether_a_capture_is_under_way(device: torch.device) -> None:
    def asks(x: torch.Tensor) -> Any:
        return x.exp() + (1 if torch.cuda.is_current_stream_capturing() else 2) + x

    def fails(x: torch.Tensor) -> Any:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not here")
        return x * 2

    x = torch.randn(3, 4, device=device)
    assert kinds(gw.check(asks, (x,))) == ["blocks another way"]
    (finding,) = gw.check(fails, (x,))
    assert (finding.kind, finding.severity) == ("another way", Severity.BLOCKS)
    assert "raise RuntimeError" in finding.place.source
    assert "not here" in finding.what


def test_a_model_that_names_a_gpu_is_checked_without_one() -> None:
    def there(x: torch.Tensor) -> Any:
        return (x.to("cuda:0") + torch.ones(4, device="cuda")).cuda().exp() * x.get_device()

    assert kinds(gw.check(there, (torch.randn(3, 4),))) == []


def test_a_way_that_only_a_gpu_has_is_not_insisted_on() -> None:
    def apart(x: torch.Tensor) -> Any:
        if x.is_cuda:
            return torch.ops.aten._cudnn_init_dropout_state(0.5, True, 1, device=x.device)
        return (x.exp() + torch.ones(4, device=x.device)).sum().item()

    assert kinds(gw.check(apart, (torch.randn(3, 4),))) == ["breaks read"]


def test_what_happens_often_is_told_once_with_its_count(device: torch.device) -> None:
    def often(x: torch.Tensor) -> Any:
        for row in range(3):
            x = x * x[row, 0].item()
        return x

    (finding,) = gw.check(often, (torch.randn(3, 4, device=device),))
    assert finding.count == 3
    assert "(3 times)" in str(finding)


@pytest.mark.parametrize("wrong", [lambda: gw.check(3), lambda: gw.check(torch.relu, runs=1)])  # type: ignore[arg-type]  # that is the point
def test_bad_options_are_refused(wrong: Fn) -> None:
    with pytest.raises(gw.OptionError):
        wrong()


def test_a_call_that_raises_by_itself_is_no_finding(device: torch.device) -> None:
    with pytest.raises(gw.ModelFailed, match=r"test_check\.py"):
        gw.check(lambda x: x @ x, (torch.randn(3, 4, device=device),))


def test_findings_as_text() -> None:
    found = gw.check(decides, (torch.randn(3, 4),))
    line, _ = marked(decides)
    place = f"tests/checker/test_check.py:{line}:8"
    assert to_lines(found).startswith(f"{place}: breaks: bool(tensor) decides")
    assert "Write: torch.where(x.sum() > 0, a, b)" in to_lines(found)
    saved = json.loads(to_json("decides", found))
    assert (saved["schema"], saved["schema_version"]) == ("graphwright.check", 2)
    assert saved["findings"][0]["place"]["expression"] == "x.sum() > 0"
    assert (
        summary("decides", found)
        == "decides: 1 break. A plain capture fails; graph() divides the call."
    )
    assert "found nothing" in summary("decides", [])


def test_equal_code_in_two_files_is_told_apart(tmp_path: Path) -> None:
    text = "import torch\n\n\ndef reads(x):\n    return x * float(x.sum())\n"
    for name in ("one", "other"):
        file = tmp_path / f"{name}.py"
        file.write_text(text, encoding="utf-8")
        space: dict[str, Any] = {}
        exec(compile(text, str(file), "exec"), space)
        (finding,) = gw.check(space["reads"], (torch.ones(3),))
        assert finding.place.file.endswith(f"{name}.py")
