"""TorchScript: script, else trace; freeze; optimize_for_inference; its tensor-expression fuser.

TorchScript is deprecated since torch 2.10 and still works.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import StrategyFailed, first_line
from ..signature import Args, Kwargs, flatten, unflatten
from ..snapshots import clone_leaves
from .base import AVAILABLE, Availability, Built, tiny_model, without_grad
from .flat import Flat, Row

# The profiling executor specialises a graph during its first runs.
_PROFILING_RUNS = 3


@dataclass(frozen=True)
class TorchScript:
    """One way to use TorchScript: plain, frozen, optimised for inference, or with its fuser."""

    variant: str
    name: str
    complexity: int

    def probe(self, device: torch.device) -> Availability:
        """Script a tiny model; for the fuser, look for a fused group in the optimised graph."""
        model, x = tiny_model(device)
        if self.variant == "fuser":
            return _probe_fuser(x)
        self.build(model, (x,), {}).call(x)
        return AVAILABLE

    def build(self, model: nn.Module, args: Args, kwargs: Kwargs) -> Built:
        """Script the model, or trace it with the reason why it could not be scripted."""
        notes: list[str] = []
        with torch.no_grad():
            try:
                call = self._script(model, args, kwargs)
            except Exception as error:
                notes.append(f"traced, since torch.jit.script failed: {first_line(error, 160)}")
                call = self._trace(model, args, kwargs, notes)
            fuser = _fuser() if self.variant == "fuser" else contextlib.nullcontext()
            with fuser:
                for _ in range(_PROFILING_RUNS):
                    call(*args, **kwargs)
        return Built(without_grad(call), notes, holds_weights=self.variant != "plain")

    def _script(self, model: nn.Module, args: Args, kwargs: Kwargs) -> Callable[..., Any]:
        scripted = self._finish(torch.jit.script(model))
        leaves, spec = flatten(args, kwargs)
        mine, named = unflatten(clone_leaves(leaves), spec)
        if pytree.tree_structure(scripted(*mine, **named)) != pytree.tree_structure(
            model(*args, **kwargs)
        ):
            raise StrategyFailed("the scripted model returns another structure")
        return scripted

    def _trace(
        self, model: nn.Module, args: Args, kwargs: Kwargs, notes: list[str]
    ) -> Callable[..., Any]:
        leaves, spec = flatten(args, kwargs)
        flat = Flat(model, Row.of(leaves, spec))
        samples = tuple(t for t in clone_leaves(leaves) if isinstance(t, torch.Tensor))
        if not samples:
            raise StrategyFailed("torch.jit.trace needs a tensor among the inputs")
        traced = torch.jit.trace(flat, samples, check_trace=False, strict=False)
        out, slots = flat.out, flat.call.slots
        assert out is not None  # The trace has run the model.
        script = self._finish(traced)

        def call(*args: Any, **kwargs: Any) -> Any:
            leaves, _ = flatten(args, kwargs)
            return out.fill(script(*[leaves[slot] for slot in slots]))

        return call

    def _finish(self, script: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
        if self.variant in ("freeze", "fuser"):
            script = torch.jit.freeze(script)
        elif self.variant == "optimize":
            script = torch.jit.optimize_for_inference(torch.jit.freeze(script))
        return script


@contextlib.contextmanager
def _fuser() -> Iterator[None]:
    """torch.jit.fuser("fuser1") without its calls to nvFuser, which only warn that it is gone."""
    bits: list[tuple[Callable[[], bool], Callable[[bool], Any]]] = [
        (torch._C._jit_can_fuse_on_cpu, torch._C._jit_override_can_fuse_on_cpu),
        (torch._C._jit_can_fuse_on_gpu, torch._C._jit_override_can_fuse_on_gpu),
        (torch._C._jit_texpr_fuser_enabled, torch._C._jit_set_texpr_fuser_enabled),
    ]
    before = [get() for get, _ in bits]
    for _, put in bits:
        put(True)
    try:
        yield
    finally:
        for (_, put), value in zip(bits, before, strict=True):
            put(value)


def _chain(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * 2.0 + x) * torch.sigmoid(x)


def _probe_fuser(x: torch.Tensor) -> Availability:
    remedy = (
        "Run on a GPU."
        if torch.version.cuda
        else "Run on a GPU, or build torch from source with USE_LLVM: the wheels come without."
    )
    scripted = torch.jit.script(_chain)
    try:
        with torch.no_grad(), _fuser():
            for _ in range(_PROFILING_RUNS + 1):
                scripted(x)
    except RuntimeError as error:
        return Availability(False, f"the fuser cannot run here: {first_line(error)}", remedy)
    if "TensorExprGroup" not in str(torch._C._last_executed_optimized_graph()):
        return Availability(False, "the fuser ran and fused nothing", remedy)
    return AVAILABLE


SCRIPT = TorchScript("plain", "torchscript", 10)
FREEZE = TorchScript("freeze", "torchscript:freeze", 11)
OPTIMIZE = TorchScript("optimize", "torchscript:optimize", 12)
FUSER = TorchScript("fuser", "torchscript:fuser", 13)
