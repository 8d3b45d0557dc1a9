"""What looking costs at every call, beside another checkout of graphwright, in alternating rounds.

Each of the two runs in a process of its own, one at a time; the figures are microseconds, the best
of five blocks a round.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from graphwright.report.environment import environment

from ..common.processes import command, variables
from ..common.record import ROOT, write

HERE = ROOT / "src"
SCHEMA = "graphwright.bench.watching"
BLOCKS = 5


def models() -> dict[str, tuple[torch.nn.Module, tuple[torch.Tensor, ...], int]]:
    """A small MLP, BERT and ResNet-50 as transformers configures them, and calls in a block."""
    import transformers

    nn = torch.nn
    mlp = nn.Sequential(
        nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)
    )
    bert = transformers.BertModel(transformers.BertConfig())
    resnet = transformers.ResNetModel(transformers.ResNetConfig())
    return {
        "mlp": (mlp.eval(), (torch.randn(4, 32),), 500),
        "bert": (bert.eval(), (torch.randint(0, 100, (1, 8)),), 5),
        "resnet50": (resnet.eval(), (torch.randn(1, 3, 64, 64),), 5),
    }


def block(work: Any, count: int) -> float:
    """Microseconds of a call: the best of some blocks."""
    best = float("inf")
    for _ in range(BLOCKS):
        began = time.perf_counter()
        for _ in range(count):
            work()
        best = min(best, (time.perf_counter() - began) / count * 1e6)
    return best


def rounds() -> None:
    """Answer each line on stdin by a round of measurements."""
    import graphwright as gw

    try:
        from graphwright.calls.watch import ModuleWatch
    except ImportError:  # the other checkout may be older than the folder calls/
        from graphwright.watch import ModuleWatch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = {}
    with torch.no_grad():
        for name, (model, args, count) in models().items():
            if torch.cuda.is_available():
                model, args = model.cuda(), tuple(arg.cuda() for arg in args)
            graphed = gw.graph(model)
            for _ in range(3):
                graphed(*args)
            watches = [ModuleWatch(model, values=values) for values in (False, True)]
            made[name] = (graphed, args, count, watches)
        print("ready", flush=True)
        for _ in sys.stdin:
            found = {}
            for name, (graphed, args, count, (plain, values)) in made.items():
                found[name] = {
                    "call": block(lambda g=graphed, a=args: g(*a), count),
                    "look": block(plain.unchanged, 200),
                    "look at values too": block(values.unchanged, 200),
                }
            print(json.dumps(found), flush=True)


def run(other: Path, out: Path, commit: str, count: int) -> int:
    """Compare with another checkout's src; writes watching-cpu.json or watching-h200.json."""
    sides = {"before": other, "now": HERE}
    processes = {
        side: subprocess.Popen(
            command("bench.watching.run"),
            env=variables(source),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for side, source in sides.items()
    }
    found: dict[str, list[Any]] = {side: [] for side in sides}
    for process in processes.values():
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
    for turn in range(count):
        for side in list(sides) if turn % 2 else list(sides)[::-1]:
            process = processes[side]
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            found[side].append(json.loads(process.stdout.readline()))
    for process in processes.values():
        process.kill()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = {
        "schema": SCHEMA,
        "schema_version": 1,
        "commit": commit,
        "environment": environment(device),
        "unit": "us",
        "rounds": found,
    }
    where = out / f"watching-{'h200' if device.type == 'cuda' else 'cpu'}.json"
    write(where, result)
    print(f"{'model':<10}{'':<20}{'before':>10}{'now':>10}{'ratio':>8}")
    for model in found["now"][0]:
        for what in found["now"][0][model]:
            before, now = (
                statistics.median(each[model][what] for each in found[side]) for side in sides
            )
            print(f"{model:<10}{what:<20}{before:>10.1f}{now:>10.1f}{now / before:>8.2f}")
    print(f"Saved: {where}")
    return 0


if __name__ == "__main__":
    rounds()
