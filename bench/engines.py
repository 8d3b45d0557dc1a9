"""Other engines beside eager, and the time to a first answer of what was tuned and saved.

scripts/bench engines runs this file for each model, in a process of its own: tune() tries each way
in turns with eager, verified; then what was chosen is saved, and fresh processes are timed from
their start to the first right answer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cases
import torch

import graphwright as gw
from graphwright.report import Report, Row
from graphwright.report.environment import environment
from graphwright.strategies import parse_candidates

Figures = dict[str, Any]
SCHEMA = "graphwright.bench"
WAYS = {
    "cuda": (
        "inductor+graph",
        "fused+graph",
        "onnxruntime",
        "onnxruntime:graph",
        "tensorrt",
        "xla",
    ),
    "cpu": ("inductor", "fused", "onnxruntime", "aot_inductor", "xla"),
}
# The models that are saved, and whose first answers are timed; and seconds for a model.
SAVED = ("resnet50", "bert")
LIMIT_S, CANDIDATE_S = 240, 100
# What is asked of a first answer: over torch.compile's with empty caches, and beyond eager's.
OF_COMPILED, BEYOND_EAGER_S = 0.25, 1.5
ROUNDS = 3
MAIN = Path(__file__)
ANSWERED = "answered"  # A line by itself.


def measure(name: str, device: torch.device, *, quick: bool) -> Figures:
    """All ways on one model; what was chosen from process start, where it is one of SAVED."""
    model, inputs = cases.load(name, device)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    with torch.no_grad():
        tuned = gw.tune(
            model,
            args,
            kwargs,
            strategies=WAYS[device.type],
            remember=False,
            # In one process, each in turns with eager; JAX comes last, and stays.
            isolate=device.type != "cuda",
            timeout_s=20.0 if quick else CANDIDATE_S,
            progress=False,
        )
        tuned.report.model = name
        found: Figures = {"report": json.loads(tuned.report.to_json()), "first_answer_s": {}}
        if name in SAVED and device.type == "cuda":
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / f"{name}.gw"
                gw.save(tuned, path)
                found["artifact_bytes"] = path.stat().st_size
                found["first_answer_s"] = first_answers(name, path, 1 if quick else ROUNDS)
    return found


def first_answers(name: str, path: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds from the start of a process to its first right answer, by what gives it, in turns.

    Each way goes once before it is timed, so that none waits for Python to compile modules.
    """
    ways = ("eager", "saved", "inductor, cold", "inductor, warm")
    found: dict[str, list[float]] = {way: [] for way in ways}
    command = [sys.executable, str(MAIN), name, str(path)]
    for number in range(-1, rounds):
        with tempfile.TemporaryDirectory() as caches:
            for way in ways:
                compiled = way.startswith("inductor")
                if (compiled and number > 0) or (way.endswith("warm") and number < 0):
                    continue  # Once each: it takes long.
                variables = dict(os.environ)
                variables.pop("PYTHONDONTWRITEBYTECODE", None)
                if compiled:
                    variables["TORCHINDUCTOR_CACHE_DIR"] = str(Path(caches) / "inductor")
                    variables["TRITON_CACHE_DIR"] = str(Path(caches) / "triton")
                seconds = _answered([*command, "--first", way], variables)
                if number >= 0:
                    found[way].append(seconds)
    return found


def _answered(command: Sequence[str], variables: dict[str, str]) -> float:
    """Seconds from a process's start until it says that it has its answer."""
    began = time.perf_counter()
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = any(line.strip() == ANSWERED for line in process.stdout)
        seconds = time.perf_counter() - began
    if not said:
        raise RuntimeError(f"{' '.join(command)} gave no answer")
    return seconds


def first_answer(name: str, path: Path, way: str) -> None:
    """Give one right answer, say so, and end at once."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.no_grad():
        if way == "saved":
            # Verified by load() itself; its sample is the call.
            tuned = gw.load(path, trust=True)
            call = tuned._choice.origin.samples[0].call
            tuned(*call.args, **call.kwargs)
        else:
            model, inputs = cases.load(name, device)
            args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
            if way != "eager":
                torch.compile(model)(*args, **kwargs)
            model(*args, **kwargs)
        if device.type == "cuda":
            torch.cuda.synchronize()
    print(ANSWERED, flush=True)
    os._exit(0)  # What the process clears up is no part of the answer.


def _cell(row: Row | None) -> str:
    """A way's time in ms, and over eager's where it was measured in turns with it."""
    if row is None or row.screening is None:
        return "–"
    own = f"{statistics.median(row.screening.rounds('latency')) * 1e3:.3f}"
    if row.baseline is None or row.strategy == "eager":
        return own
    return f"{own} ({statistics.median(row.screening.ratios(row.baseline, 'latency')):.2f})"


def targets(result: Figures) -> list[Figures]:
    """What is asked of first answers, and whether it holds."""
    found = []
    for name, model in result["models"].items():
        times = {way: statistics.median(t) for way, t in model.get("first_answer_s", {}).items()}
        if not times:
            continue
        share = times["saved"] / times["inductor, cold"]
        beyond = times["saved"] - times["eager"]
        found += [
            {
                "target": f"{name}: first answer in {OF_COMPILED:g} of torch.compile's time, cold",
                "figure": share,
                "met": share <= OF_COMPILED,
            },
            {
                "target": f"{name}: first answer at most {BEYOND_EAGER_S:g} s after eager's",
                "figure": beyond,
                "met": beyond <= BEYOND_EAGER_S,
            },
        ]
    return found


def to_markdown(result: Figures) -> str:
    """A row a model: each way's time, and its share of eager's."""
    where = result["environment"]
    ways = WAYS["cuda" if "gpu" in where else "cpu"]
    place = where.get("gpu", f"{where['processor']}, {where['threads']} threads")
    lines = [
        f"Milliseconds of a synchronised call ({place}, PyTorch {where['torch']}), and over "
        "eager's, in turns with it. Each was verified against float64.",
        "",
        f"| model | eager | {' | '.join(ways)} | chosen |",
        "| --- |" + " ---: |" * (len(ways) + 1) + " --- |",
    ]
    whys: dict[str, list[str]] = {}
    for name, model in result["models"].items():
        if "report" not in model:
            why = textwrap.shorten(model.get("failed", "?"), 160, placeholder=" …")
            whys.setdefault(f"not measured: {why}", []).append(name)
            continue
        report = Report.from_json(json.dumps(model["report"]))
        cells = []
        for way in ("eager", *ways):
            row = report.row(way)
            bad = row is not None and row.status not in ("ok", "slower")
            cells.append(f"*{row.status}*" if row and bad else _cell(row))
            if row is not None and bad:
                whys.setdefault(f"`{way}`, {row.status}: {row.reason}", []).append(name)
            for note in row.notes if row is not None and "onnx" in way else ():
                if "CPU" in note:
                    whys.setdefault(f"`{way}`: {note}", []).append(name)
        lines.append(f"| {name} | {' | '.join(cells)} | {report.chosen} |")
    lines += ["", *(f"- {why} ({', '.join(names)})" for why, names in whys.items())]
    firsts = {
        n: m["first_answer_s"] for n, m in result["models"].items() if m.get("first_answer_s")
    }
    if firsts:
        kinds = list(next(iter(firsts.values())))
        lines += ["", "Seconds from the start of a process to its first right answer:", ""]
        lines += [f"| model | {' | '.join(kinds)} |", "| --- |" + " ---: |" * len(kinds)]
        for name, times in firsts.items():
            cells = [f"{statistics.median(times[kind]):.1f}" for kind in kinds]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def benchmark(out: Path, only: Sequence[str], *, quick: bool, commit: str) -> int:
    """Measure models and write after each; the number that failed or missed a target.

    Others that the file has already, of the same commit and machine, are kept.
    """
    from processes import figures_of

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: Figures = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "engines",
        "commit": commit,
        "quick": quick,
        "environment": environment(device),
        "models": {},
    }
    out.mkdir(parents=True, exist_ok=True)
    where = out / "engines.json"
    if where.exists():
        earlier = json.loads(where.read_text(encoding="utf-8"))
        if all(earlier[key] == result[key] for key in ("commit", "quick", "environment")):
            result["models"] = earlier["models"]
    for name in only or cases.MODELS:
        began = time.perf_counter()
        found = figures_of("engines.py", name, ["--quick"] * quick, LIMIT_S)
        result["models"][name] = found.get("figures", {}) | (
            {"failed": found["failed"]} if "failed" in found else {}
        )
        result["targets"] = targets(result)
        where.write_text(json.dumps(result, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{name}: {time.perf_counter() - began:.0f} s {found.get('failed', '')}", flush=True)
    print(to_markdown(result))
    for target in result["targets"]:
        print(f"{target['target']:70} {target['figure']:7.3f}  {'yes' if target['met'] else 'NO'}")
    print(f"wrote {where}")
    failed = sum("failed" in model for model in result["models"].values())
    return failed + sum(not target["met"] for target in result["targets"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=cases.MODELS)
    parser.add_argument("file", type=Path)
    parser.add_argument("--first", help="give one answer this way, of what is saved in FILE")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    if given.what in ("bert", "gpt2", "minilm") and given.first != "saved":
        import transformers

        transformers.logging.set_verbosity_error()
    if given.first is not None:
        first_answer(given.what, given.file, given.first)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parse_candidates(WAYS[device.type], ())
    figures = measure(given.what, device, quick=given.quick)
    given.file.write_text(json.dumps({"figures": figures}), encoding="utf-8")


if __name__ == "__main__":
    main()
