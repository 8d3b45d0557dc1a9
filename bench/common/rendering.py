"""What the tables of the benchmarks share: targets, figures with units, text and Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from graphwright.calls.plurals import counted

Result = dict[str, Any]
Table = list[list[str]]  # the headings, then the rows

MIB = 2**20
# (factor, decimals, name) of what figures are kept in.
UNITS = {"s": (1e6, 1, "µs"), "B": (1 / MIB, 2, "MiB"), "": (1.0, 3, "")}


def target(
    name: str, model: str, value: float | None, limit: float | None, unit: str, met: bool | None
) -> Result:
    """A target; `met` is None where it was not measured since something is not to be had here."""
    return {
        "target": name,
        "model": model,
        "value": value,
        "limit": limit,
        "unit": unit,
        "met": met,
    }


def number(value: float | None, unit: str) -> str:
    """A figure with its unit; a dash where there is none."""
    if value is None:
        return "–"
    factor, decimals, name = UNITS[unit]
    return f"{value * factor:,.{decimals}f} {name}".rstrip()


def bare(value: float | None, unit: str) -> str:
    """A figure in its unit, which a heading names."""
    return number(value, unit).removesuffix(UNITS[unit][2]).rstrip()


def cell(model: Result, way: str, figure: str, unit: str = "s") -> str:
    """One figure of a way as a bare number, or what became of the way."""
    row = model.get("ways", {}).get(way, {})
    if figure not in row:
        return {"ok": "–", "unavailable": "–"}.get(row.get("status", ""), row.get("status", "–"))
    factor, decimals, _ = UNITS[unit]
    return f"{row[figure] * factor:,.{decimals}f}"


def short(way: str) -> str:
    """A way as a heading."""
    return way.removeprefix("graphwright.")


def reasons(result: Result) -> Iterator[tuple[str, str]]:
    """What failed, was wrong, or ought to be known, each with where."""
    seen: dict[str, list[str]] = {}
    for name, model in result["models"].items():
        if "failed" in model:
            yield name, model["failed"]
        if "reason" in model.get("memory", {}):
            yield name, f"memory: {model['memory']['reason']}"
        for way, row in model.get("ways", {}).items():
            for text in (row.get("reason"), *row.get("notes", ())):
                if text:
                    seen.setdefault(f"{short(way)}: {text}", []).append(name)
    for text, names in seen.items():
        yield ("every model" if len(names) == len(result["models"]) else ", ".join(names)), text
    if "failed" in (result.get("batches") or {}):
        yield "the batch sizes", result["batches"]["failed"]


def verdicts(found: Sequence[Result]) -> Table:
    """The targets with what came of them."""
    table = [["target", "model", "value", "limit", "met"]]
    for t in found:
        value, limit = (number(t[key], t["unit"]) for key in ("value", "limit"))
        met = {True: "yes", False: "NO", None: "not measured"}[t["met"]]
        table.append([t["target"], t["model"], value, limit, met])
    return table


def verdict(found: Sequence[Result]) -> str:
    """How many targets were met and which were missed, as a sentence."""
    met = f"{sum(t['met'] is True for t in found)} of {counted(len(found), 'target')} met"
    missed = [_missed(t) for t in found if t["met"] is False]
    return f"{met}; missed: {'; '.join(missed)}." if missed else f"{met}."


def _missed(t: Result) -> str:
    where = t["model"]
    if t["value"] is not None and t["limit"] is not None:
        where += f": {number(t['value'], t['unit'])} against {number(t['limit'], t['unit'])}"
    return f"{t['target']} ({where})"


def gpu_name(gpu: str) -> str:
    """Without what it says of its maker and memory."""
    return gpu.removeprefix("NVIDIA ").partition(" ")[0]


def machine(environment: Mapping[str, str]) -> str:
    """What a reader has to know of where it ran, as a sentence."""
    kept = ("gpu", "processor", "torch", "cuda", "driver")
    return ", ".join(f"{key} {environment[key]}" for key in kept if key in environment) + "."


def aligned(table: Table) -> str:
    """A table for a terminal."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        first, *rest = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def marked(table: Table) -> list[str]:
    """A table as lines of Markdown."""
    ruler = ["---", *["---:"] * (len(table[0]) - 1)]
    return ["| " + " | ".join(row) + " |" for row in (table[0], ruler, *table[1:])]
