"""TorchScript: script or else trace; freeze; optimize_for_inference; its tensor-expression fuser.

TorchScript is deprecated since torch 2.10 and still works.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from ..calls.input_dependence import InputDependence
from ..calls.objects import flatten_result
from ..calls.serialization import TreeTemplate
from ..calls.snapshots import ModuleState, clone_leaves
from ..calls.split import Args, Kwargs, flatten, tensors_of, unflatten
from ..calls.switches import applied
from ..errors import StrategyFailed, first_line
from .base import AVAILABLE, Availability, Built, tiny_model, without_grad
from .export import Flat


@contextlib.contextmanager
def _deprecated() -> Iterator[None]:
    """Without warnings that TorchScript is deprecated, outside of `build`, which notes them."""
    with warnings.catch_warnings():
        for kind in (DeprecationWarning, FutureWarning):
            warnings.filterwarnings("ignore", r".*torch\.jit\.", kind)
        yield


# The profiling executor specialises a graph during its first runs.
_PROFILING_RUNS = 3
_SCRIPT, _CALL = "script.pt", "call.json"
# Operations of oneDNN's from which numbers come out where PyTorch gives NaN.
_LOSE_NAN = ("relu", "sigmoid", "max_pool2d")
_OVERLOADS = "__overloads__"


@contextlib.contextmanager
def _unmarked(model: nn.Module) -> Iterator[None]:
    """TorchScript notes in a module which of its methods are overloaded: that is no attribute."""
    without = [vars(each) for each in model.modules() if _OVERLOADS not in vars(each)]
    try:
        yield
    finally:
        for attributes in without:
            attributes.pop(_OVERLOADS, None)


class _Read(Flat):
    """A model whose reads of what depends on its inputs are noted; its results are not given.

    Where an operation is traced as a constant, beside a mode, a trace would be refused for these.
    """

    def __init__(self, model: nn.Module, call: TreeTemplate) -> None:
        super().__init__(model, call)
        self.reads = InputDependence()

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.reads.begin(inputs)
        with self.reads:
            super().forward(*inputs)
        return (inputs[0].clone(),)


@dataclass(frozen=True)
class TorchScript:
    """One way to use TorchScript: plain, frozen, optimised for inference, or with its fuser."""

    variant: str
    name: str
    complexity: int
    holds_code: ClassVar[bool] = True
    bound_to: ClassVar[tuple[str, ...]] = ()
    portable: ClassVar[bool] = True

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
        torch.clear_autocast_cache()
        # A cast weight that autocast keeps would be a constant of the trace.
        with torch.no_grad(), applied({"autocast's cache": False}):
            known: _Scripted | _Traced
            try:
                known = self._script(model, args, kwargs)
            except Exception as error:
                notes.append(f"traced, since torch.jit.script failed: {first_line(error, 160)}")
                known = self._trace(model, args, kwargs)
            return self._run(known, args, kwargs, notes)

    def load(
        self, folder: Path, tensors: Mapping[str, torch.Tensor], args: Args, kwargs: Kwargs
    ) -> Built:
        """The script that was saved; what comes after freezing is done again."""
        known = json.loads((folder / _CALL).read_bytes())
        device = next((tensor.device for tensor in tensors_of((args, kwargs))), None)
        with _deprecated():
            script = torch.jit.load(folder / _SCRIPT, map_location=device)
        call: _Scripted | _Traced = _Scripted(script)
        if known is not None:
            call = _Traced(
                script, [int(n) for n in known["slots"]], TreeTemplate.read(known["out"])
            )
        with torch.no_grad(), _deprecated():
            return self._run(call, args, kwargs, [])

    def _run(
        self, known: _Scripted | _Traced, args: Args, kwargs: Kwargs, notes: list[str]
    ) -> Built:
        """The callable that a script is, once the executor has settled."""
        saved = None
        if self.variant == "optimize":
            # It changes the script that it is given, and torch.jit.load cannot read what it makes.
            saved = io.BytesIO()
            torch.jit.save(known.script, saved)
        call = dataclasses.replace(known, script=self._finish(known.script))
        notes = [*notes, *_differing(call.script)]
        fuser = _fuser() if self.variant == "fuser" else contextlib.nullcontext()
        with fuser:
            for _ in range(_PROFILING_RUNS):
                call(*args, **kwargs)

        def save(folder: Path) -> None:
            if saved is None:
                try:
                    with _deprecated():
                        torch.jit.save(known.script, folder / _SCRIPT)
                except RuntimeError as error:  # It calls Python: an autograd.Function, say.
                    raise StrategyFailed(f"torch.jit.save: {first_line(error)}") from error
            else:
                (folder / _SCRIPT).write_bytes(saved.getvalue())
            row = None
            if isinstance(known, _Traced):
                row = {"slots": [*known.slots], "out": known.out.written()}
            (folder / _CALL).write_text(json.dumps(row), encoding="ascii")

        # What is marked as ignored runs as Python, and so do functions of autograd's.
        python = call.script.inlined_graph.findAllNodes("prim::PythonOp", recurse=True)
        return Built(
            without_grad(call),
            notes,
            holds_weights=self.variant != "plain",
            save=save,
            capturable=True,
            self_contained=not python,
        )

    def _script(self, model: nn.Module, args: Args, kwargs: Kwargs) -> _Scripted:
        with _unmarked(model):
            script = torch.jit.script(model)
        # torch's stubs leave the method out.
        if script.inlined_graph.findAllNodes("prim::SetAttr", recurse=True):  # type: ignore[attr-defined]
            raise StrategyFailed("the model replaces what it holds, and a script what is its own")
        found = _Scripted(self._frozen(script))
        leaves, spec = flatten(args, kwargs)
        mine, named = unflatten(clone_leaves(leaves), spec)
        if flatten_result(found(*mine, **named))[1] != flatten_result(model(*args, **kwargs))[1]:
            raise StrategyFailed("the scripted model returns another structure")
        return found

    def _trace(self, model: nn.Module, args: Args, kwargs: Kwargs) -> _Traced:
        leaves, spec = flatten(args, kwargs)
        flat = Flat(model, TreeTemplate.of(leaves, spec))
        samples = tuple(t for t in clone_leaves(leaves) if isinstance(t, torch.Tensor))
        if not samples:
            raise StrategyFailed("torch.jit.trace needs a tensor among the inputs")
        state = ModuleState(model, weights=False)
        before = state.marks()
        # A trace of its own: beside a mode, some operations are traced as constants.
        observed = _Read(model, flat.call)
        with _unmarked(model):
            torch.jit.trace(observed, samples, check_trace=False, strict=False)
        if observed.reads.read is not None:
            raise StrategyFailed(
                f"the model reads a value that depends on its inputs ({observed.reads.read}), and "
                "a trace goes on with this one for ever"
            )
        samples = tuple(t for t in clone_leaves(leaves) if isinstance(t, torch.Tensor))
        with _unmarked(model):
            traced = torch.jit.trace(flat, samples, check_trace=False, strict=False)
        replaced = [name for name, (now, _) in state.marks().items() if now != before[name][0]]
        if replaced:
            raise StrategyFailed(f"the model replaces its {replaced[0]}, and a trace does not")
        assert flat.out is not None  # The trace has run the model.
        return _Traced(self._frozen(traced), flat.call.slots, flat.out)

    def _frozen(self, script: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
        return script if self.variant == "plain" else torch.jit.freeze(script)

    def _finish(self, script: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
        """What is done anew wherever it is loaded."""
        if self.variant == "optimize":
            return torch.jit.optimize_for_inference(script)
        return script


def _differing(script: Any) -> list[str]:
    """What a caller has to know of a script's operations, as notes."""
    graph = script.inlined_graph
    if not graph.findAllNodes("aten::to_mkldnn", recurse=True):
        return []
    found = [
        name
        for name in _LOSE_NAN
        if any(graph.findAllNodes(f"aten::{name}{end}", recurse=True) for end in ("", "_"))
    ]
    return [f"NaN before {', '.join(found)} may come out as numbers"] if found else []


@dataclass(frozen=True)
class _Scripted:
    """A scripted model, called as the model is."""

    script: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.script(*args, **kwargs)


@dataclass(frozen=True)
class _Traced:
    """A traced model: from the tensors among a call's leaves to those among its results."""

    script: Any
    slots: Sequence[int]
    out: TreeTemplate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, _ = flatten(args, kwargs)
        return self.out.fill(self.script(*[leaves[slot] for slot in self.slots]))


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
