"""Seconds from the start of a process to its first right answer: what was saved, beside PyTorch.

scripts/bench answers tunes a model, saves it, and lets fresh processes answer in turns: eager, what
was saved, torch.compile with empty caches, and with those that it has just filled. Triton's cache
is empty for eager and what was saved too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cases
import torch
from rendering import machine, marked

import graphwright as gw
from graphwright.report.environment import environment

Figures = dict[str, Any]
SCHEMA = "graphwright.bench"
MODELS = ("resnet50", "bert")
EAGER, SAVED, COLD, WARM = WAYS = ("eager", "saved", "inductor, cold", "inductor, warm")
KEPT = {"cuda": "fused+graph", "cpu": "fused"}  # What is saved.
# What is asked of what was saved: over torch.compile's with empty caches, and beyond eager's.
OF_COMPILED, BEYOND_EAGER_S = 0.25, 1.5
ROUNDS = 3
ANSWERED = "answered"  # A line by itself.


def measure(name: str, device: torch.device, rounds: int) -> Figures:
    """Seconds of each way, round by round.

    Each goes once before it is timed, so that none waits for Python to compile modules.
    """
    model, inputs = cases.load(name, device)
    args, kwargs = _called(inputs)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.gw"
        with torch.no_grad():
            tuned = gw.tune(
                model,
                args,
                kwargs,
                strategies=[KEPT[device.type]],
                remember=False,
                isolate=False,
                progress=False,
            )
        if tuned.report.chosen != KEPT[device.type]:
            raise RuntimeError(f"{name}: {tuned.report.chosen} is faster here, and not saved")
        gw.save(tuned, path)
        for number in range(rounds + 1):
            variables = {
                **os.environ,
                "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor{number}",
                "TRITON_CACHE_DIR": f"{folder}/triton{number}",
            }
            variables.pop("PYTHONDONTWRITEBYTECODE", None)
            for way in WAYS:
                if way == WARM and number != 1:
                    continue  # Once: nothing is asked of it.
                taken = _answered([name, str(path), way], variables)
                if number:
                    seconds[way].append(taken)
                    print(f"{name}, {way}: {taken:.2f} s", flush=True)
        return {
            "saved": tuned.report.chosen,
            "artifact_bytes": path.stat().st_size,
            "seconds": seconds,
        }


def _called(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), inputs) if isinstance(inputs, dict) else (inputs, {})


def _answered(words: Sequence[str], variables: dict[str, str]) -> float:
    """Seconds from a process's start until it says that it has its answer."""
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, __file__, *words], env=variables, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = any(line.strip() == ANSWERED for line in process.stdout)
        seconds = time.perf_counter() - began
    if not said:
        raise RuntimeError(f"{' '.join(words)} gave no answer")
    return seconds


def answer(name: str, path: Path, way: str) -> None:
    """Give one right answer, say so, and end at once."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.no_grad():
        if way == SAVED:
            # Verified by load() itself; its sample is the call.
            tuned = gw.load(path, trust=True)
            call = tuned._choice.origin.samples[0].call
            tuned(*call.args, **call.kwargs)
        else:
            model, inputs = cases.load(name, device)
            args, kwargs = _called(inputs)
            (model if way == EAGER else torch.compile(model))(*args, **kwargs)
        if device.type == "cuda":
            torch.cuda.synchronize()
    print(ANSWERED, flush=True)
    os._exit(0)  # What the process clears up is no part of the answer.


def medians(model: Figures) -> dict[str, float]:
    return {way: statistics.median(taken) for way, taken in model["seconds"].items()}


def targets(result: Figures) -> list[Figures]:
    """What is asked of first answers, and whether it holds."""
    found = []
    for name, model in result["models"].items():
        times = medians(model)
        share, beyond = times[SAVED] / times[COLD], times[SAVED] - times[EAGER]
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
    """A row a model: each way's median with its least and most."""
    lines = [
        "Seconds from the start of a process to its first right answer: the median, with the least "
        f"and the most, of {result['rounds']} rounds. {machine(result['environment'])}",
        "",
    ]
    heads = ["model", EAGER, SAVED, "torch.compile, empty caches", "torch.compile, filled caches"]
    rows = []
    for name, model in result["models"].items():
        cells = [
            f"{statistics.median(each):.1f}"
            + (f" ({min(each):.1f} to {max(each):.1f})" if len(each) > 1 else "")
            for each in model["seconds"].values()
        ]
        cells[1] = f"`{model['saved']}` {cells[1]}"
        rows.append([name, *cells])
    lines += [*marked([heads, *rows]), ""]
    for target in targets(result):
        verdict = "met" if target["met"] else "MISSED"
        lines.append(f"- {target['target']}: {target['figure']:.2f}, {verdict}.")
    return "\n".join([*lines, ""])


def benchmark(out: Path, only: Sequence[str], *, quick: bool, commit: str) -> int:
    """Measure models and write after each; the number of targets that are missed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rounds = 1 if quick else ROUNDS
    result: Figures = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "answers",
        "commit": commit,
        "quick": quick,
        "rounds": rounds,
        "environment": environment(device),
        "models": {},
    }
    out.mkdir(parents=True, exist_ok=True)
    where = out / "answers.json"
    for name in only or MODELS:
        result["models"][name] = measure(name, device, rounds)
        result["targets"] = targets(result)
        where.write_text(json.dumps(result, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{to_markdown(result)}wrote {where}")
    return sum(not target["met"] for target in result["targets"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Give one answer.")
    parser.add_argument("model", choices=cases.MODELS)
    parser.add_argument("file", type=Path)
    parser.add_argument("way", choices=WAYS)
    given = parser.parse_args()
    answer(given.model, given.file, given.way)


if __name__ == "__main__":
    main()
