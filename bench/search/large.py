"""Default searches of large models beside `torch.compile(mode="reduce-overhead")`.

    scripts/bench search --large [--seconds S] [--out DIR]

Stable Diffusion 1.5's UNet, MaxViT-T, and four models of over 500 modules that a seed draws from
timm, torchvision and transformers, with their default configurations. As `scripts/bench search`
measures them: in processes of their own, compiler caches empty, all ways in turns. Models that the
file has are kept.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from graphwright.errors import first_line

from ..common.processes import figures_of
from ..common.record import SCHEMA, commit, write
from ..common.rendering import Result, Table, bare, machine, marked, target, verdict
from ..unseen.models import Unusable, built, names
from .run import UNUSABLE
from .table import DEFAULT, SLOWER, figure, line

SEED = 59
NAMED = ("diffusers/stable-diffusion-1.5", "torchvision/maxvit_t")
# How many more, and how many modules each has to have.
DRAWN, MODULES = 4, 500
PEERS = ("eager", "reduce-overhead")
# Seconds of a search: the median, and the longest; and what is left for a model to be begun.
MEDIAN_S, LONGEST_S, NEEDED_S = 60.0, 90.0, 150.0
LIBRARIES = ("timm", "torchvision", "transformers")


def drawn() -> Iterator[str]:
    """All models that may take part, in the order in which the seed draws them."""
    orders = []
    for library in LIBRARIES:
        try:
            order = names(library)
        except ImportError:
            continue
        random.Random(SEED).shuffle(order)
        orders.append([f"{library}/{name}" for name in order])
    for turn in itertools.zip_longest(*orders):
        yield from filter(None, turn)


def modules_of(name: str) -> int:
    """How many modules a model has.

    Raises:
        Unusable: it cannot be built, or is too large.
    """
    library, _, rest = name.partition("/")
    try:
        model, _ = built(library, rest, torch.device("meta"))
    except Unusable:
        raise
    except Exception as error:
        raise Unusable(first_line(error)) from error
    return len(list(model.modules()))


def benchmark(out: Path, seconds: float) -> int:
    """Measure the six, the file written after each; the number of targets missed."""
    where = out / "search-large.json"
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "search-large",
        "seed": SEED,
        "environments": [],
        "models": {},
        "passed_over": {},
    }
    if where.exists():
        result |= json.loads(where.read_text(encoding="utf-8"))
    result["commit"] = commit()
    ends = time.monotonic() + seconds
    for name in NAMED:
        if name not in result["models"] and not _take(name, result, where, ends):
            break
    else:
        _draw(result, where, ends)
    result["targets"] = targets(result)
    write(where, result)
    print(to_markdown(result))
    print(f"wrote {where}")
    return sum(each["met"] is False for each in result["targets"])


def _draw(result: Result, where: Path, ends: float) -> None:
    """Measure models that the seed draws, until there are enough or time is over."""
    for name in drawn():
        if len(result["models"]) == len(NAMED) + DRAWN:
            return
        if name in result["models"] or name in result["passed_over"]:
            continue
        try:
            count = modules_of(name)
        except Unusable as error:
            result["passed_over"][name] = str(error)
            continue
        if count <= MODULES:
            result["passed_over"][name] = f"{count} modules"
        elif not _take(name, result, where, ends):
            return


def _take(name: str, result: Result, where: Path, ends: float) -> bool:
    """Measure a model, unless it is unusable; False if there is no time for it."""
    left = ends - time.monotonic()
    if left < NEEDED_S:
        return False
    found = figures_of("bench.search.run", name, ["--peers", *PEERS], left)
    if UNUSABLE in found:
        result["passed_over"][name] = found[UNUSABLE]
    elif "took over" in found.get("failed", ""):
        print(f"{name}: {found['failed']}; the next run has it again", flush=True)
        return False
    else:
        model = {"commit": result["commit"], **found.get("figures", {})}
        result["models"][name] = model | {k: found[k] for k in ("failed",) if k in found}
        if (here := found.get("environment")) and here not in result["environments"]:
            result["environments"].append(here)
        print(line(name, result["models"][name]), flush=True)
    write(where, result)
    return True


def targets(result: Result) -> list[Result]:
    """Whether each is there, fast enough, and found in time."""
    models = result["models"]
    seconds = [found["seconds"] for model in models.values() if (found := _search(model))]
    beyond = [
        name
        for name, model in models.items()
        if (theirs := figure(model, "reduce-overhead")) is not None
        and ((mine := figure(model, DEFAULT)) is None or mine > SLOWER * theirs)
    ]
    wanted, which = float(len(NAMED) + DRAWN), f"of {len(models)}"
    found = [
        target("models with a figure", "all", float(len(seconds)), wanted, "", None),
        target(
            f"latency: beyond {SLOWER:g} × reduce-overhead",
            which + (f": {', '.join(beyond)}" if beyond else ""),
            float(len(beyond)),
            0.0,
            "",
            not beyond if models else None,
        ),
    ]
    found[0]["met"] = len(seconds) >= wanted
    for what, of, limit in (
        ("median", statistics.median, MEDIAN_S),
        ("longest", max, LONGEST_S),
    ):
        value = of(seconds) if seconds else None
        met = None if value is None else value <= limit
        found.append(target(f"seconds of a default search, {what}", which, value, limit, "", met))
    return found


def _search(model: Result) -> Result | None:
    found: Result | None = model.get("searches", {}).get(DEFAULT)
    return found


def to_markdown(result: Result) -> str:
    """What docs/results/search.md shows of it."""
    table: Table = [["model", "searched, s", "chosen", "latency", *PEERS]]
    for name, model in result["models"].items():
        search = _search(model)
        chosen = model.get("ways", {}).get(DEFAULT, {}).get("chosen", "failed")
        cells = [bare(figure(model, way), "s") for way in (DEFAULT, *PEERS)]
        table.append([name, "–" if search is None else f"{search['seconds']:.0f}", chosen, *cells])
    return "\n".join(
        [
            "### Large models: latency in µs beside reduce-overhead",
            "",
            "Default options, empty compiler caches, half precision. Two models are named, the "
            f"others were drawn by the seed {result['seed']} from those of over {MODULES} modules.",
            "",
            *marked(table),
            "",
            verdict(result["targets"]),
            "",
            *(machine(each) for each in result["environments"]),
            "",
        ]
    )
