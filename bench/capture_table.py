"""The result of scripts/bench capture as targets that were met or missed, as text and Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Result = dict[str, Any]
Table = list[list[str]]  # the headings, then the rows

MIB = 2**20
WAYS = (
    "eager",
    "hand",
    "graphwright.capture",
    "graphwright.graph",
    "reduce-overhead",
    "make_graphed_callables",
)
HOST = ("replay", "hand", "graphwright.capture", "graphwright.graph")
# (factor, decimals, name) of what figures are kept in.
UNITS = {"s": (1e6, 1, "µs"), "B": (1 / MIB, 2, "MiB"), "": (1.0, 3, "")}

LATENCY_FACTOR, LATENCY_EXTRA_S = 1.03, 6e-6
HOST_MODEL, HOST_EXTRA_S = "mlp", 8e-6
MEMORY_SHARE, MEMORY_B = 0.15, 8 * MIB
TOGETHER_FACTOR = 1.08
CAPTURES_S = 0.5
BATCH_DIFFERENCE = 2e-2


def _target(
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


def targets(result: Result) -> list[Result]:
    """Every target with its figure, its limit and whether it was met."""
    found = []
    for name, model in result["models"].items():
        found += [_latency(name, model), _memory(name, model)]
        if name == HOST_MODEL:
            found.append(_host(name, model))
    if result["batches"] is not None:
        found += _batches(result["batches"])
    return found


def _latency(name: str, model: Result) -> Result:
    what = "latency of graph(), ≤ 1.03 × hand + 6 µs"
    ways = model.get("ways", {})
    hand, graph = ways.get("hand", {}), ways.get("graphwright.graph", {})
    if "latency_s" not in hand or "latency_s" not in graph:
        not_here = hand.get("status") == "unavailable" and graph.get("status") == "ok"
        met = None if not_here else False
        return _target(what, name, graph.get("latency_s"), None, "s", met)
    limit = LATENCY_FACTOR * hand["latency_s"] + LATENCY_EXTRA_S
    by_one_graph = graph["captures"] == 1 and not graph["eager_calls"]
    met = graph["latency_s"] <= limit and by_one_graph
    return _target(what, name, graph["latency_s"], limit, "s", met)


def _host(name: str, model: Result) -> Result:
    what = "host time of graph() beyond a bare replay, ≤ 8 µs"
    host = model.get("host_s", {})
    if "replay" not in host or "graphwright.graph" not in host:
        met = None if _latency(name, model)["met"] is None else False
        return _target(what, name, None, HOST_EXTRA_S, "s", met)
    beyond = host["graphwright.graph"] - host["replay"]
    return _target(what, name, beyond, HOST_EXTRA_S, "s", beyond <= HOST_EXTRA_S)


def _memory(name: str, model: Result) -> Result:
    what = "predicted memory off, ≤ 15 % or 8 MiB"
    if "measured" not in model.get("memory", {}):
        return _target(what, name, None, None, "B", False)
    predicted, measured = model["memory"]["predicted"], model["memory"]["measured"]
    off, limit = abs(predicted - measured), max(MEMORY_SHARE * measured, MEMORY_B)
    return _target(what, name, off, limit, "B", off <= limit)


def _batches(batches: Result) -> Iterator[Result]:
    if "failed" in batches:
        yield _target("the batch sizes in one pool", batches["model"], None, None, "", False)
        return
    name, refusal = batches["model"], batches["refusal"]
    ratio = batches["together"] / batches["alone"]
    what = "all batch sizes over the largest alone, ≤ 1.08"
    yield _target(what, name, ratio, TOGETHER_FACTOR, "", ratio <= TOGETHER_FACTOR)
    seconds = batches["captures_s"]
    what = "their captures after warm-up, ≤ 0.5 s"
    yield _target(what, name, seconds, CAPTURES_S, "", seconds < CAPTURES_S)
    off = max(figures["relative_difference"] for figures in batches["sizes"].values())
    yield _target("their results, off eager's", name, off, BATCH_DIFFERENCE, "", _within(off))
    grown = refusal["allocated_after"] - refusal["allocated_before"]
    clean = refusal["message"] is not None and grown == 0 and refusal["still_ready"]
    clean &= refusal["reserved_after"] == refusal["reserved_before"] == refusal["high_water"]
    yield _target("memory that a refused capture leaves", name, grown, 0, "B", clean)


def _within(off: float) -> bool:
    return off <= BATCH_DIFFERENCE


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    factor, decimals, name = UNITS[unit]
    return f"{value * factor:,.{decimals}f} {name}".rstrip()


def _cell(model: Result, way: str, figure: str, unit: str = "s") -> str:
    """One figure of a way as a bare number, or what became of the way."""
    row = model.get("ways", {}).get(way, {})
    if figure not in row:
        return {"ok": "–", "unavailable": "–"}.get(row.get("status", ""), row.get("status", "–"))
    factor, decimals, _ = UNITS[unit]
    return f"{row[figure] * factor:,.{decimals}f}"


def overview(result: Result, ways: Sequence[str] = WAYS, host: Sequence[str] = HOST) -> Table:
    """Latency and host time in µs, memory in MiB, model by model."""
    table = [["model", *map(_short, ways), *(f"host: {_short(way)}" for way in host)]]
    table[0] += ["predicted MiB", "measured MiB"]
    for name, model in result["models"].items():
        times, memory = model.get("host_s", {}), model.get("memory", {})
        cells = [_cell(model, way, "latency_s") for way in ways]
        cells += [_number(times.get(way), "s").removesuffix(" µs") for way in host]
        for figure in ("predicted", "measured"):
            cells.append(_number(memory.get(figure), "B").removesuffix(" MiB"))
        table.append([name, *cells])
    return table


def _short(way: str) -> str:
    return way.removeprefix("graphwright.")


def by_way(result: Result, figure: str, unit: str) -> Table:
    """One figure of every way, model by model."""
    table = [["model", *map(_short, WAYS)]]
    for name, model in result["models"].items():
        table.append([name, *(_cell(model, way, figure, unit) for way in WAYS)])
    return table


def by_batch(batches: Result) -> Table:
    """What each batch size added to the pool."""
    table = [["batch", "predicted MiB", "added MiB", "capture ms", "off eager's"]]
    for size, figures in batches["sizes"].items():
        table.append(
            [
                str(size),
                _number(figures["predicted"], "B").removesuffix(" MiB"),
                _number(figures["added"], "B").removesuffix(" MiB"),
                f"{figures['seconds'] * 1e3:.1f}",
                f"{figures['relative_difference']:.1e}",
            ]
        )
    return table


def _pools(batches: Result) -> str:
    """The sizes of the pools, as a sentence."""
    largest = max(map(int, batches["sizes"]))
    held = {
        f"Pool of batch {largest} alone": batches["alone"],
        "all in one pool": batches["together"],
        **{
            f"a plain script, {order}": nbytes
            for order, nbytes in batches["by_hand"].items()
            if order != "unavailable"
        },
    }
    sizes = ", ".join(f"{what}: {_number(nbytes, 'B')}" for what, nbytes in held.items())
    return f"Captured largest first. {sizes}."


def _reasons(result: Result) -> Iterator[tuple[str, str]]:
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
                    seen.setdefault(f"{_short(way)}: {text}", []).append(name)
    for text, names in seen.items():
        yield ("every model" if len(names) == len(result["models"]) else ", ".join(names)), text
    if "failed" in (result["batches"] or {}):
        yield "the batch sizes", result["batches"]["failed"]


def _verdicts(found: Sequence[Result]) -> Table:
    table = [["target", "model", "value", "limit", "met"]]
    for t in found:
        value, limit = (_number(t[key], t["unit"]) for key in ("value", "limit"))
        met = {True: "yes", False: "NO", None: "not measured"}[t["met"]]
        table.append([t["target"], t["model"], value, limit, met])
    return table


def to_text(result: Result) -> str:
    """All tables for a terminal."""
    parts = [
        "latency and host time, µs; memory, MiB",
        _aligned(overview(result)),
        "back to back, µs a call",
        _aligned(by_way(result, "back_to_back_s", "s")),
        "set-up, s",
        _aligned(by_way(result, "setup_s", "")),
    ]
    batches = result["batches"]
    if batches is not None and "failed" not in batches:
        parts += [f"{batches['model']} in one pool", _aligned(by_batch(batches)), _pools(batches)]
    parts.append(_aligned(_verdicts(result["targets"])))
    parts.append("\n".join(f"{where}: {text[:200]}" for where, text in _reasons(result)))
    return "\n\n".join(parts)


def _aligned(table: Table) -> str:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        first, *rest = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def to_markdown(result: Result) -> str:
    """What docs/results.md shows of a result."""
    machine = result["environment"]
    kept = ("gpu", "processor", "torch", "cuda", "driver")
    shown = ("eager", "hand", "graphwright.graph", "reduce-overhead", "make_graphed_callables")
    lines = [
        "### Capture: latency and host time in µs, memory in MiB",
        "",
        *_marked(overview(result, shown, ("replay", "hand", "graphwright.graph"))),
        "",
        "Latency is a single synchronised call; *host* is the host's share of a call that nobody",
        "waits for, *replay* that of a bare `CUDAGraph.replay()`. *Hand* is a capture written by",
        "hand: copy in, replay, clone what comes out. Memory is what an empty pool predicts for",
        "the capture, and by how much it grows.",
        "",
    ]
    batches = result["batches"]
    if batches is not None and "failed" not in batches:
        lines += [f"### {batches['model']}: {len(batches['sizes'])} batch sizes in one pool", ""]
        lines += [*_marked(by_batch(batches)), "", _pools(batches), ""]
    lines += [f"- {where}: {text}" for where, text in _reasons(result)]
    missed = [f"{t['target']} ({t['model']})" for t in result["targets"] if t["met"] is False]
    met = sum(t["met"] is True for t in result["targets"])
    verdict = f"{met} of {len(result['targets'])} targets met"
    lines += ["", f"{verdict}; missed: {'; '.join(missed)}." if missed else f"{verdict}.", ""]
    lines.append(", ".join(f"{key} {machine[key]}" for key in kept if key in machine) + ".")
    return "\n".join(lines) + "\n"


def _marked(table: Table) -> list[str]:
    ruler = ["---", *["---:"] * (len(table[0]) - 1)]
    return ["| " + " | ".join(row) + " |" for row in (table[0], ruler, *table[1:])]
