"""FusedModule: a model whose calls are answered by graphs that passes have made smaller."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..calls import forking
from ..calls.binding import sees_order
from ..calls.dependencies import Called
from ..calls.introspection import StandIn
from ..calls.modes import opaque
from ..calls.modules import (
    FunctionModule,
    ModuleProxy,
    in_training,
    should_be_in_eval_mode,
)
from ..calls.objects import has_objects
from ..calls.options import (
    args_problem,
    callable_problem,
    choice_problem,
    count_problem,
    flag_problem,
    kwargs_problem,
    names_checked,
    positive_problem,
    refuse,
)
from ..calls.plurals import counted
from ..calls.signature import CallSignature, inside_transform, quick_key
from ..calls.split import Args, Kwargs, require_grad
from ..calls.watch import Checks, ModuleWatch, cost_in_words, unread_in_words
from ..dispatch.answerer import SizesAnswered
from ..dispatch.decision import CAPTURED, CHANGED, FIRST, GRADIENTS, TRANSFORMED
from ..dispatch.fallback import Fallback, Words
from ..errors import OptionError, SignatureError, first_line, in_words
from ..graphs.capture_turns import turns_of
from ..graphs.composition import (
    Parts,
    apart_from_capture,
    parts_of_capture,
    running_part,
    warn_if_traced,
    warn_of_lost_gain,
)
from ..graphs.conditions import captured_by_others, capturing_now
from ..graphs.taken_apart import (
    ApartCall,
    TakenApart,
    holds_objects,
    key_with_objects,
    seconds_with_objects,
    with_objects,
)
from ..ops import compiled_checks
from ..report.progress import SHORT_S, progress_shown
from .pass_manager import PASSES, Fused, Region, fused_call, passes_named
from .passes.base import Pass
from .tracing import global_hooks

_NOT_FUSED = "it could not be fused"
_COSTS_MORE = "taking its objects apart takes longer than is won"
_ONE_MORE = "many kinds of calls are fused, and one more only when it comes again"
# Kinds of call that are fused; others go to the module.
MAX_KINDS = 64
# So many are fused at their first call, others at their second: where no kind comes twice, more
# would only take time.
_AT_ONCE = 16
# Up to so many kinds are compared one by one.
_FEW = 4
# Kinds that `explain` lists.
_LISTED = 8
# Kinds with objects: of a cache that grows, more would be fused than are ever used again.
_MAX_WITH_OBJECTS = 4
# Shapes of objects that are remembered.
_MAX_SEEN = 4096
# Timed calls of what was fused with objects, and of the model itself.
_ROUNDS = 7


class _Fusion:
    """What a FusedModule knows beside the module."""

    def __init__(
        self,
        module: nn.Module,
        passes: Sequence[Pass],
        verify: bool,
        audit: int | None = None,
        budget_s: float | None = None,
        measure: bool | None = None,
        checks: Checks = "full",
        max_kinds: int = MAX_KINDS,
    ) -> None:
        self.checks: Checks = checks
        self.max_kinds = max_kinds
        self.module = module
        self.passes = tuple(passes)
        self.verify = verify
        self.budget_s = budget_s
        self.measure = measure
        self.turns = turns_of(module, getattr(module, "_function", None))
        self.lock = forking.lock()
        self.table: list[tuple[CallSignature, Fused]] = []
        # The same by what is quickly seen, once there are many; None for what is not.
        self._by_key: dict[Any, list[tuple[CallSignature, Fused]]] = {}
        self.audit = audit
        compiled_checks.offer()
        self.watch = ModuleWatch(module, values=True, audit=audit, hooks=False, checks=checks)
        self.calls: Counter[str] = Counter()
        self.last_problem: str | None = None
        self._fallback = Fallback(functools.partial(_words, module), "eager", self._count_eager)
        # Calls that came once, with objects or of one more kind.
        self._seen: set[Any] = set()
        # What was made for calls with objects, by their shapes.
        self._with_objects: dict[Any, list[tuple[CallSignature, Fused]]] = {}

    @property
    def options(self) -> tuple[int | None, float | None, bool | None, Checks, int]:
        """Those of `fuse()` behind `verify`."""
        return self.audit, self.budget_s, self.measure, self.checks, self.max_kinds

    def fitting(self, args: Args, kwargs: Kwargs) -> tuple[CallSignature, Fused] | None:
        """What was made for calls like this one, with their signature."""
        table = self.table
        if len(table) > _FEW:
            table = self._by_key.get(_key_in_any_order(args, kwargs), [])
        for entry in table:
            if entry[0].fits(args, kwargs):
                return entry
        if self._with_objects and has_objects(pytree.tree_leaves((args, kwargs))):
            for entry in self._with_objects.get(key_with_objects(args, kwargs), ()):
                if entry[0].fits(args, kwargs):
                    return entry
        return None

    @property
    def known(self) -> list[tuple[CallSignature, Fused]]:
        """What was made for each kind of call, with its signature."""
        return [*self.table, *itertools.chain.from_iterable(self._with_objects.values())]

    @property
    def first(self) -> Fused | None:
        """What was made first."""
        known = self.known
        return known[0][1] if known else None

    @property
    def regions(self) -> list[Region]:
        """The parts that are graphs, for the first kind of call."""
        return [] if self.first is None else list(self.first.regions)

    @property
    def untraced(self) -> list[tuple[str, str]]:
        """The parts that are no graphs, by name ("" for the whole), with the reason."""
        return [] if self.first is None else list(self.first.untraced)

    def counts(self) -> Counter[str]:
        """How many calls went which way."""
        return Counter(self.calls)

    def reference(self) -> Callable[..., Any]:
        """The module, or plain function, itself."""
        module = self.module
        return module.function_of() if isinstance(module, Called) else module

    def sizes(self) -> SizesAnswered:
        """Calls of all sizes: others are fused when they come."""
        return SizesAnswered(all_sizes=True)

    def explain(self) -> str:
        """What was fused where, what was left as it is and why, and how the calls went."""
        lines = []
        for region in self.regions:
            (before, after), (read, now) = region.operations, region.nbytes
            operations = counted(before, "operation")
            lines.append(
                f"{region.path or 'the whole model'}: {operations} became {after}, "
                f"{read / 2**20:.1f} MiB read and written are {now / 2**20:.1f}"
            )
            lines += [f"  {name:<12} {text}" for name, text in _summary(region)]
            lines += [f"  {name:<12} left out: {why}" for name, why in region.left_out]
            lines += [
                f"  {name}: {seconds * 1e6:.1f} µs won"
                for name, seconds in region.gained.items()
                if seconds > 0 and region.done
            ]
            lines += [f"  {name}: not timed, {why}" for name, why in region.untimed.items()]
        for path, why in self.untraced:
            lines.append(f"{path or 'the whole model'}: no graph, {why}")
        lines += _kinds(self.known)
        for way, count in self.calls.most_common():
            lines.append(f"{counted(count, 'call')} {way}")
        if self.last_problem is not None:
            lines.append(f"last problem: {self.last_problem}")
        lines += [*cost_in_words(self.watch), *unread_in_words(self.watch)]
        change = self.watch.changed()
        if change is not None:
            lines.append(f"Every call now goes to the module itself, since {change}.")
            lines.append("Call graphwright.fuse() again to fuse the module as it is now.")
        return "\n".join(lines)

    def why_not_yet(self, args: Args, kwargs: Kwargs) -> str | None:
        """Why calls like this one, for which there is nothing, are not fused now; None if they are.

        Not at the first call with objects of some shapes: a cache that grows is of others at each.
        """
        if not has_objects(pytree.tree_leaves((args, kwargs))):
            if len(self.table) < min(_AT_ONCE, self.max_kinds):
                return None
            seen = self._came_before(_key_in_any_order(args, kwargs))
            if len(self.table) < self.max_kinds:
                remedy = "call it again, or pad to a few sizes"
                return None if seen else self._noted(_ONE_MORE, remedy, args, kwargs)
            limit = f"max_kinds={self.max_kinds} allows no more kinds of calls to be fused"
            remedy = "raise max_kinds=, or pad to a few sizes"
            return limit if seen else self._noted(limit, remedy, args, kwargs)
        seen = self._came_before(key_with_objects(args, kwargs))
        if sum(map(len, self._with_objects.values())) < _MAX_WITH_OBJECTS:
            return None if seen else FIRST
        limit = f"{_MAX_WITH_OBJECTS} kinds of calls with objects are fused, the most there are"
        remedy = "pass objects whose tensors keep their shapes"
        return limit if seen else self._noted(limit, remedy, args, kwargs)

    def _came_before(self, key: Any) -> bool:
        """Whether a call of a kind came before; if not, it is remembered."""
        if key in self._seen:
            return True
        if len(self._seen) >= _MAX_SEEN:
            self._seen.clear()
        self._seen.add(key)
        return False

    def _noted(self, why: str, remedy: str, args: Args, kwargs: Kwargs) -> str:
        """Note how a call differs from what is fused, and what to do; returns why it is not."""
        self.last_problem = f"{self._difference(args, kwargs)}; {remedy}"
        return why

    def _difference(self, args: Args, kwargs: Kwargs) -> str:
        """How a call differs from those that were fused, in words: from the one that is nearest."""
        known = [signature for signature, _ in self.known]
        nearest = known[-1]
        with contextlib.suppress(SignatureError):
            call = CallSignature.of(args, kwargs, objects=nearest.objects)
            of_value = (each for each in reversed(known) if call.differing_value(each))
            nearest = next(of_value, nearest)
        return (
            nearest.differences(args, kwargs, "fused") or "it is like one that could not be fused"
        )

    def add(self, args: Args, kwargs: Kwargs) -> tuple[CallSignature, Fused]:
        """Fuse for calls like this one; what was made, with their signature."""
        with self.turns.alone(), self.lock:
            known = self.fitting(args, kwargs)
            if known is not None:
                return known
            any_order = not sees_order(self.module)
            apart = None
            if holds_objects(args, kwargs):
                apart = ApartCall.of(args, kwargs, any_order=any_order)
            taken = None if apart is None else TakenApart(self.module, [apart.template])
            signature = (
                CallSignature.of(args, kwargs, any_order=any_order, lasts=True)
                if apart is None
                else apart.signature
            )
            try:
                title = f"fuse({type(self.module).__name__})"
                with progress_shown(None, title, after_s=SHORT_S) as progress:
                    fused = fused_call(
                        taken or self.module,
                        args if apart is None else apart.tensors,
                        kwargs if apart is None else {},
                        self.passes,
                        check=self.verify,
                        measure=self.measure,
                        budget_s=self.budget_s,
                        doing=progress.doing,
                    )
            except Exception as error:
                # Once is enough to have tried.
                failed = Fused(None, [], [("", first_line(error))])
                self._keep(signature, failed, apart, args, kwargs)
                raise
            if apart is not None and taken is not None and fused.call is not None:
                fused.call = with_objects(fused.call, apart.signature, taken.made(0, apart.tensors))
                fused.pays_alone = self._pays(apart, fused.call)
            self._keep(signature, fused, apart, args, kwargs)
        if fused.call is not None:
            self._warn_of_parts()
        return signature, fused

    def _keep(
        self,
        signature: CallSignature,
        fused: Fused,
        apart: ApartCall | None,
        args: Args,
        kwargs: Kwargs,
    ) -> None:
        if apart is None:
            self.table.append((signature, fused))
            key = _key_in_any_order(args, kwargs)
            self._by_key.setdefault(key, []).append(self.table[-1])
        else:
            self._with_objects.setdefault(key_with_objects(args, kwargs), []).append(
                (signature, fused)
            )

    def _pays(self, apart: ApartCall, call: Callable[..., Any]) -> bool:
        """Whether a call with objects is faster than the model's own, which takes none apart."""
        mine, its = seconds_with_objects(call, self.module, apart, _ROUNDS)
        return mine <= its

    def count_eager(self, why: str) -> None:
        """Count a call that goes to the module itself, and warn of the first of each kind."""
        if why != _COSTS_MORE:
            self._fallback.tell(why, "" if why == GRADIENTS else self.last_problem or "")
        self._fallback.count(why)

    def _count_eager(self, why: str) -> None:
        self.calls[f"eager: {why}"] += 1

    def _warn_of_parts(self) -> None:
        """Warn of parts inside of the model: its graph is made of what these stand for."""
        for child in self.module.modules():
            if isinstance(child, StandIn) and not isinstance(child, FusedModule):
                warn_of_lost_gain(
                    child,
                    f"fuse() of a model that holds a {type(child).__name__}",
                    "Graph or tune the whole instead.",
                )


def _words(module: nn.Module) -> Words:
    """How it is said that nothing fused answers a call; none is refused."""
    what = f"What fuse() made of {type(module).__name__}"
    return Words(what, "`calls` and explain() count them.", f"{what} does not answer this call", "")


class FusedModule(ModuleProxy):
    """A module with fewer, larger kernels; made by `fuse()`.

    It shares the module's attributes: parameters(), state_dict(), to(), train(), hooks and all else
    read and change the one module. A call of another kind (shapes, dtypes, plain values, switches)
    is fused when it comes, up to `max_kinds`. A call after a change of the module, one that wants
    gradients, or one inside a trace or transform goes to the module itself, and `calls` counts it.

    Attributes:
        calls: how many calls went which way.
        regions: the parts that are graphs, for the first kind of call.
        untraced: the parts that are not, by name, with the reason.
    """

    __slots__ = ("_fusion",)
    _graphwright_maker = "fuse"
    _graphwright_trains = False

    _fusion: _Fusion

    def __init__(self, fusion: _Fusion) -> None:
        super().__init__(fusion.module)
        object.__setattr__(self, "_fusion", fusion)

    @property
    def calls(self) -> Counter[str]:
        """Calls by where they went: "fused", or "eager: " and the reason."""
        return self._fusion.calls

    @property
    def _graphwright_answerer(self) -> _Fusion:
        return self._fusion

    @property
    def regions(self) -> list[Region]:
        """The parts that are graphs, for the first kind of call."""
        return self._fusion.regions

    @property
    def untraced(self) -> list[tuple[str, str]]:
        """The parts that are no graphs, by name ("" for the whole), with the reason."""
        return self._fusion.untraced

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what was fused, or the module itself where that does not fit."""
        fusion = self._fusion
        parts = parts_of_capture()
        if parts is not None:
            return self._in_capture(parts, args, kwargs)
        if fusion.checks == "none" and len(fusion.table) == 1:
            signature, only = fusion.table[0]
            if only.call and kwargs.keys() == {*signature.names}:
                fusion.calls["fused"] += 1
                only.answered += 1
                with torch.no_grad():
                    return only.call(*args, **signature.in_order(kwargs))
        why = self._why_not(args, kwargs)
        if why is not None:
            fusion.count_eager(why)
            with fusion.turns.calling():
                return fusion.module(*args, **kwargs)
        found = fusion.fitting(args, kwargs)
        if found is None:
            found, why = self._fuse_now(args, kwargs)
        if found is None or found[1].call is None or not found[1].pays_alone:
            costs_more = found is not None and not found[1].pays_alone
            fusion.count_eager(_COSTS_MORE if costs_more else why or _NOT_FUSED)
            with fusion.turns.calling(), torch.no_grad():
                return fusion.module(*args, **kwargs)
        fusion.calls["fused"] += 1
        found[1].answered += 1
        with torch.no_grad():
            return found[1].call(*args, **(found[0].in_order(kwargs) if kwargs else kwargs))

    def _fuse_now(
        self, args: Args, kwargs: Kwargs
    ) -> tuple[tuple[CallSignature, Fused] | None, str | None]:
        """What is made for calls like this one, or the reason why nothing is, if it is known."""
        why = self._fusion.why_not_yet(args, kwargs)
        if why is None:
            try:
                return self._fusion.add(args, kwargs), None
            except Exception as error:
                # What fails in the model fails below as it does in the model.
                self._fusion.last_problem = " ".join(filter(None, in_words(error)))
        return None, why

    def _why_not(self, args: Args, kwargs: Kwargs) -> str | None:
        captured = capturing_now() or captured_by_others()  # Its mode is no transform.
        if not captured and inside_transform():
            warn_if_traced(self, "fuse")
            return TRANSFORMED
        if self._wants_grad(args, kwargs):
            return GRADIENTS
        if captured:
            # A graph would keep the folded weights, and its owner would not know of them.
            warn_of_lost_gain(
                self,
                "What fuse() made is called in a capture that does not look at it",
                "Capture it by graphwright.graph() or capture().",
            )
            return CAPTURED
        return self._outdated()

    def _wants_grad(self, args: Args, kwargs: Kwargs) -> bool:
        return torch.is_grad_enabled() and (
            in_training(self._fusion.module) or require_grad(args, kwargs)
        )

    def _outdated(self) -> str | None:
        """Why the module is not what was fused; None where it is."""
        if global_hooks():
            return "there are global forward hooks"
        change = self._fusion.watch.changed()
        if change is not None:
            self._fusion.last_problem = change
            return CHANGED
        return None

    def _in_capture(self, parts: Parts, args: Args, kwargs: Kwargs) -> Any:
        """Answer a call inside of a capture whose owner looks at what it depends on."""
        fusion, found = self._fusion, None
        why = GRADIENTS if self._wants_grad(args, kwargs) else None
        if why is None:
            with apart_from_capture() as alone:
                why = TRANSFORMED
                if alone:
                    why = None if parts.has(fusion.watch) else self._outdated()
                if why is None:
                    found = fusion.fitting(args, kwargs)
                    why = fusion.why_not_yet(args, kwargs) if found is None else None
                    if found is None and why is None:
                        parts.need(functools.partial(fusion.add, args, kwargs))
        if found is None or found[1].call is None:
            fusion.calls[f"eager: {why or _NOT_FUSED}"] += 1
            return fusion.module(*args, **kwargs)
        fusion.calls["fused, inside of a capture"] += 1
        signature, fused = found
        assert fused.call is not None
        fused.answered += 1
        parts.add(f"what fuse() made of {type(fusion.module).__name__}", fusion.watch, fused.packed)
        with running_part():
            return fused.call(*args, **signature.in_order(kwargs))

    def explain(self) -> str:
        """What was fused where, what was left as it is and why, and how the calls went."""
        return self._fusion.explain()

    def __repr__(self) -> str:
        done, count = sum(len(region.done) for region in self.regions), sum(self.calls.values())
        changes = f"{counted(done, 'change')}, {counted(count, 'call')}"
        return f"FusedModule({type(self._fusion.module).__name__}, {changes})"

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedModule:
        fusion = self._fusion
        module = copy.deepcopy(fusion.module, memo)
        options = fusion.passes, fusion.verify, *fusion.options
        return FusedModule(_Fusion(module, *options))

    def __reduce__(self) -> tuple[Any, ...]:
        fusion = self._fusion
        passes = [each.name if each in PASSES else each for each in fusion.passes]
        return _again, (fusion.module, passes, fusion.verify, *fusion.options)


def _again(
    module: nn.Module,
    passes: Sequence[str | Pass],
    verify: bool,
    audit: int | None = None,
    budget_s: float | None = None,
    measure: bool | None = None,
    checks: Checks = "full",
    max_kinds: int = MAX_KINDS,
) -> FusedModule:
    """A FusedModule that fuses at its first call."""
    options = audit, budget_s, measure, checks, max_kinds
    return FusedModule(_Fusion(module, passes_named(passes), verify, *options))


def _key_in_any_order(args: Args, kwargs: Kwargs) -> Any:
    """Shapes and plain values of a call, whatever the order of its keywords; None for others."""
    names = sorted(kwargs)
    key = quick_key(args, {name: kwargs[name] for name in names})
    return None if key is None else (len(args), key)


def _kinds(known: Sequence[tuple[CallSignature, Fused]]) -> list[str]:
    """How many calls of each kind were answered, the most frequent first."""
    fused = [each for each in known if each[1].call is not None]
    fused.sort(key=lambda each: -each[1].answered)
    lines = []
    for signature, made in fused[:_LISTED]:
        changes = sum(len(region.done) for region in made.regions)
        lines.append(
            f"fused for {signature.in_short()}: {counted(made.answered, 'call')} "
            f"answered, {counted(changes, 'change')}"
        )
    rest = fused[_LISTED:]
    if rest:
        answered = sum(made.answered for _, made in rest)
        lines.append(
            f"fused for {counted(len(rest), 'more kind')}: {counted(answered, 'call')} answered"
        )
    return lines


def _summary(region: Region) -> list[tuple[str, str]]:
    """What passes did, with what was done several times on one line."""
    counts: Counter[tuple[str, str]] = Counter()
    where: dict[tuple[str, str], str] = {}
    for name, change in region.done:
        counts[name, change.what] += 1
        where.setdefault((name, change.what), " + ".join(change.where))
    return [
        (name, f"{count} × {what} (first: {where[name, what]})")
        for (name, what), count in counts.items()
    ]


@names_checked
def fuse(
    fn_or_module: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    passes: Sequence[str | Pass] | None = None,
    verify: bool = True,
    audit: int | None = None,
    budget_s: float | None = None,
    measure: bool | None = None,
    checks: Checks = "full",
    max_kinds: int = MAX_KINDS,
) -> FusedModule:
    """Rewrite a model for inference into fewer, larger kernels, without a compiler.

    The model is run, its operations are recorded as a graph, and passes rewrite the graph. They
    fold batch norms into weights, fuse convolutions and linear layers with what follows them,
    choose the memory layout, and replace attention and norms that are written out by hand. The
    result is verified against float64 on several inputs. If its numbers are off, passes are
    verified one by one, and those that are wrong are left out. If a call cannot be one graph, for
    example because the host reads a value or a submodule has hooks, its submodules are fused one
    by one. After two seconds, progress is shown on stderr.

    Args:
        fn_or_module: a module in eval mode, or a function.
        args: sample arguments; without any, the first call is the sample.
        kwargs: sample arguments by name.
        passes: names of passes, or passes of your own, in order; None for all.
        verify: verify the passes. If False, only their conditions protect the numbers.
        audit: every `audit` calls, compare a checksum of the weights with the earlier one. This
            finds writes that PyTorch does not report (`weight.data.mul_()`, NumPy, a pointer).
        budget_s: seconds that fusing for one kind of call may take; passes and parts that there is
            no time for are left out, and `explain()` names them. What was begun is finished and
            verified. None for no limit.
        measure: time groups of passes, on a GPU as a graph replays them, and leave out those that
            lose time; `explain()` reports what each one gains. None does so on a GPU, unless passes
            are named.
        checks: what is checked before the fused module answers a call: "full" checks the call and
            the module; "signature" only the call, for a module that never changes; "none" nothing,
            if one kind of call was fused: other calls then get silently wrong results.
        max_kinds: kinds of call (shapes, dtypes, plain values, switches) that are fused, each when
            it comes; from the 17th on, when it comes again. Others go to the module itself.

    Returns:
        a module to be called like the model, under no_grad.

    Raises:
        OptionError: the model is in training mode, or is what another part of graphwright made;
            there is no pass of a name; or an option makes no sense.
        ModelFailed: the model fails on the sample.
        SignatureError: an argument can be neither compared nor watched.
        VerificationError: two eager calls disagree.
    """
    refuse(
        "fuse",
        callable_problem("fn_or_module", fn_or_module),
        args_problem("args", args),
        kwargs_problem("kwargs", kwargs),
        flag_problem("verify", verify),
        count_problem("audit", audit, optional=True),
        positive_problem("budget_s", budget_s, "number of seconds", optional=True),
        flag_problem("measure", measure, optional=True),
        choice_problem("checks", checks, get_args(Checks)),
        count_problem("max_kinds", max_kinds),
    )
    wanted = passes_named(passes)
    while isinstance(fn_or_module, FusedModule):
        if passes is None:
            # What it was fused with counts too.
            wanted = (*wanted, *[p for p in fn_or_module._fusion.passes if p not in wanted])
        fn_or_module = fn_or_module.module
    if isinstance(fn_or_module, StandIn):
        raise OptionError(
            f"fuse() got a {type(fn_or_module).__name__}, which it cannot look into.",
            remedy="Fuse the model first, then graph what fuse() returns; tune() tries both.",
        )
    module = fn_or_module if isinstance(fn_or_module, nn.Module) else FunctionModule(fn_or_module)
    if should_be_in_eval_mode(module):
        raise OptionError(
            "The model is in training mode, and fuse() is for inference.",
            remedy="Call model.eval() first.",
        )
    if measure is None and passes is not None:
        measure = False  # What is named is wanted.
    fusion = _Fusion(module, wanted, verify, audit, budget_s, measure, checks, max_kinds)
    if args or kwargs:
        fusion.add(tuple(args), dict(kwargs or {}))
    return FusedModule(fusion)
