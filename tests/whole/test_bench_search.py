"""The benchmark of default searches: its targets, on made-up results and on those committed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from bench.search import large, models, run, table
from graphwright.evaluation.accuracy import ErrorMeasure
from graphwright.evaluation.measurement import Measurement
from graphwright.report.report import Report
from graphwright.report.result import BestSoFar, Row, Status

RESULTS = Path(__file__).parents[2] / "bench" / "results"
Result = dict[str, Any]
CANNOT = "cannot win: its kernels wait for the host"


def measured(seconds: float) -> Measurement:
    return Measurement(tuple((seconds, seconds) for _ in range(6)), (seconds,) * 6)


def report(chosen: str, cannot_win: tuple[str, ...] = (), **us: float) -> Result:
    """A report of eager, of rows that took so many µs, and of some that were not tried."""
    rows = [
        Row(
            name,
            Status.OK,
            setup_s=1.0,
            error=ErrorMeasure(1e-7, 4e-7),
            screening=measured(value * 1e-6),
            baseline=measured(1e-3),
        )
        for name, value in {"eager": 1000.0, **us}.items()
    ]
    rows += [Row(name, Status.NOT_TRIED, CANNOT) for name in cannot_win]
    found = Report("Model", ["x"], "latency", rows, {}, chosen=chosen)
    found.curve = [BestSoFar(2.0, chosen, 3.5)]
    data: Result = json.loads(found.to_json())
    return data


def way(us: float) -> Result:
    return {"status": "ok", "latency_s": us * 1e-6, "back_to_back_s": us * 1e-6}


def model(seconds: float = 50.0, searches: Result | None = None, **us: float) -> Result:
    names = {"reduce_overhead": "reduce-overhead", "compiled": "torch.compile", "short": "30 s"}
    plain = {"default": {"seconds": seconds, "report": report("fast", fast=100.0)}}
    return {
        "number": 0,
        "reference": True,
        "searches": plain if searches is None else searches,
        "ways": {names.get(name, name): way(value) for name, value in us.items()},
    }


def result(**found: Result) -> Result:
    made: Result = {"seed": 32, "environments": [{"gpu": "a GPU"}], "passed_over": {}}
    made["models"] = found
    return made | {"targets": table.targets(made)}


def verdicts(found: Result) -> dict[str, bool | None]:
    return {target["target"]: target["met"] for target in found["targets"]}


def test_a_search_that_takes_long_misses_its_targets() -> None:
    found = verdicts(result(a=model(50.0, default=100), b=model(130.0, default=100)))
    assert found["seconds of a default search, median"] is False
    assert found["seconds of a default search, longest"] is False
    found = verdicts(result(a=model(50.0, default=100), b=model(60.0, default=100)))
    assert found["seconds of a default search, median"] is True
    assert found["seconds of a default search, longest"] is True


def test_one_choice_of_eight_may_be_beyond_the_exhaustive_one_s_but_not_far() -> None:
    near = model(default=100, exhaustive=99, short=105)
    off = model(default=105, exhaustive=97, short=130)
    what = [f"default: beyond {x:g} × exhaustive + 2 µs" for x in (1.03, 1.08)]
    found = verdicts(result(a=near, b=off))
    assert [found[each] for each in what] == [True, True]
    assert found["30 s: beyond 1.1 × exhaustive + 2 µs"] is True
    found = verdicts(result(a=near, b=off, c=off, d=model(default=120, exhaustive=97, short=200)))
    assert [found[each] for each in what] == [False, False]
    assert found["30 s: beyond 1.1 × exhaustive + 2 µs"] is False


def test_what_failed_is_missed_and_so_is_what_fell_back() -> None:
    whole = {f"m{n}": model(default=100, exhaustive=100) for n in range(20)}
    assert verdicts(result(**whole))["models with a figure"] is True
    assert verdicts(result(**whole))["exhaustive with a figure"] is True
    failed = whole | {"m0": {"number": 0, "reference": True, "failed": "exit status 1"}}
    assert verdicts(result(**failed))["models with a figure"] is False
    fell_back = model(default=100, compiled=200)
    fell_back["ways"]["default"]["elsewhere"] = {"eager": 3}
    found = verdicts(result(a=fell_back))
    assert found["latency: beyond 1.03 × torch.compile + 2 µs"] is False


def test_a_choice_without_a_figure_is_beyond_what_has_one() -> None:
    found = verdicts(result(a=model(exhaustive=97, compiled=100)))
    assert found["default: beyond 1.08 × exhaustive + 2 µs"] is False
    assert found["latency: beyond 1.03 × torch.compile + 2 µs"] is False
    assert found["latency: beyond 1.03 × make_graphed_callables + 2 µs"] is True


def test_peers_are_compared_by_what_was_asked_for() -> None:
    fast = model(default=100, eager=600, reduce_overhead=200)
    found = verdicts(result(a=fast))
    assert found["latency: beyond 1.03 × reduce-overhead + 2 µs"] is True
    assert found["back to back: beyond 1.03 × reduce-overhead + 2 µs"] is None
    assert found["geometric mean of eager's latency over the choice's"] is True
    searches = fast["searches"] | {"throughput": fast["searches"]["default"]}
    slow = model(default=100, throughput=220, reduce_overhead=200, searches=searches)
    found = verdicts(result(a=slow))
    assert found["back to back: beyond 1.03 × reduce-overhead + 2 µs"] is False


def both(default: Result, exhaustive: Result) -> Result:
    pair = {"default": default, "exhaustive": exhaustive}
    return model(searches={way: {"seconds": 50.0, "report": pair[way]} for way in pair})


def test_a_bound_that_cut_off_a_winner_is_told() -> None:
    default = report("fast", cannot_win=("compiled",), fast=100.0)
    slower = both(default, report("fast", fast=100.0, compiled=101.0))
    faster = both(default, report("compiled", fast=100.0, compiled=80.0))
    assert table.cut_off(slower) == []
    assert table.cut_off(faster) == ["compiled"]
    assert verdicts(result(a=slower))["a bound cut off what was faster"] is True
    assert verdicts(result(a=faster))["a bound cut off what was faster"] is False


def test_what_people_read_names_models_choices_and_curves() -> None:
    fast = model(default=100, eager=600)
    failed = {"number": 1, "reference": False, "failed": "took over 3 s"}
    fast["ways"]["default"]["chosen"] = "fused+graph"
    text = table.to_markdown(result(**{"timm/a": fast}, b=failed))
    assert "| timm/a | 50 | fused+graph | 100.0 |" in text
    assert "- timm/a: fast 3.50× after 2 s" in text
    assert "| b | – | failed |" in text
    assert table.line("b", failed) == "b: failed, took over 3 s"
    assert "timm/a: fused+graph 100.0 µs, searched in 50 s" in table.line("timm/a", fast)


def test_what_is_measured_again_keeps_its_exhaustive_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {"seconds": 90.0, "report": report("best", best=90.0)}
    default = {"seconds": 50.0, "report": report("best", best=100.0)}
    earlier = model(searches={"default": default, "exhaustive": whole}, default=120)
    before = result(mlp=earlier) | {"commit": "old"}
    (tmp_path / "search.json").write_text(json.dumps(before), encoding="utf-8")
    asked: list[str] = []

    def figures_of(module: str, name: str, words: list[str], left: float) -> Result:
        asked.extend([name, *words])
        searches = {way: {"seconds": 9.0, "report": report("best")} for way in words[1:4]}
        found = model(searches=searches, default=100, exhaustive=95)
        return {"figures": {key: found[key] for key in ("searches", "ways")}}

    monkeypatch.setattr(run, "figures_of", figures_of)
    run.benchmark(tmp_path, ["mlp"], 1e6)
    assert asked == []
    run.benchmark(tmp_path, ["mlp"], 1e6, ["mlp"])
    assert asked[0] == "mlp"
    assert asked[-2:] == ["--best", "best"]
    after = json.loads((tmp_path / "search.json").read_text(encoding="utf-8"))["models"]["mlp"]
    assert after["searches"]["exhaustive"] == whole | {"repeated": False}
    assert after["searches"]["default"]["seconds"] == 9.0
    assert after["ways"]["exhaustive"]["latency_s"] == pytest.approx(95e-6)
    text = table.to_markdown(result(mlp=after))
    assert "Measured again later: mlp." in text
    monkeypatch.setattr(run, "figures_of", lambda *_: {"failed": "exit status 1"})
    run.benchmark(tmp_path, ["mlp"], 1e6, ["mlp"])
    kept = json.loads((tmp_path / "search.json").read_text(encoding="utf-8"))["models"]["mlp"]
    assert kept == after


def test_a_search_begins_when_earlier_processes_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = iter([10, 20, 30])
    slept: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (next(free, 40), 80))
    monkeypatch.setattr(run, "time", Mock(monotonic=lambda: 0.1 * len(slept), sleep=slept.append))
    run.wait_for_ended_processes(torch.device("cpu"))
    assert slept == []
    run.wait_for_ended_processes(torch.device("cuda"))
    assert len(slept) == pytest.approx(3 + 10 * run.QUIET_S, abs=1)


def test_the_twenty_are_the_same_each_time() -> None:
    places = list(models.places())
    assert places == list(models.places())
    assert [place.number for place in places] == list(range(20))
    assert sum(place.compared for place in places) == table.COMPARED
    assert sum("throughput" in place.searches for place in places) == 10


@pytest.mark.parametrize("file", sorted(RESULTS.glob("search*.json")), ids=lambda file: file.name)
def test_no_bound_cut_off_a_winner_in_what_is_committed(file: Path) -> None:
    data = json.loads(file.read_text(encoding="utf-8"))
    assert {n: cut for n, m in data["models"].items() if (cut := table.cut_off(m))} == {}


def test_large_models_have_targets_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is written as it goes; a later run has what there was no time for."""
    found = {
        "diffusers/stable-diffusion-1.5": model(80.0, default=102.0, reduce_overhead=100.0),
        "torchvision/maxvit_t": model(91.0, default=110.0, reduce_overhead=100.0),
        "timm/a": model(50.0, default=90.0, reduce_overhead=100.0),
    }
    asked: list[str] = []

    def figures(module: str, name: str, options: Any, limit_s: float) -> Result:
        assert options == ["--peers", "eager", "reduce-overhead"]
        asked.append(name)
        if name == "timm/c":
            return {"unusable": "no inputs"}
        return {"figures": found[name], "environment": {"torch": "2.13"}}

    counts = {"timm/a": 501, "timm/b": 500, "timm/c": 900}
    monkeypatch.setattr(large, "figures_of", figures)
    monkeypatch.setattr(large, "drawn", lambda: iter(counts))
    monkeypatch.setattr(large, "modules_of", counts.__getitem__)
    assert large.benchmark(tmp_path, seconds=0.0) > 0
    assert asked == []
    assert large.benchmark(tmp_path, seconds=600.0) == 4
    assert asked == [*large.NAMED, "timm/a", "timm/c"]
    result = json.loads((tmp_path / "search-large.json").read_text("utf-8"))
    assert result["passed_over"] == {"timm/b": "500 modules", "timm/c": "no inputs"}
    met = {each["target"]: each["met"] for each in result["targets"]}
    assert met == {
        "models with a figure": False,
        "latency: beyond 1.03 × reduce-overhead": False,
        "seconds of a default search, median": False,
        "seconds of a default search, longest": False,
    }
    assert "of 3: torchvision/maxvit_t" in large.to_markdown(result) + str(result["targets"])
    asked.clear()
    large.benchmark(tmp_path, seconds=600.0)
    assert asked == []
