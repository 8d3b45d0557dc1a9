"""The list of passes, and running them over a model's graphs, verified and timed."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from ..calls.first_use import unseen
from ..calls.modes import cached_weights_refused
from ..calls.modules import ModuleProxy
from ..calls.options import in_brief, items_problem, nearest, refuse
from ..calls.signature import CallSignature
from ..calls.snapshots import Call, ModuleState, clone_leaves, run
from ..calls.split import Args, Kwargs, flatten, tensors_of, unflatten
from ..calls.weights import sharded_module, unusual_weight
from ..errors import GraphwrightError, ModelFailed, OptionError, first_line, user_frame
from ..evaluation.garbage_collection import garbage_collection_off
from ..evaluation.reference import Reference, reference
from ..evaluation.verification import compare, verify
from ..graphs.composition import apart_from_capture
from ..graphs.conditions import for_inference
from ..graphs.python_state import PythonState
from ..ops.fused.compiling import Compiling
from ..ops.fused.fused_operator import prepare_triton
from .kernel_precompilation import asking_for_kernels
from .nodes import copy_of, finished, is_mutable, is_view, value_of
from .pass_timing import GROUPS, WORTH, LastCall, compared
from .passes.attention import ATTENTION, MASKS
from .passes.base import Change, Pass
from .passes.epilogues import EPILOGUES
from .passes.folding import BATCH_NORM, CLEAN, CONSTANTS, SCALES
from .passes.idioms import BY_HAND
from .passes.layout import CHANNELS_LAST, restored
from .passes.linears import ACTIVATIONS, GATES, PADDED, PATCHES, PROJECTIONS
from .passes.norms import NORMS, RESIDUALS
from .passes.pooling import CHANNEL_GATES, MEANS, POOLS
from .sharing import share_constants
from .tracing import GraphCall, NotTraced, Traced, trace

# In this order: what one leaves is what the next one looks for.
PASSES: tuple[Pass, ...] = (
    CLEAN,
    MASKS,
    CONSTANTS,
    BY_HAND,
    BATCH_NORM,
    SCALES,
    PATCHES,
    POOLS,
    CHANNELS_LAST,
    MEANS,
    CHANNEL_GATES,
    EPILOGUES,
    PROJECTIONS,
    GATES,
    ACTIVATIONS,
    PADDED,
    RESIDUALS,
    NORMS,
)
# Passes that run only if they are named: this one may change which results are NaN.
ON_REQUEST: tuple[Pass, ...] = (ATTENTION,)
# Devices where passes are timed unless the caller says otherwise.
MEASURED = frozenset({"cuda"})
# What all passes together win is told by this name.
ALL = "beside the model as it is"
# Arguments of submodules, by their names.
_Inputs = dict[str, tuple[Args, Kwargs]]
# Tracing switches modes of the process.
_LOCK = threading.RLock()
_LOGGER = logging.getLogger("graphwright")
if hasattr(os, "register_at_fork"):
    # Another thread of the parent may hold it, and a forked child has no such thread.
    os.register_at_fork(after_in_child=_LOCK._at_fork_reinit)  # type: ignore[attr-defined]


@dataclass
class Region:
    """A part of a model that is a graph now.

    Attributes:
        path: the submodule's name, "" for the whole model.
        done: what was changed, each with the pass's name.
        left_out: passes whose result was not used, and why.
        operations: how many operations there are, without views, before and after.
        nbytes: bytes that these read and write, before and after.
        gained: seconds of a call that groups of passes win, where they were timed; below zero for
            those that were left out since they lose time; ALL stands for all of them.
        untimed: why groups were not timed though that was asked for.
    """

    path: str
    done: list[tuple[str, Change]] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    operations: tuple[int, int] = (0, 0)
    nbytes: tuple[int, int] = (0, 0)
    gained: dict[str, float] = field(default_factory=dict)
    untimed: dict[str, str] = field(default_factory=dict)


@dataclass
class Fused:
    """The result of fusing a model for one call signature.

    Attributes:
        call: is called like the model; None if nothing could be traced.
        regions: the parts that are graphs.
        untraced: the names of the parts that are not, and why.
        packed: constants of the graphs in a library's layout.
        pays_alone: whether a call is faster than the model's own; in a graph it is in any case.
        answered: how many calls it has answered.
    """

    call: Callable[..., Any] | None
    regions: list[Region]
    untraced: list[tuple[str, str]]
    packed: list[torch.Tensor] = field(default_factory=list)
    pays_alone: bool = True
    answered: int = 0


@dataclass(frozen=True)
class _Work:
    """What is wanted of one fuse.

    Attributes:
        passes: in order.
        check: whether they are verified.
        state: of the whole module, taken at the start.
        kernels: compiles those that graphs launch.
        measure: whether they are timed, and left out where they lose time.
        budget_s: seconds that all of it may take; None for no limit.
        start: when it began, by `time.monotonic`.
        doing: is told what is under way.
    """

    passes: Sequence[Pass]
    check: bool
    state: ModuleState
    kernels: Compiling
    measure: bool = False
    budget_s: float | None = None
    start: float = field(default_factory=time.monotonic)
    doing: Callable[[str], None] = lambda what: None

    @property
    def why_not(self) -> str:
        """Why nothing more is tried; "" while there is time."""
        if self.budget_s is None or time.monotonic() - self.start < self.budget_s:
            return ""
        return f"not tried: the budget of {self.budget_s:g} s was spent"


def passes_named(names: Sequence[str | Pass] | None) -> tuple[Pass, ...]:
    """Passes by their names; all of them if none are named.

    Raises:
        OptionError: there is none of a name.
    """
    if names is None:
        return PASSES
    if isinstance(names, str):
        raise OptionError(f"passes is a text: write [{names!r}].")
    refuse("fuse", items_problem("passes", names, "names of passes"))
    known = {each.name: each for each in (*PASSES, *ON_REQUEST)}
    found = []
    for each in names:
        if isinstance(each, Pass):
            found.append(each)
        elif isinstance(each, str) and each in known:
            found.append(known[each])
        else:
            hint = nearest(each, known) if isinstance(each, str) else ""
            raise OptionError(
                f"fuse() knows no pass {in_brief(each)}.",
                remedy=" ".join(filter(None, [hint, f"Known passes: {', '.join(known)}."])),
            )
    # Other passes rely on it: it removes in-place writes that no one sees.
    return tuple(found if CLEAN in found else (CLEAN, *found))


def fused_call(
    module: nn.Module,
    args: Args,
    kwargs: Kwargs,
    passes: Sequence[Pass],
    *,
    check: bool,
    measure: bool | None = None,
    budget_s: float | None = None,
    doing: Callable[[str], None] = lambda what: None,
) -> Fused:
    """Fuse a model for one call signature.

    Args:
        module: the model.
        args: of the call.
        kwargs: likewise.
        passes: in order.
        check: whether they are verified.
        measure: whether they are timed, and left out where they lose time; None where the
            arguments are on a device of MEASURED.
        budget_s: seconds after which no other pass or part is tried. What has been tried by then is
            verified in any case.
        doing: is told what is under way.

    Raises:
        ModelFailed: the model fails on its arguments.
        VerificationError: two eager calls disagree.
    """
    start = time.monotonic()
    found = Fused(None, [], [])
    sharded = sharded_module(module)
    if sharded is not None:
        # Between calls the memory of its weights is used for other things.
        found.untraced.append((sharded[0], f"it is an {sharded[1]}"))
        return found
    unusual = unusual_weight(module)
    if unusual is not None:
        # Its bits cannot be compared, or mean something else than passes assume.
        found.untraced.append(("", "the weight {} is {}".format(*unusual)))
        return found
    devices = {t.device for t in tensors_of((args, kwargs))}
    places = [device for device in devices if device.type == "cuda"]
    if measure is None:
        measure = any(device.type in MEASURED for device in devices)
    # A full collection takes longer than a pass: there are many objects, and few of them die.
    with _LOCK, garbage_collection_off(), Compiling() as kernels:
        if places:
            prepare_triton()
            kernels.begin()
        state, undo = ModuleState(module, lazily=True), PythonState(module)
        work = _Work(passes, check, state, kernels, measure, budget_s, start, doing)
        try:
            with for_inference(), cached_weights_refused(), torch.random.fork_rng(places):
                _fuse(module, args, kwargs, work, found)
        finally:
            try:
                state.restore()
            finally:
                state.corrupted()  # This also puts back what has changed.
                undo.restore(python=True)
    return found


def _fuse(module: nn.Module, args: Args, kwargs: Kwargs, work: _Work, found: Fused) -> None:
    """Fuse the model as a whole, or else in parts."""
    found.call = _of_module(module, "", args, kwargs, work, found)
    if found.call is not None:
        return
    if any(isinstance(child, ModuleProxy) for child in module.modules()):
        found.untraced.append(("", "not in parts either: it holds what is fused or tuned already"))
        return
    try:
        with work.state.watching():
            given = _inputs_of(module, args, kwargs, work.state)
        parts = _of_children(module, "", given, work, found)
        if not parts:
            return
        whole = _with_parts(module, parts)
        with torch.no_grad(), work.state.watching():
            call = Call("the sample", args, kwargs)
            verdict = verify(whole, reference(module, module, call, state=work.state))
    except ModelFailed:
        raise
    except Exception as error:
        found.untraced.append(("", f"not in parts either: {first_line(error)}"))
    else:
        if verdict.ok:
            found.call = whole
            return
        found.untraced.append(("", f"in parts it computes something else: {verdict.reason}"))
    found.regions.clear()


def _of_module(
    module: nn.Module,
    path: str,
    args: Args,
    kwargs: Kwargs,
    work: _Work,
    found: Fused,
) -> Callable[..., Any] | None:
    """A module as one graph, or None, with the reason noted."""
    work.doing(f"tracing {path}".rstrip())
    with unseen():
        state = ModuleState(module, shared=work.state) if path else work.state
    try:
        traced = trace(module, args, kwargs, state)
    except NotTraced as error:
        found.untraced.append((path, str(error)))
        return None
    region = Region(path)
    # What the trace has used is kept by now, and often that is all: then no mode slows the rest.
    with LastCall() as kept, state.watching():
        call, problem = _optimised(traced, module, args, kwargs, work, state, region, kept)
    if problem:
        found.untraced.append((path, problem))
        return None
    found.regions.append(region)
    if isinstance(call, GraphCall):
        share_constants(call.graph, module)
        found.packed += call.packed
    return call


def _optimised(
    traced: Traced,
    module: nn.Module,
    args: Args,
    kwargs: Kwargs,
    work: _Work,
    state: ModuleState,
    region: Region,
    kept: LastCall,
) -> tuple[Callable[..., Any], str]:
    """A traced call after all passes that pay; what is wrong with it, if anything is."""

    @functools.cache
    def truth() -> Reference | None:
        if not work.check:
            return None
        work.doing("computing the float64 reference")
        with torch.no_grad():
            return reference(module, module, Call("the sample", args, dict(kwargs)), state=state)

    call, problem = _rewritten(traced, module, args, kwargs, work, state, region, truth)
    if problem or not work.measure:
        return call, problem
    known = truth()
    # What is wrong, or had no time, is not tried again with fewer others.
    left_out = list(region.left_out)
    names = dict(left_out)
    work = replace(work, passes=[each for each in work.passes if each.name not in names])
    for name, group in GROUPS.items():
        done = {each for each, _ in region.done} & {each.name for each in group}
        if not done or work.why_not:
            continue
        fewer = replace(work, passes=[each for each in work.passes if each not in group])
        found = _faster(name, call, traced, module, args, kwargs, fewer, state, region, known, kept)
        if found is not None:
            call, why = found
            work = fewer
            left_out += [(each.name, why) for each in group if each.name in done]
    region.left_out[:] = left_out
    return _if_it_pays(call, module, args, kwargs, work, region, kept), ""


def _faster(
    name: str,
    call: Callable[..., Any],
    traced: Traced,
    module: nn.Module,
    args: Args,
    kwargs: Kwargs,
    fewer: _Work,
    state: ModuleState,
    region: Region,
    known: Reference | None,
    kept: LastCall,
) -> tuple[Callable[..., Any], str] | None:
    """A call without a group of passes, and what these lose; None if it is not faster.

    The region is then that of the faster call.
    """
    fewer.doing(f"leaving out {name}")
    gc.collect(1)  # The last one, which may hold folded weights.
    other = Region(region.path)
    # Only what will be used is worth verifying.
    given = traced, module, args, kwargs, fewer, state, other
    without, problem = _rewritten(*given, lambda: None)
    if problem:
        return None
    fewer.doing(f"timing {name}")
    times = _times((call, without), args, kwargs, region, name, kept)
    if times is None or times[1] >= (1 - WORTH) * times[0]:
        return None
    if known is not None and not verify(without, known).ok:
        return None
    other.gained, other.untimed = region.gained, region.untimed
    vars(region).update(vars(other))
    return without, f"{_loses(*times)}, with {name}"


def _if_it_pays(
    call: Callable[..., Any],
    module: nn.Module,
    args: Args,
    kwargs: Kwargs,
    work: _Work,
    region: Region,
    kept: LastCall,
) -> Callable[..., Any]:
    """A call after its passes, or the module itself if that is faster."""
    if not region.done:
        return call
    work.doing("timing all passes")
    times = _times((call, module), args, kwargs, region, ALL, kept)
    if times is None or times[1] >= (1 - WORTH) * times[0]:
        return call
    why = f"{_loses(*times)}, {ALL}"
    region.left_out += [(name, why) for name in dict.fromkeys(n for n, _ in region.done)]
    region.done.clear()
    region.operations, region.nbytes = region.operations[:1] * 2, region.nbytes[:1] * 2
    return module


def _times(
    calls: tuple[Callable[..., Any], Callable[..., Any]],
    args: Args,
    kwargs: Kwargs,
    region: Region,
    name: str,
    kept: LastCall,
) -> tuple[float, float] | None:
    """Seconds of a call with something and without it, noted by its name; None if they fail."""
    device = tensors_of((args, kwargs))[0].device
    try:
        now, then = compared(calls, args, kwargs, device, kept)
    except Exception as error:
        region.untimed[name] = first_line(error)
        return None
    region.gained[name] = then - now
    return now, then


def _loses(now: float, then: float) -> str:
    return f"it loses {(now - then) * 1e6:.0f} of {now * 1e6:.0f} µs"


def _rewritten(
    traced: Traced,
    module: nn.Module,
    args: Args,
    kwargs: Kwargs,
    work: _Work,
    state: ModuleState,
    region: Region,
    truth: Callable[[], Reference | None],
    *,
    together: bool = True,
) -> tuple[Callable[..., Any], str]:
    """A traced call after all passes; what is wrong with it, if anything is.

    All passes change one copy, and the result is compared with the reference, if there is one: it
    is computed while kernels are compiled, which the run before has asked for.
    Where it is wrong, or a pass fails, they are tried again one by one, so that the others stay.
    """
    leaves, _ = flatten(args, kwargs)
    samples = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    known = None if together else truth()
    if known is not None:
        verdict = _verdict(traced.call(traced.graph), known)
        if verdict:
            return module, f"its graph computes something else: {verdict}"
    graph = copy_of(traced.graph) if together else traced.graph
    graph, problem = _after_passes(
        traced, graph, samples, work, state, region, known, together=together
    )
    if not problem:
        region.operations, region.nbytes = zip(_cost(traced.graph), _cost(graph), strict=True)
        # The traced graph itself stays as it is.
        ended = graph if together else copy_of(graph)
        call, problem = _ended(traced, ended, samples, work, state, truth)
        if call is not None and not problem:
            return call, ""
    if not together:
        return module, problem
    region.done.clear()
    region.left_out.clear()
    again = traced, module, args, kwargs, work, state, region, truth
    return _rewritten(*again, together=False)


def _after_passes(
    traced: Traced,
    graph: fx.GraphModule,
    samples: Sequence[torch.Tensor],
    work: _Work,
    state: ModuleState,
    region: Region,
    known: Reference | None,
    *,
    together: bool,
) -> tuple[fx.GraphModule, str]:
    """A graph after all passes; what went wrong, if that ends it.

    Args:
        traced: where it comes from.
        graph: that is changed, if `together`.
        samples: tensors to call it with.
        work: the passes.
        state: the model's.
        region: gets what was done and what was left out.
        known: what each pass is compared with, if it is.
        together: whether a pass that fails ends it; else it is left out.
    """
    writes: bool | None = None
    for each in work.passes:
        if each is not CLEAN:
            if work.why_not:
                region.left_out.append((each.name, work.why_not))
                continue
            if writes is None and (writes := any(map(is_mutable, graph.graph.nodes))):
                why = "the model writes in place to memory that it sees elsewhere"
                region.left_out.append(("others", why))
            if writes:
                continue
        if not together:
            work.doing(f"verifying the pass {each.name}")
        verdict = ""
        try:
            result = each(graph, samples[0].device, in_place=together)
            if result.changes and known is not None:
                candidate = _in_layout(traced, copy_of(result.model), samples, state)
                verdict = _verdict(traced.call(candidate), known)
        except Exception as error:
            verdict = _in_short(error)
            if together:
                return graph, verdict
        if verdict:
            region.left_out.append((each.name, verdict))
        elif result.changes:
            graph = result.model
            region.done += [(each.name, change) for change in result.changes]
    return graph, ""


def _ended(
    traced: Traced,
    graph: fx.GraphModule,
    samples: Sequence[torch.Tensor],
    work: _Work,
    state: ModuleState,
    truth: Callable[[], Reference | None],
) -> tuple[GraphCall | None, str]:
    """What calls a graph, with all kernels compiled; what is wrong with it, if anything is."""
    call, problem = None, ""
    work.doing("running the graph")
    try:
        with asking_for_kernels(graph, samples, work.kernels):
            call = traced.call(_in_layout(traced, graph, samples, state))
    except Exception as error:
        problem = _in_short(error)
    known = truth()
    if work.kernels.running:
        work.doing("compiling kernels")
        work.kernels.wait()
    if work.kernels.problem:
        _LOGGER.warning("kernels are compiled one by one: %s", work.kernels.problem)
        work.kernels.problem = ""
    if call is None or known is None:
        return call, problem
    work.doing("verifying")
    try:
        final = verify(call, known)
    except Exception as error:
        return call, _in_short(error)
    return call, "" if final.ok else final.reason


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _in_layout(
    traced: Traced, graph: fx.GraphModule, samples: Sequence[torch.Tensor], state: ModuleState
) -> fx.GraphModule:
    """A graph with eager's strides where they can be seen; the given one is changed."""
    try:
        mine = [t for t in clone_leaves(samples) if isinstance(t, torch.Tensor)]
        restored(graph, traced.strides, *mine)
    finally:
        state.restore()
    return finished(graph)


def _verdict(call: Callable[..., Any], known: Reference) -> str:
    """What is wrong with a candidate's numbers on all inputs, if anything is."""
    try:
        for case in known.cases:
            verdict = compare(run(call, case.call, known.state), case, known)
            if not verdict.ok:
                return case.wrong(verdict.reason)
    finally:
        known.state.restore()
    return ""


def _cost(graph: fx.GraphModule) -> tuple[int, int]:
    """Operations that are no views, and the bytes that they read and write."""
    count = nbytes = 0
    for node in graph.graph.nodes:
        if node.op == "call_function" and (is_mutable(node) or not is_view(node)):
            count += 1
            results = [u for u in node.users if value_of(node) is None] or [node]
            for value in map(value_of, (*node.all_input_nodes, *results)):
                if value is not None:
                    nbytes += value.numel() * value.element_size()
    return count, nbytes


# Module by module.


def _inputs_of(module: nn.Module, args: Args, kwargs: Kwargs, state: ModuleState) -> _Inputs:
    """What submodules are called with, the first time, in a call of the module.

    Raises:
        CaptureError: the module changes with every call.
        ModelFailed: it fails.
    """
    found: _Inputs = {}

    def noting(path: str) -> Callable[..., None]:
        def note(_: nn.Module, given: Args, named: Kwargs) -> None:
            leaves, spec = flatten(given, named)
            if any(isinstance(leaf, torch.Tensor) and leaf.is_nested for leaf in leaves):
                return  # It has no sizes, so that no copy can be made: nn.TransformerEncoder's.
            with contextlib.suppress(GraphwrightError):
                found.setdefault(path, unflatten(clone_leaves(leaves), spec))

        return note

    # Hooks of the module itself would be seen by other threads.
    twin = _twin(module, {})
    for path, child in twin.named_modules():
        if path:
            child.register_forward_pre_hook(noting(path), with_kwargs=True)
    leaves, spec = flatten(args, kwargs)
    with unseen():
        undo = PythonState(module, hooks=False)
    for n, called in enumerate((module, module, twin)):
        mine, named = unflatten(clone_leaves(leaves), spec)
        raw = state.watching_addresses() if not n else contextlib.nullcontext()
        try:
            with torch.no_grad(), raw, undo.refusing_advances():
                called(*mine, **named)
        except GraphwrightError:
            raise
        except Exception as error:
            raise ModelFailed(
                f"The model fails in eager with the sample inputs: {first_line(error)}",
                where=user_frame(error),
                remedy="Make the plain call work first.",
            ) from error
        undo.check()
    return found


def _twin(module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
    """The same module, and submodules, as other objects with hooks of their own."""
    if id(module) not in known:
        twin = known[id(module)] = _other(module)
        for name, child in module._modules.items():
            twin._modules[name] = None if child is None else _twin(child, known)
    return known[id(module)]


def _other(module: nn.Module) -> nn.Module:
    """Another object with the same attributes; submodules and hooks can be set apart."""
    other: nn.Module = object.__new__(type(module))
    apart = ("_modules", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
    other.__dict__.update({k: copy.copy(v) if k in apart else v for k, v in vars(module).items()})
    return other


def _of_children(
    module: nn.Module,
    path: str,
    given: _Inputs,
    work: _Work,
    found: Fused,
) -> dict[str, nn.Module]:
    """What stands in for the submodules of a module, by name."""
    parts: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        # What holds no others is a single operation, and no faster as a graph. What has a forward
        # of its own as an attribute calls another object's.
        if "forward" in vars(child) or next(child.children(), None) is None:
            continue
        if work.why_not:
            found.untraced.append((where, work.why_not))
            continue
        call = None
        if where in given:
            call = _of_module(child, where, *given[where], work, found)
        if call is not None:
            with unseen():
                signature = CallSignature.of(*given[where])
            parts[name] = _part(child, signature, call)
            continue
        inner = _of_children(child, where, given, work, found)
        if inner:
            parts[name] = _with_parts(child, inner)
    return parts


def _with_parts(module: nn.Module, parts: dict[str, nn.Module]) -> nn.Module:
    """The same module with other submodules."""
    other = _other(module)
    other._modules.update(parts)
    return other


def _part(module: nn.Module, signature: CallSignature, call: Callable[..., Any]) -> nn.Module:
    """The same submodule, with calls that fit answered by a graph."""
    part = _other(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        fits = signature.fits(args, kwargs)
        if not fits and torch._C._len_torch_dispatch_stack():
            with apart_from_capture() as alone:
                fits = alone and signature.fits(args, kwargs)
        return (call if fits else module.forward)(*args, **kwargs)

    vars(part)["forward"] = forward
    return part
