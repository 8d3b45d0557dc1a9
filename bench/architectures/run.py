"""Which architectures of transformers take buckets of batches and of lengths, on the CPU.

scripts/bench architectures runs this. Each tiny model of tests/support/tiny_architectures.py that
can be captured is prepared for one bucket; where that is accepted, calls of other sizes are
compared with eager, which gets them as they are.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from tiny_architectures import CASES, FULL_BATCH, Case, errors

import graphwright as gw
from graphwright.calls.plurals import counted
from graphwright.errors import GraphwrightError, first_line
from graphwright.report.environment import environment

Row = dict[str, Any]

WAYS = {"batch": ("batch",), "length": ("length",), "both": ("batch", "length")}
CALLS = 30
# Largest difference from eager, relative to an output's root mean square: float32 and other
# kernels for other shapes.
TOLERANCE = 1e-4


def measure() -> Row:
    """The rows of all architectures, and where they were taken."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    rows = []
    for case in CASES:
        if not case.refused:
            print(f"== {case.model}", flush=True)
            rows.append(_row(case))
    versions = {"transformers": transformers.__version__}
    return {
        "environment": environment(torch.device("cpu")) | versions,
        "buckets": {"batch": FULL_BATCH},
        "calls": CALLS,
        "rows": rows,
    }


def _row(case: Case) -> Row:
    line = case.line
    row: Row = {"model": case.model, "inputs": case.inputs.__name__, "pad": case.pad}
    for way, names in WAYS.items():
        if "length" in names and line is None:
            row[way] = {"verdict": "no sequence"}
            continue
        row[way] = _verdict(case, names)
        if line is not None:
            row[way] |= {"bucket": line.bucket, "masked": line.masked} if way != "batch" else {}
    return row


def _verdict(case: Case, names: tuple[str, ...]) -> Row:
    """Whether a model takes buckets over some dimensions, and how far its results are off."""
    torch.manual_seed(0)
    model = case.build()
    graphs = case.bucketed(model, names)
    with torch.no_grad():
        model(**case.inputs(0))  # Some set themselves up in their first call.
        begun = time.perf_counter()
        try:
            graphs.prepare([case.inputs(0)], progress=False)
            found: Row = {"verdict": "accepted"}
        except GraphwrightError as error:
            found = {"verdict": "exact-only", "reason": error.what}
        found["prepare_s"] = time.perf_counter() - begun
        now = graphs.statistics
        found |= {"proof_runs": now.proof_runs, "proof_s": now.proof_s}
        if found["verdict"] == "accepted":
            found |= _compared(case, graphs, model, names)
    return found


def _compared(
    case: Case, graphs: gw.GraphedModule, model: torch.nn.Module, names: tuple[str, ...]
) -> Row:
    """The largest errors over calls of several sizes, in and beside the call's own mask."""
    data = padding = 0.0
    wrong = []
    for call in case.calls(names, CALLS):
        sizes = {name: list(call[name].shape) for name in call if hasattr(call[name], "shape")}
        try:
            mine, beside = errors(graphs(**call), model(**call), call.get("attention_mask"))
        except Exception as error:
            wrong.append({"sizes": sizes, "error": first_line(error)})
            continue
        data, padding = max(data, mine), max(padding, beside)
        if mine > TOLERANCE:
            wrong.append({"sizes": sizes, "error": mine})
    return {
        "error": data,
        "error_at_padding": padding,
        "padded_calls": graphs.statistics.padded,
        "wrong": wrong,
    }


def failures(result: Row) -> Iterator[str]:
    """Accepted models whose results are not eager's."""
    for row in result["rows"]:
        for way in WAYS:
            if wrong := row[way].get("wrong"):
                yield f"{row['model']}, {way}: {counted(len(wrong), 'call')}, the first {wrong[0]}"
