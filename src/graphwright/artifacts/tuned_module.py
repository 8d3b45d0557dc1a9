"""TunedModule: what `tune` and `load` return, a module with a faster way to call it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..calls.dependencies import Called
from ..calls.modes import opaque
from ..calls.modules import ModuleProxy, any_in_training, in_training
from ..calls.objects import detached
from ..calls.plurals import counted
from ..calls.serialization import TreeTemplate
from ..calls.signature import CallSignature, Range, RangedSignature, inside_transform
from ..calls.split import Args, Kwargs, require_grad
from ..calls.switches import read
from ..calls.watch import Checks, ModuleWatch, cost_in_words, unread_in_words
from ..dispatch.answerer import Answerer, SizesAnswered
from ..dispatch.decision import CAPTURED, CHANGED, GRADIENTS, TRANSFORMED
from ..dispatch.fast_path import MISS, Shortcut, shortcut
from ..graphs.composition import (
    Parts,
    apart_from_capture,
    parts_of_capture,
    running_part,
    warn_if_traced,
    warn_of_lost_gain,
)
from ..graphs.conditions import captured_by_others, capturing_now
from ..graphs.taken_apart import ApartCall, kind_of, with_objects
from ..ops import compiled_checks
from ..report.notebook import short_table
from ..report.report import Report
from ..report.result import EAGER
from ..report.table import duration, ratio
from ..strategies.base import Built, Candidate
from .built_calls import Entries, Entry
from .padded_calls import OTHER_KIND, PaddedCalls
from .proved_forms import ProvedForms
from .untuned_calls import (
    NO_BUCKET,
    NOTHING_TUNED,
    OTHER,
    Absent,
    ModelFallback,
    OnMiss,
    model_sees_order,
)

# Where eager was chosen, so many of the first calls are looked at, and then one in so many.
_LOOKS = 16


@dataclass(frozen=True)
class Origin:
    """What a TunedModule was made of; `save` needs it.

    Attributes:
        candidate: the candidate that was chosen.
        builts: what was built for each sample.
        samples: the calls, with their references.
        device: where they run.
        ranges: the ranges of sizes that what was built answers; empty if it has single sizes.
        switches: PyTorch's switches that it was built under.
    """

    candidate: Candidate
    builts: Sequence[Built]
    samples: Sequence[Any]
    device: torch.device
    ranges: tuple[Range, ...] = ()
    switches: Mapping[str, Any] = field(default_factory=read)

    @property
    def self_contained(self) -> bool:
        """Whether nothing that was built runs Python of the model's."""
        return bool(self.builts) and all(built.self_contained for built in self.builts)


@dataclass(frozen=True)
class Apart:
    """What answers calls with objects; `save` needs it.

    Attributes:
        tuned: of the model that was taken apart; it is called with tensors.
        calls: that it was tuned for.
        made: what their results are beside tensors.
    """

    tuned: TunedModule
    calls: Sequence[ApartCall]
    made: Sequence[TreeTemplate]


class TunedChoice:
    """What a TunedModule holds in addition to the module: the winner, and when it may be called.

    Attributes:
        module: what was tuned.
        report: of tuning it.
        entries: what was built, with the signatures of its calls.
        watch: sees changes of the module; None if nothing depends on it.
        pure: whether a call changes nothing.
        same_under_no_grad: whether eager computes the same under no_grad.
        padded: answers calls between the buckets.
        shortcuts: answer calls that change nothing, with less work for each.
        origin: what it was made of; None for a copy, and where `apart` has it.
        loaded: how it was loaded from a file, in words.
        inside: by the identity of the entry's callable: what a capture runs in its place.
        apart: what answers calls with objects, if such were tuned for.
        fallback: what is done with all other calls.
        calls: how many calls went which way.
        plain: the module itself, where it is the winner: no call of it can go wrong.
        may_not_launch: whether somebody else's graph would keep copies of the weights without
            their owner's knowledge.
        looks_later: whether the winner may be called before the module is looked at. Else what it
            runs of the module, or compiles again, would already act on a change.
    """

    def __init__(
        self,
        module: nn.Module,
        report: Report,
        table: Sequence[Entry],
        watch: ModuleWatch | None,
        pure: bool,
        same_under_no_grad: bool,
        padded: PaddedCalls | None,
        shortcuts: Sequence[Shortcut],
        origin: Origin | None,
        loaded: Sequence[str],
        inside: Mapping[int, Built],
        on_miss: OnMiss,
        apart: Apart | None,
    ) -> None:
        self.module, self.report, self.watch = module, report, watch
        self.pure, self.same_under_no_grad = pure, same_under_no_grad
        self.padded, self.shortcuts, self.inside = padded, tuple(shortcuts), inside
        self.origin, self.loaded, self.apart = origin, tuple(loaded), apart
        there = not isinstance(module, Absent)
        proves = there and watch is not None and apart is None and same_under_no_grad
        calls = () if apart is None else apart.calls
        self.entries = Entries(module, table, calls, ProvedForms(module) if proves else None)
        self.fallback = ModelFallback(module, on_miss, quiet=report.chosen == EAGER)
        self.calls = self.fallback.calls
        winner = report.chosen if origin is None else origin.candidate.name
        self.plain = _as_called(module) if winner == EAGER and table and there else None
        copies = watch is not None and watch.values
        # bool() is False, and quicker than a function in Python.
        self.may_not_launch: Callable[[], bool] = captured_by_others if copies else bool
        self.looks_later = pure and origin is not None and origin.self_contained
        self._changed_last_time = False

    def reference(self) -> Callable[..., Any] | None:
        """What computes any size eagerly; None where a file was loaded without its model."""
        return None if isinstance(self.module, Absent) else _as_called(self.module)

    def sizes(self) -> SizesAnswered:
        """Which calls what was chosen answers: all sizes if it is eager, or takes a range."""
        module = self.module
        ranged = self.origin is not None and bool(self.origin.ranges)
        return SizesAnswered(
            all_sizes=self.report.chosen == EAGER or ranged,
            samples=[] if self.origin is None else [each.call for each in self.origin.samples],
            argument_names=module.argument_names if isinstance(module, Absent) else None,
            pads=() if self.padded is None else self.padded.fills(),
        )

    def counts(self) -> Counter[str]:
        """How many calls went which way."""
        return Counter(self.calls)

    def explain(self) -> str:
        """What runs and why, when it falls back, and how calls went so far, in words."""
        lines = [f"strategy: {self.report.chosen}", self.report.reason]
        lines += [f"loaded from a file: {what}" for what in self.loaded]
        lines += _when_it_answers(self)
        for way, count in self.calls.most_common():
            lines.append(f"{counted(count, 'call')} {way}")
        if self.fallback.last is not None:
            lines.append(f"last call that did not match: {self.fallback.last}")
        return "\n".join(line for line in lines if line)

    def padded_callable_for(
        self, padded: PaddedCalls, args: Args, kwargs: Kwargs
    ) -> tuple[str, Callable[..., Any] | None]:
        """What answers a call between the buckets, behind the reason if nothing does."""
        change = padded.outdated()
        if change is not None:
            self.fallback.last = change
            return CHANGED, None
        found = padded.callable_for(args, kwargs)
        if not isinstance(found, str):
            return "", found
        if found is OTHER_KIND:
            nearest = self.entries.differences
            found = padded.difference(args, kwargs) or nearest(args, kwargs) or found
        self.fallback.last = found
        return NO_BUCKET, None

    def attempt(self, tuned: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Call the winner: its result, or `MISS` if the module has changed.

        What runs nothing of the module, and changes nothing, is called before the module is
        checked, which is done while the GPU works. The result is dropped if the module has changed;
        as it mostly stays so, the next checks come first.
        """
        watch = self.watch
        if watch is None:
            return tuned(*args, **kwargs)
        if (self._changed_last_time or not self.looks_later) and self.outdated(watch):
            return MISS
        if not self.looks_later:
            return tuned(*args, **kwargs)
        try:
            result = tuned(*args, **kwargs)
        except Exception:
            if self.outdated(watch):
                return MISS
            raise
        return MISS if self.outdated(watch) else result

    def look_at(self, args: Args, kwargs: Kwargs) -> None:
        """Note how a call differs from those that were tuned, where eager answers all of them."""
        entries = self.entries
        if entries.is_new(args, kwargs) and entries.found_for(args, kwargs)[0] is None:
            found = entries.differences(args, kwargs)
            self.fallback.last = found or self.fallback.last

    def outdated(self, watch: ModuleWatch) -> bool:
        """Whether the module has changed; the reason is kept for `explain`."""
        change = watch.changed()
        if change is not None:
            self.fallback.last = change
        self._changed_last_time = change is not None
        return self._changed_last_time


def _as_called(module: nn.Module) -> Callable[..., Any]:
    return module.function_of() if isinstance(module, Called) else module


def choice_of(tuned: TunedModule) -> TunedChoice:
    """What a TunedModule holds in addition to the module, whose attributes it shows as its own."""
    return tuned._choice


class TunedModule(ModuleProxy):
    """The module that was tuned, called by the strategy that was chosen.

    It shares the module's attributes: parameters(), state_dict(), to(), train(), hooks and so on
    read and change the same module. A call falls back to the module itself, and `calls` counts it
    by its reason, if it differs from the tuned one in shapes, dtypes, devices, plain values,
    autocast or backend switches, or if the module has changed. Outputs do not require grad, unless
    the module is in training mode or an input requires grad while gradients are on: then the
    module is called as it is and gradients flow.

    Attributes:
        report: what was measured, verified and chosen.
        calls: how many calls went which way.
    """

    __slots__ = ("_choice",)
    _graphwright_maker = "tune"
    _graphwright_trains = False
    _choice: TunedChoice

    def __init__(
        self,
        module: nn.Module,
        report: Report,
        table: Sequence[Entry] = (),
        watch: ModuleWatch | None = None,
        pure: bool = False,
        same_under_no_grad: bool = True,
        padded: PaddedCalls | None = None,
        shortcuts: Sequence[Shortcut] = (),
        origin: Origin | None = None,
        loaded: Sequence[str] = (),
        inside: Mapping[int, Built] | None = None,
        on_miss: OnMiss = "eager",
        apart: Apart | None = None,
    ) -> None:
        super().__init__(module)
        choice = TunedChoice(
            module,
            report,
            table,
            watch,
            pure,
            same_under_no_grad,
            padded,
            shortcuts,
            origin,
            loaded,
            inside or {},
            on_miss,
            apart,
        )
        object.__setattr__(self, "_choice", choice)

    @property
    def _graphwright_answerer(self) -> Answerer:
        return self._choice

    @property
    def report(self) -> Report:
        """What was measured, verified and chosen."""
        return self._choice.report

    @property
    def calls(self) -> Counter[str]:
        """How many calls were "tuned", padded, or "eager: " with the reason.

        Without the model, calls that would be eager are "refused: " with the reason.
        """
        return self._choice.calls

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the winner, or fall back to the module itself."""
        choice = self._choice
        if choice.plain is not None and not torch.is_grad_enabled():
            count = choice.calls["tuned"]
            choice.calls["tuned"] = count + 1
            if count < _LOOKS or not count % _LOOKS:
                choice.look_at(args, kwargs)
            return choice.plain(*args, **kwargs)
        # A launch refuses where this thread captures: such a call is answered below.
        if choice.shortcuts and not (in_training(choice.module) or choice.may_not_launch()):
            for short in choice.shortcuts:
                result = short(args, kwargs)
                if result is not MISS:
                    choice.calls["tuned"] += 1
                    return result
        return self._answer_by_table(args, kwargs)

    def _answer_by_table(self, args: Args, kwargs: Kwargs) -> Any:
        """Call what was built for such calls, after a look at what goes on around this one."""
        choice = self._choice
        parts = parts_of_capture()
        if parts is not None and choice.report.chosen != EAGER:
            return self._in_capture(parts, args, kwargs)
        # A graph would keep the winner's copies of the weights without its owner's knowledge.
        if (capturing_now() or choice.may_not_launch()) and not isinstance(choice.module, Absent):
            return self._in_unknown_capture(args, kwargs)
        found, mine, named = choice.entries.entry_for(args, kwargs), args, kwargs
        if found is None:
            found, mine, named = choice.entries.in_other_forms(args, kwargs)
            if found is None:
                return self._answer_others(args, kwargs, mine, named)
        if torch.is_grad_enabled() and (
            in_training(choice.module)
            or (choice.watch is None and any_in_training(choice.module))
            # A call that fits requires grad exactly where the sample did.
            or found[0].wants_grad
        ):
            return self._with_gradients(args, kwargs)
        result = choice.attempt(found[1], mine, named)
        if result is MISS:
            return self._without_gradients(CHANGED, args, kwargs)
        choice.calls["tuned"] += 1
        return result

    def _answer_others(self, args: Args, kwargs: Kwargs, mine: Args, named: Kwargs) -> Any:
        """Answer a call that nothing was built for.

        Args:
            args: of the call.
            kwargs: likewise.
            mine: the same in the form of what was tuned, as far as it has one.
            named: likewise.
        """
        choice = self._choice
        if inside_transform():
            warn_if_traced(self, "tune")
            return choice.fallback.answer(TRANSFORMED, choice.module, args, kwargs, TRANSFORMED)
        if torch.is_grad_enabled() and (
            in_training(choice.module)
            or (choice.watch is None and any_in_training(choice.module))
            or require_grad(args, kwargs)
        ):
            return self._with_gradients(args, kwargs)
        tuned, way, kind = None, "tuned", OTHER if choice.entries.table else NOTHING_TUNED
        found, other = choice.entries.proved_for(args, kwargs)
        if found is not None:
            tuned, mine, named = found[1], args, other
        elif choice.padded is not None:
            kind, tuned = choice.padded_callable_for(choice.padded, mine, named)
            way = "tuned, padded to a bucket"
        elif choice.report.chosen == EAGER:
            choice.look_at(args, kwargs)
        else:
            choice.fallback.last = choice.entries.differences(mine, named)
        result = MISS if tuned is None else choice.attempt(tuned, mine, named)
        if result is MISS:
            return self._without_gradients(kind if tuned is None else CHANGED, args, kwargs)
        choice.calls[way] += 1
        return result

    def _with_gradients(self, args: Args, kwargs: Kwargs) -> Any:
        """Call the module as it is, since gradients are wanted."""
        choice, why = self._choice, "training mode, or an input that requires grad"
        return choice.fallback.answer(GRADIENTS, choice.module, args, kwargs, why)

    def _without_gradients(self, kind: str, args: Args, kwargs: Kwargs) -> Any:
        """Call the module itself as what was tuned would, unless a part of it is in training."""
        choice = self._choice
        if torch.is_grad_enabled() and any_in_training(choice.module):
            why = "a part of the module is in training mode"
            return choice.fallback.answer(GRADIENTS, choice.module, args, kwargs, why)
        if kind == NO_BUCKET and isinstance(choice.module, Absent):
            # The difference to the nearest bucket says more than that there is no plan.
            nearest = choice.entries.differences(args, kwargs)
            choice.fallback.last = nearest or choice.fallback.last
        eager = eager_without_grad(choice.module, choice.same_under_no_grad)
        return choice.fallback.answer(kind, eager, args, kwargs)

    def _in_unknown_capture(self, args: Args, kwargs: Kwargs) -> Any:
        """Call the module inside of a capture whose owner does not look at what was tuned."""
        choice = self._choice
        if self._wants_grad(args, kwargs):
            return self._with_gradients(args, kwargs)
        if choice.entries.table and choice.report.chosen != EAGER:
            warn_of_lost_gain(
                self,
                "What tune() made is called in a capture that does not look at it",
                "Capture it by graphwright.graph() or capture().",
            )
        return choice.fallback.answer(CAPTURED, choice.module, args, kwargs, CAPTURED)

    def _wants_grad(self, args: Args, kwargs: Kwargs) -> bool:
        return torch.is_grad_enabled() and (
            any_in_training(self._choice.module) or require_grad(args, kwargs)
        )

    def _in_capture(self, parts: Parts, args: Args, kwargs: Kwargs) -> Any:
        """Answer a call inside of a capture whose owner looks at what it depends on."""
        choice, built = self._choice, None
        if self._wants_grad(args, kwargs):
            return choice.fallback.answer(GRADIENTS, choice.module, args, kwargs)
        why = OTHER if choice.entries.table else NOTHING_TUNED
        with apart_from_capture() as alone:
            entry, mine, named = None, args, kwargs
            if alone:
                entry, mine, named = choice.entries.found_for(args, kwargs)
            if entry is not None and choice.watch is not None:
                built = choice.inside.get(id(entry[1]))
                why = f"no graph can hold what {choice.report.chosen} made"
                if not parts.has(choice.watch) and choice.outdated(choice.watch):
                    built, why = None, CHANGED
        if built is None:
            if choice.entries.table:
                parts.lose(
                    self,
                    f"What tune() made is called inside of a capture ({why})",
                    "Tune the whole instead, or call graph() on what is tuned for these shapes.",
                )
            if isinstance(choice.module, Absent):
                why = choice.entries.differences(args, kwargs) or why
                raise choice.module.refusal(OTHER, why)
            return choice.fallback.answer(CAPTURED, choice.module, args, kwargs, CAPTURED)
        choice.calls["tuned, inside of a capture"] += 1
        name = f"what tune() made of {type(choice.module).__name__} ({choice.report.chosen})"
        assert choice.watch is not None
        parts.add(name, choice.watch, built.packed)
        with torch.no_grad(), running_part():
            return built.call(*mine, **named)

    def explain(self) -> str:
        """What runs and why, when it falls back, and how calls went so far, in words."""
        return self._choice.explain()

    def __repr__(self) -> str:
        report, count = self._choice.report, sum(self.calls.values())
        found = [report.model, report.chosen or EAGER]
        row = report.chosen_row
        speed = None if row is None or row.strategy == EAGER else report.speedup(row)
        if speed is not None:
            found.append(f"{ratio(speed[0])} eager")
        return f"{type(self).__name__}({', '.join(found)}, {counted(count, 'call')})"

    def _repr_html_(self) -> str:
        report, row = self._choice.report, self._choice.report.chosen_row
        pairs = [("strategy", report.chosen or EAGER)]
        if row is not None and row.measurement is not None:
            seconds = row.measurement.typical(report.figure).median
            pairs.append(("time of a call", duration(seconds)))
        speed = None if row is None or row.strategy == EAGER else report.speedup(row)
        if speed is not None:
            pairs.append(("as fast as eager", f"{ratio(speed[0])} ({ratio(speed[1])} to "
                          f"{ratio(speed[2])})"))  # fmt: skip
        pairs.append(("tuned for", "; ".join(report.inputs)))
        pairs += [(f"calls: {way}", f"{count:,}") for way, count in self.calls.most_common()]
        return short_table(f"{type(self).__name__} of {report.model}", pairs)

    def __deepcopy__(self, memo: dict[int, Any]) -> TunedModule:
        # What was built holds for the original's weights: a copy is not tuned, and says so.
        module = copy.deepcopy(self._choice.module, memo)
        return TunedModule(
            module, self._choice.report, same_under_no_grad=self._choice.same_under_no_grad
        )

    def __reduce__(self) -> tuple[Any, ...]:
        choice = self._choice
        arguments = (choice.module, choice.report, (), None, False, choice.same_under_no_grad)
        return TunedModule, arguments


def assemble(
    module: nn.Module,
    report: Report,
    signatures: Sequence[CallSignature],
    origin: Origin,
    *,
    pure: bool,
    same_under_no_grad: bool,
    pad_with: Callable[[list[tuple[CallSignature, Callable[..., Any]]]], PaddedCalls] | None = None,
    loaded: Sequence[str] = (),
    audit: int | None = None,
    on_miss: OnMiss = "eager",
    checks: Checks = "full",
    watch: ModuleWatch | None = None,
) -> TunedModule:
    """Make a TunedModule that answers calls by one candidate.

    Args:
        module: the module that was tuned.
        report: the report of tuning it.
        signatures: of the calls that something was built for.
        origin: the candidate, and what was built for each of these calls.
        pure: whether a call changes nothing.
        same_under_no_grad: whether eager computes the same under no_grad.
        pad_with: makes a PaddedCalls from what was built, for calls between the buckets.
        loaded: how it was loaded from a file, in words.
        audit: if a copy of the weights is held, compare their values every so many calls.
        on_miss: what is done with a call that was not tuned.
        checks: what is looked at before a call is answered.
        watch: of the module, begun before what was built was made; None begins one now.
    """
    builts, eager = origin.builts, origin.candidate.name == EAGER
    if watch is None and origin.candidate.name.split(":")[0] != EAGER:  # Eager needs no watching.
        watch = _watch_of(module, builts, audit, checks)
    if watch is not None and checks == "full":
        _join_what_they_read(watch, builts)
    calls: list[Callable[..., Any]] = [built.call for built in builts]
    if eager:  # What tune() gives never requires grad, eager included.
        calls = [eager_without_grad(module, same_under_no_grad)] * len(builts)
    table: list[Entry] = list(zip(signatures, calls, strict=True))
    padded = None
    if origin.ranges:
        table.append((RangedSignature(signatures[-1], origin.ranges), calls[-1]))
    elif pad_with is not None and pure and not eager:
        padded = pad_with(list(zip(signatures, calls, strict=True)))
    shortcuts: list[Shortcut] = []
    if watch is not None and pure:
        shortcuts = _shortcuts(module, signatures, builts, watch, checks)
    return TunedModule(
        module,
        report,
        table,
        watch,
        pure,
        same_under_no_grad,
        padded,
        shortcuts,
        origin,
        loaded,
        {} if eager else _inside_of_captures(calls, origin),
        on_miss,
    )


def _watch_of(
    module: nn.Module, builts: Sequence[Built], audit: int | None, checks: Checks
) -> ModuleWatch:
    """Begin to notice changes of the module, of the values of weights too if copies are held."""
    compiled_checks.offer()
    copies = any(built.holds_weights for built in builts)
    return ModuleWatch(module, values=copies, audit=audit, checks=checks)


def _join_what_they_read(watch: ModuleWatch, builts: Sequence[Built]) -> None:
    for depends in filter(None, (built.depends for built in builts)):
        watch.join(depends)


def _shortcuts(
    module: nn.Module,
    signatures: Sequence[CallSignature],
    builts: Sequence[Built],
    watch: ModuleWatch,
    checks: Checks,
) -> list[Shortcut]:
    """What answers calls with less work for each, of what can be launched."""
    unchanged, training = watch.unchanged, in_training(module)
    # Where several calls were tuned, they are told apart by their signatures.
    alike: Checks = "signature" if checks == "none" and len(builts) > 1 else checks
    # A launch takes the arguments in a row, in the order of the signature.
    if not model_sees_order(module):
        signatures = [each.in_any_order() for each in signatures]
    found = [
        shortcut(signature, built.launch, unchanged, training=training, checks=alike)
        for signature, built in zip(signatures, builts, strict=True)
    ]
    return [each for each in found if each is not None]


def _inside_of_captures(calls: Sequence[Callable[..., Any]], origin: Origin) -> dict[int, Built]:
    """What captures run in place of callables, by the identity of these."""
    found = {
        id(call): built.inside_of_capture(origin.device)
        for call, built in zip(calls, origin.builts, strict=True)
    }
    return {key: built for key, built in found.items() if built is not None}


def _when_it_answers(choice: TunedChoice) -> list[str]:
    """Which calls are answered and which go to the module, in words."""
    change = None if choice.watch is None else choice.watch.changed()
    absent = isinstance(choice.module, Absent)
    goes = "is refused" if absent else "goes to the module itself"
    lines: list[str] = []
    if not choice.entries.table:
        lines.append(f"This copy was not tuned: every call {goes}.")
    elif absent:
        lines.append("It was loaded without the model: whatever else is called is refused.")
    elif choice.watch is not None and choice.watch.values:
        every = choice.watch.audit
        lines.append(
            "It holds a copy of the weights: after a change of them calls go to the module "
            "itself. Changes through .data, NumPy or a pointer are "
            + ("not noticed without audit=N." if every is None else "looked for,")
            + ("" if every is None else f" once in {counted(every, 'call')}.")
        )
    if choice.watch is not None:
        lines += [*cost_in_words(choice.watch), *unread_in_words(choice.watch)]
    if change is not None:
        lines.append(f"Every call now {goes}, since {change}.")
        if not absent:
            lines.append("Call graphwright.tune() again to tune the module as it is now.")
    return lines


def put_together(module: nn.Module, apart: Apart) -> TunedModule:
    """For what was tuned of a model that was taken apart: the model, called with objects.

    Args:
        module: the model, or what stands in for it.
        apart: what was tuned.
    """
    choice, count = apart.tuned._choice, len(apart.calls)
    eager = choice.report.chosen == EAGER and not isinstance(module, Absent)
    table: list[Entry] = []
    for number, (call, made) in enumerate(zip(apart.calls, apart.made, strict=True)):
        if eager:
            answer = eager_without_grad(module, choice.same_under_no_grad)
        else:
            built = choice.entries.table[number][1]
            answer = with_objects(built, call.signature, made, kind_of(number, count))
        table.append((call.signature, answer))
    return TunedModule(
        module,
        choice.report,
        table,
        None if eager else choice.watch,
        same_under_no_grad=choice.same_under_no_grad,
        loaded=choice.loaded,
        on_miss=choice.fallback.on_miss,
        apart=apart,
    )


def of_tensors(tuned: TunedModule) -> TunedModule:
    """What answers the tensors of calls with objects; for other calls, what was given."""
    apart = tuned._choice.apart
    return tuned if apart is None else apart.tuned


def eager_without_grad(module: nn.Module, same_under_no_grad: bool) -> Callable[..., Any]:
    """A callable that runs the module itself and returns outputs that do not require grad.

    If the module's results differ under no_grad, its outputs are detached instead.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if same_under_no_grad:
            with torch.no_grad():
                return module(*args, **kwargs)
        return detached(module(*args, **kwargs))

    return call
