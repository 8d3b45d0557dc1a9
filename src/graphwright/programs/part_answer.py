"""What answers a method in an accelerated program, and keeps calls that it was not tuned for."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..artifacts.tuned_module import TunedModule, choice_of
from ..calls.dependencies import FORWARD_HOOKS
from ..calls.snapshots import clone_leaves
from ..calls.split import Args, Kwargs, flatten, unflatten
from ..errors import GraphwrightError
from .installation import twin_of
from .observed_calls import FORWARD, described
from .part_calls import PartCalls

# So many kinds of calls that were not tuned for are kept with their arguments, to be learned.
_MOST_MISSED = 8


class TunedAnswer:
    """Answers calls of a method by what tuning has made of it.

    Hooks of the module run around `forward`, as ever: a call of a module that has some goes to the
    method itself, since what was tuned may hold them, too. So does a call through which gradients
    flow to parameters.

    Attributes:
        tuned: what tuning has made.
        known: the calls that it was tuned for; None if these are not known.
        missed: calls that were not tuned for, the first of each kind.
    """

    def __init__(
        self, module: nn.Module, method: str, tuned: TunedModule, known: PartCalls | None = None
    ) -> None:
        self.tuned, self.known = tuned, known
        self.missed: list[tuple[Args, Kwargs]] = []
        self._kinds: set[tuple[tuple[str, str], ...]] = set()
        self._lock = threading.Lock()
        self._has_hooks = method == FORWARD
        self._twin = twin_of(module)
        self._original: Callable[..., Any] = (
            self._twin if method == FORWARD else getattr(self._twin, method)
        )
        choice_of(tuned).fallback.missed = self._note

    @property
    def calls(self) -> Counter[str]:
        """How many calls went which way."""
        return self.tuned.calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what was tuned; or the method itself, where that alone does the same."""
        if self._has_hooks and has_hooks(self._twin):
            self.calls["eager: the module has hooks"] += 1
        elif torch.is_grad_enabled() and any(p.requires_grad for p in self._twin.parameters()):
            self.calls["eager: gradients flow through it"] += 1
        else:
            return self.tuned(*args, **kwargs)
        return self._original(*args, **kwargs)

    def forget(self) -> None:
        """Forget the calls that were not tuned for: nothing is faster for them."""
        with self._lock:
            self.missed.clear()
            self._kinds.clear()

    def _note(self, args: Args, kwargs: Kwargs) -> None:
        """Keep a call that was not tuned for, the first of its kind."""
        with self._lock, contextlib.suppress(GraphwrightError, torch.OutOfMemoryError):
            if len(self._kinds) == _MOST_MISSED:
                return
            words, _ = described([f"{n}" for n in range(len(args))], args, dict(kwargs))
            kind = tuple(words.items())
            if kind not in self._kinds:
                leaves, spec = flatten(args, kwargs)
                self.missed.append(unflatten(clone_leaves(leaves), spec))
                self._kinds.add(kind)


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks run around a module's forward."""
    return any(getattr(module, name) for name in FORWARD_HOOKS)
