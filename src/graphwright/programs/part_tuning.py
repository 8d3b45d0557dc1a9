"""What becomes of one method of a program: it is tuned for its calls, or generates by graphs."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..artifacts.tuned_module import TunedModule
from ..calls.split import tensors_of
from ..calls.switches import applied
from ..errors import SignatureError
from ..generation.generator import GraphedGenerator, graph_generate
from ..report.result import EAGER
from ..shapes.buckets import Buckets, SizesSeen
from ..tuning.tuner import tune
from .inspection import SharedSize
from .installation import twin_of
from .observed_calls import FORWARD
from .part_calls import MOST_KNOWN, PartCalls

# The method that graph_generate() answers, and how that is called.
GENERATE, GENERATE_BY = "generate", "graph_generate"
# Kinds of calls of one part that are tuned for.
_MOST_KINDS = 2 * MOST_KNOWN
# So many buckets, by device: on a CPU they are samples alone, of what takes any size.
_MOST_BUCKETS = {"cpu": 2, "cuda": 8}
# The weight of a bucket for which no call was seen, in calls.
_RARE = 0.01
# Seconds for a part, at least.
_LEAST_BUDGET_S = 1.0
# So many dimensions may vary for buckets.
_MOST_DIMENSIONS = 3
# What takes any size without padding, which on a CPU costs as much as other work.
_FOR_ANY_SIZE = ("onnxruntime",)


class GenerateAnswer:
    """Answers calls of generate() by graphs."""

    def __init__(self, generator: GraphedGenerator) -> None:
        self.generator = generator

    @property
    def calls(self) -> Counter[str]:
        """How many calls went which way."""
        made = self.generator.statistics
        eager = {f"eager: {why}": count for why, count in made.eager.items()}
        return Counter({"generated": made.calls, **eager})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate."""
        return self.generator.generate(*args, **kwargs)


def generator_of(module: nn.Module) -> GraphedGenerator:
    """What generates by graphs in a model's place."""
    return graph_generate(twin_of(module))


def tuned_for(
    module: nn.Module, calls: PartCalls, buckets: bool, options: Mapping[str, Any]
) -> TunedModule:
    """What tuning makes of a method, for the calls that it gets.

    Args:
        module: whose method it is.
        calls: of the method.
        buckets: whether what was made may answer sizes between those that were seen.
        options: of `tune`.

    Raises:
        GraphwrightError: it cannot be tuned.
    """
    with applied(calls.switches):
        return _tuned(module, calls, buckets, dict(options))


def _tuned(
    module: nn.Module, calls: PartCalls, buckets: bool, options: dict[str, Any]
) -> TunedModule:
    twin = twin_of(module)
    called: Any = twin if calls.target.method == FORWARD else getattr(twin, calls.target.method)
    device = next((t.device.type for t in tensors_of(calls.samples[0])), "cpu")
    began = time.monotonic()
    if buckets and calls.varying and len(calls.varying) <= _MOST_DIMENSIONS:
        found = _tuned_for_any_size(called, calls, device, options)
        if found is not None:
            return found
        if options.get("budget_s") is not None:
            left_s = options["budget_s"] - (time.monotonic() - began)
            options["budget_s"] = max(_LEAST_BUDGET_S, left_s)
    given = calls.samples[:_MOST_KINDS]
    if len(given) == 1:
        return tune(called, *given[0], **options)
    return tune(
        called, samples=[*given], weights=[float(n) for n in calls.counts[:_MOST_KINDS]], **options
    )


def _tuned_for_any_size(
    called: Callable[..., Any], calls: PartCalls, device: str, options: Mapping[str, Any]
) -> TunedModule | None:
    """What is made of a method for all sizes between those seen; None if nothing of it is faster.

    On a GPU that is a graph for each bucket, to which calls are padded where that is proved to be
    harmless. On a CPU padding is work, and only what takes any size is tried.
    """
    names = [f"size{n}" for n in range(len(calls.varying))]
    dynamic_shapes: dict[str, dict[int, str]] = {}
    for name, shared in zip(names, calls.varying, strict=True):
        for argument, dimension in shared.places:
            dynamic_shapes.setdefault(argument, {})[dimension] = name
    seen: dict[tuple[int, ...], float] = {}
    for sizes, count in zip(calls.sizes, calls.counts, strict=True):
        own = tuple(_size(sizes, shared) for shared in calls.varying)
        seen[own] = seen.get(own, 0.0) + count
    largest = max(range(len(calls.sizes)), key=lambda n: _volume(calls.sizes[n]))
    chosen = dict(options)
    if device == "cpu" and chosen.get("strategies") is None:
        chosen["strategies"] = _FOR_ANY_SIZE
    args, kwargs = calls.samples[largest]
    buckets = _buckets(names, seen, tuple(map(_least, calls.varying)), device)
    try:
        found = tune(
            called,
            args,
            kwargs,
            buckets=buckets,
            weights=_weights(buckets, seen),
            dynamic_shapes=dynamic_shapes,
            **chosen,
        )
    except SignatureError:  # The sizes depend on each other, or cannot be named.
        return None
    return None if found.report.chosen == EAGER else found


def _buckets(
    names: Sequence[str],
    seen: Mapping[tuple[int, ...], float],
    least: tuple[int, ...],
    device: str,
) -> Buckets:
    """Those that waste the least on the sizes seen; on a CPU also the least that is answered.

    What takes any size there answers sizes smaller than those seen, too.
    """
    counts = {own: math.ceil(count) for own, count in seen.items()}
    sizes = SizesSeen(tuple(names), counts)
    between = Buckets.from_sizes(sizes, max_graphs=_MOST_BUCKETS[device])
    if device != "cpu":
        return between
    return Buckets.from_points(names, {least, *between.points})


def _weights(buckets: Buckets, seen: Mapping[tuple[int, ...], float]) -> dict[Any, float]:
    """The share of calls that each bucket holds as the smallest, or hardly any."""
    found: dict[Any, float] = dict.fromkeys(buckets.points, _RARE)
    for sizes, count in seen.items():
        holding = (p for p in buckets.points if all(n <= m for n, m in zip(sizes, p, strict=True)))
        found[min(holding, key=math.prod)] += count
    return {p if len(p) > 1 else p[0]: weight for p, weight in found.items()}


def _least(shared: SharedSize) -> int:
    """The least size to be answered: a batch of one, but of two where one alone is special."""
    is_batch = all(dimension == 0 for _, dimension in shared.places)
    return 1 if is_batch else min(2, shared.low)


def _size(sizes: Mapping[str, tuple[int, ...]], shared: SharedSize) -> int:
    name, dimension = shared.places[0]
    return sizes[name][dimension]


def _volume(sizes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in sizes.values())
