"""Calls between the sizes that something was built for: filled up, answered, and cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..calls.signature import Args, CallSignature, Kwargs, are_plain, flatten, quick_key, unflatten
from ..calls.watch import ModuleWatch
from ..errors import GraphwrightError, first_line
from ..shapes.padding import PaddingPlan, Sizes

# What was built for a call, and for which.
Tuned = tuple[CallSignature, Callable[..., Any]]
# Shape and strides of each of a call's tensors, None for its other leaves.
Shapes = tuple[tuple[Sizes, Sizes] | None, ...]
OTHER_KIND = "it is of another kind than what was tuned for"
_MAX_KNOWN = 1 << 14


@dataclass(frozen=True)
class Known:
    """A way to answer calls of some shapes, if their strides are these."""

    plan: PaddingPlan
    tuned: Tuned
    strides: tuple[tuple[int, ...], ...]


class PaddedCalls:
    """Answers calls that fit no bucket exactly by what was built for a larger one.

    Args:
        module: the model; what is known holds for it as it is now, its weights included.
    """

    def __init__(self, module: nn.Module) -> None:
        self._watch = ModuleWatch(module, values=True)
        self._known: dict[Any, Known] = {}

    def outdated(self) -> str | None:
        """What has changed of the module, so that nothing is known any more; None if nothing."""
        return self._watch.changed()

    def fitting(self, args: Args, kwargs: Kwargs) -> Callable[..., Any] | str:
        """What answers a call, to be called with its arguments; or why nothing does.

        To be asked of a module that is not `outdated`.
        """
        key = quick_key(args, kwargs)
        known = None if key is None else self._known.get(key)
        leaves, _ = flatten(args, kwargs)
        if known is None or not are_plain(leaves) or known.strides != strides_of(leaves):
            try:
                found = self._find(args, kwargs)
            except GraphwrightError as error:
                return error.what
            except Exception as error:
                return f"what was chosen fails on a filled-up call: {first_line(error)}"
            if isinstance(found, str):
                return found
            known = found
            if key is not None and are_plain(leaves):
                if len(self._known) >= _MAX_KNOWN:
                    self._known.clear()
                self._known[key] = known
        signature, call = known.tuned
        plan = known.plan
        with torch.no_grad():
            values = plan.pad(leaves)
        padded, named = unflatten(values, signature.spec)
        if not signature.fits(padded, named):
            return OTHER_KIND

        def answer(*args: Any, **kwargs: Any) -> Any:
            outputs, spec = pytree.tree_flatten(call(*padded, **named))
            with torch.no_grad():
                return pytree.tree_unflatten(plan.cut(outputs, leaves, values), spec)

        return answer

    def plans(self) -> dict[Shapes, tuple[PaddingPlan, int]]:
        """How calls are filled up and to which bucket, by the shapes of the calls: for `save`."""
        raise NotImplementedError

    def _find(self, args: Args, kwargs: Kwargs) -> Known | str:
        raise NotImplementedError


class StoredPaddedCalls(PaddedCalls):
    """By plans that were proved where they come from.

    Args:
        plans: as `plans()` gave them; no tensors of such a call share memory.
        table: what was built for each bucket, and for which call.
        module: the model.
    """

    def __init__(
        self,
        plans: Mapping[Shapes, tuple[PaddingPlan, int]],
        table: Sequence[Tuned],
        module: nn.Module,
    ) -> None:
        super().__init__(module)
        self._plans = dict(plans)
        self._table = list(table)

    def plans(self) -> dict[Shapes, tuple[PaddingPlan, int]]:
        return dict(self._plans)

    def _find(self, args: Args, kwargs: Kwargs) -> Known | str:
        leaves, spec = flatten(args, kwargs)
        found = self._plans.get(shapes_of(leaves))
        if found is None:
            return "nothing that was saved answers its sizes"
        plan, tuned = found[0], self._table[found[1]]
        signature = CallSignature.of(args, kwargs)
        if spec != tuned[0].spec or signature.aliases:
            return OTHER_KIND
        return Known(plan, tuned, strides_of(leaves))


def shapes_of(leaves: Sequence[Any]) -> Shapes:
    """The key by which plans are kept."""
    return tuple(
        (tuple(leaf.shape), leaf.stride()) if isinstance(leaf, torch.Tensor) else None
        for leaf in leaves
    )


def strides_of(leaves: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Of a call's tensors, nothing for its other leaves."""
    return tuple(leaf.stride() if isinstance(leaf, torch.Tensor) else () for leaf in leaves)
