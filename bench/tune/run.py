"""Tune a model, and time what was chosen in turns with PyTorch's own ways to be fast.

scripts/bench tune runs this module for each model, in a process of its own. Everything runs under
torch.no_grad(); what is timed gets other values of the inputs than those that were tuned with.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import graphwright as gw
from graphwright.calls.plurals import counted
from graphwright.evaluation.measurement import Timer, interleave
from graphwright.report.environment import environment

from .. import cases
from ..common.peers import PEERS, Call, Case, Figures, needs_cuda, set_up, timed

CHOSEN = "graphwright.tune"
# The models that max-autotune is tried on: it searches for minutes on larger ones.
MAX_AUTOTUNE = ("mlp", "conv_relu_pool")
# Seconds of timing: of the choice and its peers, and of each round of tune() when it is only tried.
BUDGET_S, QUICK_S = 4.0, 0.2

Options = dict[str, Any]


def tune_options(words: Sequence[str]) -> Options:
    """Keyword arguments of gw.tune from options such as `--strategies A,B` and `--budget 60s`."""
    parser = argparse.ArgumentParser(prog="--options", allow_abbrev=False, add_help=False)
    for name, parameter in inspect.signature(gw.tune).parameters.items():
        if parameter.kind is not parameter.KEYWORD_ONLY or name == "progress":
            continue
        option = "--budget" if name == "budget_s" else f"--{name.replace('_', '-')}"
        read = {"budget_s": _seconds, "allow": _names, "strategies": str}.get(name, _plain)
        parser.add_argument(option, dest=name, type=read, default=argparse.SUPPRESS)
    return vars(parser.parse_args(words))


def _seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _plain(text: str) -> Any:
    """A number, true, false or null as JSON writes them; else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _left_out(way: str, name: str, device: torch.device, left_out: Sequence[str]) -> str | None:
    """Why a way is not tried on a model; None where it is."""
    if way in left_out:
        return f"left out by --leave-out {way}"
    if way == "max-autotune" and name not in MAX_AUTOTUNE:
        return f"tried on {' and '.join(MAX_AUTOTUNE)} alone"
    return needs_cuda(way, device)


def tuned(case: Case, options: Options, *, quick: bool) -> gw.TunedModule:
    """The model as tune() gives it back."""
    rounds: Any = contextlib.nullcontext()
    if quick:
        rounds = mock.patch.multiple(
            "graphwright.tuning.tuner", SCREENING_S=QUICK_S, FINAL_S_EACH=QUICK_S
        )
    # An earlier run's choice would be no run of this one.
    given = {"remember": False, **options}
    with rounds:
        return gw.tune(case.model, case.args, case.kwargs, progress=False, **given)


@torch.no_grad()
def measure(
    name: str,
    device: torch.device,
    options: Options,
    left_out: Sequence[str],
    save: Callable[[Figures, str], None],
    *,
    quick: bool,
) -> Figures:
    """All figures of one model; `save` gets what is known by then, and what is under way."""
    case = Case.of(name, device)
    timer = Timer(device)
    for _ in range(3):
        timer.once(case.on_others(case.model))
    figures: Figures = {"report": None, "ways": {}}

    def choose(case: Case) -> Call:
        call = tuned(case, options, quick=quick)
        call.report.model = name
        figures["report"] = json.loads(call.report.to_json())
        call.calls.clear()
        return call

    def begun(way: str, rows: dict[str, Figures]) -> None:
        save(figures | {"ways": rows}, way)

    # What was chosen comes first: its graphs keep the workspaces that they were captured with.
    ways: Mapping[str, Callable[[Case], Call]] = {CHOSEN: choose, **PEERS}
    why_not = functools.partial(_left_out, name=name, device=device, left_out=left_out)
    calls, rows = set_up(case, ways, timer, why_not, begun)
    figures["ways"] = rows
    save(figures, "the timing")
    on_others = {way: case.on_others(call) for way, call in calls.items()}
    measured = interleave(on_others, timer, budget_s=QUICK_S if quick else BUDGET_S)
    for way, measurement in measured.items():
        rows[way] |= timed(measurement)
    if CHOSEN in calls:
        row = rows[CHOSEN]
        row["chosen"] = figures["report"]["chosen"]
        row["elsewhere"] = {k: n for k, n in calls[CHOSEN].calls.items() if k != "tuned"}
        row["notes"] += [
            f"{counted(n, 'call')} went to {kind}" for kind, n in row["elsewhere"].items()
        ]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("what", choices=cases.MODELS)
    parser.add_argument("file", type=Path, help="the JSON to write")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--leave-out", action="append", default=[], metavar="WAY")
    given, rest = parser.parse_known_args()
    options = tune_options(rest)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def save(figures: Figures, doing: str | None = None) -> None:
        result = {"environment": environment(device), "figures": figures}
        if doing is not None:
            result["doing"] = doing
        # At once: the process may be ended at any moment.
        beside = given.file.with_suffix(".new")
        beside.write_text(json.dumps(result), encoding="utf-8")
        os.replace(beside, given.file)

    save(measure(given.what, device, options, given.leave_out, save, quick=given.quick))


if __name__ == "__main__":
    main()
