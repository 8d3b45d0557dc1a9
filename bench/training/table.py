"""The result of scripts/bench training as targets that were met or missed, as text and Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from graphwright.calls.plurals import counted

from ..common.rendering import (
    MIB,
    Result,
    Table,
    aligned,
    machine,
    marked,
    reasons,
    short,
    target,
    verdict,
    verdicts,
)

EAGER, CALLABLES = "eager", "torch.cuda.make_graphed_callables"
PLAIN, FUSED = "graphwright.graph_step", "graphwright.inductor+graph_step"
OURS = (PLAIN, FUSED)
OTHERS = (EAGER, "torch.compile", "reduce-overhead", CALLABLES)
SHOWN = (*OTHERS, "graphwright.make_graphed_callables", *OURS)
# Models whose eager steps are known to leave the GPU waiting for the host.
LAUNCH_BOUND = ("mlp", "lstm", "resnet18_b8", "gpt2", "bert")
TIME, RESERVED = "back_to_back_s", "reserved"

FASTER, MEAN, SLOWER, OFF, AGAIN = 3.0, 1.15, 1.03, 0.01, 3.0


def seconds(model: Result, way: str, figure: str = TIME) -> float | None:
    """Seconds a step of a way that works; None where there is no figure."""
    row = model.get("ways", {}).get(way, {})
    return row.get(figure) if row.get("status") == "ok" else None


def best(model: Result, ways: Sequence[str]) -> tuple[str, float] | None:
    """The fastest of some ways back to back, and its seconds."""
    found = [(time, way) for way in ways if (time := seconds(model, way)) is not None]
    return min(found)[::-1] if found else None


def gain(model: Result) -> float | None:
    """The best of the others over the best of ours."""
    ours, others = best(model, OURS), best(model, OTHERS)
    return others[1] / ours[1] if ours and others else None


def idle(model: Result) -> float | None:
    """The share of an eager step in which the GPU waits: what plain graph_step() does without."""
    eager, plain = seconds(model, EAGER), seconds(model, PLAIN)
    return max(0.0, 1 - plain / eager) if eager and plain else None


def peak(model: Result, way: str, when: str = "with_setup", what: str = RESERVED) -> int | None:
    """Bytes at the peak of a way in a process of its own."""
    return model.get("memory", {}).get(way, {}).get(when, {}).get(what)


def targets(result: Result) -> list[Result]:
    """Every target with its figure, its limit and whether it was met."""
    found = []
    gains = []
    for name, model in result["models"].items():
        ours, eager = best(model, OURS), seconds(model, EAGER)
        if name in LAUNCH_BOUND:
            ratio = eager / ours[1] if ours and eager else None
            what = f"eager over the best of ours, launch-bound, ≥ {FASTER:g}"
            found.append(target(what, name, ratio, FASTER, "", _at_least(ratio, FASTER)))
        ratio = gain(model)
        gains += [ratio] if ratio is not None else []
        slowest = 1 / SLOWER
        what = f"best of the others over the best of ours, ≥ 1 / {SLOWER:g}"
        found.append(target(what, name, ratio, slowest, "", _at_least(ratio, slowest)))
        found += [_memory(name, model, ours), _loss(name, model)]
    total = len(result["models"])
    mean = statistics.geometric_mean(gains) if gains else None
    where = f"{len(gains)} of {counted(total, 'model')}"
    met = len(gains) == total and _at_least(mean, MEAN)
    what = f"geometric mean of the best of the others over the best of ours, ≥ {MEAN:g}"
    return [*found, target(what, where, mean, MEAN, "", met)]


def _at_least(value: float | None, limit: float) -> bool:
    return value is not None and value >= limit


def _memory(name: str, model: Result, ours: tuple[str, float] | None) -> Result:
    """Of the best of ours, as that is what a reader would take for its speed."""
    what = "peak memory of the best of ours, ≤ torch's make_graphed_callables"
    mine = peak(model, ours[0]) if ours else None
    limit = peak(model, CALLABLES)
    if mine is None or limit is None:
        return target(what, name, mine, limit, "B", None)
    return target(what, name, mine, limit, "B", mine <= limit)


def _loss(name: str, model: Result) -> Result:
    ways = model.get("ways", {})
    limit = max(OFF, AGAIN * ways.get(EAGER, {}).get("repeat_relative_difference", 0.0))
    what = f"loss of plain graph_step() after its first steps, off eager's by ≤ {OFF:.0%}"
    what += f" or {AGAIN:g} × eager's off itself"
    off = ways.get(PLAIN, {}).get("loss_relative_difference")
    return target(what, name, off, limit, "", off is not None and off <= limit)


def summary(model: Result) -> Result:
    """What is made of a model's figures, for the file."""
    ours, others = best(model, OURS), best(model, OTHERS)
    return {
        "best_of_ours": ours[0] if ours else None,
        "best_of_others": others[0] if others else None,
        "others_over_ours": gain(model),
        "gpu_idle_in_eager": idle(model),
    }


def line(name: str, model: Result) -> str:
    """A model as it is done."""
    ours, others, ratio = best(model, OURS), best(model, OTHERS), gain(model)
    parts = [f"{short(way)} {time * 1e3:.3f} ms" for way, time in filter(None, (ours, others))]
    text = f"{name}: {'; '.join(parts) or 'nothing was timed'}"
    text += f"; {ratio:.2f}×" if ratio is not None else ""
    return text + (f"; failed, {model['failed']}" if "failed" in model else "")


def overview(result: Result) -> Table:
    """Milliseconds a step back to back with their spread, and the ratios that are asked for."""
    table = [["model", *map(short, SHOWN), "eager / ours", "others / ours", "GPU idle in eager"]]
    for name, model in result["models"].items():
        ours, eager, waits = best(model, OURS), seconds(model, EAGER), idle(model)
        cells = []
        for way in SHOWN:
            time = seconds(model, way)
            spread = seconds(model, way, "back_to_back_spread_s") or 0.0
            status = model.get("ways", {}).get(way, {}).get("status", "–")
            missing = "–" if status in ("ok", "unavailable") else status
            cells.append(missing if time is None else f"{time * 1e3:.3f} ±{spread * 1e3:.3f}")
        cells.append(_times(eager / ours[1] if ours and eager else None))
        cells += [_times(gain(model)), "–" if waits is None else f"{waits:.0%}"]
        table.append([name, *cells])
    return table


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×"


def by_way(result: Result, figure: str, factor: float, decimals: int) -> Table:
    """One figure of every way, model by model."""
    table = [["model", *map(short, SHOWN)]]
    for name, model in result["models"].items():
        found = [seconds(model, way, figure) for way in SHOWN]
        table.append([name, *("–" if f is None else f"{f * factor:.{decimals}f}" for f in found)])
    return table


def by_memory(result: Result) -> Table:
    """Peaks in MiB: reserved / allocated with the set-up, then reserved in steps after it."""
    table = [["model", *map(short, SHOWN)]]
    for name, model in result["models"].items():
        cells = []
        for way in SHOWN:
            peaks = [
                peak(model, way),
                peak(model, way, what="allocated"),
                peak(model, way, "after_setup"),
            ]
            texts = ["–" if p is None else f"{p / MIB:,.0f}" for p in peaks]
            cells.append("–" if peaks[0] is None else f"{texts[0]} / {texts[1]}; {texts[2]}")
        table.append([name, *cells])
    return table


def by_loss(result: Result) -> Table:
    """How far the last of the first losses is off eager's; eager's own is that of a second run."""
    table = [["model", *map(short, SHOWN)]]
    for name, model in result["models"].items():
        rows = [model.get("ways", {}).get(way, {}) for way in SHOWN]
        offs = [row.get("loss_relative_difference") for row in rows]
        again = model.get("ways", {}).get(EAGER, {}).get("repeat_relative_difference")
        cells = ["–" if off is None else f"{off:.1e}" for off in (again, *offs[1:])]
        table.append([name, *cells])
    return table


HEADINGS = {
    "a step back to back, ms": overview,
    "a step that is waited for, ms": lambda result: by_way(result, "latency_s", 1e3, 3),
    "set-up, s": lambda result: by_way(result, "setup_s", 1.0, 1),
    "peak memory, MiB: reserved / allocated with the set-up; reserved after it": by_memory,
    "loss after 20 steps, off eager's (relative; eager: of a second run)": by_loss,
}


def _whys(result: Result) -> list[str]:
    """What failed or ought to be known, in lines."""
    lines = [f"{where}: {text[:300]}" for where, text in reasons(_without_memory(result))]
    for name, model in result["models"].items():
        for way, row in model.get("memory", {}).items():
            if row.get("status") == "failed":
                lines.append(f"{name}: memory of {short(way)}: {row['reason'][:300]}")
    return lines


def _without_memory(result: Result) -> Result:
    models = result["models"].items()
    return result | {
        "models": {n: {k: v for k, v in m.items() if k != "memory"} for n, m in models}
    }


def to_text(result: Result) -> str:
    """All tables for a terminal."""
    parts = [f"{title}\n\n{aligned(table(result))}" for title, table in HEADINGS.items()]
    parts += [aligned(verdicts(result["targets"])), "\n".join(_whys(result))]
    return "\n\n".join(parts)


def to_markdown(result: Result, file: str) -> str:
    """docs/results/training.md."""
    lines = [
        "# Training steps",
        "",
        "One whole training step, forward, backward and a fused optimizer, by `graph_step()` and",
        "by PyTorch's own methods, timed in turns in one process on changing batches. *inductor+*",
        "is `graph_step()` of a model under `torch.compile`. *GPU idle in eager* is the share of",
        "an eager step that plain `graph_step()` saves.",
        "",
        # What turned out later about a run.
        *(f"**{remark}**\n" for remark in result.get("remarks", ())),
    ]
    for title, table in HEADINGS.items():
        lines += [f"## {title[0].upper()}{title[1:]}", "", *marked(table(result)), ""]
    lines += [
        "Set-up and memory include the first steps. Code that `torch.compile` compiled for one",
        "column may be reused by another in the same process: only the first set-up is cold.",
        "Memory is measured in a separate process for each column.",
        "",
        *(f"- {why}" for why in _whys(result)),
    ]
    lines += ["", verdict(result["targets"]), "", machine(result["environment"])]
    return "\n".join(lines) + "\n"
