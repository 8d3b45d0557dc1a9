"""Calls between the sizes that were tuned for: inputs are padded and outputs are sliced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..calls.leaves import are_plain
from ..calls.signature import CallSignature, quick_key
from ..calls.split import Args, Kwargs, flatten, unflatten
from ..calls.watch import HELD, ModuleWatch
from ..errors import GraphwrightError, first_line, in_a_row
from ..shapes.padding import PaddingPlan, Sizes, Value

# What was built for a call, behind the signature of that call.
Tuned = tuple[CallSignature, Callable[..., Any]]
# Shape and strides of each of a call's tensors, None for its other leaves.
ShapeKey = tuple[tuple[Sizes, Sizes] | None, ...]
OTHER_KIND = "it is of another kind than what was tuned for"
# How many planned calls are cached.
_MAX_CACHED = 1 << 14


@dataclass(frozen=True)
class PlannedCall:
    """How to answer calls of some shapes.

    Attributes:
        plan: pads the inputs and slices the outputs.
        tuned: what answers the padded call.
        strides: those of the call's tensors; for others a new plan is needed.
    """

    plan: PaddingPlan
    tuned: Tuned
    strides: tuple[tuple[int, ...], ...]


class PaddedCalls:
    """Answers calls that have no bucket's size by what was built for a larger one.

    Args:
        module: the model; plans hold for it as it is now, with its present weights.
    """

    def __init__(self, module: nn.Module) -> None:
        self._watch = ModuleWatch(module, values=True)
        self._cache: dict[Any, PlannedCall] = {}

    def outdated(self) -> str | None:
        """What has changed in the module, so that no plan holds any more; None if nothing."""
        change = self._watch.changed()
        return change and change.replace(
            HELD, "and padding was proved for other values: tune again"
        )

    def callable_for(self, args: Args, kwargs: Kwargs) -> Callable[..., Any] | str:
        """What answers a call when called with its arguments; or why nothing does.

        Ask `outdated` first.
        """
        key = quick_key(args, kwargs)
        planned = None if key is None else self._cache.get(key)
        leaves, _ = flatten(args, kwargs)
        if planned is None or not are_plain(leaves) or planned.strides != strides_of(leaves):
            try:
                found = self._plan(args, kwargs)
            except GraphwrightError as error:
                return in_a_row(error)
            except Exception as error:
                return f"what was chosen fails on a padded call: {first_line(error)}"
            if isinstance(found, str):
                return found
            planned = found
            if key is not None and are_plain(leaves):
                if len(self._cache) >= _MAX_CACHED:
                    self._cache.clear()
                self._cache[key] = planned
        signature, call = planned.tuned
        plan = planned.plan
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

    def difference(self, args: Args, kwargs: Kwargs) -> str | None:
        """How a call of another kind differs in more than sizes, in words; None if nobody knows."""
        return None

    def plans(self) -> dict[ShapeKey, tuple[PaddingPlan, int]]:
        """For `save`: plans, each with the index of its bucket, by the shapes of calls."""
        raise NotImplementedError

    def fills(self) -> Sequence[Value]:
        """The pad value of each of a call's leaves; empty if there are no plans."""
        raise NotImplementedError

    def _plan(self, args: Args, kwargs: Kwargs) -> PlannedCall | str:
        """How to answer a call; or why it cannot be padded."""
        raise NotImplementedError


class StoredPaddedCalls(PaddedCalls):
    """Pads calls by plans from a file, which were proved before they were saved.

    Args:
        plans: what `plans()` gave; no tensors of such a call share memory.
        table: what was built for each bucket, with the signature it was built for.
        module: the model.
    """

    def __init__(
        self,
        plans: Mapping[ShapeKey, tuple[PaddingPlan, int]],
        table: Sequence[Tuned],
        module: nn.Module,
    ) -> None:
        super().__init__(module)
        self._plans = dict(plans)
        self._table = list(table)

    def plans(self) -> dict[ShapeKey, tuple[PaddingPlan, int]]:
        return dict(self._plans)

    def fills(self) -> Sequence[Value]:
        return next((plan.fills for plan, _ in self._plans.values()), ())

    def _plan(self, args: Args, kwargs: Kwargs) -> PlannedCall | str:
        leaves, spec = flatten(args, kwargs)
        found = self._plans.get(shape_key(leaves))
        if found is None:
            return "nothing that was saved answers its sizes"
        plan, tuned = found[0], self._table[found[1]]
        signature = CallSignature.of(args, kwargs)
        if spec != tuned[0].spec or signature.aliases:
            return OTHER_KIND
        return PlannedCall(plan, tuned, strides_of(leaves))


def shape_key(leaves: Sequence[Any]) -> ShapeKey:
    """The key that plans are stored under."""
    return tuple(
        (tuple(leaf.shape), leaf.stride()) if isinstance(leaf, torch.Tensor) else None
        for leaf in leaves
    )


def strides_of(leaves: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Strides of a call's tensors; `()` for its other leaves."""
    return tuple(leaf.stride() if isinstance(leaf, torch.Tensor) else () for leaf in leaves)
