"""fused+graph beside eager+graph on models that nobody has tuned for.

    scripts/bench unseen [--out DIR] [--only LIBRARY ...] [--count N] [--plain]

Each model is fused with its passes timed, then graphed; the whole is verified against float64 and
its replays are timed in turns with those of the model as it is. Models that cannot take part (too
large, inputs of another kind, no half precision, no graph of the model as it is) are named with the
reason, and the next one by the seed takes their place.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import graphwright as gw
from graphwright.calls.plurals import counted
from graphwright.calls.snapshots import Call
from graphwright.errors import first_line
from graphwright.evaluation.reference import reference
from graphwright.evaluation.verification import verify
from graphwright.graphs.capture import capture
from graphwright.report.environment import environment

from ..common.processes import run_all
from ..common.record import SCHEMA, commit, write
from ..common.timing import in_turns, times
from .models import SEED, WANTED, Unusable, built, names

Row = dict[str, Any]

BATCHES = (1, 8)
ROUNDS = 40
# What is asked: no model slower than this, and half of them set up in so many seconds.
SLOWER, SETUP_S = 1.02, 5.0
# Seconds of one process, which goes through all models that are left.
LIMIT_S = 540
ENDED = "it ended the process"


def on(device: torch.device, values: Any) -> Any:
    """Arguments on a device, numbers in half precision where it is a GPU."""

    def moved(value: torch.Tensor) -> torch.Tensor:
        half = device.type == "cuda" and value.is_floating_point()
        return value.to(device, torch.float16 if half else value.dtype)

    args, kwargs = values
    return tuple(map(moved, args)), {name: moved(value) for name, value in kwargs.items()}


def measured(model: nn.Module, args: Any, kwargs: Any, *, timed: bool) -> Row:
    """Set-up, verdict and times of one model at one size.

    Raises:
        Unusable: the model fails, or there is no graph of it as it is.
    """
    with torch.no_grad():
        try:
            model(*args, **kwargs)
            known = reference(model, model, Call("the sample", args, kwargs))
            plain = capture(model, *args, **kwargs)
        except Exception as error:
            raise Unusable(first_line(error)) from error
        began = time.perf_counter()
        fused = gw.fuse(model, args, kwargs, measure=timed)
        seconds = time.perf_counter() - began
        graphed = gw.graph(fused)
        verdict = verify(graphed, known)
        row: Row = {
            "setup_s": seconds,
            "right": verdict.ok,
            "reason": verdict.reason,
            "graphed": graphed.statistics.hits > 0,
            "passes": sorted({name for region in fused.regions for name, _ in region.done}),
            "left_out": [list(each) for region in fused.regions for each in region.left_out],
            "gained_us": {
                name: value * 1e6
                for region in fused.regions
                for name, value in region.gained.items()
            },
            "untraced": [list(each) for each in fused.untraced][:5],
        }
        both = {"graph": plain.replay, "fused+graph": capture(fused, *args, **kwargs).replay}
        row["ways"] = times(in_turns(both, ROUNDS), 1)
    one, other = (row["ways"][name]["samples"] for name in ("fused+graph", "graph"))
    row["ratio"] = statistics.median(a / b for a, b in zip(one, other, strict=True))
    return row


def go_on(found: Row, where: Path, libraries: list[str], share: float, *, timed: bool) -> None:
    """Measure all models that `found` has not, and write it after each."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found["environment"] = environment(device)
    for library in libraries:
        for name in names(library):
            done = [key for key in found["models"] if key.startswith(f"{library}/")]
            if len(done) >= WANTED[library] * share:
                break
            key = f"{library}/{name}"
            if key in found["models"] or key in found["passed_over"]:
                continue
            # If the process ends here, this is why the next one leaves it out.
            found["passed_over"][key] = ENDED
            write(where, found)
            try:
                model, inputs = built(library, name, device)
                if device.type == "cuda":
                    model = model.half()
                rows = {}
                for batch in BATCHES:
                    args, kwargs = on(device, inputs(batch))
                    rows[str(batch)] = measured(model, args, kwargs, timed=timed)
            except Exception as error:
                # Not where the other package lies.
                found["passed_over"][key] = first_line(error).partition(" (at ")[0]
            else:
                del found["passed_over"][key]
                found["models"][key] = rows
            write(where, found)
            model = rows = args = kwargs = None
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def targets(result: Row) -> list[Row]:
    """What is asked of the figures, and whether it holds."""
    rows = {(key, b): row for key, sizes in result["models"].items() for b, row in sizes.items()}
    wrong = [f"{key} × {b}" for (key, b), row in rows.items() if not row["right"]]
    slower = [f"{key} × {b}" for (key, b), row in rows.items() if row["ratio"] > SLOWER]
    seconds = statistics.median(row["setup_s"] for row in rows.values()) if rows else 0.0
    count = len(result["models"])
    return [
        {"target": "30 models", "figure": count, "met": count >= 30},
        {"target": "right on all", "figure": wrong, "met": not wrong},
        {"target": f"none over {SLOWER:g}", "figure": slower, "met": not slower},
        {"target": f"median of set-up {SETUP_S:g} s", "figure": seconds, "met": seconds <= SETUP_S},
    ]


def to_markdown(result: Row) -> str:
    """A row a model."""
    where = result["environment"]
    place = where.get("gpu", f"{where['processor']}, {counted(int(where['threads']), 'thread')}")
    lines = [
        f"Drawn by the seed {result['seed']}; default configurations, random weights ({place},",
        f"PyTorch {where['torch']}). Milliseconds of a replay at batch 1 and 8; seconds of",
        "`fuse`'s set-up, which times its passes.",
        "",
        "| model | graph, 1 | fused, 1 | ratio | graph, 8 | fused, 8 | ratio | set-up |",
        "| --- |" + " ---: |" * 7,
    ]
    for key, sizes in sorted(result["models"].items()):
        cells = []
        for row in sizes.values():
            both = [f"{row['ways'][way]['median'] * 1e3:.3f}" for way in ("graph", "fused+graph")]
            cells += [*both, f"{row['ratio']:.2f}" + ("" if row["right"] else " (wrong)")]
        cells.append(", ".join(f"{row['setup_s']:.1f}" for row in sizes.values()))
        lines.append(f"| {key} | {' | '.join(cells)} |")
    passed = sorted(result["passed_over"].items())
    lines += ["", f"Skipped ({len(passed)}):", ""]
    lines += [f"- {key}: {why}" for key, why in passed]
    return "\n".join([*lines, ""])


def benchmark(out: Path, only: list[str], share: float, *, timed: bool) -> int:
    """Measure all models, in a new process where one ends; the number of targets missed."""
    where = out / "unseen.json"
    result: Row = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "unseen",
        "commit": commit(),
        "seed": SEED,
        "timed": timed,
        "environment": {},
        "models": {},
        "passed_over": {},
    }
    if where.exists():
        earlier = json.loads(where.read_text(encoding="utf-8"))
        if (earlier["commit"], earlier["timed"]) == (result["commit"], timed):
            result = earlier
    write(where, result)
    began = time.monotonic()
    while (left := LIMIT_S - (time.monotonic() - began)) > 0:
        words = [str(where), "--share", str(share), "--only", *(only or WANTED)]
        words += [] if timed else ["--plain"]
        command = ["bench.unseen.run", *words]
        [(_, failure)] = run_all([command], at_once=1, limit_s=left)
        if failure is None:
            break
        print(failure, flush=True)
    else:  # The last one was cut off by the limit: the next run has it again.
        result = json.loads(where.read_text(encoding="utf-8"))
        last = next(reversed(result["passed_over"]), None)
        if last is not None and result["passed_over"][last] == ENDED:
            del result["passed_over"][last]
            write(where, result)
    result = json.loads(where.read_text(encoding="utf-8"))
    result["targets"] = targets(result)
    write(where, result)
    print(to_markdown(result))
    for target in result["targets"]:
        print(f"{target['target']:40} {target['figure']!s:>30}  {'yes' if target['met'] else 'NO'}")
    return sum(not target["met"] for target in result["targets"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="+", default=list(WANTED))
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--plain", action="store_true")
    given = parser.parse_args()
    found = json.loads(given.file.read_text(encoding="utf-8"))
    go_on(found, given.file, given.only, given.share, timed=not given.plain)


if __name__ == "__main__":
    main()
