"""What `tune` returns: the module as it was, with a faster way to call it."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..calls.modes import opaque
from ..calls.modules import ModuleProxy, in_training
from ..calls.signature import (
    Args,
    CallSignature,
    Kwargs,
    Range,
    RangedSignature,
    inside_transform,
    tensors_of,
)
from ..calls.watch import ModuleWatch, unread_in_words
from ..dispatch.fast_path import MISS, Shortcut, shortcut
from ..errors import SignatureError
from ..graphs.conditions import captured_by_others, capturing_now
from ..graphs.turns import turns_of
from ..report.report import Report
from ..report.result import EAGER
from ..strategies.base import Built, Candidate

if TYPE_CHECKING:
    from .padded_calls import PaddedCalls


def quiet_eager(module: nn.Module, same_without_grad: bool) -> Callable[..., Any]:
    """The module's own answer, not requiring grad.

    Where a module computes other numbers under no_grad, gradients are cut off afterwards.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if same_without_grad:
            with torch.no_grad():
                return module(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, module(*args, **kwargs))

    return call


# Why a call goes to the module itself, as it is counted.
GRADIENTS, NOTHING_TUNED = "gradients are wanted", "nothing tuned"
TRANSFORMED = "it is traced or transformed"
CAPTURED = "it is captured"
CHANGED, OTHER, NO_BUCKET = "the module changed", "another signature", "no bucket"


class Absent(nn.Module):
    """Stands for a model that `load` was not given: it answers no call."""

    def __init__(self) -> None:
        super().__init__()
        self.training = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise SignatureError."""
        raise self.refusal("it goes to the model", None)

    def refusal(self, kind: str, why: str | None) -> SignatureError:
        """What a call is told that the model would answer.

        Args:
            kind: of reason why the call goes to the model, as `calls` counts it.
            why: in words, where it is known.
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


# The calls that something was built for, and that.
Entry = tuple[CallSignature | RangedSignature, Callable[..., Any]]


@dataclass(frozen=True)
class Origin:
    """What a TunedModule was made of, for `save`.

    Attributes:
        candidate: that was chosen.
        builts: what was built for each sample.
        samples: the calls, with what they are judged by.
        device: where they run.
        ranges: of sizes, all of which what was built answers.
    """

    candidate: Candidate
    builts: Sequence[Built]
    samples: Sequence[Any]
    device: torch.device
    ranges: tuple[Range, ...] = ()


class _Choice:
    """What a TunedModule knows beside the module: the winner and when it may be called."""

    def __init__(
        self,
        module: nn.Module,
        report: Report,
        table: Sequence[Entry],
        watch: ModuleWatch | None,
        pure: bool,
        quiet: bool,
        filled: PaddedCalls | None,
        shortcuts: Sequence[Shortcut],
        origin: Origin | None,
        loaded: Sequence[str],
    ) -> None:
        self.module = module
        self.report = report
        self.table = list(table)
        self.watch = watch
        self.copies = watch is not None and watch.values
        self.pure = pure
        self.quiet = quiet
        self.filled = filled
        self.shortcuts = tuple(shortcuts)
        self.origin = origin
        self.loaded = tuple(loaded)
        self.turns = turns_of(module, getattr(module, "_function", None))
        self.calls: Counter[str] = Counter()
        self.last_difference: str | None = None

    def fitting(self, args: Args, kwargs: Kwargs) -> Entry | None:
        """What answers a call, and the signature it was built for; None where nothing does."""
        for entry in self.table:
            if entry[0].fits(args, kwargs):
                return entry
        return None

    def filling(
        self, filled: PaddedCalls, args: Args, kwargs: Kwargs
    ) -> tuple[str, Callable[..., Any] | None]:
        """What answers a call between the buckets; else the kind of reason why nothing does."""
        change = filled.outdated()
        if change is not None:
            self.last_difference = change
            return CHANGED, None
        answer = "it is traced or transformed"
        if not inside_transform():
            found = filled.fitting(args, kwargs)
            if not isinstance(found, str):
                return "", found
            answer = found
        self.last_difference = answer
        return NO_BUCKET, None

    def attempt(self, tuned: Callable[..., Any], args: Args, kwargs: Kwargs) -> tuple[bool, Any]:
        """Call the winner and then look whether the module had changed; True if the result counts.

        A call that changes nothing may begin first: the GPU works while the module is looked
        over, and a result that came too late is dropped.
        """
        watch = self.watch
        if watch is None:
            return True, tuned(*args, **kwargs)
        if not self.pure:
            if self.outdated(watch):
                return False, None
            return True, tuned(*args, **kwargs)
        try:
            result = tuned(*args, **kwargs)
        except Exception:
            if self.outdated(watch):
                return False, None
            raise
        return (False, None) if self.outdated(watch) else (True, result)

    def differences(self, args: Args, kwargs: Kwargs) -> str | None:
        """How a call differs from what was tuned for: from a range of sizes, or the nearest."""
        signatures = [signature for signature, _ in self.table]
        found = [each for each in signatures if isinstance(each, RangedSignature)] or signatures
        if len(found) > 1 and not inside_transform():
            with contextlib.suppress(SignatureError):
                found.sort(key=functools.partial(_distance, CallSignature.of(args, kwargs)))
        return found[0].differences(args, kwargs) if found else None

    def eager(self, kind: str, call: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """The module's own answer, if there is a module, counted by the kind of reason."""
        if not isinstance(self.module, Absent):
            self.calls[f"eager: {kind}"] += 1
            with self.turns.calling():
                return call(*args, **kwargs)
        self.calls[f"refused: {kind}"] += 1
        if kind == NO_BUCKET:
            # What the nearest bucket is says more than that there are no plans.
            self.last_difference = self.differences(args, kwargs) or self.last_difference
        raise self.module.refusal(kind, self.last_difference)

    def outdated(self, watch: ModuleWatch) -> bool:
        """Whether the module has changed; the reason is kept for `explain`."""
        change = watch.changed()
        if change is not None:
            self.last_difference = change
        return change is not None


class TunedModule(ModuleProxy):
    """The module that was tuned, called by the strategy that was chosen.

    It shares the module's attributes: parameters(), state_dict(), to(), train(), hooks and all
    else read and change the one module. A call that differs from the tuned one in shapes, dtypes,
    devices, plain values, autocast or backend switches, or that comes after the module changed,
    goes to the module itself, and `calls` counts it by its reason. Outputs never require grad,
    unless the module is in training mode or an input requires grad while gradients are on: then
    the module is called as it is and gradients flow.

    Attributes:
        report: what was measured, verified and chosen.
        calls: how many calls went which way.
    """

    __slots__ = ("_choice",)

    def __init__(
        self,
        module: nn.Module,
        report: Report,
        table: Sequence[Entry] = (),
        watch: ModuleWatch | None = None,
        pure: bool = False,
        quiet: bool = True,
        filled: PaddedCalls | None = None,
        shortcuts: Sequence[Shortcut] = (),
        origin: Origin | None = None,
        loaded: Sequence[str] = (),
    ) -> None:
        super().__init__(module)
        choice = _Choice(
            module, report, table, watch, pure, quiet, filled, shortcuts, origin, loaded
        )
        object.__setattr__(self, "_choice", choice)

    _choice: _Choice

    @property
    def report(self) -> Report:
        """What was measured, verified and chosen."""
        return self._choice.report

    @property
    def calls(self) -> Counter[str]:
        """Calls by where they went: "tuned", filled up or not, or "eager: " and the reason.

        Of what was loaded without the model "refused: " and the reason.
        """
        return self._choice.calls

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the winner, or the module itself where the winner does not fit."""
        choice = self._choice
        if (capturing_now() or (choice.copies and captured_by_others())) and not isinstance(
            choice.module, Absent
        ):
            # A graph would keep the winner's copies, and its owner would not know of them.
            choice.last_difference = CAPTURED
            return choice.eager(CAPTURED, choice.module, args, kwargs)
        if not choice.module.training:
            for short in choice.shortcuts:
                result = short(args, kwargs)
                if result is not MISS:
                    choice.calls["tuned"] += 1
                    return result
        found = choice.fitting(args, kwargs)
        if found is None and inside_transform():
            choice.last_difference = "it is traced or transformed"
            return choice.eager(TRANSFORMED, choice.module, args, kwargs)
        if torch.is_grad_enabled() and (
            choice.module.training
            or (choice.watch is None and any(map(in_training, choice.module.modules())))
            # What fits requires grad exactly where the sample did.
            or (found[0].wants_grad if found is not None else _wants_grad(args, kwargs))
        ):
            choice.last_difference = "training mode, or an input that requires grad"
            return choice.eager(GRADIENTS, choice.module, args, kwargs)
        tuned, way = (None, "tuned") if found is None else (found[1], "tuned")
        kind = OTHER if choice.table else NOTHING_TUNED
        if found is None and choice.filled is not None:
            kind, tuned = choice.filling(choice.filled, args, kwargs)
            way = "tuned, filled up to a bucket"
        elif found is None and choice.report.chosen != EAGER:
            choice.last_difference = choice.differences(args, kwargs)
        if tuned is not None:
            counts, result = choice.attempt(tuned, args, kwargs)
            if counts:
                choice.calls[way] += 1
                return result
            kind = CHANGED
        if torch.is_grad_enabled() and any(map(in_training, choice.module.modules())):
            choice.last_difference = "a part of the module is in training mode"
            return choice.eager(GRADIENTS, choice.module, args, kwargs)
        return choice.eager(kind, quiet_eager(choice.module, choice.quiet), args, kwargs)

    def explain(self) -> str:
        """What runs now and why, what it costs, and how the calls went so far."""
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
                + ("" if every is None else f" once in {every} calls.")
            )
        if choice.watch is not None:
            lines += unread_in_words(choice.watch)
        if change is not None:
            lines.append(f"Every call now {goes}, since {change}.")
            if not absent:
                lines.append("Call graphwright.tune() again to tune the module as it is now.")
        for way, count in choice.calls.most_common():
            lines.append(f"{count} call{'s' * (count != 1)} {way}")
        if choice.last_difference is not None:
            lines.append(f"last call that did not fit: {choice.last_difference}")
        return "\n".join(line for line in lines if line)

    def extra_repr(self) -> str:
        """Shown by repr()."""
        return f"strategy={self._choice.report.chosen!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> TunedModule:
        # What was built belongs to the original's weights; a copy starts untuned, and says so.
        module = copy.deepcopy(self._choice.module, memo)
        return TunedModule(module, self._choice.report, quiet=self._choice.quiet)

    def __reduce__(self) -> tuple[Any, ...]:
        choice = self._choice
        return TunedModule, (choice.module, choice.report, (), None, False, choice.quiet)


def assembled(
    module: nn.Module,
    report: Report,
    signatures: Sequence[CallSignature],
    origin: Origin,
    *,
    pure: bool,
    quiet: bool,
    filling: Callable[[list[tuple[CallSignature, Callable[..., Any]]]], PaddedCalls] | None = None,
    loaded: Sequence[str] = (),
    audit: int | None = None,
) -> TunedModule:
    """The module with one of the candidates to answer its calls.

    Args:
        module: that was tuned.
        report: of it.
        signatures: of the calls that something was built for.
        origin: the candidate, and what was built for each of them.
        pure: whether a call changes nothing.
        quiet: whether eager computes the same under no_grad.
        filling: makes of what was built what answers calls between the buckets.
        loaded: what was done to load it from a file, in words.
        audit: every so many calls, compare the values of weights that it holds a copy of.
    """
    builts, eager = origin.builts, origin.candidate.name == EAGER
    watch = None
    if origin.candidate.name.split(":")[0] != EAGER:  # Eager needs no watching.
        copies = any(built.holds_weights for built in builts)
        watch = ModuleWatch(module, values=copies, audit=audit)
    calls: list[Callable[..., Any]] = [built.call for built in builts]
    if eager:  # What tune() gives never requires grad, eager included.
        calls = [quiet_eager(module, quiet)] * len(builts)
    table: list[Entry] = list(zip(signatures, calls, strict=True))
    filled = None
    if origin.ranges:
        table.append((RangedSignature(signatures[-1], origin.ranges), calls[-1]))
    elif filling is not None and pure and not eager:
        filled = filling(list(zip(signatures, calls, strict=True)))
    found: list[Shortcut | None] = []
    if watch is not None and pure:
        unchanged, training = watch.unchanged, in_training(module)
        found = [
            shortcut(signature, built.launch, unchanged, training=training)
            for signature, built in zip(signatures, builts, strict=True)
        ]
    short = [each for each in found if each is not None]
    return TunedModule(module, report, table, watch, pure, quiet, filled, short, origin, loaded)


def _distance(call: CallSignature, other: CallSignature | RangedSignature) -> tuple[float, int]:
    """How far a call is from another: by the leaves that differ, and by their sizes."""
    base = other.base if isinstance(other, RangedSignature) else other
    if call.spec != base.spec:
        return math.inf, 0
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
