"""The result of scripts/bench search as targets that were met or missed, as text and Markdown."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator

from graphwright.calls.plurals import counted
from graphwright.report.report import Report
from graphwright.report.result import EAGER

from ..common.rendering import (
    Result,
    Table,
    aligned,
    bare,
    gpu_name,
    machine,
    marked,
    number,
    target,
    verdict,
    verdicts,
)

DEFAULT, EXHAUSTIVE, SHORT, THROUGHPUT = "default", "exhaustive", "30 s", "throughput"
PEERS = ("torch.compile", "reduce-overhead", "make_graphed_callables")
# How many models, and on how many an exhaustive search.
MODELS, COMPARED = 20, 8
# Seconds of a default search: the median, and the longest.
MEDIAN_S, LONGEST_S = 60.0, 120.0
# So much slower may a choice be.
SLOWER, EXTRA_S = 1.03, 2e-6
# Of the models with an exhaustive search: within SLOWER on all but one, never beyond this, ...
NEVER_BEYOND = 1.08
# ... and with 30 seconds within this on all but two.
SHORT_BEYOND = 1.10
# At least so many times as fast as eager, and as reduce-overhead: on reference models, on new ones.
OVER_EAGER, OVER_REDUCED = 5.0, (1.8, 1.2)
_LIMIT = f"{100 * (SLOWER - 1):.0f} % plus {1e6 * EXTRA_S:.0f} µs"
_TARGETS = (
    f"every model has a figure, and so has the exhaustive search of {COMPARED} models",
    f"the median search takes at most {MEDIAN_S:.0f} s, the longest at most {LONGEST_S:.0f} s",
    f"a call of the winner takes at most {_LIMIT} longer than a call of each of PyTorch's own "
    "methods; on the reference models, a search with `objective='throughput'` finds a winner for "
    "which this holds for calls that are issued back to back",
    f"a call of the winner takes at most {_LIMIT} longer than a call of the exhaustive search's "
    "winner; one model may miss this, but none takes over "
    f"{100 * (NEVER_BEYOND - 1):.0f} % plus {1e6 * EXTRA_S:.0f} µs longer",
    "a call of the winner of a search with a budget of 30 s takes at most "
    f"{100 * (SHORT_BEYOND - 1):.0f} % plus {1e6 * EXTRA_S:.0f} µs longer than a call of the "
    "exhaustive search's winner; two models may miss this",
    f"by geometric means, the winner is at least {OVER_EAGER:g} times as fast as eager; compared "
    f"with reduce-overhead, it is at least {OVER_REDUCED[0]:g} times as fast on the reference "
    f"models, and {OVER_REDUCED[1]:g} times on the others",
    "of the strategies that were skipped as unable to win, none was faster than the winner when "
    f"the exhaustive search timed both, by over {100 * (SLOWER - 1):.0f} % and more than the noise",
)
_CURVES = (
    "How each search went: the best strategy so far, how many times as fast as eager it was, and "
    "when that was known. These factors were measured during the search, at different moments. "
    "Those that follow from the table were measured afterwards, in turns, and can be quite "
    "different. The last entry need not be the winner: finalists are timed again."
)
Models = dict[str, Result]


def figure(model: Result, way: str, which: str = "latency_s") -> float | None:
    """Seconds of a way; None where there is no figure."""
    found: float | None = model.get("ways", {}).get(way, {}).get(which)
    return found


def targets(result: Result) -> list[Result]:
    """Every target with its figure, its limit and whether it was met."""
    models: Models = result["models"]
    return [
        *_complete(models),
        *_times(models),
        *_beside_exhaustive(models),
        *_beside_peers(models),
        *_means(models),
        _bounds(models),
    ]


def _complete(models: Models) -> Iterator[Result]:
    """Whether all are there: what failed has no figure that could miss a target."""
    for what, way, wanted in (("models", DEFAULT, MODELS), ("exhaustive", EXHAUSTIVE, COMPARED)):
        count = sum(figure(model, way) is not None for model in models.values())
        yield target(
            f"{what} with a figure", "all", float(count), float(wanted), "", count >= wanted
        )


def _times(models: Models) -> Iterator[Result]:
    seconds = [
        model["searches"][DEFAULT]["seconds"]
        for model in models.values()
        if DEFAULT in model.get("searches", {})
    ]
    which = f"of {len(seconds)}"
    for what, of, limit in (
        ("median", statistics.median, MEDIAN_S),
        ("longest", max, LONGEST_S),
    ):
        value = of(seconds) if seconds else None
        met = None if value is None else value <= limit
        yield target(f"seconds of a default search, {what}", which, value, limit, "", met)


def _beyond(model: Result, way: str, other: str, factor: float, which: str = "latency_s") -> bool:
    """Whether a way takes longer than another by more than a factor and 2 µs."""
    mine, theirs = figure(model, way, which), figure(model, other, which)
    if theirs is None:
        return False
    # What fell back is not what was chosen.
    fell_back = bool(model["ways"].get(way, {}).get("elsewhere"))
    return fell_back or mine is None or mine > factor * theirs + EXTRA_S


def _beside_exhaustive(models: Models) -> Iterator[Result]:
    compared = {name: m for name, m in models.items() if figure(m, EXHAUSTIVE) is not None}
    for way, factor, excused in (
        (DEFAULT, SLOWER, 1),
        (DEFAULT, NEVER_BEYOND, 0),
        (SHORT, SHORT_BEYOND, 2),
    ):
        missed = [n for n, m in compared.items() if _beyond(m, way, EXHAUSTIVE, factor)]
        yield _count(
            f"{way}: beyond {factor:g} × exhaustive + 2 µs", missed, len(compared), excused
        )


def _beside_peers(models: Models) -> Iterator[Result]:
    for peer in PEERS:
        missed = [n for n, m in models.items() if _beyond(m, DEFAULT, peer, SLOWER)]
        yield _count(f"latency: beyond {SLOWER:g} × {peer} + 2 µs", missed, len(models), 0)
    searched = {n: m for n, m in models.items() if THROUGHPUT in m.get("searches", {})}
    for peer in PEERS:
        missed = [
            n for n, m in searched.items() if _beyond(m, THROUGHPUT, peer, SLOWER, "back_to_back_s")
        ]
        yield _count(f"back to back: beyond {SLOWER:g} × {peer} + 2 µs", missed, len(searched), 0)


def _count(what: str, missed: list[str], of: int, excused: int) -> Result:
    """A target on how many models miss something."""
    where = f"of {of}" + (f": {', '.join(missed)}" if missed else "")
    met = len(missed) <= excused if of else None
    return target(what, where, float(len(missed)), float(excused), "", met)


def _means(models: Models) -> Iterator[Result]:
    kinds: list[tuple[str, float, str, Callable[[Result], bool]]] = [
        ("eager", OVER_EAGER, "all models", lambda m: True),
        ("reduce-overhead", OVER_REDUCED[0], "the reference models", lambda m: m["reference"]),
        ("reduce-overhead", OVER_REDUCED[1], "the new models", lambda m: not m["reference"]),
    ]
    for peer, factor, which, taken in kinds:
        ratios = [
            theirs / mine
            for model in models.values()
            if taken(model)
            and (mine := figure(model, DEFAULT)) is not None
            and (theirs := figure(model, peer)) is not None
        ]
        what = f"geometric mean of {peer}'s latency over the choice's"
        value = statistics.geometric_mean(ratios) if ratios else None
        met = None if value is None else value >= factor
        yield target(what, f"of {len(ratios)}, {which}", value, factor, "", met)


def cut_off(model: Result) -> list[str]:
    """What "cannot win", and was faster in the exhaustive search than the default's choice."""
    searches = model.get("searches", {})
    if EXHAUSTIVE not in searches or DEFAULT not in searches:
        return []
    default, whole = (
        Report.from_json(json.dumps(searches[way]["report"])) for way in (DEFAULT, EXHAUSTIVE)
    )
    chosen = whole.row(default.chosen) if default.chosen else None
    best = whole.speedup(chosen, EAGER) if chosen is not None else None
    found = []
    for row in default.rows:
        tried = whole.row(row.strategy)
        if best is None or tried is None or not row.reason.startswith("cannot win"):
            continue
        speed = whole.speedup(tried, EAGER)
        # By more than the noise: the intervals lie apart.
        if speed is not None and speed[0] > SLOWER * best[0] and speed[1] > best[2]:
            found.append(row.strategy)
    return found


def _bounds(models: Models) -> Result:
    compared = {name: m for name, m in models.items() if EXHAUSTIVE in m.get("searches", {})}
    missed = [f"{n} ({', '.join(cut)})" for n, m in compared.items() if (cut := cut_off(m))]
    return _count("a bound cut off what was faster", missed, len(compared), 0)


def line(name: str, model: Result) -> str:
    """One model in a line, for whoever watches."""
    if "failed" in model:
        return f"{name}: failed, {model['failed']}"
    seconds = model["searches"].get(DEFAULT, {}).get("seconds")
    mine = number(figure(model, DEFAULT), "s")
    row = model["ways"].get(DEFAULT, {})
    took = "" if seconds is None else f", searched in {seconds:.0f} s"
    return f"{name}: {row.get('chosen', row.get('reason', row.get('status')))} {mine}{took}"


def overview(result: Result) -> Table:
    """Seconds of the search, what was chosen, and latencies in µs, model by model."""
    ways = (EXHAUSTIVE, SHORT, "eager", *PEERS)
    table = [["model", "searched, s", "chosen", "latency", *ways]]
    several = len({model.get("gpu") for model in result["models"].values()} - {None}) > 1
    if several:
        table[0].append("GPU")
    for name, model in result["models"].items():
        seconds = model.get("searches", {}).get(DEFAULT, {}).get("seconds")
        chosen = model.get("ways", {}).get(DEFAULT, {}).get("chosen", "failed")
        cells = [bare(figure(model, way), "s") for way in (DEFAULT, *ways)]
        table.append([name, "–" if seconds is None else f"{seconds:.0f}", chosen, *cells])
        if several:
            table[-1].append(gpu_name(model.get("gpu") or "–"))
    return table


def to_text(result: Result) -> str:
    """The tables for a terminal."""
    return "\n\n".join([aligned(overview(result)), aligned(verdicts(result["targets"]))])


def to_markdown(result: Result) -> str:
    """What docs/results/search.md shows."""
    lines = [
        "### Latency in µs: the winner of the default search, and what it is compared with",
        "",
        *marked(overview(result)),
        "",
        "*searched*: seconds of the whole call of `tune()`. Its default budget grows with the "
        "model and differed between commits ([what it is now](../tutorial/tune.md#the-budget)). "
        "*exhaustive* and *30 s*: the winner of an exhaustive search, and of one with a budget of "
        "30 s. –: not measured.",
        "",
        "Default options, empty compiler caches. For each model, all were built in one process and "
        "timed in turns. The ten models without a slash are our reference models, built as "
        "`bench/cases.py` says. The others were drawn at random (seed "
        f"{result['seed']}) from models that no earlier benchmark had used; they run in half "
        "precision on one input.",
        "",
        f"{verdict(result['targets'])} The targets, in {len(_TARGETS)} groups:",
        "",
        *(f"- {each};" for each in _TARGETS[:-1]),
        f"- {_TARGETS[-1]}.",
        "",
        *(machine(each) for each in result["environments"]),
        "",
    ]
    again = [name for name, model in result["models"].items() if not _repeated(model)]
    if again:
        lines += [
            f"Measured again later: {', '.join(again)}. For these, the exhaustive search was not "
            "repeated: its earlier winner was built again and timed with the others.",
            "",
        ]
    if result["passed_over"]:
        count = counted(len(result["passed_over"]), "model")
        lines += [f"Skipped: {count} that the benchmark could not build or call, and why:", ""]
        lines += [
            f"- {name}: {why.removeprefix('Unusable: ')}"
            for name, why in sorted(result["passed_over"].items())
        ]
        lines += [""]
    curves = [curve for name, m in result["models"].items() for curve in _curve(name, m)]
    return "\n".join([*lines, *([_CURVES, ""] if curves else []), *curves])


def _repeated(model: Result) -> bool:
    """Whether its exhaustive search, if it has one, ran beside its other searches."""
    repeated: bool = model.get("searches", {}).get(EXHAUSTIVE, {}).get("repeated", True)
    return repeated


def _curve(name: str, model: Result) -> list[str]:
    """What the best known was, and when."""
    report = model.get("searches", {}).get(DEFAULT, {}).get("report")
    if report is None or not report.get("curve"):
        return []
    points = "; ".join(
        f"{point['strategy']} {point['speedup']:.2f}× after {point['seconds']:.0f} s"
        for point in report["curve"]
    )
    return [f"- {name}: {points}"]
