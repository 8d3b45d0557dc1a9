"""What a call costs beside what answers it: eager, the bare winner, what tune() gives, graph().

    scripts/bench calls [SRC] [--rounds N] [--strategies NAME ...] [--out DIR]

With the src folder of another checkout, `tune` and `graph` of both are measured, each in a process
of its own, one at a time in alternating rounds. Every call is waited for. Figures are microseconds:
the median of the blocks' means.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphwright.calls.plurals import counted
from graphwright.report.environment import environment

from ..common.processes import command, variables
from ..common.record import ROOT, SCHEMA, commit, write
from ..common.rendering import machine, marked

Row = dict[str, Any]

HERE = ROOT / "src"
# A block takes about so long, and has at most so many calls.
BLOCK_S, MOST = 0.02, 500
# Strategies on either device: what usually wins there, without minutes of compiling.
STRATEGIES = {
    "cpu": ["eager:no_grad", "torchscript:freeze", "inductor:freeze"],
    "cuda": ["eager:no_grad", "fused+graph", "torchscript:optimize+graph"],
}
# What is asked, in microseconds: where eager is chosen; elsewhere at all, and for each module.
EAGER_SHARE, EAGER_US = 1.02, 0.5
LEAST_US, REAL_US, HOT_US, GPU_US = 3.0, 0.2, 0.01, 5.0
# A look at the module alone, for which no device is waited for; and one without the checks in C++.
LOOK, LOOK_IN_PYTHON = "look", "look in Python"
LOOKS = (LOOK, LOOK_IN_PYTHON)
# A model of many modules, which is not tuned here; and what its looks may take, in microseconds.
LARGE = "UNet of Stable Diffusion 1.5"
LARGE_US = {LOOK: 15.0, LOOK_IN_PYTHON: 300.0}


def models(device: torch.device) -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    """Models with default sizes, random weights and inputs."""
    import transformers

    mlp = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    cnn = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    config = transformers.BertConfig
    two = config(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512)
    ids, image = torch.randint(0, 1000, (1, 32)), torch.randn(1, 3, 64, 64)
    mobile = transformers.MobileNetV2Model(transformers.MobileNetV2Config())
    if device.type == "cuda":  # torchvision has no build for the CPU.
        from torchvision.models import mobilenet_v3_large

        mobile = mobilenet_v3_large()
    found: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]] = {
        "MLP": (mlp, (torch.randn(8, 64),)),
        "CNN": (cnn, (image,)),
        "BERT, 2 layers": (transformers.BertModel(two), (ids,)),
        "BERT, 12 layers": (transformers.BertModel(config()), (ids,)),
        "ResNet-50": (transformers.ResNetModel(transformers.ResNetConfig()), (image,)),
        type(mobile).__name__: (mobile, (image,)),
    }
    with contextlib.suppress(ImportError):
        found[LARGE] = unet(device)
    return {
        name: (model.eval().to(device), tuple(x.to(device) for x in args))
        for name, (model, args) in found.items()
    }


def unet(device: torch.device) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """diffusers' UNet as Stable Diffusion 1.5 configures it; on the CPU with few channels."""
    from diffusers import UNet2DConditionModel

    channels, width = ((320, 640, 1280, 1280), 768) if device.type == "cuda" else ((32,) * 4, 64)
    model = UNet2DConditionModel(
        sample_size=64, cross_attention_dim=width, block_out_channels=channels, attention_head_dim=8
    )
    size = 64 if device.type == "cuda" else 8
    args = torch.randn(2, 4, size, size), torch.tensor(10), torch.randn(2, 77, width)
    return model, args


def ways(
    name: str, model: nn.Module, args: tuple[torch.Tensor, ...], strategies: list[str]
) -> tuple[dict[str, Any], Row]:
    """The ways to call a model, by name; what is known of them."""
    import graphwright as gw
    from graphwright.calls.watch import ModuleWatch

    def look(watch: Any) -> Callable[[], bool]:
        # After tuning, for one, the fast check has to be made anew.
        return lambda: watch.unchanged() or watch.changed() is None

    watch, in_python = (ModuleWatch(model, values=False) for _ in range(2))
    # No check in C++ is made for it, by either of the names that versions have had.
    (maker,) = {"_compile", "compiled"} & set(dir(in_python))
    setattr(in_python, maker, lambda: None)
    looks = {LOOK: look(watch), LOOK_IN_PYTHON: look(in_python)}
    count = len(list(model.modules()))
    graphed = gw.graph(model)
    if name == LARGE:
        for _ in range(3):
            graphed(*args)
        assert graphed._graphs.statistics.captures == 1
        calls = {"eager": lambda: model(*args), "graph": lambda: graphed(*args)}
        return calls | looks, {"chosen": None, "modules": count}
    options: Row = {"remember": False, "progress": False, "isolate": False}
    tuned = gw.tune(model, args, strategies=strategies, **options)
    for _ in range(3):
        graphed(*args)
    (entry,) = graphed._graphs._entries.ready()
    launch = entry.graph.launcher()
    found: dict[str, Callable[[], object]] = {
        "eager": lambda: model(*args),
        "winner": lambda: tuned._choice.entries.table[0][1](*args),
        "tune": lambda: tuned(*args),
        "replay": lambda: launch(args),
        "graph": lambda: graphed(*args),
    }
    return found | looks, {"chosen": tuned.report.chosen, "modules": count}


def block(work: Callable[[], object], count: int, wait: Callable[[], object]) -> float:
    """Seconds of a call, the mean of some."""
    began = time.perf_counter()
    for _ in range(count):
        work()
        wait()
    return (time.perf_counter() - began) / count


def rounds(strategies: list[str], only: list[str]) -> None:
    """Answer each line on stdin by a round of measurements."""
    from graphwright.ops import compiled_checks

    compiled_checks.provide()  # Else they are built meanwhile.
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(2)
    wait: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else int
    waits: dict[str, Callable[[], object]] = dict.fromkeys(LOOKS, int)
    strategies = strategies or STRATEGIES[device.type]
    made: dict[str, tuple[dict[str, Any], dict[str, int]]] = {}
    facts: Row = {}
    with torch.no_grad():
        for name, (model, args) in models(device).items():
            if only and not any(part in name for part in only):
                continue
            print(f"setting up {name}", file=sys.stderr, flush=True)
            calls, facts[name] = ways(name, model, args, strategies)
            # Checks in C++ are made once there were some looks.
            for way, call in calls.items():
                block(call, 20, waits.get(way, wait))
            counts = {
                way: max(1, min(MOST, int(BLOCK_S / block(call, 3, waits.get(way, wait)))))
                for way, call in calls.items()
            }
            made[name] = calls, counts
        print(json.dumps(facts), flush=True)
        for number, _ in enumerate(sys.stdin):
            found: Row = {}
            for name, (calls, counts) in made.items():
                order = list(calls)[number % len(calls) :] + list(calls)[: number % len(calls)]
                found[name] = {
                    way: block(calls[way], counts[way], waits.get(way, wait)) * 1e6 for way in order
                }
            print(json.dumps(found), flush=True)


def measured(
    source: Path,
    count: int,
    other: Path | None,
    strategies: list[str],
    only: list[str],
    limit_s: float,
) -> tuple[Row, Row]:
    """Rounds of "now", and of "before" where there is another checkout; what is known of both.

    No round but the first begins later than `limit_s` after the start.
    """
    began = time.monotonic()
    sides = {"now": source} | ({} if other is None else {"before": other})
    processes: dict[str, subprocess.Popen[str]] = {}
    facts: Row = {}
    found: dict[str, list[Row]] = {side: [] for side in sides}
    try:
        for side, where in sides.items():
            processes[side] = process = subprocess.Popen(
                command("bench.calls.run", json.dumps(strategies), json.dumps(only)),
                env=variables(where),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            # One after the other: `tune` times what it chooses from.
            assert process.stdout is not None
            facts[side] = json.loads(process.stdout.readline())
        for turn in range(count):
            if turn and time.monotonic() > began + limit_s:
                break
            for side in list(sides) if turn % 2 else list(sides)[::-1]:
                process = processes[side]
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write("\n")
                process.stdin.flush()
                found[side].append(json.loads(process.stdout.readline()))
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return found, facts


def medians(turns: list[Row]) -> dict[str, dict[str, float]]:
    """The median of each way, by model."""
    return {
        name: {way: statistics.median(turn[name][way] for turn in turns) for way in turns[0][name]}
        for name in turns[0]
    }


def gap(turns: list[Row], name: str, more: str, less: str, share: float = 1.0) -> float:
    """By how much one way takes longer than a share of another: the median over the rounds.

    What a round has in common, such as other work on the machine, falls out.
    """
    return statistics.median(turn[name][more] - share * turn[name][less] for turn in turns)


def beside(found: Row) -> dict[str, dict[str, float]]:
    """By how much "now" takes longer than "before" in the same round: the median, by model."""
    pairs = list(zip(found["now"], found.get("before", []), strict=False))
    return {
        name: {
            way: statistics.median(now[name][way] - before[name][way] for now, before in pairs)
            for way in found["now"][0][name]
        }
        for name in (found["now"][0] if pairs else ())
    }


def targets(found: Row, facts: Row, *, gpu: bool) -> list[Row]:
    """What is asked of each model, and whether it holds."""
    rows, turns = [], found["now"]
    for name, us in medians(turns).items():
        chosen, count = facts["now"][name]["chosen"], facts["now"][name]["modules"]
        if chosen is None:
            rows += [(f"{name}: a {way}, hot", us[way], most) for way, most in LARGE_US.items()]
            continue
        limit = GPU_US if gpu else LEAST_US + REAL_US * count
        if chosen == "eager":
            above = gap(turns, name, "tune", "eager", EAGER_SHARE)
            rows.append((f"{name}: tuned to eager, above {EAGER_SHARE:g} of it", above, EAGER_US))
        else:
            above = gap(turns, name, "tune", "winner")
            rows.append((f"{name}: tune() above {chosen}", above, limit))
        rows.append((f"{name}: graph() above a replay", gap(turns, name, "graph", "replay"), limit))
        rows.append((f"{name}: a look, hot", us[LOOK], LEAST_US + HOT_US * count))
    return [
        {"target": what, "figure": figure, "most": most, "met": figure <= most}
        for what, figure, most in rows
    ]


def to_markdown(result: Row) -> str:
    """What docs/results/calls.md shows: what a call takes, and how much of it is graphwright's."""
    found, facts = result["rounds"], result["facts"]["now"]
    turns = found["now"]
    table = [
        ["model", "modules", "eager", "chosen", "what was chosen", "tune()", "added"],
    ]
    table[0] += ["replay", "graph()", "added", "look at the module", "in Python"]
    for name, us in medians(turns).items():
        if facts[name]["chosen"] is None:
            row = [name, str(facts[name]["modules"]), _us(us["eager"]), *["–"] * 5]
            table.append([*row, _us(us["graph"]), "–", *(f"{us[look]:.1f}" for look in LOOKS)])
            continue
        tuned, graphed = added(turns, name)
        row = [name, str(facts[name]["modules"]), _us(us["eager"]), facts[name]["chosen"]]
        row += [_us(us["winner"]), _us(us["tune"]), f"{tuned:+.1f}"]
        row += [_us(us["replay"]), _us(us["graph"]), f"{graphed:+.1f}", f"{us[LOOK]:.1f}"]
        row.append(f"{us[LOOK_IN_PYTHON]:.1f}" if LOOK_IN_PYTHON in us else "–")
        table.append(row)
    targets = result["targets"]
    missed = [target["target"] for target in targets if not target["met"]]
    met = f"{len(targets) - len(missed)} of {counted(len(targets), 'target')} met"
    return "\n".join(
        [
            "Microseconds of a synchronised call: the median of "
            f"{counted(len(turns), 'round')}. *what was chosen* is called without graphwright, "
            "*replay* is a replay of the graph with its inputs copied, *look* is the check that "
            "the module has not changed, in C++ and in Python. *added* is the median of the "
            "differences within a round, so it is not exactly the difference of the medians. Where "
            "a call takes milliseconds, the noise is larger than what is added.",
            "",
            *marked(table),
            "",
            f"{met}; missed: {'; '.join(missed)}." if missed else f"{met}.",
            "",
            machine(result["environment"]),
            "",
        ]
    )


def added(turns: list[Row], name: str) -> tuple[float, float]:
    """Microseconds that tune() adds to what was chosen, and graph() to a replay."""
    return gap(turns, name, "tune", "winner"), gap(turns, name, "graph", "replay")


def _us(value: float) -> str:
    return f"{value:,.1f}"


def benchmark(
    out: Path,
    other: Path | None,
    count: int,
    strategies: list[str],
    only: list[str],
    limit_s: float,
) -> int:
    """Measure and write; the number of targets missed."""
    found, facts = measured(HERE, count, other, strategies, only, limit_s)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "calls",
        "commit": commit(),
        "environment": environment(device),
        "unit": "us",
        "facts": facts,
        "rounds": found,
        "beside": beside(found),
        "targets": targets(found, facts, gpu=device.type == "cuda"),
    }
    where = out / f"calls-{'h200' if device.type == 'cuda' else 'cpu'}.json"
    write(where, result)
    for side, turns in found.items():
        for name, us in medians(turns).items():
            figures = ", ".join(f"{way} {value:.1f}" for way, value in us.items())
            print(f"{side:<6} {name} ({facts[side][name]['chosen']}): {figures}")
    for name, us in result["beside"].items():
        print(f"now - before {name}: {', '.join(f'{way} {more:+.2f}' for way, more in us.items())}")
    for target in result["targets"]:
        met = "yes" if target["met"] else "NO"
        print(f"{target['target']:50}{target['figure']:>10.2f}{target['most']:>10.2f}  {met}")
    print(f"wrote {where}")
    return sum(not target["met"] for target in result["targets"])


if __name__ == "__main__":
    rounds(*map(json.loads, sys.argv[1:]))
