"""Calls that nothing tuned answers: they go to the module itself, or are refused."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import nn

from ..calls.binding import sees_order
from ..calls.split import Args, Kwargs
from ..dispatch.decision import CAPTURED, CHANGED, GRADIENTS, TRANSFORMED
from ..dispatch.fallback import Fallback, Words
from ..errors import SignatureError
from ..graphs.capture_turns import turns_of

# Reasons why a call falls back to the module that hold for what was tuned alone.
NOTHING_TUNED, OTHER, NO_BUCKET = "nothing tuned", "another signature", "no bucket"
# Of these the caller knows, whatever was tuned.
_INTENDED = (GRADIENTS, TRANSFORMED, CAPTURED)
# What is done with a call that was not tuned.
OnMiss = Literal["eager", "error"]


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


class ModelFallback(Fallback):
    """What is done with calls that nothing tuned answers: the module itself does, if there is one.

    Attributes:
        calls: how many calls went which way, those that were answered too.
        missed: is told the arguments of each call that was not tuned, before it runs; None for
            nobody.
        elsewhere: gives what answers calls of the module as it is by now, since it has changed;
            None, or a result of None, for nothing but the module itself.

    Args:
        module: what was tuned.
        on_miss: what is done with a call that was not tuned.
        quiet: whether eager was chosen, so that nothing is lost.
    """

    on_miss: OnMiss

    def __init__(self, module: nn.Module, on_miss: OnMiss, *, quiet: bool) -> None:
        words = None if quiet else functools.partial(_words, module)
        super().__init__(words, on_miss, self._count_eager)
        self.calls: Counter[str] = Counter()
        self.missed: Callable[[Args, Kwargs], object] | None = None
        self.elsewhere: Callable[[], Callable[..., Any] | None] | None = None
        self._module = module
        self._turns = turns_of(module, getattr(module, "_function", None))

    def _count_eager(self, kind: str) -> None:
        self.calls[f"eager: {kind}"] += 1

    def answer(
        self,
        kind: str,
        call: Callable[..., Any],
        args: Args,
        kwargs: Kwargs,
        why: str | None = None,
    ) -> Any:
        """Call the module itself, if there is one, and count the call by its reason.

        Args:
            kind: one of the reasons above.
            call: runs the module.
            args: of the call.
            kwargs: likewise.
            why: how the call differs, in words, unless that is known.

        Raises:
            SignatureError: there is no module; or on_miss="error", and the call was not tuned.
        """
        if kind == CHANGED and self.elsewhere is not None:
            other = self.elsewhere()
            if other is not None:
                return other(*args, **kwargs)
        if why is not None:
            self.last = why
        if isinstance(self._module, Absent):
            self.calls[f"refused: {kind}"] += 1
            raise self._module.refusal(kind, self.last)
        how = "" if self.last is None or self.last == kind else self.last
        if kind not in _INTENDED:
            self.refuse(f"{kind} ({how.rstrip('.')})." if how else f"{kind}.")
        self.tell(kind, how)
        self.count(kind)
        if self.missed is not None and kind in (OTHER, NO_BUCKET):
            self.missed(args, kwargs)
        with self._turns.calling():
            return call(*args, **kwargs)


def _words(module: nn.Module) -> Words:
    """How it is said that nothing tuned answers a call."""
    what = f"What tune() made of {type(module).__name__}"
    return Words(
        what,
        "`calls` and explain() count them.",
        f"{what} does not answer this call",
        "Tune for it too (samples=, buckets=), or allow on_miss='eager'.",
    )


def model_sees_order(module: nn.Module) -> bool:
    """Whether a model, or the one that is absent, may see the order of keyword arguments."""
    return module.sees_order if isinstance(module, Absent) else sees_order(module)
