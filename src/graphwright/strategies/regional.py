"""Regional compilation: Inductor for each region of the model once, however often it repeats.

A transformer of twelve layers is compiled in the time of one. Between regions nothing is fused.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from ..calls.snapshots import clone_leaves
from ..calls.split import Args, Kwargs, flatten
from ..errors import StrategyFailed
from ..fusion.nodes import arguments, calls, constant, inputs, replace
from ..fusion.pass_manager import fused_call, passes_named
from ..fusion.regions import GraphRegion, TensorKind, kinds_of, regions_of
from ..fusion.tracing import GraphCall
from .base import Availability, Built, probe
from .inductor import INDUCTOR, load_cache, save_cache

# What Inductor does with frozen weights alone, and what hides that layers are alike.
_PASSES = passes_named(["clean", "masks", "constants", "batch_norm", "scales", "projections"])
_Compiled = Callable[..., Sequence[torch.Tensor]]
_CAT = torch.ops.aten.cat.default


@dataclass(frozen=True)
class Regional:
    """Inductor, region by region, compiled for the sample's own shapes."""

    name: str = "inductor:regional"
    complexity: int = 29
    holds_code: ClassVar[bool] = True

    def probes_late(self, device: torch.device) -> bool:
        """The probe compiles, which takes as long as a build."""
        return True

    def probe(self, device: torch.device) -> Availability:
        """Inductor has to work."""
        return probe(INDUCTOR, device)

    def build(self, model: nn.Module, args: Args, kwargs: Kwargs) -> Built:
        """Trace the call, and compile each of its regions once.

        Raises:
            StrategyFailed: the call is no graph, or it draws random numbers.
        """
        fused = fused_call(model, args, kwargs, _PASSES, check=False, measure=False)
        if not isinstance(fused.call, GraphCall):
            raise StrategyFailed(f"the call as a whole is no graph: {fused.untraced[0][1]}")
        graph = fused.call.graph
        _refuse_random(graph)
        leaves, _ = flatten(args, kwargs)
        with torch.no_grad():
            given = clone_leaves(leaves)
            kinds = kinds_of(graph, [given[slot] for slot in fused.call.slots])
            _simplify(graph, kinds)
            regions = regions_of(graph, kinds)
            call = _RegionalCall(fused.call, regions, kinds)
            call.compile(clone_leaves(leaves))
        return Built(
            call,
            [f"{len(regions)} regions, of which {len(call.compiled)} were compiled"],
            holds_weights=True,
            save=save_cache,
            capturable=True,
            packed=fused.packed,
            self_contained=True,
        )

    def warm(self, folder: Path) -> None:
        """Give torch.compile the cache that was saved, so that a build compiles nothing."""
        load_cache(folder)


def _refuse_random(graph: fx.GraphModule) -> None:
    """Refuse operations that draw random numbers: Inductor draws others."""
    for node in graph.graph.nodes:
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags and not _is_off(node):
            raise StrategyFailed(f"{node.target} draws random numbers, and Inductor draws others")


def _is_off(node: fx.Node) -> bool:
    """Whether it is a dropout, or an operation with one, that drops nothing."""
    given = arguments(node)
    return given.get("train") is False or given.get("p", given.get("dropout_p")) == 0


def _simplify(graph: fx.GraphModule, kinds: dict[fx.Node, TensorKind]) -> None:
    """Copy what is joined to nothing, as a new cache is: Inductor's result has other strides."""
    for node in calls(graph, _CAT):
        parts = [part for part in inputs(node)[0] if kinds[part].shape.numel()]
        if len(parts) == 1 and kinds[parts[0]].shape == kinds[node].shape:
            options = {"memory_format": torch.contiguous_format}
            copied = replace(graph, node, torch.ops.aten.clone.default, (parts[0],), **options)
            kinds[copied] = kinds[node]


class _RegionalCall:
    """Runs the regions one after the other, and is called as the model is.

    Attributes:
        compiled: code by the keys of regions, each from a region's inputs to its outputs.
    """

    def __init__(
        self, call: GraphCall, regions: Sequence[GraphRegion], kinds: dict[fx.Node, TensorKind]
    ) -> None:
        graph, self._slots, self._out = call.graph, call.slots, call.out
        nodes = list(graph.graph.nodes)
        self._numbers = numbers = {node: number for number, node in enumerate(nodes)}
        self._arguments = [numbers[node] for node in nodes if node.op == "placeholder"]
        self._known = {
            numbers[node]: tensor.detach()
            for node in nodes
            if (tensor := constant(graph, node)) is not None
        }
        (output,) = (node for node in nodes if node.op == "output")
        self._results = [numbers[node] for node in output.args[0]]
        self._steps = self._planned(regions)
        self._kinds = kinds
        self.compiled: dict[int, _Compiled] = {}

    def _planned(
        self, regions: Sequence[GraphRegion]
    ) -> list[tuple[GraphRegion, list[int], list[int], list[int]]]:
        """Each region with its inputs, its outputs, and what nobody needs after it."""
        number_of = self._numbers
        last = {number_of[n]: place for place, region in enumerate(regions) for n in region.inputs}
        for kept in (*self._results, *self._known):
            last.pop(kept, None)
        done: list[list[int]] = [[] for _ in regions]
        for number, place in last.items():
            done[place].append(number)
        return [
            (
                region,
                [number_of[node] for node in region.inputs],
                [number_of[node] for node in region.outputs],
                done[place],
            )
            for place, region in enumerate(regions)
        ]

    def compile(self, leaves: Sequence[Any]) -> None:
        """Compile each region once, then run all of them on a call's leaves."""
        with _kernels_together():
            for region, *_ in self._steps:
                if region.key not in self.compiled:
                    self.compiled[region.key] = _compiled(region, self._example(region))
        seen: set[int] = set()

        def prepare(region: GraphRegion, given: Sequence[torch.Tensor]) -> None:
            if region.key not in seen:
                code = self.compiled[region.key]
                self.compiled[region.key] = self._laid_out(region, code, given)
                seen.add(region.key)

        self._run(leaves, prepare)

    def _example(self, region: GraphRegion) -> list[torch.Tensor]:
        """Inputs like those of a region."""
        found = []
        for node in region.inputs:
            tensor = self._known.get(self._numbers[node])
            if tensor is None:
                kind = self._kinds[node]
                tensor = torch.empty_strided(
                    kind.shape, kind.strides, dtype=kind.dtype, device=kind.device
                )
            found.append(tensor)
        return found

    def _laid_out(
        self, region: GraphRegion, code: _Compiled, given: Sequence[torch.Tensor]
    ) -> _Compiled:
        """A region's code whose results are as in the graph, for which the others are compiled."""
        expected = [self._kinds[node] for node in region.outputs]
        found = [TensorKind.of(each) for each in code(*given)]
        if found == expected:
            return code

        def laid_out(*given: torch.Tensor) -> list[torch.Tensor]:
            return [
                each
                if each.stride() == kind.strides
                else each.new_empty_strided(kind.shape, kind.strides).copy_(each)
                for each, kind in zip(code(*given), expected, strict=True)
            ]

        return laid_out

    def _run(
        self,
        leaves: Sequence[Any],
        prepare: Callable[[GraphRegion, Sequence[torch.Tensor]], None] | None = None,
    ) -> list[torch.Tensor]:
        """The tensors of the result, `prepare` having seen each region and its inputs before."""
        values = dict(self._known)
        values.update(zip(self._arguments, (leaves[slot] for slot in self._slots), strict=True))
        for region, taken, outputs, done in self._steps:
            given = [values[number] for number in taken]
            if prepare is not None:
                prepare(region, given)
            values.update(zip(outputs, self.compiled[region.key](*given), strict=True))
            for number in done:
                del values[number]
        return [values[number] for number in self._results]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, _ = flatten(args, kwargs)
        with torch.no_grad():
            return self._out.fill(self._run(leaves))


@contextlib.contextmanager
def _kernels_together() -> Iterator[None]:
    """Have the kernels of all graphs of a block compiled at once: at its end they are there.

    Inductor waits for those of each graph, where there are few, before it goes on with the next.
    """
    from torch._inductor.async_compile import AsyncCompile

    waiting: list[tuple[Any, Any]] = []
    wait, mine = AsyncCompile.wait, threading.get_ident()

    def later(self: Any, scope: Any) -> None:
        if threading.get_ident() == mine:
            waiting.append((self, scope))
        else:
            wait(self, scope)

    AsyncCompile.wait = later  # type: ignore[method-assign]  # until all graphs are there
    try:
        yield
    finally:
        AsyncCompile.wait = wait  # type: ignore[method-assign]
    for compiling, scope in waiting:
        wait(compiling, scope)


def _compiled(region: GraphRegion, given: Sequence[torch.Tensor]) -> _Compiled:
    """A region's code for inputs like some."""
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Without a mode that could hold symbols, nothing gets into the cache.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with tracing(TracingContext(mode)):
        made: Any = compile_fx(region.graph(), [*given], ignore_shape_env=True)
    code: _Compiled = made
    return code


REGIONAL = Regional()
