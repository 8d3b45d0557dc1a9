"""Measure training steps: graph_step() beside eager and PyTorch's own ways, on one model.

scripts/bench training runs this module for each model, in a process of its own, and then for the
memory of each way of each model, in one more. All ways begin with the same weights and have the
same fused optimizer; each works on a copy of its own.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import torch

import graphwright as gw
from graphwright.calls.plurals import counted
from graphwright.errors import first_line
from graphwright.evaluation.garbage_collection import collection_held_off
from graphwright.evaluation.measurement import DIGITS, Measurement, Timer
from graphwright.report.environment import environment

from ..common.peers import compilations, compilations_since
from .cases import MODELS, Task, task
from .ways import COMPILED, EAGER, FUSED, PLAIN, WAYS, Trainer, eager, left_out, settle

Figures = dict[str, Any]
Call = Callable[[], object]
Save = Callable[[Figures, str | None], None]

# Seconds of timing a model, and of a block of steps that nobody waits for.
BUDGET_S, QUICK_S = 2.5, 0.1
BLOCK_S = 0.06
MIN_BLOCK, MAX_BLOCK = 6, 200
SYNCHRONISED = 6  # steps a round
MIN_ROUNDS, MAX_ROUNDS = 5, 25
# Steps after which the losses are compared. Far from eager's is wrong and not another rounding.
COMPARED, WRONG = 20, 0.2
# Steps whose peak of memory is taken once all is set up.
SETTLED_STEPS = 5


def measure(
    name: str, device: torch.device, save: Save, without: Container[str] = (), *, quick: bool
) -> Figures:
    """All figures of one model but its memory; `save` gets what is known and what is under way."""
    one = task(name, device, quick=quick)
    timer = Timer(device)
    rows: dict[str, Figures] = {}
    trainers: dict[str, Trainer] = {}
    figures: Figures = {
        "inputs": [f"{tuple(t.shape)} {t.dtype}" for t in one.batches[0]],
        "parameters": sum(p.numel() for p in one.model.parameters()),
        "ways": rows,
    }
    # What libraries do at their first call is no set-up of the way that happens to come first.
    settle(one, eager(one))
    for way in WAYS:
        why = left_out(way, device, without)
        if why is not None:
            rows[way] = {"status": "unavailable", "reason": why}
            continue
        save(figures, way)
        rows[way] = _set_up(way, one, timer, trainers)
    # Once all are there: none may have spoilt another.
    save(figures, "the losses")
    for way in list(trainers):
        try:
            rows[way]["losses"] = losses(one, trainers[way])
        except Exception as error:
            rows[way] |= {"status": "failed", "reason": first_line(error)}
            del trainers[way]
    compare(rows, trainers)
    if EAGER in trainers:
        # The GPU adds up in another order each time, here and there: no way is nearer than this.
        again, first = losses(one, trainers[EAGER])[-1], rows[EAGER]["losses"][-1]
        rows[EAGER]["repeat_relative_difference"] = abs(again - first) / abs(first)
    if FUSED in trainers and rows[FUSED]["losses"] == rows.get(PLAIN, {}).get("losses"):
        rows[FUSED]["notes"].append("its losses are plain graph_step()'s: was it compiled at all?")
    save(figures, "the timing")
    steps = {way: _stepping(one, trainer) for way, trainer in trainers.items()}
    for way, measured in timed(steps, timer, budget_s=QUICK_S if quick else BUDGET_S).items():
        rows[way] |= {
            "latency_s": measured.latencies.median,
            "back_to_back_s": measured.back_to_back.median,
            "back_to_back_spread_s": measured.back_to_back.spread,
            "latency_samples": measured.latency,
            "back_to_back_samples": measured.throughput,
        }
    for way, trainer in trainers.items():
        if trainer.graphed is not None:
            rows[way] |= _went(trainer.graphed, rows[way]["notes"])
            trainer.graphed.close()
    return figures


def _set_up(way: str, one: Task, timer: Timer, trainers: dict[str, Trainer]) -> Figures:
    """The row of a way that is made and run until it has settled; `trainers` gets what it made."""
    before = compilations() if way in COMPILED else {}
    notes: list[str] = []
    try:
        timer.synchronize()
        start = time.perf_counter()
        trainer = WAYS[way](one)
        settle(one, trainer)
        timer.synchronize()
        row: Figures = {"status": "ok", "setup_s": round(time.perf_counter() - start, 6)}
        trainers[way] = trainer
        notes += trainer.notes
    except Exception as error:
        row = {"status": "failed", "reason": first_line(error)}
    if before:
        notes += compilations_since(before)
    return row | {"notes": notes}


def _went(graphed: gw.GraphedStep, notes: list[str]) -> Figures:
    """How the steps went; `notes` hears of what a graph ought to have done and did not."""
    now = graphed.statistics
    # The first step of an optimizer makes its state, and is eager by design.
    if sum(now.eager.values()) > 1:
        notes.append(
            "went eager: "
            + ", ".join(f"{counted(n, 'step')}, {why}" for why, n in now.eager.items())
        )
    if now.captures > 1:
        notes.append(f"was captured {now.captures} times")
    counts = {"replays": now.replays, "captures": now.captures, "eager_steps": dict(now.eager)}
    return {**counts, "explain": graphed.explain()}


def losses(one: Task, trainer: Trainer) -> list[float]:
    """The losses of the first steps, from the weights that every way begins with."""
    trainer.start_again(one.model.state_dict())
    torch.manual_seed(1)
    batches = itertools.islice(itertools.cycle(one.batches), COMPARED)
    return [float(trainer.step(*batch)) for batch in batches]


def compare(rows: dict[str, Figures], trainers: dict[str, Trainer]) -> None:
    """Set each way's last loss against eager's; what is far off it is dropped from `trainers`."""
    expected = rows[EAGER].get("losses")
    if expected is None:
        return
    for way in list(trainers):
        found = rows[way]["losses"]
        pairs = zip(found, expected, strict=True)
        off = abs(found[-1] - expected[-1]) / abs(expected[-1])
        rows[way]["loss_relative_difference"] = off
        rows[way]["losses_equal_bit_for_bit"] = sum(a == b for a, b in pairs)
        if not (math.isfinite(off) and off <= WRONG):
            reason = f"its loss after {COMPARED} steps is off eager's by {off:.0%}"
            rows[way] |= {"status": "wrong", "reason": reason}
            del trainers[way]


def _stepping(one: Task, trainer: Trainer) -> Call:
    """A training step on the next batch, without arguments."""
    batches = itertools.cycle(one.batches)
    return lambda: trainer.step(*next(batches))


def timed(steps: Mapping[str, Call], timer: Timer, *, budget_s: float) -> dict[str, Measurement]:
    """Time steps in turns: in each round some that are waited for, then a block that is not.

    A block holds at least MIN_BLOCK steps and ends with the device, so that the figure is what a
    loop of training comes to.
    """
    names = list(steps)
    sizes = {name: _block_size(steps[name], timer) for name in names}
    single: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
    block: dict[str, list[float]] = {name: [] for name in names}
    deadline = time.monotonic() + budget_s
    with collection_held_off():
        for turn in range(MAX_ROUNDS):
            if turn >= MIN_ROUNDS and time.monotonic() >= deadline:
                break
            shift = turn % len(names) if names else 0
            for name in names[shift:] + names[:shift]:
                step, size = steps[name], sizes[name]
                timer.once(step)  # for the caches that the way before has used
                waited = (timer.once(step) for _ in range(min(size, SYNCHRONISED)))
                single[name].append(tuple(round(s, DIGITS) for s in waited))
                block[name].append(round(_in_a_row(step, size, timer) / size, DIGITS))
    return {name: Measurement(tuple(single[name]), tuple(block[name])) for name in names}


def _block_size(step: Call, timer: Timer) -> int:
    """Steps that fill a block."""
    _in_a_row(step, MIN_BLOCK, timer)
    seconds = statistics.median(_in_a_row(step, MIN_BLOCK, timer) for _ in range(3)) / MIN_BLOCK
    return max(MIN_BLOCK, min(MAX_BLOCK, round(BLOCK_S / seconds)))


def _in_a_row(step: Call, count: int, timer: Timer) -> float:
    """Seconds of steps that nobody waits for until the last is done."""
    timer.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    timer.synchronize()
    return time.perf_counter() - start


def memory(name: str, way: str, device: torch.device, *, quick: bool) -> Figures:
    """Peaks of what torch has reserved and allocated, in bytes, with the set-up and after it."""
    if device.type != "cuda":
        return {"status": "unavailable", "reason": "needs a CUDA device"}
    try:
        one = task(name, device, quick=quick)
        trainer = WAYS[way](one)
        settle(one, trainer)
        row: Figures = {"status": "ok", "with_setup": _peaks(device)}
        torch.cuda.reset_peak_memory_stats(device)
        step = _stepping(one, trainer)
        for _ in range(SETTLED_STEPS):
            step()
        return row | {"after_setup": _peaks(device)}
    except Exception as error:
        return {"status": "failed", "reason": first_line(error)}


def _peaks(device: torch.device) -> dict[str, int]:
    torch.cuda.synchronize(device)
    return {
        "reserved": torch.cuda.max_memory_reserved(device),
        "allocated": torch.cuda.max_memory_allocated(device),
    }


def _save(file: Path, device: torch.device, figures: Figures, doing: str | None = None) -> None:
    """Write the figures at once: the process may be ended at any moment."""
    result = {"environment": _environment(device), "figures": figures}
    if doing is not None:
        result["doing"] = doing
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps(result), encoding="utf-8")
    os.replace(beside, file)


@functools.cache
def _environment(device: torch.device) -> dict[str, str]:
    """Where it runs, with the switches that decide how fast fp32 is."""
    tf32 = {
        "tf32 of convolutions": str(torch.backends.cudnn.allow_tf32),
        "tf32 of matrices": str(torch.backends.cuda.matmul.allow_tf32),
    }
    return environment(device) | (tf32 if device.type == "cuda" else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=MODELS)
    parser.add_argument("file", type=Path, help="the JSON to write")
    parser.add_argument("--memory", choices=WAYS, metavar="WAY", help="its memory and no more")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: no result")
    parser.add_argument("--leave-out", action="append", default=[], choices=WAYS, metavar="WAY")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if any(package in given.what for package in ("gpt2", "bert")):
        import transformers

        transformers.logging.set_verbosity_error()
    save = functools.partial(_save, given.file, device)
    if given.memory:
        save(memory(given.what, given.memory, device, quick=given.quick))
    else:
        save(measure(given.what, device, save, given.leave_out, quick=given.quick))


if __name__ == "__main__":
    main()
