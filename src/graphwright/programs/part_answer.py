"""What answers a method in an accelerated program, and keeps calls that it was not tuned for."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..artifacts.tuned_module import TunedModule, choice_of
from ..calls.dependencies import FORWARD_HOOKS
from ..calls.snapshots import clone_leaves
from ..calls.split import Args, Kwargs, flatten, unflatten
from ..calls.switches import differences, read
from ..calls.watch import HELD
from ..errors import GraphwrightError
from .installation import twin_of
from .observed_calls import FORWARD, described
from .part_calls import PartCalls

# So many kinds of calls that were not tuned for are kept with their arguments, to be learned.
_MOST_MISSED = 8
# In so many states of a module something answers, each with memory of its own.
_MOST_STATES = 8
# In a state that nothing was tuned in, states are compared at one call in so many.
_LOST_LOOKS = 16


class TunedAnswer:
    """Answers calls of a method by what tuning has made of it.

    The module may get into another state than it was tuned in: another adapter is active, say. What
    was tuned in each state is kept, and answers when the module is in that state again.

    Hooks of the module run around `forward`, as ever: a call of a module that has some goes to the
    method itself, since what was tuned may hold them, too. So does a call through which gradients
    flow to parameters.

    Attributes:
        tuned: what tuning has made, in the state that was seen last.
        known: the calls that it was tuned for; None if these are not known.
        missed: calls that were not tuned for, the first of each kind.
        is_left: whether a call came in a state that nothing was tuned in.
        tune_here: tunes the method in the state that it is in, when a call comes in a new one; None
            to leave that to `learn()`.

    Args:
        module: the module.
        method: the name of the method.
        tuned: what tuning has made of it.
        known: as the attribute.
        others: what it has made of it in other states.
    """

    def __init__(
        self,
        module: nn.Module,
        method: str,
        tuned: TunedModule,
        known: PartCalls | None = None,
        others: Sequence[TunedModule] = (),
    ) -> None:
        self.tuned, self.known = tuned, known
        self.missed: list[tuple[Args, Kwargs]] = []
        self.is_left = False
        self.tune_here: Callable[[], TunedModule | None] | None = None
        self._kinds: set[tuple[tuple[str, str], ...]] = set()
        self._lock = threading.RLock()
        self._has_hooks = method == FORWARD
        self._twin = twin_of(module)
        self._original: Callable[..., Any] = (
            self._twin if method == FORWARD else getattr(self._twin, method)
        )
        self._own_calls: Counter[str] = Counter()
        self._states: tuple[TunedModule, ...] = (tuned, *others)[:_MOST_STATES]
        self._lost = 0  # Calls in a row in a state that nothing was tuned in.
        own = {} if known is None else known.switches
        self._switches = {**read(), **own}

    def attach(self) -> None:
        """Be told of calls that what was tuned does not answer, as what is installed now."""
        for each in self._states:
            self._attach_to(each)

    def _attach_to(self, tuned: TunedModule) -> None:
        fallback = choice_of(tuned).fallback
        fallback.missed, fallback.elsewhere = self._note, self._answers_instead

    @property
    def calls(self) -> Counter[str]:
        """How many calls went which way."""
        return sum((each.calls for each in self._states), self._own_calls.copy())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what was tuned; or the method itself, where that alone does the same."""
        if self._has_hooks and has_hooks(self._twin):
            self._own_calls["eager: the module has hooks"] += 1
        elif torch.is_grad_enabled() and any(p.requires_grad for p in self._twin.parameters()):
            self._own_calls["eager: gradients flow through it"] += 1
        else:
            return self.tuned(*args, **kwargs)
        return self._original(*args, **kwargs)

    def of_other_states(self) -> list[TunedModule]:
        """What was tuned in other states of the module, as far as these may come back.

        Weights that were written to never do, for what holds copies of them.
        """
        found = []
        for each in self._states:
            watch = choice_of(each).watch
            change = None if watch is None else watch.changed()
            if change is not None and HELD not in change:
                found.append(each)
        return found

    def of_this_state(self) -> TunedModule | None:
        """What was tuned in the state that the module is in; None if nothing was."""
        return next(filter(_is_as_tuned, self._states), None)

    def _answers_instead(self) -> TunedModule | None:
        """What answers a call for which what answered last has found another state."""
        with self._lock:
            self._lost += 1
            # To compare takes longer than a small model's call: less often, where it finds nothing.
            looks = self._lost & (self._lost - 1) == 0 or self._lost % _LOST_LOOKS == 0
            found = self.of_this_state() if looks else None
            if found is None and self.tune_here and len(self._states) < _MOST_STATES:
                found = self.tune_here()
                if found is not None:
                    self._states = (found, *self._states)
                    self._attach_to(found)
            if found is None:
                self.is_left = True
            else:
                self.tuned, self._lost = found, 0
        return found

    def forget(self) -> None:
        """Forget the calls that were not tuned for: nothing is faster for them."""
        with self._lock:
            self.missed.clear()
            self._kinds.clear()
            self.is_left = False

    def _note(self, args: Args, kwargs: Kwargs) -> None:
        """Keep a call that was not tuned for, the first of its kind."""
        with self._lock, contextlib.suppress(GraphwrightError, torch.OutOfMemoryError):
            if len(self._kinds) == _MOST_MISSED or differences(self._switches, read()):
                return
            words, _ = described([f"{n}" for n in range(len(args))], args, dict(kwargs))
            kind = tuple(words.items())
            if kind not in self._kinds:
                leaves, spec = flatten(args, kwargs)
                self.missed.append(unflatten(clone_leaves(leaves), spec))
                self._kinds.add(kind)


def _is_as_tuned(tuned: TunedModule) -> bool:
    """Whether a module is in the state that it was tuned in."""
    watch = choice_of(tuned).watch
    return watch is None or watch.unchanged() or watch.changed() is None


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks run around a module's forward."""
    return any(getattr(module, name) for name in FORWARD_HOOKS)
