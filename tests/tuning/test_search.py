"""What is tried next, and what is not tried since it cannot win."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.calls.snapshots import Call
from graphwright.evaluation.host_floor import host_seconds
from graphwright.evaluation.measurement import Measurement
from graphwright.report.report import Report
from graphwright.report.result import Row, Status
from graphwright.strategies.base import Availability, Candidate
from graphwright.strategies.registry import (
    default_candidates,
    kernels_of,
    parse_candidates,
    without,
)
from graphwright.tuning.screening import Screening, Terms
from graphwright.tuning.search import Search
from graphwright.tuning.tuner import MOST_BUDGET_S, Tuning

CPU, GPU = torch.device("cpu"), torch.device("cuda")
EAGER_S = 1e-3


def row(name: str, seconds: float, status: Status = Status.OK) -> Row:
    """A row that takes these seconds where eager takes EAGER_S."""

    def of(value: float) -> Measurement:
        return Measurement(((value,) * 4,) * 6, (value,) * 6)

    known = status in (Status.OK, Status.SLOWER)
    return Row(
        name,
        status,
        screening=of(seconds) if known else None,
        baseline=of(EAGER_S) if known else None,
    )


def search_of(
    device: torch.device, rows: list[Row], names: str = "", objective: str = "latency", **given: Any
) -> Search:
    facts = {name: given.pop(name) for name in ("host_s", "input_bytes") if name in given}
    report = Report("model", ["x"], objective, rows, {}, **facts)
    waiting = (
        parse_candidates(names.split(","), ())
        if names
        else default_candidates(nn.Linear(2, 2), device, ())
    )
    known = {each.strategy for each in rows}
    search = Search(report, device, waiting, **given)
    search.waiting = [each for each in waiting if each.name not in known]
    return search


def left_out(search: Search) -> set[str]:
    return {each.name for each in search.waiting if search.cannot_win(each)}


def test_kernels_are_named_by_what_computes_them() -> None:
    names = {
        "eager:inference_mode": "eager",
        "torchscript": "eager",
        "torchscript:freeze": "torchscript:freeze",
        "channels_last+inductor+graph": "channels_last+inductor",
        "channels_last": "channels_last",
    }
    for name, kernels in names.items():
        assert kernels_of(parse_candidates([name], ())[0]) == kernels


def test_where_the_host_is_the_limit_a_graph_of_the_same_kernels_stands_for_them() -> None:
    rows = [row("eager", EAGER_S), row("eager+graph", 0.2e-3)]
    search = search_of(GPU, rows)
    out = left_out(search)
    assert {"eager:no_grad", "eager:inference_mode", "torchscript", "inductor", "fused"} <= out
    assert out.isdisjoint(
        {"inductor+graph", "inductor:reduce-overhead", "onnxruntime", "torchscript:fuser"}
    )
    assert search.cannot_win(parse_candidates(["inductor"], ())[0]) == (
        "cannot win: inductor+graph runs the same kernels as a graph, and the host is the limit "
        "here (eager takes 1.00 ms, and 200 µs in a graph)"
    )
    while chosen := search.choose(3):
        assert not out & {each.name for each in chosen}
    assert {each.name for each, _ in search.rest()} == out


def test_unsteady_figures_still_show_that_the_host_is_the_limit() -> None:
    graphed = row("eager+graph", 0.2e-3)
    graphed.unsteady = "of eager beside it, its rounds disagree by a factor of 2.0"
    assert {"inductor", "fused", "torchscript"} <= left_out(
        search_of(GPU, [row("eager", EAGER_S), graphed])
    )
    # Its slowest rounds are not faster than the fastest that eager ever was.
    graphed.baseline = replace(row("eager", EAGER_S).baseline, latency=((0.21e-3,) * 4,) * 6)
    assert not left_out(search_of(GPU, [row("eager", EAGER_S), graphed]))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"rows": [row("eager", EAGER_S)]}, "no graph is known to work"),
        (
            {"rows": [row("eager", EAGER_S), row("eager+graph", 0, Status.FAILED)]},
            "the model cannot be captured",
        ),
        (
            {"rows": [row("eager", EAGER_S), row("eager+graph", 0.95e-3)]},
            "the GPU is the limit",
        ),
        ({"input_bytes": 100 << 20}, "copies of inputs may take longer than the host"),
        ({"objective": "memory"}, "time says nothing of memory"),
        ({"objective": "cold_start"}, "nor of the first answer"),
        ({"exhaustive": True}, "all is wanted"),
        ({"in_order": True}, "all was named"),
    ],
)
def test_otherwise_all_is_tried(changed: dict[str, Any], why: str) -> None:
    given = {"rows": [row("eager", EAGER_S), row("eager+graph", 0.2e-3)], **changed}
    search = search_of(GPU, **given)
    assert not left_out(search), why


def test_what_a_graph_may_stand_for_waits_until_that_is_known() -> None:
    names = "fused,eager+graph,fused+graph,inductor,onnxruntime"
    rows = [row("eager", EAGER_S)]
    search = search_of(GPU, rows, names)
    first = {each.name for each in search.choose(9)}
    assert first == {"eager+graph", "fused+graph", "inductor", "onnxruntime"}
    assert search.choose(9) == []  # What is under way decides.
    rows += [row("inductor", 0.9e-3), row("onnxruntime", 0.9e-3)]
    rows += [row("eager+graph", 0.95e-3), row("fused+graph", 0.5e-3)]
    assert [each.name for each in search.choose(9)] == ["fused"]
    assert {each.name for each in search_of(CPU, [row("eager", EAGER_S)], names).choose(9)} == {
        *names.split(",")
    }


def test_what_shares_a_build_comes_together() -> None:
    names = "fused,onnxruntime,inductor,fused+graph,inductor+graph"
    rows = [row("eager", EAGER_S), row("eager+graph", 0.95e-3)]
    search = search_of(GPU, rows, names, exhaustive=True)
    first = [each.name for each in search.choose(2)]
    assert sorted(first) == ["fused", "fused+graph", "inductor", "inductor+graph"]
    assert [each.name for each in search.choose(2)] == ["onnxruntime"]
    assert search.choose(2) == []


def test_what_a_failing_graph_stood_for_is_tried_after_all() -> None:
    rows = [row("eager", EAGER_S), row("eager+graph", 0.2e-3)]
    search = search_of(GPU, rows, "inductor,inductor+graph,fused,fused+graph")
    assert {each.name for each in search.choose(9)} == {"inductor+graph", "fused+graph"}
    rows += [row("inductor+graph", 0, Status.FAILED), row("fused+graph", 0.1e-3)]
    assert [each.name for each in search.choose(9)] == ["inductor"]
    assert [each.name for each, _ in search.rest()] == ["fused"]


def test_eagers_kernels_are_left_out_where_others_are_faster_than_these_alone() -> None:
    rows = [row("eager", EAGER_S), row("eager:no_grad", 0.9e-3), row("onnxruntime", 0.5e-3)]
    search = search_of(CPU, rows, "eager:inference_mode,torchscript,fused", host_s=0.2e-3)
    assert left_out(search) == {"eager:inference_mode", "torchscript"}
    why = search.cannot_win(search.waiting[0])
    assert why == (
        "cannot win: it runs eager's kernels, which alone take at least 665 µs of eager's 1.00 ms, "
        "and onnxruntime takes 500 µs"
    )
    # The host could do without what it needs: 0.9 - 0.5 ms.
    assert not left_out(replace(search, report=replace(search.report, host_s=0.5e-3)))
    assert not left_out(replace(search, report=replace(search.report, host_s=None)))
    rows[1] = row("eager:no_grad", 0, Status.FAILED)
    assert not left_out(search)


def test_the_most_promising_comes_first_and_what_was_found_counts() -> None:
    rows = [row("eager", EAGER_S)]
    search = search_of(GPU, rows, "inductor+graph,fused+graph,inductor:freeze+graph,eager+graph")
    assert search.choose(1)[0].name == "eager+graph"
    rows.append(row("eager+graph", 0.3e-3))
    assert search.choose(1)[0].name == "fused+graph"
    rows.append(row("fused+graph", 0.25e-3))
    names = "aot_autograd+graph,inductor:freeze+graph"
    failed = [*rows, row("inductor+graph", 0, Status.FAILED)]
    found = [*rows, row("inductor+graph", 0.1e-3)]
    orders = []
    for known in (failed, found):
        again = search_of(GPU, known, f"{names},inductor+graph")
        orders.append([each.name for each in again.choose(9)])
    assert orders == [
        ["aot_autograd+graph", "inductor:freeze+graph"],
        ["inductor:freeze+graph", "aot_autograd+graph"],
    ]


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
@pytest.mark.parametrize("best", [1.0, 0.5, 0.1])
def test_what_costs_little_comes_before_what_takes_long(device: torch.device, best: float) -> None:
    rows = [row("eager", EAGER_S), row("torchscript:optimize", best * EAGER_S)]
    search = search_of(device, rows)
    order = [each for each in search.choose(99) if not search.cannot_win(each)]
    cheap = [search.is_cheap(each) for each in order]
    assert cheap == sorted(cheap, reverse=True)
    assert True in cheap
    assert False in cheap


def test_nothing_that_costs_little_is_left_out_at_the_default_budget() -> None:
    """As time goes by in a search on a CPU, where what is chosen takes its usual time."""
    rows = [row("eager", EAGER_S)]
    search = search_of(CPU, rows)
    wanted = {each.name for each in search.waiting if search.is_cheap(each)}
    left_s = search.one_after_the_other_s()
    assert 8 + left_s < 0.8 * MOST_BUDGET_S["cpu"], "it is no default budget any more"
    tried: set[str] = set()
    while (chosen := search.choose(1, left_s)) and left_s > 0:
        tried |= {each.name for each in chosen}
        rows += [row(each.name, EAGER_S) for each in chosen]
        left_s -= max(map(search.set_up_s, chosen)) + 2.0
    assert wanted <= tried
    assert {"inductor", "onnxruntime"} <= tried


def test_what_an_unsteady_row_gained_says_nothing_of_its_compiler() -> None:
    names = "inductor:freeze+graph,aot_autograd,inductor+graph"
    unsteady = row("inductor+graph", 3e-3)
    unsteady.unsteady = "its rounds disagree by a factor of 3.0"
    beside, steady = (
        search_of(GPU, [row("eager", EAGER_S), known], names).choose(1)
        for known in (unsteady, row("inductor+graph", 3e-3))
    )
    assert [each.name for each in beside] == ["inductor:freeze+graph"]
    assert [each.name for each in steady] == ["aot_autograd"]


def test_a_compiler_whose_kernels_did_well_in_a_graph_is_tried_without_one_soon() -> None:
    rows = [row("eager", EAGER_S), row("eager+graph", 1.1e-3), row("inductor+graph", 0.7e-3)]
    names = "eager+graph,inductor+graph,torchscript:fuser,fused,aot_autograd,inductor"
    search = search_of(GPU, rows, names, objective="throughput", input_bytes=1 << 30)
    assert [each.name for each in search.choose(1)] == ["inductor"]


def test_what_there_is_no_time_to_set_up_is_not_begun() -> None:
    rows = [row("eager", EAGER_S)]
    names = "fused,torchscript,inductor,inductor:freeze"
    search = search_of(CPU, rows, names)
    assert {each.name for each in search.choose(9, 18.0)} == {"fused", "torchscript", "inductor"}
    assert search.choose(9, 18.0) == []
    assert [(each.name, why) for each, why in search.rest()] == [("inductor:freeze", "")]
    # No limit, or all is wanted.
    for left_s, given in ((None, {}), (18.0, {"exhaustive": True}), (18.0, {"in_order": True})):
        every = search_of(CPU, rows, names, **given).choose(9, left_s)
        assert {each.name for each in every} == set(names.split(","))
    assert search_of(CPU, rows, names).choose(9, -1.0) == []
    # Its kernels are in the compiler's cache.
    known = [*rows, row("inductor+graph", 0.5e-3)]
    search = search_of(GPU, known, "inductor,inductor+graph,aot_autograd")
    assert [each.name for each in search.choose(9, 4.0)] == ["inductor"]


def test_slow_set_ups_begin_early_where_others_are_timed_meanwhile() -> None:
    names = (
        "eager+graph,torchscript:freeze+graph,fused+graph,aot_autograd+graph,inductor+graph,"
        "inductor:freeze+graph"
    )
    rows = [row("eager", EAGER_S)]

    def firsts(count: int, **given: Any) -> list[str]:
        return [each.name for each in search_of(GPU, rows, names, **given).choose(count)]

    quick = {"eager+graph", "torchscript:freeze+graph"}
    assert set(firsts(2)) == quick
    assert {*firsts(3, spare=True)} == {
        "eager+graph",
        "inductor+graph",
        "inductor:freeze+graph",
    }
    assert firsts(1, spare=True) == firsts(1)  # One at a time, what pays soonest.
    assert len(firsts(9, spare=True)) == 6
    # What cannot end in time only slows others down; what may end is begun.
    soon = search_of(GPU, rows, names, spare=True).choose(9, 6.0)
    assert {each.name for each in soon} == {*quick, "fused+graph", "aot_autograd+graph"}


def test_set_ups_take_longer_where_the_host_needs_longer_for_a_call() -> None:
    (inductor,) = parse_candidates(["inductor:freeze"], ())
    seconds = [search_of(GPU, [], host_s=s).set_up_s(inductor) for s in (None, 1e-3, 18e-3)]
    assert seconds[0] == seconds[1] == 12.0
    assert seconds[2] == pytest.approx(12.0 * 23 / 7.5)
    assert search_of(GPU, [], host_s=46e-3).set_up_s(inductor) == 48.0
    assert search_of(CPU, [], host_s=18e-3).set_up_s(inductor) == 16.0


def test_inductor_takes_longer_on_a_cpu_for_a_model_of_many_modules() -> None:
    """A set-up that would be stopped is not begun: the time is for others."""
    rows, names = [row("eager", EAGER_S)], "inductor,onnxruntime,fused"
    small, large = (search_of(CPU, rows, names, modules=count) for count in (10, 120))
    (inductor, others) = (parse_candidates([each], ())[0] for each in ("inductor", "fused"))
    assert small.set_up_s(inductor) == pytest.approx(15.7)
    assert large.set_up_s(inductor) == pytest.approx(23.4)
    assert large.set_up_s(others) == small.set_up_s(others)
    (onnx,) = parse_candidates(["onnxruntime"], ())
    assert small.is_cheap(onnx)
    assert large.set_up_s(onnx) - small.set_up_s(onnx) == pytest.approx(4.4)
    assert large.one_after_the_other_s() - small.one_after_the_other_s() == pytest.approx(12.1)
    for search, begun in ((small, True), (large, False)):
        chosen = {each.name for each in search.choose(9, 20.0)}
        assert chosen == {"onnxruntime", "fused", *(["inductor"] if begun else [])}


@pytest.mark.parametrize("status", [Status.OK, Status.SLOWER, Status.FAILED, Status.NOT_TRIED])
def test_on_a_cpu_inductor_takes_less_where_it_has_compiled_before(status: Status) -> None:
    names = "inductor,inductor:freeze,channels_last+inductor,torchscript"
    known = [row("eager", EAGER_S), row("inductor", EAGER_S, status)]
    search = search_of(CPU, known, names, modules=10)
    freeze, last, other = parse_candidates(names.split(",")[1:], ())
    before = search_of(CPU, known[:1], names, modules=10)
    less = 13.0 if status in (Status.OK, Status.SLOWER) else 0.0
    assert before.set_up_s(freeze) - search.set_up_s(freeze) == pytest.approx(less)
    assert before.set_up_s(last) - search.set_up_s(last) == pytest.approx(less)
    assert before.set_up_s(other) == search.set_up_s(other)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(19))).eval()
    assert Tuning(model, (torch.randn(2, 2),), remember=False)._search.modules == 20


def test_a_default_budget_grows_with_what_compilers_need() -> None:
    model, x = nn.Linear(2, 2).eval(), torch.randn(2, 2)

    def budget(
        host_s: float | None, device: torch.device = GPU, failed: str = "", **given: Any
    ) -> float | None:
        exclude = given.pop("exclude", ())
        tuning = Tuning(model, (x,), remember=False, exclude=exclude, **given)
        tuning.asked = replace(tuning.asked, device=device)
        candidates = without(default_candidates(model, device, ()), exclude)
        tuning._search = Search(tuning.report, device, candidates)
        tuning.report.host_s = host_s
        if failed:
            tuning.report.rows.append(Row(failed, Status.FAILED, "", "", complexity=1))
        terms = tuning._screening.terms
        tuning._started -= 5.0  # The reference, and eager.
        tuning._compilers_begin_s = 5.0
        terms.deadline = tuning._search_ends()
        tuning._give_compilers_time()
        assert terms.budget_s == tuning._budget_s
        if terms.budget_s is not None:
            assert terms.deadline == pytest.approx(tuning._started + 0.8 * terms.budget_s)
        return terms.budget_s

    regional = ["inductor:regional"]
    inductors = ["inductor", "inductor:freeze", "inductor:reduce-overhead"]
    assert budget(None) == budget(2e-3) == budget(14e-3) == 60.0
    # Region by region there is time for it by then; as a whole there is not.
    assert budget(1.0) == 60.0
    known = budget(14e-3, exclude=regional)
    assert known is not None
    assert 60 < known < MOST_BUDGET_S["cuda"]
    assert budget(1.0, exclude=regional) == MOST_BUDGET_S["cuda"]
    assert budget(1.0, failed="inductor:regional+graph") == MOST_BUDGET_S["cuda"]
    on_cpu = budget(1.0, CPU)
    assert on_cpu is not None
    assert 60 < on_cpu < MOST_BUDGET_S["cpu"]  # Whatever the host needs.
    assert budget(1.0, CPU, exclude=[*inductors, "onnxruntime", "torchscript"]) == 60.0
    assert budget(1.0, budget_s=7) == 7.0
    assert budget(1.0, exhaustive=True) is None
    assert budget(1.0, exclude=[*regional, *inductors]) == 60.0


@pytest.mark.parametrize(
    ("rows", "awaited"),
    [
        ({}, False),
        ({"eager": 1.0}, True),  # What a graph gains is not known yet.
        ({"eager": 1.0, "fused+graph": 0.05}, True),
        ({"eager": 1.0, "eager+graph": None, "fused+graph": 0.35}, False),
        ({"eager": 1.0, "eager+graph": 0.4, "fused+graph": 0.35}, True),
        ({"eager": 1.0, "eager+graph": 0.4, "fused+graph": 0.2}, False),
        ({"eager": 1.0, "eager+graph": 0.4, "inductor:regional+graph": 0.39}, False),
        ({"eager": 1.0, "eager+graph": 0.4, "inductor:regional+graph": None}, False),
    ],
)
def test_a_compiler_is_awaited_while_little_was_gained_without_it(
    rows: dict[str, float | None], awaited: bool
) -> None:
    known = [
        row(name, (share or 0.0) * EAGER_S, Status.OK if share else Status.FAILED)
        for name, share in rows.items()
    ]
    assert search_of(GPU, known).awaits_compiler() is awaited
    assert not search_of(CPU, known).awaits_compiler()
    assert not search_of(GPU, known, exhaustive=True).awaits_compiler()
    assert not search_of(GPU, known, objective="memory").awaits_compiler()
    assert not search_of(GPU, known, "eager+graph,fused+graph,inductor").awaits_compiler()


def test_the_whole_model_is_compiled_after_its_regions() -> None:
    search = search_of(GPU, [row("eager", EAGER_S)])
    chosen: list[str] = []
    while following := search.choose(4):
        chosen += [each.name for each in following]
    whole = [name for name in chosen if name.startswith(("inductor+", "inductor:r", "inductor:f"))]
    whole.remove("inductor:regional+graph")
    assert {"inductor+graph", "inductor:freeze+graph", "inductor:reduce-overhead"} == {*whole}
    assert chosen.index("inductor:regional+graph") < min(map(chosen.index, whole))
    assert chosen.index("fused+graph") < min(map(chosen.index, whole))
    # On a CPU nothing is compiled region by region.
    assert any(each.name == "inductor" for each in search_of(CPU, [row("eager", 1e-3)]).waiting)


def test_regions_that_are_beaten_show_that_the_whole_is() -> None:
    rows = [row("eager", EAGER_S), row("eager+graph", 0.2e-3), row("fused+graph", 0.1e-3)]
    whole = {"inductor+graph", "inductor:freeze+graph", "inductor:reduce-overhead"}
    known = row("inductor:regional+graph", 0.13e-3)
    assert left_out(search_of(GPU, rows)).isdisjoint(whole)
    assert whole <= left_out(search_of(GPU, [*rows, known]))
    search = search_of(GPU, [*rows, known])
    assert search.cannot_win(parse_candidates(["inductor+graph"], ())[0]) == (
        "cannot win: inductor:regional+graph compiles the same operations, region by region, and "
        "takes 130 µs; fused+graph takes 100 µs"
    )
    near = row("inductor:regional+graph", 0.11e-3)
    assert left_out(search_of(GPU, [*rows, near])).isdisjoint(whole)
    assert left_out(search_of(GPU, [*rows, known], exhaustive=True)).isdisjoint(whole)
    failed = Row("inductor:regional+graph", Status.FAILED, "", "", complexity=1)
    assert left_out(search_of(GPU, [*rows, failed])).isdisjoint(whole)


@pytest.mark.slow
def test_a_row_says_that_there_was_no_time_to_set_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphwright.strategies import registry
    from graphwright.tuning import request

    monkeypatch.setattr(request, "BUDGET_S", {"cpu": 60.0, "cuda": 60.0})
    monkeypatch.setitem(MOST_BUDGET_S, "cpu", 60.0)
    monkeypatch.setitem(registry._USUAL["cpu"], "inductor", (1.3, 100.0))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    others = ["onnxruntime", "inductor:freeze", "inductor:reduce-overhead", "aot_autograd"]
    report = gw.tune(
        model, (torch.randn(2, 8),), exclude=others, isolate=False, remember=False
    ).report
    row = report.row("inductor")
    assert row is not None
    assert row.status is Status.NOT_TRIED
    said = re.fullmatch(
        r"its set-up takes about 100 s: (\d+) s more than the budget of 60 s left", row.reason
    )
    assert said is not None
    missing_s = int(said[1])
    assert 102 - 48 <= missing_s < 102
    advised = re.fullmatch(r"--budget (\d+)s, or budget_s=(\d+), would try it\.", row.remedy)
    assert advised is not None
    assert advised[1] == advised[2]
    assert 0 <= int(advised[1]) - (60 + missing_s / 0.8) < 5
    tried = report.row("torchscript:freeze")
    assert tried is not None
    assert tried.status is not Status.NOT_TRIED


def test_budgets_that_are_advised_are_for_all_before_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = "inductor,inductor:freeze"
    search = search_of(CPU, [row("eager", EAGER_S)], names)
    terms = Terms(False, 600.0, None, 20.0, deadline=time.monotonic() + 10.5)
    screening = Screening(nn.Linear(2, 2), CPU, search, terms, str)
    monkeypatch.setattr(screening, "_in_this_process", lambda candidate, _: row("eager", EAGER_S))
    found = {each.strategy: each for each in screening.rows(Mock(samples=[]), Mock())}
    # 17 s and 18 s are needed, and 10.5 s are left.
    assert "7 s more than the budget of 20 s left" in found["inductor"].reason
    assert "25 s more than the budget of 20 s left" in found["inductor:freeze"].reason
    assert found["inductor"].remedy == "--budget 30s, or budget_s=30, would try it."
    assert found["inductor:freeze"].remedy == "--budget 55s, or budget_s=55, would try it."


@pytest.mark.parametrize("left_s", [-1.0, 9.0])
def test_after_the_search_nobody_looks_whether_a_slow_one_could_run(
    left_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To import ONNX Runtime and try it takes seconds."""
    looked: list[str] = []

    def look(candidate: Candidate, device: torch.device) -> Availability:
        looked.append(candidate.name)
        return Availability(True)

    monkeypatch.setattr(Candidate, "availability", look)
    names = "onnxruntime,torchscript"
    search = search_of(CPU, [row("eager", EAGER_S)], names)
    terms = Terms(False, 600.0, None, 20.0, deadline=time.monotonic() + left_s)
    screening = Screening(nn.Linear(2, 2), CPU, search, terms, str)
    found = [screening._not_tried(each) for each in search.waiting]
    assert [each.status for each in found] == [Status.NOT_TRIED] * 2
    assert looked == (["torchscript"] if left_s < 0 else names.split(","))


def test_what_cannot_be_stopped_is_not_begun_where_it_would_end_late() -> None:
    """A set-up in this process goes on until it ends, also if it was asked for by name."""
    model = nn.Linear(8, 8).eval()
    report = gw.tune(
        model,
        (torch.randn(2, 8),),
        strategies=["inductor", "eager:no_grad"],
        budget_s=10,
        isolate=False,
        remember=False,
    ).report
    compiled, plain = report.row("inductor"), report.row("eager:no_grad")
    assert compiled is not None
    assert compiled.status is Status.NOT_TRIED
    assert "more than the budget of 10 s left" in compiled.reason
    assert plain is not None
    assert plain.status is not Status.NOT_TRIED


def test_in_this_process_too_all_that_share_a_build_are_tried() -> None:
    report = gw.tune(
        nn.Linear(8, 8).eval(),
        (torch.randn(2, 8),),
        strategies=["torchscript", "torchscript+graph"],
        isolate=False,
        remember=False,
    ).report
    assert {each.strategy for each in report.rows} == {"eager", "torchscript", "torchscript+graph"}


def test_a_row_does_not_name_a_set_up_that_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphwright.tuning import request

    monkeypatch.setattr(request, "BUDGET_S", {"cpu": 2.0, "cuda": 2.0})
    monkeypatch.setitem(MOST_BUDGET_S, "cpu", 2.0)
    model = nn.Linear(8, 8).eval()
    report = gw.tune(model, (torch.randn(2, 8),), isolate=False, remember=False).report
    row = report.row("eager:no_grad")
    assert row is not None
    assert row.status is Status.NOT_TRIED
    assert row.reason == "the budget of 2 s left no time to measure it"


@pytest.mark.slow
def test_the_host_needs_no_more_than_the_call(device: torch.device) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).to(device).eval()
    x = torch.randn(2048, 256, device=device)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = host_seconds(model, Call("call", (x,), {}), device)
    assert found is not None
    if device.type == "cpu":
        fast = gw.tune(model, (x,), strategies=["eager"], remember=False, progress=False)
        whole = fast.report.rows[0].screening
        assert whole is not None
        assert found < 0.5 * whole.typical().median
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_reads_values_has_no_such_bound() -> None:
    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * float(x.sum())

    assert host_seconds(Reads(), Call("call", (torch.randn(3),), {}), CPU) is None


def test_the_curve_tells_when_what_was_found(device: torch.device) -> None:
    model = nn.Linear(8, 8).to(device).eval()
    x = torch.randn(2, 8, device=device)
    report = gw.tune(
        model, (x,), strategies=["eager:no_grad", "torchscript"], isolate=False, remember=False
    ).report
    assert report.curve[0].strategy == "eager"
    assert [step.seconds for step in report.curve] == sorted(s.seconds for s in report.curve)
    assert [step.speedup for step in report.curve] == sorted(s.speedup for s in report.curve)
    assert Report.from_json(report.to_json()) == report


def test_a_search_without_a_budget_has_a_minute_a_sample(device: torch.device) -> None:
    from graphwright.tuning.request import Request

    def budget(**given: Any) -> float | None:
        samples = given.pop("samples", None)
        args = () if samples else (torch.randn(2, 2, device=device),)
        model = nn.Linear(2, 2, device=device).eval()
        asked = Request.of(model, args, None, samples=samples, **given)
        return asked.limits.budget_s

    each = 60.0 if device.type == "cpu" else 50.0
    assert budget() == each
    samples = [(torch.randn(n, 2, device=device),) for n in (1, 2, 3)]
    assert budget(samples=samples) == 3 * each
    assert budget(budget_s=10) == 10.0
    assert budget(exhaustive=True) is None
    assert budget(exhaustive=True, budget_s=7) == 7.0
    assert budget(strategies=["fused"]) is None
    assert budget(objective="cold_start") is None
    with pytest.raises(gw.OptionError, match="exhaustive"):
        budget(exhaustive="yes")


def test_what_is_tried_takes_longer_where_calls_do() -> None:
    """Calls verify and time it; a default budget has to have room for them."""
    short, long = (search_of(CPU, [row("eager", seconds)]) for seconds in (1e-3, 0.2))
    for search in (short, long):
        [fused] = [each for each in search.waiting if each.name == "fused"]
        eager_s = search._seconds("eager")
        assert search.needs_s(fused) == pytest.approx(search.set_up_s(fused) + 2 + 25 * eager_s)
    assert long.one_after_the_other_s() > short.one_after_the_other_s() + 40


class Logged(nn.Module):
    """Writes a byte to a file at each call: what a call does to Python's objects is undone."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path, self.layer = path, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with open(self.path, "ab") as log:
            log.write(b".")
        return self.layer(x)


def test_where_eager_alone_takes_more_than_the_budget_nothing_is_called_after_it(
    tmp_path: Path,
) -> None:
    """Each call of such a model takes seconds."""
    log = tmp_path / "calls"
    listener = Mock()
    seen: list[int] = []
    listener.row.side_effect = lambda row: seen.append(log.stat().st_size)
    tuning = Tuning(Logged(str(log)).eval(), (torch.randn(16, 8),), budget_s=1e-3, remember=False)
    report = tuning.run(listener).report
    assert report.chosen == "eager"
    assert log.stat().st_size == seen[0]
    [said] = [note for note in report.notes if "less than tune needs" in note]
    assert "the reference and eager alone took" in said


@pytest.mark.parametrize(
    ("left_s", "said"),
    [
        (None, "eager"),
        (100.0, "eager"),
        (80.0, "eager: its calls take about 84 s, and the budget leaves less"),
        (-5.0, "eager: its calls take about 84 s, and the budget leaves less"),
    ],
)
def test_it_is_said_beforehand_that_eager_alone_takes_longer(
    left_s: float | None, said: str
) -> None:
    search = search_of(CPU, [], "torchscript")
    deadline = None if left_s is None else time.monotonic() + left_s
    screening = Screening(nn.Linear(2, 2), CPU, search, Terms(False, 9.0, None, 9.0, deadline), str)
    evaluator = Mock(samples=[Mock(reference=Mock(call_s=2.7))])
    assert screening._eager_in_words(evaluator) == said
