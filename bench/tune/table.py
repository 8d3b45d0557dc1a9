"""The result of scripts/bench tune as targets that were met or missed, as text and Markdown."""

from __future__ import annotations

import html
import json
import statistics

from graphwright.calls.plurals import counted
from graphwright.errors import GraphwrightError
from graphwright.report.markdown import to_markdown as report_to_markdown
from graphwright.report.report import Report
from graphwright.report.result import Status
from graphwright.tuning.selection import reason_for

from ..common.rendering import (
    Result,
    Table,
    aligned,
    bare,
    cell,
    machine,
    marked,
    number,
    reasons,
    short,
    target,
    verdict,
    verdicts,
)

CHOSEN = "graphwright.tune"
PEERS = (
    "eager",
    "torch.jit",
    "torch.compile",
    "reduce-overhead",
    "make_graphed_callables",
    "max-autotune",
)
LATENCY_FACTOR, LATENCY_EXTRA_S = 1.03, 2e-6
# By how much the choice is to be faster, as a geometric mean over the models.
FACTORS = {"eager": 5.0, "reduce-overhead": 1.5}


def latency(model: Result, way: str) -> float | None:
    """Seconds of a way's single call; None where there is no figure."""
    return model.get("ways", {}).get(way, {}).get("latency_s")


def best_peer(model: Result) -> tuple[str, float] | None:
    """The fastest of the peers that work, and its latency."""
    found = {way: seconds for way in PEERS if (seconds := latency(model, way)) is not None}
    return min(found.items(), key=lambda item: item[1]) if found else None


def targets(result: Result) -> list[Result]:
    """Every target with its figure, its limit and whether it was met."""
    models = result["models"]
    found = [_latency(name, model) for name, model in models.items()]
    return found + [_mean(models, peer, factor) for peer, factor in FACTORS.items()]


def _latency(name: str, model: Result) -> Result:
    what = "latency of the choice, ≤ 1.03 × the best peer + 2 µs"
    mine, peer = latency(model, CHOSEN), best_peer(model)
    if mine is None or peer is None:
        return target(what, name, mine, None, "s", False)
    limit = LATENCY_FACTOR * peer[1] + LATENCY_EXTRA_S
    # Eager may be as fast as all else; but what fell back to it was not what was chosen.
    as_chosen = not model["ways"][CHOSEN]["elsewhere"]
    return target(what, name, mine, limit, "s", mine <= limit and as_chosen)


def _mean(models: dict[str, Result], peer: str, factor: float) -> Result:
    what = f"geometric mean of {peer}'s latency over the choice's, ≥ {factor:g}"
    ratios = []
    for model in models.values():
        mine, theirs = latency(model, CHOSEN), latency(model, peer)
        if mine is not None and theirs is not None:
            ratios.append(theirs / mine)
    which = f"{len(ratios)} of {counted(len(models), 'model')}"
    if not ratios:
        # A model that failed early has no row of it.
        rows = [row for model in models.values() if (row := model.get("ways", {}).get(peer))]
        not_here = bool(rows) and all(row["status"] == "unavailable" for row in rows)
        return target(what, which, None, factor, "", None if not_here else False)
    mean = statistics.geometric_mean(ratios)
    return target(what, which, mean, factor, "", mean >= factor)


def _outcome(model: Result) -> str:
    """What was chosen, or what became of it."""
    row = model.get("ways", {}).get(CHOSEN, {})
    return "failed" if "failed" in model else row.get("chosen", row.get("status", "–"))


def line(name: str, model: Result) -> str:
    """One model in a line, for whoever watches."""
    mine, peer = latency(model, CHOSEN), best_peer(model)
    if mine is None:
        row = model.get("ways", {}).get(CHOSEN, {})
        why = model.get("failed") or row.get("reason", "it was not timed")
        return f"{name}: {_outcome(model)}, {why}"
    chosen = f"{name}: {model['ways'][CHOSEN]['chosen']} {number(mine, 's')}"
    if peer is None:
        return f"{chosen}; no peer works"
    return f"{chosen}; best peer {peer[0]} {number(peer[1], 's')}, {peer[1] / mine:.2f}×"


def overview(result: Result) -> Table:
    """Latency in µs and factors, model by model."""
    peers = [way for way in PEERS if any(latency(m, way) for m in result["models"].values())]
    table = [["model", "chosen", "tuned", *peers, "vs eager", "vs best peer"]]
    for name, model in result["models"].items():
        mine, peer, plain = latency(model, CHOSEN), best_peer(model), latency(model, "eager")
        factors = ["–", "–"]
        if mine is not None and plain is not None:
            factors[0] = f"{plain / mine:.2f}×"
        if mine is not None and peer is not None:
            factors[1] = f"{peer[1] / mine:.2f}× {peer[0]}"
        cells = [cell(model, way, "latency_s") for way in peers]
        table.append([name, _outcome(model), bare(mine, "s"), *cells, *factors])
    return table


def _by_way(result: Result, figure: str, unit: str) -> Table:
    ways = (CHOSEN, *PEERS)
    table = [["model", *map(short, ways)]]
    for name, model in result["models"].items():
        table.append([name, *(cell(model, way, figure, unit) for way in ways)])
    return table


def _circumstances(result: Result) -> str:
    """How it was run, as a sentence; empty where that was as usual."""
    told = []
    if result["quick"]:
        told.append("A quick run, to try the script: no result.")
    if result["options"]:
        told.append(f"Options of tune: `{' '.join(result['options'])}`.")
    return " ".join(told)


def to_text(result: Result) -> str:
    """All tables for a terminal."""
    parts = [
        "latency, µs",
        aligned(overview(result)),
        "back to back, µs a call",
        aligned(_by_way(result, "back_to_back_s", "s")),
        "set-up, s",
        aligned(_by_way(result, "setup_s", "")),
        aligned(verdicts(result["targets"])),
        "\n".join(f"{where}: {text[:200]}" for where, text in reasons(result)),
        _circumstances(result),
    ]
    return "\n\n".join(part for part in parts if part)


def to_markdown(result: Result) -> str:
    """What docs/results/tune.md shows: targets, an overview, and each report folded up."""
    if result["schema_version"] == 1:  # Reports alone, by model.
        return "\n".join(_folded(name, report) for name, report in reports(result).items())
    means = [t for t in result["targets"] if t["unit"] == "" and t["value"] is not None]
    lines = [
        "### Tune: latency of the choice and of its peers in µs",
        "",
        *marked(overview(result)),
        "",
        "A single synchronised call under `torch.no_grad()`, all in turns in one process. *tuned*",
        "is what `tune` returns, its checks included. `torch.jit` is traced, frozen and optimised",
        "for inference. Outputs of reduce-overhead and max-autotune are copied, since the next",
        "call overwrites them; those of make_graphed_callables are not.",
        "",
        *(f"- {t['target']}: {number(t['value'], t['unit'])}, {t['model']}" for t in means),
        "",
        verdict(result["targets"]),
        "",
    ]
    if told := _circumstances(result):
        lines += [told, ""]
    if found := [f"- {where}: {text}" for where, text in reasons(result)]:
        lines += [*found, ""]
    lines += [machine(result["environment"]), ""]
    lines += [_folded(name, report) for name, report in reports(result).items()]
    return "\n".join(lines)


def reports(result: Result) -> dict[str, Result]:
    """The report of each model that was tuned, by its name."""
    if result["schema_version"] == 1:
        return result["cases"]
    models = result["models"].items()
    return {name: model["report"] for name, model in models if model.get("report")}


def read(report: Result) -> Report | None:
    """A report, its reason in this version's words; None where it reads no such schema."""
    try:
        found = Report.from_json(json.dumps(report))
    except GraphwrightError:
        return None
    if found.chosen_row is not None:
        finalists = [row for row in found.rows if row.final and row.status is Status.OK]
        found.reason = reason_for(found, found.chosen_row, finalists)
    return found


def _folded(name: str, data: Result) -> str:
    """The full table of a report, to be opened by a click."""
    report = read(data)
    if report is None:
        return f"{name}: a report of another version of graphwright, not shown.\n"
    heading, _, rest = report_to_markdown(report).partition("\n\n")
    summary = html.escape(heading.removeprefix("### "), quote=False)
    # `markdown` is for mkdocs, blank lines for GitHub.
    return f'<details markdown="1">\n<summary>{summary}</summary>\n\n{rest.strip()}\n\n</details>\n'
