"""What check() predicts of each model, and on a GPU what a plain capture of it does.

scripts/bench check runs this: the tiny architectures of tests/support/tiny_architectures.py, some
more that are known not to be captured, and the reference models. The prediction is made of the
model on the CPU. A plain capture is `gw.capturing()`, which adds nothing to torch.cuda.graph but to
clean up.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_architectures import CASES, GPT, TOKENS, WORDS, case, prompt, text
from torch import nn
from torch.utils import _pytree as pytree

import graphwright as gw
from graphwright.errors import CaptureError, first_line
from graphwright.report.environment import environment

from .. import cases

Row = dict[str, Any]
Made = Callable[[], tuple[nn.Module, Any]]

MORE = [
    case(
        "GPTNeoForCausalLM",
        prompt,
        TOKENS,
        vocab_size=WORDS,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
    ),
    case("XLMModel", text, TOKENS, vocab_size=WORDS, emb_dim=32, n_layers=2, n_heads=4),
    case("CTRLLMHeadModel", prompt, GPT, n_positions=64, dff=64),
]
EDGENEXT = "edgenext_xx_small"


def measure() -> Row:
    """The rows of all models, and where they were taken."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    rows = []
    for name, make in models():
        row = _row(name, make)
        rows.append(row)
        print(f"{name}: {_told(row)}", flush=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    versions = {"transformers": transformers.__version__}
    return {"environment": environment(device) | versions, "rows": rows}


def models() -> Iterator[tuple[str, Made]]:
    """Names, and what makes a model with its inputs on the CPU."""
    for each in [*CASES, *MORE]:
        refused = f" ({each.refused[0]})" if each.refused else ""
        yield f"{each.model}{refused}", lambda each=each: (each.build(), each.inputs(0))
    for name in cases.MODELS:
        yield name, lambda name=name: cases.load(name, torch.device("cpu"))
    yield EDGENEXT, _edgenext


def _edgenext() -> tuple[nn.Module, Any]:
    import timm

    torch.manual_seed(0)
    return timm.create_model(EDGENEXT).eval(), (torch.randn(2, 3, 64, 64),)


def _row(name: str, make: Made) -> Row:
    row: Row = {"model": name}
    try:
        torch.manual_seed(0)
        model, inputs = make()
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        started = time.perf_counter()
        row["cpu"] = _findings(gw.check(model, args, kwargs))
        row["seconds"] = time.perf_counter() - started
        if torch.cuda.is_available():
            model.cuda()
            args, kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.cuda, (args, kwargs))
            row["cuda"] = _findings(gw.check(model, args, kwargs))
            row["capture"] = _captured(model, args, kwargs)
    except Exception as error:
        row["failed"] = first_line(error)
    return row


def _findings(found: list[gw.Finding]) -> list[Row]:
    return [
        {
            "kind": f.kind,
            "severity": str(f.severity),
            "operation": f.operation,
            "file": _inside(f.place.file),
            "line": f.place.line,
            "source": f.place.source,
            "count": f.count,
        }
        for f in found
    ]


def _inside(file: str) -> str:
    """A file's path inside its package: where packages lie is the machine's own affair."""
    for folder in ("site-packages/", "dist-packages/"):
        file = file.rpartition(folder)[2]
    return file


def _captured(model: nn.Module, args: Any, kwargs: Any) -> Row:
    """Whether a plain capture works, else its error and the line that it comes from."""
    with torch.no_grad():
        for _ in range(3):
            model(*args, **kwargs)
        torch.cuda.synchronize()
        try:
            with gw.capturing() as graph:
                model(*args, **kwargs)
        except CaptureError as error:
            file, _, line = (error.where or "").rpartition(":")
            return {
                "ok": False,
                "error": error.what,
                "file": _inside(file),
                "line": int(line or 0),
            }
        graph.replay()
        torch.cuda.synchronize()
        graph.close()
    return {"ok": True}


def stop(found: list[Row]) -> Row | None:
    """The first finding that a plain capture does not survive."""
    stops = ("blocks", "breaks", "hoisted")
    return next((finding for finding in found if finding["severity"] in stops), None)


def _told(row: Row) -> str:
    if "failed" in row:
        return f"failed: {row['failed']}"
    first = stop(row["cpu"])
    told = "captured" if first is None else f"{first['kind']} at {_line(first)}"
    if "capture" not in row:
        return told
    was = row["capture"]
    if was["ok"]:
        return f"{told}; was captured"
    return f"{told}; stopped at {_line(was)}: {was['error']}"


def _line(place: Row) -> str:
    return f"{Path(place['file']).name}:{place['line']}"


def confusion(rows: list[Row], side: str) -> dict[str, list[str]]:
    """Models by what was predicted of them on one side, and what came true."""
    found: dict[str, list[str]] = {
        "captured as predicted": [],
        "stopped as predicted": [],
        "stopped elsewhere": [],
        "missed": [],
        "false alarm": [],
    }
    for row in rows:
        if "failed" in row or "capture" not in row:
            continue
        first, was = stop(row[side]), row["capture"]
        if first is None:
            kind = "captured as predicted" if was["ok"] else "missed"
        elif was["ok"]:
            kind = "false alarm"
        else:
            same = _line(first) == _line(was)
            kind = "stopped as predicted" if same else "stopped elsewhere"
        found[kind].append(row["model"])
    return found


def counts(result: Row) -> list[str]:
    """The result in sentences."""
    rows = result["rows"]
    failed = [f"{row['model']} ({row['failed']})" for row in rows if "failed" in row]
    known = len(rows) - len(failed)
    free = sum("failed" not in row and stop(row["cpu"]) is None for row in rows)
    lines = [f"{free} of {known} models have nothing that stops a capture."]
    for side in ("cpu", "cuda"):
        found = confusion(rows, side)
        if any(found.values()):
            where = "on the CPU" if side == "cpu" else "on the GPU"
            told = ", ".join(f"{len(names)} {kind}" for kind, names in found.items())
            lines.append(f"Checked {where}: {told}.")
            for kind in ("stopped elsewhere", "missed", "false alarm"):
                lines += [f"  {kind}: {', '.join(found[kind])}"] if found[kind] else []
    return lines + [f"Not run: {', '.join(failed)}."] * bool(failed)


def to_markdown(result: Row, file: str) -> str:
    """The page of docs/."""
    environment, rows = result["environment"], result["rows"]
    machine = environment.get("gpu") or environment.get("processor", "")
    captured = any("capture" in row for row in rows)
    then = ", and what a plain capture on a GPU then did" if captured else ""
    headings = ["model", "the first obstacle", "where", "others"]
    headings += ["plain capture"] * captured
    lines = [
        "# Models that can be captured",
        "",
        f"What [`check()`](findings.md) finds in each model on the CPU{then}. Tiny configurations",
        "and random weights; the last ones are the reference models of the benchmarks.",
        "",
        *(f"- {line.strip()}" for line in counts(result)),
        "",
        f"| {' | '.join(headings)} |",
        f"| {' | '.join('---' for _ in headings)} |",
    ]
    for row in rows:
        if "failed" in row:
            continue
        first = stop(row["cpu"])
        others = sorted({f["kind"] for f in row["cpu"] if f is not first})
        cells = [
            row["model"].replace("|", "\\|"),
            "–" if first is None else f"{first['severity']}: {first['kind']}",
            "" if first is None else f"`{_line(first)}`",
            ", ".join(others),
        ]
        if captured:
            was = row["capture"]
            cells.append("works" if was["ok"] else f"stops at `{_line(was)}`")
        lines.append(f"| {' | '.join(cells)} |")
    told = f"torch {environment['torch']}, transformers {environment['transformers']}."
    return "\n".join([*lines, "", f"{machine}, {told}", ""])
