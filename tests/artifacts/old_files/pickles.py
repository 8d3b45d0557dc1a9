"""What users may have pickled: an object of each public class, made the same way by each version.

`VALUES` are compared as a whole with what was unpickled, `CALLABLES` by what they answer.
"""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from old_files import models
from torch import fx, nn

import graphwright as gw
from graphwright.checker import CheckReport, Place, Severity
from graphwright.diagnosis.result import Cause as Reason
from graphwright.dispatch import BucketStatistics, CallStatistics
from graphwright.evaluation.accuracy import ErrorMeasure
from graphwright.evaluation.measurement import Measurement
from graphwright.fusion import PASSES, Change, Fused, PassResult, Region
from graphwright.graphs import GraphMemory, MemoryPrediction
from graphwright.ops import Function
from graphwright.profiler import Cause, Roofs, Verdict
from graphwright.profiler.lines import Line
from graphwright.profiler.remedies import Remedy
from graphwright.profiler.timing import CallTimes, ThreadTimes
from graphwright.profiler.verdict import CpuFigures
from graphwright.report import Row, Status
from graphwright.report.result import Prediction, Shape, Step
from graphwright.serving.protocol import TensorMetadata
from graphwright.shapes import SizesSeen
from graphwright.strategies import Availability, Built, Rewritten
from graphwright.strategies.registry import RUNNERS, parse_candidates
from graphwright.training import StepStatistics, TrainingCallStatistics

ERRORS = [
    kind
    for kind in map(gw.__dict__.get, gw.__all__)
    if isinstance(kind, type) and issubclass(kind, gw.GraphwrightError)
]
ADD = """
#include <ATen/ATen.h>
at::Tensor old_add(const at::Tensor& x, const at::Tensor& y) { return x + y; }
"""


def row() -> Row:
    measured = Measurement(((0.25, 0.5), (0.25, 0.75)), (0.25, 0.5), 0.125)
    return Row(
        "fused",
        Status.OK,
        "the fastest",
        "none",
        ["a note"],
        7,
        setup_s=0.5,
        peak_bytes=4096,
        error=ErrorMeasure(0.5, 0.75),
        screening=measured,
        baseline=measured,
        final=measured,
        build_s=0.25,
        repeat="gw.tune(...)",
        by_shape={"one": Row("fused", Status.OK, screening=measured)},
        first_answers=[0.5],
    )


def report() -> gw.Report:
    return gw.Report(
        "Rows",
        ["x: 2×4 float32"],
        "latency",
        [row(), Row("eager", Status.OK, by_shape={"one": Row("eager", Status.OK)})],
        {"torch": "2"},
        chosen="fused",
        reason="it is the fastest",
        notes=["a note"],
        eager_error=ErrorMeasure(0.25, 0.5),
        created="2026-01-01T00:00:00",
        seconds=1.5,
        shapes=[Shape("one", 1.0, ["x: 2×4 float32"])],
        recalled="2026-01-02T00:00:00",
        curve=[Step(0.5, "fused", 1.5)],
        host_s=0.125,
        input_bytes=32,
        predictions=[Prediction("graph", "eager+graph", "eager", 1.0, 2.0, 1.5)],
    )


def finding() -> gw.Finding:
    place = Place("model.py", 3, 5, "if x.any():", "x.any()")
    return gw.Finding("read", Severity.BREAKS, "any()", "It reads.", "Do not.", "x", place, 2)


def roofs() -> Roofs:
    return Roofs(
        "cpu",
        2,
        ((1024, 1e9), (4096, 2e9)),
        {"float32": 1e11},
        1e-6,
        measured="2026-01-01",
        transfers={"to": 1e9},
    )


def verdict() -> Verdict:
    cause = next(iter(Cause))
    return Verdict((cause,), {cause: 1.0}, ((Line("model.py", 3, "x + 1"), "adds"),), "It adds.")


def profile() -> gw.Profile:
    threads = ThreadTimes(1, {1: 0.5, 2: 0.25}, 2, 2.0, 1.5, 2.5, 2, 0.0)
    return gw.Profile(
        name="Rows",
        device="cpu",
        training=False,
        verdict=verdict(),
        remedies=(Remedy("graph", 1.0, 2.0, "few operations", (1.0, 1.5), 1.25),),
        times=CallTimes(0.5, 0.25, 0.75, 0.25, 0.5, 3),
        figures=CpuFigures(0.5, 0.25, 0.125, {next(iter(Cause)): 0.125}, threads),
        roofs=roofs(),
        environment={"torch": "2"},
        notes=("a note",),
        seconds=1.5,
    )


def node() -> gw.Node:
    return gw.Node(1, "operation", "aten.add", (0,), 0, "aten.add", "up", "model.py:3", 32)


def module() -> nn.Module:
    return models.filled(models.Rows())


def extension() -> gw.Extension:
    functions = {"old_add": Function("(Tensor x, Tensor y) -> Tensor", fake=models.like)}
    return gw.extension("old_files", cpp=ADD, functions=functions)


def config() -> gw.ModelConfig:
    return gw.ModelConfig(
        models.values,
        (models.values(2, models.SIZE),),
        {"shift": 1},
        gw.Buckets(batch=[2, 4]),
        inputs=[TensorMetadata("x", "FP32", (-1, models.SIZE))],
    )


VALUES: dict[str, Callable[[], Any]] = {
    "Buckets": lambda: gw.Buckets(batch=[1, 4], length=[8]),
    "Diagnosis": lambda: gw.Diagnosis("Rows", Reason.RESULT, "wrong", "aten.add", notes=("a",)),
    "FallbackWarning": lambda: gw.FallbackWarning("what, and why"),
    "Finding": finding,
    "ModelConfig": config,
    "Node": node,
    "Nodes": lambda: gw.Nodes("Rows", [gw.Node(0, "empty", ""), node()], ["a note"]),
    "Profile": profile,
    "Report": report,
    "checker.CheckReport": lambda: CheckReport("Rows", [finding()]),
    "checker.Place": lambda: finding().place,
    "checker.Severity": lambda: [*Severity],
    "dispatch.BucketStatistics": lambda: BucketStatistics(3, 4, 0.25),
    "dispatch.CallStatistics": lambda: CallStatistics(
        1, 2, {"a reason": 3}, 4, 5, 6, sizes=SizesSeen(("batch",), {(2,): 3}), waste=0.25
    ),
    "fusion.Change": lambda: Change("add and relu", ("aten.add", "aten.relu")),
    "fusion.Fused": lambda: Fused(models.values, [Region("up")], [("down", "a loop")]),
    "fusion.Region": lambda: Region("up", [("folding", Change("a", ("b",)))], operations=(3, 2)),
    "graphs.GraphMemory": lambda: GraphMemory("Rows", 32, 64),
    "graphs.MemoryPrediction": lambda: MemoryPrediction(64, (32, 32), (("aten.add", 32),)),
    "ops.Function": lambda: Function("(Tensor x) -> Tensor", fake=models.values),
    "profiler.Cause": lambda: [*Cause],
    "profiler.Roofs": roofs,
    "profiler.Verdict": verdict,
    "report.Row": row,
    "report.Status": lambda: [*Status],
    "shapes.SizesSeen": lambda: SizesSeen(("batch",), {(2,): 3}),
    "strategies.Availability": lambda: Availability(False, "it is not installed", "Install it."),
    "strategies.Built": lambda: Built(models.values, ["a note"], holds_weights=True),
    "strategies.Candidate": lambda: parse_candidates(["channels_last+fused", "inductor+graph"], ()),
    "strategies.Runner": lambda: [*RUNNERS],
    "training.StepStatistics": lambda: StepStatistics(3, Counter({"a reason": 2}), 1, 64),
    "training.TrainingCallStatistics": lambda: TrainingCallStatistics(
        3, 2, 1, Counter({"a reason": 2})
    ),
    **{
        kind.__name__: lambda kind=kind: kind("what", where="model.py:3", remedy="do")
        for kind in ERRORS
    },
}
CALLABLES: dict[str, Callable[[], Any]] = {
    "BackgroundModule": lambda: gw.tune(
        module(), (models.values(2, models.SIZE),), background=True
    ),
    "FusedModule": lambda: gw.fuse(module()),
    "GraphedCallable": lambda: gw.graph(models.doubled, pool=gw.MemoryPool("1GiB", evict=True)),
    "GraphedModule": lambda: gw.graph(module(), max_graphs=3),
    "GraphedModule-buckets": lambda: gw.graph(module(), buckets=gw.Buckets(batch=[2, 4])),
    "Prefetcher": lambda: gw.prefetch([models.values(2, models.SIZE)], "cpu"),
    "fusion.Pass": lambda: PASSES[0],
    "fusion.PassResult": lambda: PassResult(fx.symbolic_trace(nn.ReLU()), (Change("a", ()),)),
    "Extension": extension,
    "ops.Operator": lambda: extension().old_add,
    "strategies.Rewritten": lambda: Rewritten(module(), (), {}, models.values, True),
}


def public_classes() -> Iterator[str]:
    """The paths of all classes that graphwright and its subpackages show."""
    shown = {name for name in gw.__all__ if isinstance(getattr(gw, name), type)}
    yield from sorted(shown)
    known = {getattr(gw, name) for name in shown}
    for each in pkgutil.iter_modules(gw.__path__):
        if each.ispkg:
            package = importlib.import_module(f"graphwright.{each.name}")
            for name, kind in inspect.getmembers(package, inspect.isclass):
                if kind not in known and kind.__module__.startswith("graphwright."):
                    yield f"{each.name}.{name}"


# Classes of which nothing could be pickled, and why.
NOT_PICKLED = {
    "Graph": "it is tied to memory addresses, and says so",
    "GraphedStep": "its graphs are tied to a model and an optimizer, and it says so",
    "MemoryPool": "it holds a lock",
    "strategies.Compiler": "it is a protocol",
    "strategies.Rewrite": "it holds functions without a name",
}


def write(out: Path) -> None:
    """Write a pickle of each object; `out` has the files that were made before."""
    (out / "pickles").mkdir()
    made = VALUES | CALLABLES | {"TunedModule": lambda: gw.load(out / "files/fused.gw", module())}
    missing = {*public_classes()} ^ {name.partition("-")[0] for name in {*made, *NOT_PICKLED}}
    assert not missing, missing
    for name, make in made.items():
        found = make()
        (out / "pickles" / f"{name}.pickle").write_bytes(pickle.dumps(found))
        if isinstance(found, gw.BackgroundModule):
            found.close()
