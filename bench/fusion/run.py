"""fuse() beside eager, TorchScript and Inductor, all under one graph where there is a GPU.

    scripts/bench fusion [--out DIR] [--only MODEL ...] [--quick]

Each model has a process of its own. A first one builds every way with empty caches, for what its
set-up costs then; a second one builds them again, verifies each against float64 and times them in
turns: calls one after the other, every sample kept. On a GPU each way is replayed as a CUDA graph
without the copies of its arguments; without one, ways are called as they are.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphwright.calls.plurals import counted
from graphwright.calls.snapshots import Call
from graphwright.evaluation.reference import reference
from graphwright.evaluation.verification import verify
from graphwright.graphs.capture import capture
from graphwright.ops.fused import registry as operators
from graphwright.report.environment import environment
from graphwright.strategies.registry import parse_candidates

from .. import cases
from ..common.processes import figures_of, run_all
from ..common.record import SCHEMA, commit, write
from ..common.timing import in_turns, times

Row = dict[str, Any]
Args = tuple[Any, ...]

ON_GPU = (
    "resnet50_b1",
    "resnet50_b32",
    "mobilenet_v3_large",
    "convnext_tiny",
    "vit_b_16",
    "bert",
    "gpt2",
    "conv_relu_pool",
)
ON_CPU = ("resnet18_b8", "conv_relu_pool")
RESNET = ("resnet50_b1", "resnet50_b32")
# What is asked: of ResNet-50's two sizes in geometric mean, of all models, of each.
RESNET_RATIO, MEAN_RATIO, EACH_RATIO, SETUP_S = 0.90, 1.0, 1.1, 2.0
POOL_OVER_EAGER, POOL_OVER_FLOOR = 1.5, 1.15
CPU_OVER_EAGER = 1.2
ROUNDS, LIMIT_S, AT_ONCE = 40, 180, 8
WAYS = ("eager", "torchscript:optimize", "inductor", "channels_last+inductor", "fused")
# fused first: Inductor's helpers would be starting up beside it, and Triton be there already.
BUILT = ("fused", *(way for way in WAYS if way != "fused"))
# What a quick run leaves out, as it takes long to build.
SLOW = ("inductor", "channels_last+inductor")


def model_of(name: str, device: torch.device) -> tuple[nn.Module, Args, dict[str, Any]]:
    """A model with its inputs on a device, in the precision that is asked for there."""
    if name == "resnet18_b8":
        from resnet import images  # of examples/

        model, inputs = images()
    elif name == "conv_relu_pool":
        model, inputs = cases.conv_relu_pool()
    elif name == "convnext_tiny":
        model, inputs = _convnext()
    else:
        model, given = cases.load(name.partition("_b1")[0].partition("_b32")[0], device)
        if isinstance(given, dict):
            return model, (), given
        inputs = given
        if name == "resnet50_b32":
            inputs = (torch.randn(32, *inputs[0].shape[1:], device=device).to(inputs[0]),)
            inputs = (inputs[0].contiguous(memory_format=torch.channels_last),)
    return model.to(device), tuple(x.to(device) for x in inputs), {}


def _convnext() -> tuple[nn.Module, Args]:
    from torchvision import models

    torch.manual_seed(0)
    model = models.convnext_tiny(weights=None)
    for name, parameter in model.named_parameters():
        if name.endswith("layer_scale"):
            nn.init.ones_(parameter)  # At 1e-6 the blocks would add nothing.
    model = model.half().eval().to(memory_format=torch.channels_last)
    x = torch.randn(1, 3, 224, 224).half()
    return model, (x.contiguous(memory_format=torch.channels_last),)


def build(name: str, model: nn.Module, args: Args, kwargs: dict[str, Any]) -> tuple[Any, float]:
    """A way of calling a model, and the seconds that it took to build."""
    (candidate,) = parse_candidates([name], ())
    began = time.perf_counter()
    built = candidate.build(model, args, kwargs)
    if args and torch.cuda.is_available():
        torch.cuda.synchronize()
    return built.call, time.perf_counter() - began


def tried(*, quick: bool) -> Sequence[str]:
    """The ways in the order in which they are built."""
    return [way for way in BUILT if not (quick and way in SLOW)]


def cold(name: str, device: torch.device, *, quick: bool) -> Row:
    """Seconds of each way's first build."""
    model, args, kwargs = model_of(name, device)
    found = {}
    with torch.no_grad():
        model(*args, **kwargs)  # Whatever is made at the first call is no way's own.
        for way in tried(quick=quick):
            try:
                found[way] = build(way, model, args, kwargs)[1]
            except Exception as error:
                print(f"{name}: {way}: {error}", file=sys.stderr)
    return {"cold_s": found}


def measure(name: str, device: torch.device, *, quick: bool) -> Row:
    """Every way: set-up, error, time."""
    model, args, kwargs = model_of(name, device)
    row: Row = {"model": name, "ways": {}, "skipped": {}}
    calls: dict[str, Callable[[], object]] = {}
    with torch.no_grad():
        known = reference(model, model, Call("the sample", args, kwargs))
        for way in tried(quick=quick):
            try:
                call, seconds = build(way, model, args, kwargs)
                verdict = verify(call, known)
                if not verdict.ok:
                    raise ArithmeticError(verdict.reason)
                calls[way] = replayed(call, args, kwargs, device)
            except Exception as error:
                row["skipped"][way] = str(error).splitlines()[0]
                continue
            error_ = None if verdict.error is None else verdict.error.rms
            row["ways"][way] = {"setup_s": seconds, "error": error_}
        if name == "conv_relu_pool" and device.type == "cuda":
            calls |= {k: replayed(c, args, kwargs, device) for k, c in floor(model, args).items()}
        found = in_turns(calls, 5 if quick else ROUNDS)
    for way, timed in times(found, 1).items():
        row["ways"].setdefault(way, {}).update(timed)
    return row


def floor(model: nn.Module, args: Args) -> dict[str, Callable[..., object]]:
    """The block's two parts alone: cuDNN's convolution + bias + ReLU, and a pool."""
    conv, (x,) = model[0], args
    weight = conv.weight.contiguous(memory_format=torch.channels_last)
    x = x.contiguous(memory_format=torch.channels_last)
    ones = [1, 1]
    y = torch.cudnn_convolution_relu(x, weight, conv.bias, ones, ones, ones, 1)
    return {
        "convolution alone": lambda *_: torch.cudnn_convolution_relu(
            x, weight, conv.bias, ones, ones, ones, 1
        ),
        "pool alone": lambda *_: operators.relu_max_pool2d(y, 2),
    }


def replayed(
    call: Callable[..., Any], args: Args, kwargs: dict[str, Any], device: torch.device
) -> Callable[[], object]:
    """The call on its inputs; on a GPU the replay of its graph."""
    if device.type != "cuda":
        return lambda: call(*args, **kwargs)
    graph = capture(call, *args, **kwargs)
    return graph.replay


def ratio(row: Row, other: str, way: str = "fused") -> float:
    """The time of one way over another's, in the median of the turns."""
    pairs = zip(row["ways"][way]["samples"], row["ways"][other]["samples"], strict=True)
    return statistics.median(a / b for a, b in pairs)


def over_inductor(row: Row) -> float | None:
    """fused over the better one of Inductor's two layouts."""
    if "samples" not in row["ways"].get("fused", {}):
        return None
    others = ("inductor", "channels_last+inductor")
    found = [ratio(row, w) for w in others if "samples" in row["ways"].get(w, {})]
    return max(found, default=None)


def targets(result: Row) -> list[Row]:
    """What is asked of the figures, and whether it holds."""
    rows = {row["model"]: row for row in result["models"]}
    found: list[Row] = []

    def ask(target: str, figure: float | None, met: bool) -> None:
        found.append({"target": target, "figure": figure, "met": met and figure is not None})

    if "gpu" not in result["environment"]:
        for name in set(rows) & {"resnet18_b8"}:
            gain = 1 / ratio(rows[name], "eager")
            ask(
                f"{name}: at least {CPU_OVER_EAGER:g} times eager's speed",
                gain,
                gain >= CPU_OVER_EAGER,
            )
        return found
    against = {name: over_inductor(row) for name, row in rows.items()}
    for names, limit, title in (
        (RESNET, RESNET_RATIO, "ResNet-50 at 1 and 32"),
        (tuple(n for n in ON_GPU if n != "conv_relu_pool"), MEAN_RATIO, "all models"),
    ):
        values = [against.get(name) for name in names]
        known = [v for v in values if v is not None]
        mean = math.exp(statistics.fmean(map(math.log, known))) if known else None
        whole = len(known) == len(names)
        text = f"{title}: at most {limit:g} of inductor+graph's time in geometric mean"
        ask(text, mean, whole and mean is not None and mean <= limit)
    for name in (n for n in rows if n != "conv_relu_pool"):
        value = against[name]
        text = f"{name}: at most {EACH_RATIO:g} of inductor+graph's time"
        ask(text, value, value is not None and value <= EACH_RATIO)
        seconds = rows[name]["ways"].get("fused", {}).get("setup_s")
        ask(f"{name}: set up in {SETUP_S:g} s", seconds, seconds is not None and seconds <= SETUP_S)
    if "conv_relu_pool" in rows and "samples" in rows["conv_relu_pool"]["ways"].get("fused", {}):
        row = rows["conv_relu_pool"]
        gain = 1 / ratio(row, "eager")
        ask(f"the block: {POOL_OVER_EAGER:g} times eager's speed", gain, gain >= POOL_OVER_EAGER)
        parts = sum(row["ways"][k]["median"] for k in ("convolution alone", "pool alone"))
        over = row["ways"]["fused"]["median"] / parts
        ask(f"the block: at most {POOL_OVER_FLOOR:g} of its parts", over, over <= POOL_OVER_FLOOR)
    return found


def to_markdown(result: Row) -> str:
    """A row a model."""
    where = result["environment"]
    gpu = "gpu" in where
    shown = (*WAYS, "convolution alone", "pool alone")
    used = [w for w in shown if any("median" in r["ways"].get(w, {}) for r in result["models"])]
    place = where.get("gpu", f"{where['processor']}, {counted(int(where['threads']), 'thread')}")
    how = ", each as a CUDA graph" if gpu else ""
    lines = [
        f"`fuse()` and its alternatives ({place}, PyTorch {where['torch']}){how}: medians in ms.",
        "Set-up in seconds with Triton's and Inductor's caches filled (in brackets: empty).",
        "",
        "| model | "
        + " | ".join(used)
        + " | fused: times eager | of inductor's time | set-up of fused | of inductor |",
        "| --- |" + " ---: |" * (len(used) + 4),
    ]
    for row in result["models"]:
        cells = []
        for way in used:
            one = row["ways"].get(way, {})
            cells.append(f"{one['median'] * 1e3:.3f}" if "median" in one else "–")
        gain, share = "–", over_inductor(row)
        if "samples" in row["ways"].get("fused", {}):
            gain = f"{1 / ratio(row, 'eager'):.2f}×"
        cells += [gain, "–" if share is None else f"{share:.2f}"]
        for way in ("fused", "inductor"):
            seconds = row["ways"].get(way, {}).get("setup_s"), row.get("cold_s", {}).get(way)
            warm, first = (f"{v:.1f}" if v is not None else "–" for v in seconds)
            cells.append(f"{warm} ({first})")
        lines.append(f"| {row['model']} | {' | '.join(cells)} |")
    for row in result["models"]:
        lines += ["", *(f"{row['model']}: no {w}: {why}." for w, why in row["skipped"].items())]
    return "\n".join([*lines, ""])


def benchmark(out: Path, only: Sequence[str], *, quick: bool) -> int:
    """Measure all models and write; the number of targets that are missed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = [n for n in (ON_GPU if device.type == "cuda" else ON_CPU) if not only or n in only]
    options = ["--quick"] if quick else []
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        # Caches of their own, so that the first builds are cold, and the second ones warm.
        for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            os.environ[variable] = str(Path(folder) / variable.lower())
        files = [Path(folder) / f"{name}.json" for name in names]
        commands = [
            ["bench.fusion.run", name, str(file), "--cold", *options]
            for name, file in zip(names, files, strict=True)
        ]
        at_once = AT_ONCE if device.type == "cuda" else 1
        for index, failure in run_all(commands, at_once=at_once, limit_s=LIMIT_S):
            print(f"{names[index]}: built{'' if failure is None else f': {failure}'}", flush=True)
        for name, file in zip(names, files, strict=True):
            row = {"model": name, "ways": {}, "skipped": {}}
            row |= figures_of("bench.fusion.run", name, options, LIMIT_S)
            if file.exists():
                row |= json.loads(file.read_text(encoding="utf-8"))
            rows.append(row)
            text = {
                w: f"{v['median'] * 1e3:.3f} ms" for w, v in row["ways"].items() if "median" in v
            }
            print(f"{name}: {text} {row['skipped'] or ''}", flush=True)
    result = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "fusion",
        "commit": commit(),
        "quick": quick,
        "environment": environment(device),
        "models": rows,
    }
    result["targets"] = targets(result)
    for target in result["targets"]:
        figure = "–" if target["figure"] is None else f"{target['figure']:.3f}"
        print(f"{target['target']:70} {figure:>7}  {'yes' if target['met'] else 'NO'}")
    where = out / "fusion.json"
    write(where, result)
    print(f"wrote {where}")
    return sum(not target["met"] for target in result["targets"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what")
    parser.add_argument("file", type=Path)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if given.what in ("bert", "gpt2"):
        import transformers

        transformers.logging.set_verbosity_error()
    if given.cold:
        found = cold(given.what, device, quick=given.quick)
    else:
        found = measure(given.what, device, quick=given.quick)
    given.file.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
