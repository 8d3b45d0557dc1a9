"""fuse(): passes over the graphs of a model, each proved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from ..errors import GraphwrightError, OptionError, first_line
from ..reference import Reference, reference
from ..signature import Args, CallSignature, Kwargs, flatten, tensors_of, unflatten
from ..snapshots import Call, State, clone_leaves, run
from ..verification import compare, verify
from .attention import ATTENTION
from .by_hand import BY_HAND
from .convolutions import EPILOGUES, POOLS
from .folding import BATCH_NORM, CLEAN, CONSTANTS, SCALES
from .layout import CHANNELS_LAST, restored
from .linears import ACTIVATIONS, GATES, PROJECTIONS
from .nodes import copy_of, finished, is_view, value_of
from .passes import Change, Pass
from .residuals import RESIDUALS
from .tracing import Traced, Untraceable, trace

# In this order: what one leaves is what the next one looks for.
PASSES: tuple[Pass, ...] = (
    CLEAN,
    CONSTANTS,
    BY_HAND,
    ATTENTION,
    BATCH_NORM,
    SCALES,
    POOLS,
    CHANNELS_LAST,
    EPILOGUES,
    PROJECTIONS,
    GATES,
    ACTIVATIONS,
    RESIDUALS,
)


@dataclass
class Region:
    """A part of a model that is a graph now.

    Attributes:
        path: the submodule's name, "" for the whole model.
        done: what was changed, by the pass's name.
        left_out: passes whose result was not used, and why.
        operations: how many that are no views, before and after.
        nbytes: that these read and write, before and after.
    """

    path: str
    done: list[tuple[str, Change]] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    operations: tuple[int, int] = (0, 0)
    nbytes: tuple[int, int] = (0, 0)


@dataclass
class Fused:
    """What came of a model and one kind of call.

    Attributes:
        call: is called as the model is; None where nothing could be traced.
        regions: the parts that are graphs.
        untraced: the names of the parts that are not, and why.
    """

    call: Callable[..., Any] | None
    regions: list[Region]
    untraced: list[tuple[str, str]]


def passes_named(names: Sequence[str | Pass] | None) -> tuple[Pass, ...]:
    """Passes by their names; all of them if none are named.

    Raises:
        OptionError: there is none of a name.
    """
    if names is None:
        return PASSES
    if isinstance(names, str):
        raise OptionError(f"passes is a text: write [{names!r}].")
    known = {each.name: each for each in PASSES}
    unknown = [name for name in names if isinstance(name, str) and name not in known]
    if unknown:
        raise OptionError(
            f"fuse() knows no pass {', '.join(map(repr, unknown))}.",
            remedy=f"Known passes: {', '.join(known)}.",
        )
    return tuple(known[name] if isinstance(name, str) else name for name in names)


def fused_call(
    module: nn.Module, args: Args, kwargs: Kwargs, passes: Sequence[Pass], *, check: bool
) -> Fused:
    """Fuse a model for one kind of call.

    Raises:
        ModelFailed: the model fails on its arguments.
        VerificationError: two eager calls disagree.
    """
    found = Fused(None, [], [])
    places = {t.device for t in tensors_of((args, kwargs)) if t.device.type == "cuda"}
    with torch.random.fork_rng(list(places)):
        _fuse(module, args, kwargs, passes, check, found)
    return found


def _fuse(
    module: nn.Module,
    args: Args,
    kwargs: Kwargs,
    passes: Sequence[Pass],
    check: bool,
    found: Fused,
) -> None:
    """As a whole, else in parts."""
    found.call = _of_module(module, "", args, kwargs, passes, check, found)
    if found.call is None:
        inputs = _inputs_of_children(module, args, kwargs)
        parts = _of_children(module, "", inputs, passes, check, found)
        if parts:
            whole = _with_parts(module, parts)
            if not check or _agrees(module, whole, args, kwargs, found):
                found.call = whole
            else:
                found.regions.clear()


def _of_module(
    module: nn.Module,
    path: str,
    args: Args,
    kwargs: Kwargs,
    passes: Sequence[Pass],
    check: bool,
    found: Fused,
) -> Callable[..., Any] | None:
    """A module as one graph, or None, with the reason noted."""
    try:
        traced = trace(module, args, kwargs)
    except Untraceable as error:
        found.untraced.append((path, str(error)))
        return None
    region = Region(path)
    call, problem = _optimised(traced, module, args, kwargs, passes, check, region)
    if problem:
        found.untraced.append((path, problem))
        return None
    found.regions.append(region)
    return call


def _optimised(
    traced: Traced,
    module: nn.Module,
    args: Args,
    kwargs: Kwargs,
    passes: Sequence[Pass],
    check: bool,
    region: Region,
) -> tuple[Callable[..., Any], str]:
    """A traced call after all passes; what is wrong with it, if anything is."""
    leaves, _ = flatten(args, kwargs)
    samples = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    device = samples[0].device
    state = State(module, weights=False)
    known: Reference | None = None
    if check:
        with torch.no_grad():
            known = reference(module, module, Call("the sample", args, dict(kwargs)), state=state)
        verdict = _verdict(traced.call(traced.graph), known)
        if verdict:
            return module, f"its graph computes something else: {verdict}"
    graph = traced.graph
    for each in passes:
        try:
            result = each(graph, device)
            if not result.changes:
                continue
            verdict = ""
            if known is not None:
                verdict = _verdict(traced.call(_in_layout(result.model, samples, state)), known)
        except Exception as error:
            verdict = f"{type(error).__name__}: {first_line(error)}"
        if verdict:
            region.left_out.append((each.name, verdict))
            continue
        graph = result.model
        region.done += [(each.name, change) for change in result.changes]
    region.operations, region.nbytes = zip(_cost(traced.graph), _cost(graph), strict=True)
    graph = _in_layout(graph, samples, state)
    call = traced.call(graph)
    if known is not None:
        final = verify(call, known)
        if not final.ok:
            return module, final.reason
    return call, ""


def _in_layout(
    graph: fx.GraphModule, samples: Sequence[torch.Tensor], state: State
) -> fx.GraphModule:
    """A graph with eager's strides where they can be seen."""
    copied = copy_of(graph)
    try:
        restored(copied, *[t for t in clone_leaves(samples) if isinstance(t, torch.Tensor)])
    finally:
        state.restore()
    return finished(copied)


def _verdict(call: Callable[..., Any], known: Reference) -> str:
    """What is wrong with a candidate's numbers on all inputs, if anything is."""
    try:
        for case in known.cases:
            verdict = compare(run(call, case.call, known.state), case, known)
            if not verdict.ok:
                return f"{case.call.name}: {verdict.reason}"
    finally:
        known.state.restore()
    return ""


def _cost(graph: fx.GraphModule) -> tuple[int, int]:
    """Operations that are no views, and the bytes that they read and write."""
    count = nbytes = 0
    for node in graph.graph.nodes:
        if node.op == "call_function" and not is_view(node):
            count += 1
            results = [u for u in node.users if value_of(node) is None] or [node]
            for value in map(value_of, (*node.all_input_nodes, *results)):
                if value is not None:
                    nbytes += value.numel() * value.element_size()
    return count, nbytes


def _agrees(
    module: nn.Module, call: Callable[..., Any], args: Args, kwargs: Kwargs, found: Fused
) -> bool:
    """Whether a module of parts is right as a whole."""
    with torch.no_grad():
        verdict = verify(call, reference(module, module, Call("the sample", args, dict(kwargs))))
    if not verdict.ok:
        found.untraced.append(("", f"in parts it computes something else: {verdict.reason}"))
    return verdict.ok


# Module by module.

_Inputs = dict[str, tuple[Args, Kwargs]]


def _inputs_of_children(module: nn.Module, args: Args, kwargs: Kwargs) -> _Inputs:
    """What submodules are called with, the first time, in a call of the module."""
    inputs: _Inputs = {}
    handles = []

    def noting(path: str) -> Callable[..., None]:
        def note(_: nn.Module, given: Args, named: Kwargs) -> None:
            leaves, spec = flatten(given, named)
            with contextlib.suppress(GraphwrightError):
                inputs.setdefault(path, unflatten(clone_leaves(leaves), spec))

        return note

    for path, child in module.named_modules():
        if path:
            handles.append(child.register_forward_pre_hook(noting(path), with_kwargs=True))
    state = State(module, weights=False)
    try:
        leaves, spec = flatten(args, kwargs)
        mine, named = unflatten(clone_leaves(leaves), spec)
        with torch.no_grad():
            module(*mine, **named)
    finally:
        for handle in handles:
            handle.remove()
        state.restore()
    return inputs


def _of_children(
    module: nn.Module,
    path: str,
    inputs: _Inputs,
    passes: Sequence[Pass],
    check: bool,
    found: Fused,
) -> dict[str, nn.Module]:
    """What stands in for the submodules of a module, by name."""
    parts: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        given = inputs.get(where)
        call = None
        # A single operation is no faster as a graph.
        if given is not None and next(child.children(), None) is not None:
            try:
                call = _of_module(child, where, *given, passes, check, found)
            except GraphwrightError as error:
                found.untraced.append((where, first_line(error)))
        if call is not None and given is not None:
            parts[name] = Part(child, CallSignature.of(*given), call)
            continue
        inner = _of_children(child, where, inputs, passes, check, found)
        if inner and "forward" not in child.__dict__:
            parts[name] = _with_parts(child, inner)
    return parts


def _with_parts(module: nn.Module, parts: dict[str, nn.Module]) -> nn.Module:
    """The same module with other submodules."""
    other = module.__class__.__new__(module.__class__)
    other.__dict__ = dict(module.__dict__)
    other.__dict__["_modules"] = {**module._modules, **parts}
    return other


class Part(nn.Module):
    """A submodule whose calls are answered by a graph where they fit."""

    def __init__(
        self, module: nn.Module, signature: CallSignature, call: Callable[..., Any]
    ) -> None:
        super().__init__()
        self.training = module.training
        self.module = module
        self._signature = signature
        self._call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._signature.fits(args, kwargs):
            return self._call(*args, **kwargs)
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # What a container asks of its submodules: a convolution's stride, a layer's weight.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def wants_grad(args: Args, kwargs: Kwargs) -> bool:
    """Whether a tensor among a call's arguments requires grad."""
    return any(tensor.requires_grad for tensor in tensors_of((args, kwargs)))
