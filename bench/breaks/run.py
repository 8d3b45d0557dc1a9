"""Calls that a plain capture does not take, as graph() answers them, beside eager.

scripts/bench breaks runs this: models that copy constants from the host or read values in forward,
a mixture of experts, a loop with an early exit, greedy decoding. Each is compared with eager on
random inputs, then timed at batch 2. The floor is what a call cannot do without: its segments,
replayed as they are, and the reads between them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from tiny_architectures import CASES
from torch import nn
from torch.utils import _pytree as pytree

import graphwright as gw
from graphwright.errors import first_line
from graphwright.evaluation.measurement import Timer, interleave
from graphwright.graphs.captured_call import CapturedCall
from graphwright.report.environment import environment

from ..check.run import EDGENEXT, MORE, _edgenext

Row = dict[str, Any]
Make = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]

INPUTS = 50
MODELS = (
    "GPTJForCausalLM",
    "GPTNeoForCausalLM",
    "BloomForCausalLM",
    "MPNetModel",
    "XLMModel",
    "ConvBertModel",
)
# Asked of the models: times as fast as eager, and at most 1.3 times the floor and 20 µs.
FASTER, OVER, BESIDE_S = 1.5, 1.3, 20e-6


class Experts(nn.Module):
    """A mixture of experts: each token goes to one, which sees its own tokens alone."""

    def __init__(self, width: int = 64, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of tokens (batch, width)."""
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            if rows.numel():
                result.index_add_(0, rows, expert(x[rows]) * weight[rows, None])
        return result


class UntilConverged(nn.Module):
    """Layers that are run until what they change is small, at most 12 times."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Of rows (batch, width)."""
        for step in range(12):
            y = 0.5 * x + 0.1 * self.layer(x)
            if (y - x).abs().max() < 0.2:
                return y, step
            x = y
        return x, 12


class Greedy(nn.Module):
    """Greedy decoding, to the end token or for 16 tokens; a recurrent cell stands for a model."""

    def __init__(self, width: int = 64, words: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.cell = nn.GRUCell(width, width)
        self.head = nn.Linear(width, words)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        """Of a state (batch, width); the tokens (batch, steps)."""
        token = torch.zeros(len(state), dtype=torch.long, device=state.device)
        tokens = []
        over = torch.zeros(len(state), dtype=torch.bool, device=state.device)
        for _ in range(16):
            state = self.cell(self.words(token), state)
            token = self.head(state).argmax(-1)
            tokens.append(torch.where(over, 0, token))
            over |= token < 4
            if over.all():
                break
        return torch.stack(tokens, 1)


def cases() -> Iterator[tuple[str, Callable[[], tuple[nn.Module, Make]]]]:
    """Names, and what makes a model on the CPU with a maker of its inputs."""
    for each in [*CASES, *MORE]:
        if each.model in MODELS:
            yield each.model, lambda each=each: (each.build(), lambda step: ((), each.inputs(step)))
    if environment_has("timm"):
        yield EDGENEXT, lambda: (_edgenext()[0], lambda step: ((torch.randn(2, 3, 64, 64),), {}))
    for kind in (Experts, UntilConverged, Greedy):
        scale = 3.0 if kind is UntilConverged else 1.0
        yield (
            kind.__name__,
            lambda kind=kind, scale=scale: (
                kind().eval(),
                lambda step: ((torch.randn(2, 64) * scale * torch.rand(()),), {}),
            ),
        )


def environment_has(package: str) -> bool:
    """Whether a package can be imported."""
    try:
        __import__(package)
    except ImportError:
        return False
    return True


def measure(*, quick: bool = False) -> Row:
    """The rows of all models, and where they were taken."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for name, make in cases():
        rows.append(row_of(name, make, device, quick=quick))
        print(told(rows[-1]), flush=True)
    versions = {"transformers": transformers.__version__}
    return {"environment": environment(device) | versions, "rows": rows}


def row_of(
    name: str, make: Callable[[], tuple[nn.Module, Make]], device: torch.device, *, quick: bool
) -> Row:
    """All figures of one model."""
    row: Row = {"model": name}
    try:
        torch.manual_seed(0)
        model, inputs = make()
        model.to(device)

        def call(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
            args, kwargs = inputs(step)
            return pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), (args, kwargs))

        with torch.no_grad(), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            graphed = gw.graph(model)
            began = time.perf_counter()
            args, kwargs = call(0)
            graphed(*args, **kwargs)
            row["first_call_s"] = time.perf_counter() - began
            row |= _compared(model, graphed, call, 5 if quick else INPUTS)
            row |= _timed(model, graphed, call(0), device, 0.3 if quick else 3.0)
            row["explain"] = graphed.explain()
        row["warnings"] = [str(w.message)[:300] for w in warned if w.category is RuntimeWarning]
        row["eager_calls"] = dict(graphed.statistics.eager)
    except Exception as error:
        row["failed"] = first_line(error)
    return row


def _compared(model: nn.Module, graphed: Any, call: Callable[[int], Any], count: int) -> Row:
    """How many results are eager's, bit for bit, and how far the others are off."""
    equal, worst, wrong = 0, 0.0, 0
    for step in range(count):
        args, kwargs = call(step)
        expected = pytree.tree_leaves(model(*args, **kwargs))
        actual = pytree.tree_leaves(graphed(*args, **kwargs))
        exact = len(expected) == len(actual)
        for a, b in zip(actual, expected, strict=False):
            if not isinstance(b, torch.Tensor):
                exact = exact and a == b
                wrong += a != b
                continue
            if a.shape != b.shape or a.dtype != b.dtype:
                exact, wrong = False, wrong + 1
            elif not torch.equal(a, b):
                exact = False
                wrong += not torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
                worst = max(worst, float((a.double() - b.double()).abs().nan_to_num().max()))
        equal += exact
    return {"inputs": count, "equal": equal, "largest_difference": worst, "wrong": wrong}


def _timed(model: nn.Module, graphed: Any, call: Any, device: torch.device, budget_s: float) -> Row:
    """Seconds of a synchronised call: eager, by graphs, and of the floor."""
    args, kwargs = call
    ways: dict[str, Callable[[], Any]] = {
        "eager": lambda: model(*args, **kwargs),
        "graph": lambda: graphed(*args, **kwargs),
    }
    graphed(*args, **kwargs)
    entries = graphed._graphs._entries.ready()
    row: Row = {"paths": 0, "segments": 0, "breaks": 0}
    if entries:
        graph: CapturedCall = entries[-1].graph
        tree = graph.tree
        if tree is None:
            recording = graph._recording
            assert recording is not None
            ways["floor"] = recording.replay
            row |= {"paths": 1, "segments": 1}
        else:
            ways["floor"] = _floor(tree.root)
            nodes = list(tree.root.below())
            row |= {"paths": tree.paths, "segments": len(nodes)}
            row["breaks"] = sum(node.break_ is not None for node in nodes)
    for way, found in interleave(ways, Timer(device), budget_s=budget_s).items():
        row[way] = {"median": found.latencies.median, "spread": found.latencies.spread}
    return row


def _floor(root: Any) -> Callable[[], None]:
    """The segments of the way that the call goes, and the reads between them, and no more."""
    way: list[tuple[Callable[[], Any], Any]] = []
    node = root
    while True:
        if node.recording is not None:
            node.recording.replay()
            way.append((node.recording.replay, None))
        if node.break_ is None:
            break
        key, result = node.break_.run()
        following = node.break_.after[key]
        # Its results have to be where the next segment reads them.
        enter = following.enter if following.targets else None
        if enter is not None:
            enter(result)
        way.append((node.break_.run, enter))
        node = following

    def run() -> None:
        for part, enter in way:
            found = part()
            if enter is not None:
                enter(found[1])

    return run


def told(row: Row) -> str:
    """A row in a line."""
    if "failed" in row:
        return f"{row['model']}: failed: {row['failed']}"
    text = (
        f"{row['model']}: {row['equal']} of {row['inputs']} equal, {row['wrong']} wrong, "
        f"{row['paths']} ways in {row['segments']} segments; eager "
        f"{row['eager']['median'] * 1e6:.0f} µs, graph {row['graph']['median'] * 1e6:.0f}"
    )
    if "floor" in row:
        text += f", floor {row['floor']['median'] * 1e6:.0f}"
    return text + (f"; {row['warnings'][0]}" if row["warnings"] else "")


def targets(result: Row) -> list[Row]:
    """What is asked of the figures, and whether it holds."""
    found = []
    for row in result["rows"]:
        if "failed" in row:
            found.append({"target": f"{row['model']} runs", "met": False})
            continue
        name, eager, graph = row["model"], row["eager"]["median"], row["graph"]["median"]
        found.append({"target": f"{name}: no result is wrong", "met": row["wrong"] == 0})
        of_a_model = name in (*MODELS, EDGENEXT)
        asked = FASTER if of_a_model else 1.0
        gave_up = bool(row["eager_calls"]) and not of_a_model
        met = eager / graph >= asked or gave_up
        times = f"{asked:g} times " if asked != 1 else ""
        found.append({"target": f"{name}: {times}as fast as eager", "met": met})
        if of_a_model:
            floor = row.get("floor", {}).get("median", 0.0)
            met = graph <= OVER * floor + BESIDE_S
            found.append({"target": f"{name}: at most 1.3 times the floor + 20 µs", "met": met})
    return found


def to_markdown(result: Row, file: str) -> str:
    """The part of docs/results/capturable.md."""
    environment, rows = result["environment"], result["rows"]
    machine = environment.get("gpu") or environment.get("processor", "")
    lines = [
        "## Calls in segments",
        "",
        f"Calls that no single capture can hold, batch 2, on {machine}: microseconds of a",
        "synchronised call (median). The *floor* is the bare replay of the segments with the",
        "reads between them.",
        "",
        "| model | paths | segments | results equal to eager's | eager | graph | floor |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['model']} | failed: {row['failed']} | | | | | |")
            continue
        times = [f"{row[w]['median'] * 1e6:.0f}" if w in row else "–" for w in WAYS]
        gave_up = " (given up)" if row["eager_calls"] else ""
        equal = f"{row['equal']} of {row['inputs']}"
        if row["equal"] < row["inputs"]:
            equal += f", others within {row['largest_difference']:.0e}"
        counts = [f"{row['paths']}{gave_up}", str(row["segments"]), equal]
        lines.append(f"| {row['model']} | {' | '.join([*counts, *times])} |")
    return "\n".join([*lines, ""])


WAYS = ("eager", "graph", "floor")
