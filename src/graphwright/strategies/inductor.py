"""torch.compile with Inductor: the default, freezing, reduce-overhead and max-autotune.

Each build compiles a code object of its own: TorchDynamo keeps its compiled entries by code object
and goes eager without a word after eight of them, which a tuner reaches at once.
"""

from __future__ import annotations

import contextlib
import json
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from ..calls.objects import map_tensors
from ..calls.plurals import counted
from ..calls.snapshots import clone_leaves
from ..calls.split import Args, Kwargs, flatten, unflatten
from ..errors import StrategyFailed
from .base import AVAILABLE, Availability, Built, probe, tiny_model, without_grad
from .expected import laid_out_as

_CACHE, _PROCESSOR = "cache.bin", "processor.json"
# Instructions, as PyTorch's packages name them, and what tells whether the processor has them.
INSTRUCTIONS = {
    "AVX2": "_is_avx2_supported",
    "AVX512": "_is_avx512_supported",
    "AVX512_VNNI": "_is_vnni_supported",
    "AMX_TILE": "_is_amx_tile_supported",
}
_NOT_KEPT = "torch.compile keeps no code with frozen weights in its cache"


def fresh_entry(model: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls the model, with a code object that no other function has."""

    def entry(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    # Equal code objects share nothing in TorchDynamo; identical ones do.
    return types.FunctionType(
        entry.__code__.replace(co_name="graphwright_entry"),
        entry.__globals__,
        "graphwright_entry",
        None,
        entry.__closure__,
    )


def compile_and_run(
    compiled: Callable[..., Any], args: Args, kwargs: Kwargs, runs: int
) -> tuple[list[str], dict[str, int], Any]:
    """Call a torch.compile'd function until it has settled: notes on breaks, counters, a result."""
    from torch._dynamo.utils import counters

    def count() -> dict[str, int]:
        return {
            "graphs": counters["stats"]["unique_graphs"],
            "breaks": sum(counters["graph_break"].values()),
            "skips": counters["inductor"]["cudagraph_skips"],
            "cached": counters["inductor"]["fxgraph_cache_hit"],
        }

    before = count()
    leaves, spec = flatten(args, kwargs)
    result = None
    for _ in range(runs):
        mine, named = unflatten(clone_leaves(leaves), spec)
        result = None  # With CUDA graphs, its memory is the next one's.
        result = compiled(*mine, **named)
    delta = {name: value - before[name] for name, value in count().items()}
    notes = []
    if delta["graphs"] == 0:
        notes.append("torch.compile captured nothing of this model, which runs eagerly")
    elif delta["breaks"]:
        notes.append(
            f"{counted(delta['graphs'], 'graph')}, {counted(delta['breaks'], 'graph break')}"
        )
    if delta["cached"]:
        notes.append("compiled code came from torch.compile's cache: a first set-up takes longer")
    return notes, delta, result


@dataclass(frozen=True)
class Inductor:
    """torch.compile(mode=…), compiled for the sample's own shapes.

    With `freezing`, Inductor takes the weights for constants: it folds batch norms into
    convolutions, merges matrix products of one input, and packs weights for the CPU.
    """

    mode: str
    name: str
    complexity: int
    cuda_graphs: bool = False
    freezing: bool = False
    holds_code: ClassVar[bool] = True

    @property
    def unsavable(self) -> str | None:
        """Why it cannot be saved; None where it can."""
        return _NOT_KEPT if self.freezing else None

    def probes_late(self, device: torch.device) -> bool:
        """Whether the probe compiles, which takes as long as a build."""
        return not (self.cuda_graphs and device.type == "cpu")

    def probe(self, device: torch.device) -> Availability:
        """Compile and run a tiny model: all kinds in the default mode but that with CUDA graphs."""
        if not self.cuda_graphs and self is not INDUCTOR:
            return probe(INDUCTOR, device)
        model, x = tiny_model(device)
        if self.cuda_graphs and device.type == "cpu":
            # The mode runs, but its CUDA graphs do not: it would be the default under another name.
            return Availability(
                False, "on a CPU it is the same as inductor: it adds CUDA graphs", "Run on a GPU."
            )
        try:
            with torch.no_grad():
                compiled = torch.compile(fresh_entry(model), mode=self.mode, dynamic=False)
                compile_and_run(compiled, (x,), {}, 3)
        except Exception as error:
            return explained(error)
        return AVAILABLE

    def build(self, model: nn.Module, args: Args, kwargs: Kwargs) -> Built:
        """Compile and run until settled; under CUDA graphs outputs are copied out."""
        import torch._inductor.config

        frozen = bool(self.freezing or torch._inductor.config.freezing)
        if self.freezing:
            compiled = torch.compile(fresh_entry(model), backend=_frozen_backend(), dynamic=False)
        else:
            compiled = torch.compile(fresh_entry(model), mode=self.mode, dynamic=False)
        # TorchDynamo asks for this switch too, so that an option of the backend is not enough.
        freezing = torch._inductor.config.patch(FROZEN if self.freezing else {})
        with torch.no_grad(), freezing, unprinted_weights():
            runs = 3 if self.cuda_graphs else 1
            notes, delta, made = compile_and_run(compiled, args, kwargs, runs)
        if not self.cuda_graphs:
            laid_out = laid_out_as(model, compiled, made, args, kwargs)
            return Built(without_grad(laid_out), notes, frozen, save=save_cache, capturable=True)
        if delta["skips"]:
            notes.append("torch.compile skipped CUDA graphs for this model")
        notes.append("outputs are copied out: the next call would overwrite them")

        def call(*args: Any, **kwargs: Any) -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return map_tensors(torch.clone, compiled(*args, **kwargs))

        laid_out = laid_out_as(model, call, made, args, kwargs)
        return Built(without_grad(laid_out), notes, frozen, save=save_cache)

    def warm(self, folder: Path) -> None:
        """Give torch.compile the cache that was saved, so that a build compiles nothing."""
        load_cache(folder)


def load_cache(folder: Path) -> None:
    """Give torch.compile the cache that `save_cache` has written, on such a processor.

    It holds C++ written for vectors of that processor's width, and its keys do not name that:
    compiled here for longer vectors, the code would write beyond its results.
    """
    written = folder / _PROCESSOR
    if written.exists() and json.loads(written.read_text(encoding="utf-8")) == _vectors():
        torch.compiler.load_cache_artifacts((folder / _CACHE).read_bytes())


def save_cache(folder: Path) -> None:
    """Write what this process has compiled, or found in torch.compile's cache."""
    found = torch.compiler.save_cache_artifacts()
    if found is None:
        raise StrategyFailed(
            "torch.compile's cache is switched off, so that there is nothing to keep",
            remedy="Leave torch._inductor.config.fx_graph_cache on.",
        )
    (folder / _CACHE).write_bytes(found[0])
    (folder / _PROCESSOR).write_text(json.dumps(_vectors()), encoding="utf-8")


def _vectors() -> list[str]:
    """What Inductor chooses the width of its vectors by. Names of processors do not tell."""
    known = [name for name, asked in INSTRUCTIONS.items() if getattr(torch.cpu, asked, bool)()]
    return [torch.backends.cpu.get_cpu_capability(), *known]


# The user's module keeps its weights, whatever the user has chosen for code of their own.
FROZEN: dict[str, Any] = {"freezing": True, "freezing_discard_parameters": False}


def _frozen_backend() -> Callable[..., Any]:
    """Inductor with freezing, as a backend that is equal to no other.

    Behind a graph break TorchDynamo caches code by the user's own functions, and tells entries
    apart by whether their backends are equal: frozen weights would come back in later builds, and
    in the user's own torch.compile.
    """
    from torch._inductor.compile_fx import compile_fx

    def frozen(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return compile_fx(graph, inputs, config_patches=dict(FROZEN))

    return frozen


@contextlib.contextmanager
def unprinted_weights() -> Iterator[None]:
    """Keep the values of weights out of the texts of guards.

    With freezing, TorchDynamo compares each weight by identity. Before PyTorch 2.13 the text of
    such a guard prints the weight, which takes five seconds for 400 of them on a GPU.
    """
    from torch._dynamo import guards

    if hasattr(guards, "_safe_type_repr"):
        yield
        return
    vars(guards)["repr"] = _short_repr
    try:
        yield
    finally:
        vars(guards).pop("repr", None)


def _short_repr(value: object) -> str:
    return f"<{type(value).__name__}>" if isinstance(value, torch.Tensor) else repr(value)


def explained(error: Exception) -> Availability:
    """Why a compilation cannot work here; other errors are raised again."""
    text = f"{type(error).__name__}: {error}"
    if "InvalidCxxCompiler" in text or "No working C++ compiler" in text:
        return Availability(
            False, "Inductor found no C++ compiler", "Install g++ and set CXX to it."
        )
    if "Triton" in text or "triton" in text:
        return Availability(False, "Inductor found no working Triton", "pip install triton")
    raise error


INDUCTOR = Inductor("default", "inductor", 30)
FREEZE = Inductor("default", "inductor:freeze", 31, freezing=True)
REDUCE_OVERHEAD = Inductor("reduce-overhead", "inductor:reduce-overhead", 32, cuda_graphs=True)
MAX_AUTOTUNE = Inductor("max-autotune", "inductor:max-autotune", 33)
