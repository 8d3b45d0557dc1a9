"""TunedModule: what `tune` and `load` return, a module with a faster way to call it."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from ..calls.binding import Form, Parameters, form_of, sees_order
from ..calls.dependencies import Called
from ..calls.modes import opaque
from ..calls.modules import ModuleProxy, any_in_training, in_training
from ..calls.objects import detached
from ..calls.plurals import counted
from ..calls.serialization import TreeTemplate
from ..calls.signature import CallSignature, Range, RangedSignature, inside_transform, quick_key
from ..calls.split import Args, Kwargs, tensors_of
from ..calls.switches import read
from ..calls.watch import Checks, ModuleWatch, cost_in_words, unread_in_words
from ..dispatch.decision import CAPTURED, CHANGED, GRADIENTS, TRANSFORMED
from ..dispatch.fast_path import MISS, Shortcut, shortcut
from ..errors import SignatureError, warn_of_fallback
from ..graphs.composition import (
    Parts,
    apart_from_capture,
    parts_of_capture,
    running_part,
    warn_if_traced,
    warn_of_lost_gain,
)
from ..graphs.conditions import captured_by_others, capturing_now
from ..graphs.taken_apart import ApartCall, key_with_objects, kind_of, with_objects
from ..graphs.turns import turns_of
from ..ops import compiled_checks
from ..report.html import short_table
from ..report.report import Report
from ..report.result import EAGER
from ..report.table import duration, ratio
from ..strategies.base import Built, Candidate
from .padded_calls import OTHER_KIND, PaddedCalls
from .proved_forms import ProvedForms

# Reasons why a call falls back to the module, as `TunedModule.calls` counts them.
NOTHING_TUNED, OTHER, NO_BUCKET = "nothing tuned", "another signature", "no bucket"
# Of these the caller knows, whatever was tuned.
_INTENDED = (GRADIENTS, TRANSFORMED, CAPTURED)
# Where eager was chosen, so many of the first calls are looked at, and then one in so many.
_LOOKS = 16
# Shapes and plain values of which is remembered that they were looked at.
_MAX_LOOKED_AT = 256
# What is done with a call that was not tuned.
OnMiss = Literal["eager", "error"]
# The signature of calls that something was built for, and what was built.
Entry = tuple[CallSignature | RangedSignature, Callable[..., Any]]


class Absent(nn.Module):
    """Stands in for a model that `load` was not given: every call raises SignatureError.

    Args:
        argument_names: the names of the model's parameters, as far as they are known.
        sees_order: whether the model may see the order of keyword arguments.
    """

    def __init__(self, argument_names: Sequence[str] = (), *, sees_order: bool = True) -> None:
        super().__init__()
        self.argument_names = tuple(argument_names)
        self.sees_order = sees_order
        self.training = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise SignatureError."""
        raise self.refusal("it goes to the model", None)

    def refusal(self, kind: str, why: str | None) -> SignatureError:
        """The error of a call that needs the model.

        Args:
            kind: one of the reasons above.
            why: the reason in words, where it is known.
        """
        what = f"This call is not like the one that was saved: {(why or kind).rstrip('.')}."
        remedy = "Pass the model to load(), which answers other calls."
        if kind == NOTHING_TUNED:
            what = "This is a copy of what was loaded without the model, and copies are not tuned."
            remedy = "Call the original, or load the file again."
        elif self.training:
            what = "What was loaded without the model is in training mode, and cannot be trained."
            remedy = "Call eval() first, or pass the model to load()."
        elif self._forward_hooks or self._forward_pre_hooks:
            what = "What was loaded without the model has a forward hook, which it cannot run."
            remedy = "Remove the hook, or pass the model to load()."
        elif kind == CHANGED:
            what = f"What was loaded without the model was changed since: {why}."
            remedy = "Take the change back, or load the file again."
        elif kind == GRADIENTS:
            what = "Gradients are wanted, which the model alone gives: an input requires grad."
            remedy = "Call it without them (x.detach()), or pass the model to load()."
        return SignatureError(what, remedy=remedy)


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


class _Choice:
    """What a TunedModule holds in addition to the module: the winner, and when it may be called."""

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
    ) -> None:
        self.module = module
        # By the identity of the entry's callable: what a capture runs in its place.
        self.inside = inside
        self.report = report
        self.table = list(table)
        self.watch = watch
        self.copies = watch is not None and watch.values
        # Whether somebody else's graph would keep the copies without their owner's knowledge.
        self.may_not_launch = captured_by_others if self.copies else _never
        self.pure = pure
        # Whether the winner may be called before the module is looked at. Else what it runs of the
        # module, or compiles again, would already act on a change.
        builts = () if origin is None else origin.builts
        self.looks_later = pure and bool(builts) and all(each.self_contained for each in builts)
        self._changed_last_time = False
        self.same_under_no_grad = same_under_no_grad
        self.padded = padded
        self.shortcuts = tuple(shortcuts)
        self.origin = origin
        self.loaded = tuple(loaded)
        self.turns = turns_of(module, getattr(module, "_function", None))
        # The module itself, where it is the winner: no call of it can go wrong.
        self.plain: Callable[..., Any] | None = None
        winner = None if origin is None else origin.candidate.name
        if winner == EAGER and self.table and not isinstance(module, Absent):
            self.plain = module.function_of() if isinstance(module, Called) else module
        self.on_miss = on_miss
        self._told: set[str] = set()
        # Shapes and plain values of calls that `look_at` has seen.
        self._looked_at: set[Any] = set()
        self.calls: Counter[str] = Counter()
        self.last_difference: str | None = None
        self.apart: Apart | None = None
        # Of calls with objects, which take long to compare: the table by what is seen at once.
        self.by_key: dict[Any, list[Entry]] = {}
        # In which forms the calls of the table pass their arguments.
        self.forms: dict[Form, None] = dict.fromkeys(_form(signature) for signature, _ in table)
        # In which other forms they were proved to be the same.
        self.proved = ProvedForms(module)

    def found_for(self, args: Args, kwargs: Kwargs) -> tuple[Entry | None, Args, Kwargs]:
        """The entry that answers a call, and the call in the form of that entry.

        A call that is not answered in its own form is put in those of the entries: what was a
        keyword there is one. The module itself always gets the caller's form.
        """
        found = self.entry_for(args, kwargs)
        if found is not None or not self.forms:
            return found, args, kwargs
        own = form_of(args, kwargs)
        forms = [form for form in self.forms if form != own]
        others = self._in_forms(forms, args, kwargs) if forms else []
        for mine, named in others:
            found = self.entry_for(mine, named)
            if found is not None:
                return found, mine, named
        if own in self.forms or not others:
            return None, args, kwargs
        return None, *others[0]

    def _in_forms(
        self, forms: Sequence[Form], args: Args, kwargs: Kwargs
    ) -> list[tuple[Args, dict[str, Any]]]:
        """A call in those of some forms in which it is the same call."""
        parameters = Parameters.of(self.module)
        if parameters is not None:
            every = [parameters.in_form(form, args, kwargs) for form in forms]
            return [each for each in every if each is not None]
        orders = [names for count, names in forms if count == len(args)]
        orders = [names for names in orders if kwargs.keys() == {*names}]
        if not orders or model_sees_order(self.module):
            return []
        return [(args, {name: kwargs[name] for name in names}) for names in orders]

    def entry_for(self, args: Args, kwargs: Kwargs) -> Entry | None:
        """The entry that answers a call; None if there is none."""
        table = self.by_key.get(key_with_objects(args, kwargs), ()) if self.by_key else self.table
        for entry in table:
            if entry[0].fits(args, kwargs):
                return entry
        return None

    def proved_for(self, args: Args, kwargs: Kwargs) -> tuple[Entry | None, Kwargs]:
        """The entry that answers a call but for plain keywords that are proved to change nothing.

        Behind it are the keyword arguments of its form. The first call of a form may run the module
        for a proof: see `proved_forms`.
        """
        watch = self.watch
        alone = watch is not None and self.apart is None and self.same_under_no_grad
        if alone and not isinstance(self.module, Absent):
            for entry in self.table:
                named = self.proved.in_form_of(entry[0], args, kwargs)
                if named is not None:
                    return entry, named
        return None, kwargs

    def padded_callable_for(
        self, padded: PaddedCalls, args: Args, kwargs: Kwargs
    ) -> tuple[str, Callable[..., Any] | None]:
        """What answers a call between the buckets, behind the reason if nothing does."""
        change = padded.outdated()
        if change is not None:
            self.last_difference = change
            return CHANGED, None
        why = TRANSFORMED
        if not inside_transform():
            found = padded.callable_for(args, kwargs)
            if not isinstance(found, str):
                return "", found
            why = found
            if found is OTHER_KIND:
                why = padded.difference(args, kwargs) or self.differences(args, kwargs) or found
        self.last_difference = why
        return NO_BUCKET, None

    def attempt(self, tuned: Callable[..., Any], args: Args, kwargs: Kwargs) -> tuple[bool, Any]:
        """Call the winner: True and its result, or False if the module has changed.

        What runs nothing of the module, and changes nothing, is called before the module is
        checked, which is done while the GPU works. The result is dropped if the module has changed;
        as it mostly stays so, the next checks come first.
        """
        watch = self.watch
        if watch is None:
            return True, tuned(*args, **kwargs)
        if (self._changed_last_time or not self.looks_later) and self.outdated(watch):
            return False, None
        if not self.looks_later:
            return True, tuned(*args, **kwargs)
        try:
            result = tuned(*args, **kwargs)
        except Exception:
            if self.outdated(watch):
                return False, None
            raise
        return (False, None) if self.outdated(watch) else (True, result)

    def differences(self, args: Args, kwargs: Kwargs) -> str | None:
        """How a call differs from what was tuned for: a range of sizes, or the nearest call."""
        signatures = [signature for signature, _ in self.table]
        found = [each for each in signatures if isinstance(each, RangedSignature)] or signatures
        if len(found) > 1 and not inside_transform():
            with contextlib.suppress(SignatureError):
                call = CallSignature.of(args, kwargs, objects=self.apart is not None)
                found.sort(key=functools.partial(_distance, call))
        made = "saved" if isinstance(self.module, Absent) else "tuned"
        return found[0].differences(args, kwargs, made) if found else None

    def look_at(self, args: Args, kwargs: Kwargs) -> None:
        """Note how a call differs from those that were tuned, where eager answers all of them."""
        key = quick_key(args, kwargs)
        if key is None:
            key = key_with_objects(args, kwargs)
        if key is None or key in self._looked_at:
            return
        if len(self._looked_at) >= _MAX_LOOKED_AT:
            self._looked_at.clear()
        self._looked_at.add(key)
        if self.found_for(args, kwargs)[0] is None:
            self.last_difference = self.differences(args, kwargs) or self.last_difference

    def eager(self, kind: str, call: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Call the module itself, if there is one, and count the call by its reason."""
        if not isinstance(self.module, Absent):
            if self.report.chosen != EAGER:
                self._fell_back(kind)
            self.calls[f"eager: {kind}"] += 1
            with self.turns.calling():
                return call(*args, **kwargs)
        self.calls[f"refused: {kind}"] += 1
        if kind == NO_BUCKET:
            # The difference to the nearest bucket says more than that there is no plan.
            self.last_difference = self.differences(args, kwargs) or self.last_difference
        raise self.module.refusal(kind, self.last_difference)

    def _fell_back(self, kind: str) -> None:
        """Warn of a call that goes to the module itself, once for each kind; or refuse it.

        Raises:
            SignatureError: with on_miss="error", the call is not one that was tuned.
        """
        what = f"What tune() made of {type(self.module).__name__}"
        why = kind if self.last_difference in (None, kind) else f"{kind} ({self.last_difference})"
        if self.on_miss == "error" and kind not in _INTENDED:
            raise SignatureError(
                f"{what} does not answer this call: {why.rstrip('.')}.",
                remedy="Tune for it too (samples=, buckets=), or allow on_miss='eager'.",
            )
        if kind not in self._told:
            self._told.add(kind)
            warn_of_fallback(what, why, "`calls` and explain() count them.")

    def outdated(self, watch: ModuleWatch) -> bool:
        """Whether the module has changed; the reason is kept for `explain`."""
        change = watch.changed()
        if change is not None:
            self.last_difference = change
        self._changed_last_time = change is not None
        return self._changed_last_time


def _never() -> bool:
    return False


def model_sees_order(module: nn.Module) -> bool:
    """Whether a model, or the one that is absent, may see the order of keyword arguments."""
    return module.sees_order if isinstance(module, Absent) else sees_order(module)


def _form(signature: CallSignature | RangedSignature) -> Form:
    """In which form calls of a signature pass their arguments."""
    base = signature.base if isinstance(signature, RangedSignature) else signature
    args, kwargs = base.spec.children()
    return len(args.children()), tuple(kwargs.context)


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
    _choice: _Choice

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
    ) -> None:
        super().__init__(module)
        choice = _Choice(
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
        )
        object.__setattr__(self, "_choice", choice)

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
        parts = parts_of_capture()
        if parts is not None and choice.report.chosen != EAGER:
            return self._in_capture(parts, args, kwargs)
        if (capturing_now() or (choice.copies and captured_by_others())) and not isinstance(
            choice.module, Absent
        ):
            # A graph would keep the winner's copies of the weights without its owner's knowledge.
            if self._wants_grad(args, kwargs):
                choice.last_difference = "training mode, or an input that requires grad"
                return choice.eager(GRADIENTS, choice.module, args, kwargs)
            if choice.table and choice.report.chosen != EAGER:
                warn_of_lost_gain(
                    self,
                    "What tune() made is called in a capture that does not look at it",
                    "Capture it by graphwright.graph() or capture().",
                )
            choice.last_difference = CAPTURED
            return choice.eager(CAPTURED, choice.module, args, kwargs)
        found, mine, named = choice.found_for(args, kwargs)
        if found is None and inside_transform():
            warn_if_traced(self, "tune")
            choice.last_difference = TRANSFORMED
            return choice.eager(TRANSFORMED, choice.module, args, kwargs)
        if torch.is_grad_enabled() and (
            in_training(choice.module)
            or (choice.watch is None and any_in_training(choice.module))
            # A call that fits requires grad exactly where the sample did.
            or (found[0].wants_grad if found is not None else _wants_grad(args, kwargs))
        ):
            choice.last_difference = "training mode, or an input that requires grad"
            return choice.eager(GRADIENTS, choice.module, args, kwargs)
        if found is None:
            found, other = choice.proved_for(args, kwargs)
            if found is not None:
                mine, named = args, other
        tuned, way = (None if found is None else found[1]), "tuned"
        kind = OTHER if choice.table else NOTHING_TUNED
        if found is None and choice.padded is not None:
            kind, tuned = choice.padded_callable_for(choice.padded, mine, named)
            way = "tuned, padded to a bucket"
        elif found is None and choice.report.chosen == EAGER:
            choice.look_at(args, kwargs)
        elif found is None:
            choice.last_difference = choice.differences(mine, named)
        if tuned is not None:
            counts, result = choice.attempt(tuned, mine, named)
            if counts:
                choice.calls[way] += 1
                return result
            kind = CHANGED
        if torch.is_grad_enabled() and any_in_training(choice.module):
            choice.last_difference = "a part of the module is in training mode"
            return choice.eager(GRADIENTS, choice.module, args, kwargs)
        return choice.eager(
            kind, eager_without_grad(choice.module, choice.same_under_no_grad), args, kwargs
        )

    def _wants_grad(self, args: Args, kwargs: Kwargs) -> bool:
        return torch.is_grad_enabled() and (
            any_in_training(self._choice.module) or _wants_grad(args, kwargs)
        )

    def _in_capture(self, parts: Parts, args: Args, kwargs: Kwargs) -> Any:
        """Answer a call inside of a capture whose owner looks at what it depends on."""
        choice, built = self._choice, None
        if self._wants_grad(args, kwargs):
            return choice.eager(GRADIENTS, choice.module, args, kwargs)
        why = OTHER if choice.table else NOTHING_TUNED
        with apart_from_capture() as alone:
            entry, mine, named = None, args, kwargs
            if alone:
                entry, mine, named = choice.found_for(args, kwargs)
            if entry is not None and choice.watch is not None:
                built = choice.inside.get(id(entry[1]))
                why = f"no graph can hold what {choice.report.chosen} made"
                if not parts.has(choice.watch) and choice.outdated(choice.watch):
                    built, why = None, CHANGED
        if built is None:
            if choice.table:
                parts.lose(
                    self,
                    f"What tune() made is called inside of a capture ({why})",
                    "Tune the whole instead, or call graph() on what is tuned for these shapes.",
                )
            if isinstance(choice.module, Absent):
                raise choice.module.refusal(OTHER, choice.differences(args, kwargs) or why)
            choice.last_difference = CAPTURED
            return choice.eager(CAPTURED, choice.module, args, kwargs)
        choice.calls["tuned, inside of a capture"] += 1
        name = f"what tune() made of {type(choice.module).__name__} ({choice.report.chosen})"
        assert choice.watch is not None
        parts.add(name, choice.watch, built.packed)
        with torch.no_grad(), running_part():
            return built.call(*mine, **named)

    def explain(self) -> str:
        """What runs and why, when it falls back, and how calls went so far, in words."""
        choice = self._choice
        lines = [f"strategy: {choice.report.chosen}", choice.report.reason]
        lines += [f"loaded from a file: {what}" for what in choice.loaded]
        change = None if choice.watch is None else choice.watch.changed()
        absent = isinstance(choice.module, Absent)
        goes = "is refused" if absent else "goes to the module itself"
        if not choice.table:
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
        for way, count in choice.calls.most_common():
            lines.append(f"{counted(count, 'call')} {way}")
        if choice.last_difference is not None:
            lines.append(f"last call that did not match: {choice.last_difference}")
        return "\n".join(line for line in lines if line)

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
        copies = any(built.holds_weights for built in builts)
        compiled_checks.offer()
        watch = ModuleWatch(module, values=copies, audit=audit, checks=checks)
    if watch is not None and checks == "full":
        for depends in filter(None, (built.depends for built in builts)):
            watch.join(depends)
    calls: list[Callable[..., Any]] = [built.call for built in builts]
    if eager:  # What tune() gives never requires grad, eager included.
        calls = [eager_without_grad(module, same_under_no_grad)] * len(builts)
    table: list[Entry] = list(zip(signatures, calls, strict=True))
    padded = None
    if origin.ranges:
        table.append((RangedSignature(signatures[-1], origin.ranges), calls[-1]))
    elif pad_with is not None and pure and not eager:
        padded = pad_with(list(zip(signatures, calls, strict=True)))
    found: list[Shortcut | None] = []
    if watch is not None and pure:
        unchanged, training = watch.unchanged, in_training(module)
        # Where several calls were tuned, they are told apart by their signatures.
        alike: Checks = "signature" if checks == "none" and len(builts) > 1 else checks
        # A launch takes the arguments in a row, in the order of the signature.
        ordered = model_sees_order(module)
        found = [
            shortcut(
                signature if ordered else signature.in_any_order(),
                built.launch,
                unchanged,
                training=training,
                checks=alike,
            )
            for signature, built in zip(signatures, builts, strict=True)
        ]
    short = [each for each in found if each is not None]
    found_inside = [
        (id(call), built.inside_of_capture(origin.device))
        for call, built in zip(calls, builts, strict=True)
    ]
    return TunedModule(
        module,
        report,
        table,
        watch,
        pure,
        same_under_no_grad,
        padded,
        short,
        origin,
        loaded,
        {} if eager else {key: built for key, built in found_inside if built is not None},
        on_miss,
    )


def put_together(module: nn.Module, apart: Apart) -> TunedModule:
    """For what was tuned of a model that was taken apart: the model, called with objects.

    Args:
        module: the model, or what stands in for it.
        apart: what was tuned.
    """
    choice, count = apart.tuned._choice, len(apart.calls)
    eager = choice.report.chosen == EAGER and not isinstance(module, Absent)
    table: list[Entry] = []
    by_key: dict[Any, list[Entry]] = {}
    for number, (call, made) in enumerate(zip(apart.calls, apart.made, strict=True)):
        answer = with_objects(choice.table[number][1], call.signature, made, kind_of(number, count))
        if eager:
            answer = eager_without_grad(module, choice.same_under_no_grad)
        table.append((call.signature, answer))
        by_key.setdefault(key_with_objects(*call.anew()), []).append(table[-1])
    tuned = TunedModule(
        module,
        choice.report,
        table,
        None if eager else choice.watch,
        same_under_no_grad=choice.same_under_no_grad,
        loaded=choice.loaded,
        on_miss=choice.on_miss,
    )
    if eager:
        tuned._choice.plain = module.function_of() if isinstance(module, Called) else module
    tuned._choice.apart, tuned._choice.by_key = apart, by_key
    return tuned


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


def _distance(call: CallSignature, other: CallSignature | RangedSignature) -> tuple[float, int]:
    """How far a call is from another: how many leaves differ, and by how many elements.

    Those with the same arguments are nearer than all others.
    """
    base = other.base if isinstance(other, RangedSignature) else other
    if call.spec != base.spec:
        mine, its = call.by_name().items(), base.by_name().items()
        return math.inf, len(mine ^ its)
    apart = [pair for pair in zip(call.leaves, base.leaves, strict=True) if pair[0] != pair[1]]
    shapes = [(a[0], b[0]) for a, b in apart if len(a) == len(b) == 5]
    return len(apart), sum(abs(math.prod(a) - math.prod(b)) for a, b in shapes)


def _wants_grad(args: Args, kwargs: Kwargs) -> bool:
    for value in (*args, *kwargs.values()):
        if type(value) is torch.Tensor:
            if value.requires_grad:
                return True
        elif any(tensor.requires_grad for tensor in tensors_of(value)):
            return True
    return False
