"""The result of scripts/bench capture as targets that were met or missed, as text and Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..common.rendering import (
    MIB,
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

WAYS = (
    "eager",
    "hand",
    "graphwright.capture",
    "graphwright.graph",
    "reduce-overhead",
    "make_graphed_callables",
)
HOST = ("replay", "hand", "graphwright.capture", "graphwright.graph")

LATENCY_FACTOR, LATENCY_EXTRA_S = 1.03, 6e-6
HOST_MODEL, HOST_EXTRA_S = "mlp", 8e-6
MEMORY_SHARE, MEMORY_B = 0.15, 8 * MIB
TOGETHER_FACTOR = 1.08
CAPTURES_S = 0.5
BATCH_DIFFERENCE = 2e-2


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
        return target(what, name, graph.get("latency_s"), None, "s", met)
    limit = LATENCY_FACTOR * hand["latency_s"] + LATENCY_EXTRA_S
    by_one_graph = graph["captures"] == 1 and not graph["eager_calls"]
    met = graph["latency_s"] <= limit and by_one_graph
    return target(what, name, graph["latency_s"], limit, "s", met)


def _host(name: str, model: Result) -> Result:
    what = "host time of graph() beyond a bare replay, ≤ 8 µs"
    host = model.get("host_s", {})
    if "replay" not in host or "graphwright.graph" not in host:
        met = None if _latency(name, model)["met"] is None else False
        return target(what, name, None, HOST_EXTRA_S, "s", met)
    beyond = host["graphwright.graph"] - host["replay"]
    return target(what, name, beyond, HOST_EXTRA_S, "s", beyond <= HOST_EXTRA_S)


def _memory(name: str, model: Result) -> Result:
    what = "predicted memory off, ≤ 15 % or 8 MiB"
    if "measured" not in model.get("memory", {}):
        return target(what, name, None, None, "B", False)
    predicted, measured = model["memory"]["predicted"], model["memory"]["measured"]
    off, limit = abs(predicted - measured), max(MEMORY_SHARE * measured, MEMORY_B)
    return target(what, name, off, limit, "B", off <= limit)


def _batches(batches: Result) -> Iterator[Result]:
    if "failed" in batches:
        yield target("the batch sizes in one pool", batches["model"], None, None, "", False)
        return
    name, refusal = batches["model"], batches["refusal"]
    ratio = batches["together"] / batches["alone"]
    what = "all batch sizes over the largest alone, ≤ 1.08"
    yield target(what, name, ratio, TOGETHER_FACTOR, "", ratio <= TOGETHER_FACTOR)
    seconds = batches["captures_s"]
    what = "their captures after warm-up, ≤ 0.5 s"
    yield target(what, name, seconds, CAPTURES_S, "", seconds < CAPTURES_S)
    off = max(figures["relative_difference"] for figures in batches["sizes"].values())
    yield target("their results, off eager's", name, off, BATCH_DIFFERENCE, "", _within(off))
    grown = refusal["allocated_after"] - refusal["allocated_before"]
    clean = refusal["message"] is not None and grown == 0 and refusal["still_ready"]
    clean &= refusal["reserved_after"] == refusal["reserved_before"] == refusal["high_water"]
    yield target("memory that a refused capture leaves", name, grown, 0, "B", clean)


def _within(off: float) -> bool:
    return off <= BATCH_DIFFERENCE


def overview(result: Result, ways: Sequence[str] = WAYS, host: Sequence[str] = HOST) -> Table:
    """Latency and host time in µs, memory in MiB, model by model."""
    table = [["model", *map(short, ways), *(f"host: {short(way)}" for way in host)]]
    table[0] += ["predicted MiB", "measured MiB"]
    for name, model in result["models"].items():
        times, memory = model.get("host_s", {}), model.get("memory", {})
        cells = [cell(model, way, "latency_s") for way in ways]
        cells += [bare(times.get(way), "s") for way in host]
        for figure in ("predicted", "measured"):
            cells.append(bare(memory.get(figure), "B"))
        table.append([name, *cells])
    return table


def by_way(result: Result, figure: str, unit: str) -> Table:
    """One figure of every way, model by model."""
    table = [["model", *map(short, WAYS)]]
    for name, model in result["models"].items():
        table.append([name, *(cell(model, way, figure, unit) for way in WAYS)])
    return table


def by_batch(batches: Result) -> Table:
    """What each batch size added to the pool."""
    table = [["batch", "predicted MiB", "added MiB", "capture ms", "off eager's"]]
    for size, figures in batches["sizes"].items():
        table.append(
            [
                str(size),
                bare(figures["predicted"], "B"),
                bare(figures["added"], "B"),
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
    sizes = ", ".join(f"{what}: {number(nbytes, 'B')}" for what, nbytes in held.items())
    return f"Captured largest first. {sizes}."


def to_text(result: Result) -> str:
    """All tables for a terminal."""
    parts = [
        "latency and host time, µs; memory, MiB",
        aligned(overview(result)),
        "back to back, µs a call",
        aligned(by_way(result, "back_to_back_s", "s")),
        "set-up, s",
        aligned(by_way(result, "setup_s", "")),
    ]
    batches = result["batches"]
    if batches is not None and "failed" not in batches:
        parts += [f"{batches['model']} in one pool", aligned(by_batch(batches)), _pools(batches)]
    parts.append(aligned(verdicts(result["targets"])))
    parts.append("\n".join(f"{where}: {text[:200]}" for where, text in reasons(result)))
    return "\n\n".join(parts)


def to_markdown(result: Result) -> str:
    """What docs/results/capture.md shows of a result."""
    shown = ("eager", "hand", "graphwright.graph", "reduce-overhead", "make_graphed_callables")
    lines = [
        "### Capture: latency and host time in µs, memory in MiB",
        "",
        *marked(overview(result, shown, ("replay", "hand", "graphwright.graph"))),
        "",
        "Latency is that of a single synchronised call. *host* is the host's time in a call that",
        "nobody waits for, *replay* that of a bare `CUDAGraph.replay()`. *hand* is a capture",
        "written by hand: copy the inputs, replay, clone the outputs. Memory is what an empty",
        "pool predicts for the capture, and how much it grows.",
        "",
    ]
    batches = result["batches"]
    if batches is not None and "failed" not in batches:
        lines += [f"### {batches['model']}: {len(batches['sizes'])} batch sizes in one pool", ""]
        lines += [*marked(by_batch(batches)), "", _pools(batches), ""]
    lines += [f"- {where}: {text}" for where, text in reasons(result)]
    lines += ["", verdict(result["targets"]), "", machine(result["environment"])]
    return "\n".join(lines) + "\n"
