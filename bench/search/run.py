"""The searches of one model, and PyTorch's own ways, all in one process, then timed in turns.

`scripts/bench search` runs this module for each model. Each search begins with empty caches of
compilers, PyTorch's ways share one, and what all of them give runs on other values of the inputs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import graphwright as gw
from graphwright.errors import first_line
from graphwright.evaluation.measurement import Timer, interleave
from graphwright.report.environment import environment

from ..cases import MODELS
from ..common.peers import (
    Call,
    Case,
    Figures,
    compiled,
    eager,
    make_graphed_callables,
    needs_cuda,
    reduce_overhead,
    set_up,
    timed,
)
from ..common.processes import figures_of
from ..common.record import SCHEMA, commit, write
from ..unseen.models import Unusable
from .models import SEED, Place, case_of, places
from .table import line, targets, to_text

SEARCHES: Mapping[str, dict[str, Any]] = {
    "default": {},
    "throughput": {"objective": "throughput"},
    "30 s": {"budget_s": 30.0},
    "exhaustive": {"exhaustive": True},
}
PEERS: Mapping[str, Callable[[Case], Call]] = {
    "eager": eager,
    "torch.compile": compiled,
    "reduce-overhead": reduce_overhead,
    "make_graphed_callables": make_graphed_callables,
}
# About so many seconds does each take: a model is begun only where that fits.
ESTIMATES_S = {"default": 90, "throughput": 60, "30 s": 35, "exhaustive": 150}
PEERS_S = 60
TIMING_S = 4.0
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
UNUSABLE = "unusable"
# Seconds for which a GPU's memory has to stay as it is, and for which that is waited for.
QUIET_S, MOST_WAIT_S = 2.0, 20.0
# Searches whose rows are compared one by one.
WHOLE = ("default", "exhaustive")
MEASUREMENTS = ("screening", "baseline", "final", "bare")


def medians(latency: list[list[float]]) -> list[list[float]]:
    """For each round the median of its calls: of all of them a report has half a megabyte."""
    return [[statistics.median(block)] for block in latency]


@contextlib.contextmanager
def empty_caches() -> Iterator[None]:
    """Compilers find nothing of what was compiled before."""
    before = {name: os.environ.get(name) for name in CACHES}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ.update({name: f"{folder}/{name}" for name in CACHES})
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def wait_for_ended_processes(device: torch.device) -> None:
    """Wait until the GPU's free memory does not change.

    The driver needs seconds for each process of an earlier search that was ended, and holds calls
    up meanwhile. Who tunes one model does not see that.
    """
    if device.type != "cuda":
        return
    latest = time.monotonic() + MOST_WAIT_S
    free, since = torch.cuda.mem_get_info(device)[0], time.monotonic()
    while time.monotonic() < min(latest, since + QUIET_S):
        time.sleep(0.1)
        now = torch.cuda.mem_get_info(device)[0]
        if now != free:
            free, since = now, time.monotonic()


def measure(
    name: str,
    searches: list[str],
    device: torch.device,
    save: Callable[[Figures, str], None],
    best: str | None = None,
    peers: Sequence[str] = tuple(PEERS),
) -> Figures:
    """All figures of one model; `save` gets what is known by then, and what is under way.

    `best` is what an exhaustive search has chosen before: it is not repeated then. `peers` are
    PyTorch's own ways that are timed beside the searches.

    Raises:
        Unusable: the model cannot take part.
    """
    timer = Timer(device)
    try:
        case = case_of(name, device)
        for _ in range(3):
            timer.once(case.on_others(case.model))
    except Exception as error:
        raise Unusable(first_line(error)) from error
    figures: Figures = {"searches": {}, "ways": {}}

    def searched(case: Case, way: str) -> Call:
        wait_for_ended_processes(device)
        began = time.perf_counter()
        with empty_caches():
            options = {"remember": False, "progress": False, **SEARCHES[way]}
            if way == "exhaustive" and best is not None:
                options = {**options, "exhaustive": False, "strategies": [best]}
            call: Any = gw.tune(case.model, case.args, case.kwargs, **options)
        seconds = time.perf_counter() - began
        call.report.model = name
        report = json.loads(call.report.to_json())
        if way not in WHOLE:
            report = {key: report[key] for key in ("chosen", "reason", "curve")}
        for row in report.get("rows", ()):
            for measurement in filter(None, (row[key] for key in MEASUREMENTS)):
                measurement["latency"] = medians(measurement["latency"])
        figures["searches"][way] = {"seconds": seconds, "report": report}
        call.calls.clear()
        made: Call = call
        return made

    # Searches come first: graphs of theirs keep the workspaces that they were captured with.
    ways: dict[str, Callable[[Case], Call]]
    ways = {way: partial(searched, way=way) for way in searches}
    with empty_caches():
        calls, rows = set_up(
            case,
            ways | {peer: PEERS[peer] for peer in peers},
            timer,
            lambda way: needs_cuda(way, device),
            lambda way, rows: save(figures | {"ways": rows}, way),
        )
    figures["ways"] = rows
    save(figures, "the timing")
    on_others = {way: case.on_others(call) for way, call in calls.items()}
    for way, measurement in interleave(on_others, timer, budget_s=TIMING_S).items():
        rows[way] |= timed(measurement)
    for way in searches:
        if way in calls:
            rows[way]["chosen"] = figures["searches"][way]["report"]["chosen"]
            rows[way]["elsewhere"] = {k: n for k, n in calls[way].calls.items() if k != "tuned"}
    return figures


def benchmark(out: Path, only: list[str], seconds: float, again: Sequence[str] = ()) -> int:
    """Search for each of the twenty, the file written after each; the number of targets missed.

    Models that the file has are kept with the commit that they were measured at, so that runs are
    joined. Those of `again` are measured again, but for their exhaustive search: its choice is.
    """
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "search",
        "commit": commit(),
        "seed": SEED,
        "environments": [],
        "models": {},
        "passed_over": {},
    }
    where = out / "search.json"
    if where.exists():
        earlier = json.loads(where.read_text(encoding="utf-8"))
        for model in earlier["models"].values():
            model.setdefault("commit", earlier["commit"])
        result = earlier | {"commit": result["commit"]}
    ends = time.monotonic() + seconds
    for place in places():
        there = [n for n, m in result["models"].items() if m["number"] == place.number]
        if there and not set(there) <= set(again):
            continue
        if there:
            place = replace(place, names=tuple(there))
        if only and not any(name.partition("/")[0] in only for name in place.names[:1]):
            continue
        _take(place, result, where, ends)
    result["targets"] = targets(result)
    write(where, result)
    print(f"\n{to_text(result)}\nwrote {where}")
    return sum(target["met"] is False for target in result["targets"])


def _take(place: Place, result: dict[str, Any], where: Path, ends: float) -> None:
    """Measure the first model that can take this place, while there is time."""
    for name in place.names:
        earlier = result["models"].get(name, {})
        if name in result["passed_over"] or earlier.get("number", place.number) != place.number:
            continue
        whole = earlier.get("searches", {}).get("exhaustive")
        needed = PEERS_S + sum(ESTIMATES_S[way] for way in place.searches)
        needed -= 0 if whole is None else ESTIMATES_S["exhaustive"]
        left = ends - time.monotonic()
        if left < needed:
            return
        words = ["--searches", *place.searches]
        words += [] if whole is None else ["--best", whole["report"]["chosen"]]
        found = figures_of("bench.search.run", name, words, left)
        if UNUSABLE in found:
            result["passed_over"][name] = found[UNUSABLE]
            write(where, result)
            continue
        if "took over" in found.get("failed", "") or (earlier and "failed" in found):
            print(f"{name}: {found['failed']}; the next run has it again", flush=True)
            return
        model = {"number": place.number, "reference": place.reference, "commit": result["commit"]}
        model |= found.get("figures", {})
        if "failed" in found:
            model["failed"] = found["failed"]
        if whole is not None:
            model["searches"]["exhaustive"] = whole | {"repeated": False}
        if here := found.get("environment"):
            model["gpu"] = here.get("gpu")
            if here not in result["environments"]:
                result["environments"].append(here)
        result["models"][name] = model
        write(where, result)
        print(line(name, model), flush=True)
        return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("name", help=f"one of {', '.join(MODELS)}, or LIBRARY/NAME")
    parser.add_argument("file", type=Path, help="the JSON to write")
    parser.add_argument("--searches", nargs="+", choices=SEARCHES, default=["default"])
    parser.add_argument("--best", help="what an exhaustive search chose, which is not repeated")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=[*PEERS])
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    here = environment(device)

    def save(figures: Figures, doing: str | None = None) -> None:
        result = {"environment": here, "figures": figures}
        write(given.file, result if doing is None else result | {"doing": doing})

    with torch.no_grad():
        try:
            save(measure(given.name, given.searches, device, save, given.best, given.peers))
        except Unusable as error:
            write(given.file, {UNUSABLE: str(error)})


if __name__ == "__main__":
    main()
