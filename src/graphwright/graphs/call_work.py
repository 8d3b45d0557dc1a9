"""CallWork: runs a call on static inputs, and takes apart what it returns and does to objects."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from ..calls.objects import has_objects
from ..calls.places import Written
from ..calls.split import objects_tree
from ..errors import SignatureError
from .call_spec import CallSpec
from .conditions import autocast_cache_apart
from .effects import GivenObjects, Unrepeatable
from .python_state import PythonState
from .segments.tracer import Untraceable
from .static_inputs import Geometry, StaticInputs


class Reach(Protocol):
    """What knows the objects that a module holds: they stay the same."""

    @property
    def objects(self) -> list[Any]: ...


class CallWork:
    """The work of a call, as warm-up, recordings and new paths run it.

    Args:
        spec: what is called.
        known: attributes and items outside of it to which other calls write.

    Attributes:
        known: likewise.
        candidates: those that it may write to.
        places: those to which each run writes, once that is known.
        has_effects: whether a run changed or returned objects that it was given.
        reach: what the module holds.
        answers: whether it is recorded, so that a run answers a call.
    """

    def __init__(self, spec: CallSpec, known: Sequence[Written] = ()) -> None:
        self.known = list(known)
        self.candidates: list[Written] = []
        self.places: list[Written] = []
        self.has_effects = False
        self.reach: Reach | None = None
        self.answers = False
        self._spec = spec
        # The objects that the last run was given.
        self._given: GivenObjects | None = None

    def begin_anew(self) -> None:
        """Forget to which places it writes, before it is warmed up again."""
        self.candidates[:], self.places[:] = self.known, []

    @contextlib.contextmanager
    def beginning_with(self, state: PythonState) -> Iterator[None]:
        """Run it inside the block, with the Python side of its state as it was at the start."""
        if self._spec.takes_objects and self._spec.trained is None:
            state.allow_writes(self.candidates, self.places)
            self.reach = state
        try:
            yield
        finally:
            self.reach = self._given = None

    def __call__(self, inputs: StaticInputs) -> Any:
        """Run the call on static inputs; lazily conjugated or negated results are materialized."""
        args, kwargs = self._spec.arguments(inputs.leaves)
        holds = self._spec.holds_objects
        self._given = given = GivenObjects(objects_tree(args, kwargs)) if holds else None
        addresses = [inputs.tensor(slot).data_ptr() for slot in inputs.slots]
        with autocast_cache_apart():
            result = self._spec.fn(*args, **kwargs)
            _refuse_changed_inputs(inputs, addresses)
            tree = self._outcome(given, result)
            return pytree.tree_map_only(torch.Tensor, resolved, tree)

    def effects_so_far(self) -> Any:
        """What the last run has done to the objects it was given; None if it did nothing."""
        given = self._given
        if given is not None and self._spec.takes_objects:
            with contextlib.suppress(Unrepeatable, SignatureError):
                tree, effects = given.outcome(None)
                return pytree.tree_map_only(torch.Tensor, resolved, tree) if effects else None
        return None

    def _outcome(self, given: GivenObjects | None, result: Any) -> Any:
        """What the call returned, taken apart, with what it did to the objects it was given."""
        places = self.places
        if given is None and not (places or has_objects(pytree.tree_leaves(result))):
            return result
        given = GivenObjects(()) if given is None else given
        try:
            if self._spec.takes_objects:
                owned = [] if self.reach is None else self.reach.objects
                tree, effects = given.outcome(result, places, owned)
                if effects and self.answers and not self._spec.fresh:
                    raise Unrepeatable("and outputs='static' would leave what is overwritten in it")
                self.has_effects = self.has_effects or effects
                return tree
            if given.changes()[0]:
                raise Unrepeatable("whose length or values then differ")
        except Unrepeatable as error:
            raise Untraceable(
                f"The call changes a container that it is given, {error}; a graph would not.",
                remedy="Return what is new instead, or capture a function that passes copies, "
                "such as `lambda features: model(dict(features))`.",
            ) from error
        return result


def _refuse_changed_inputs(inputs: StaticInputs, addresses: Sequence[int]) -> None:
    """Refuse a call that gives an argument's tensor another shape or other memory."""
    for leaf, geometry in zip(inputs.leaves, inputs.geometries, strict=True):
        if isinstance(leaf, torch.Tensor) and Geometry.of(leaf) != geometry:
            break
    else:
        if addresses == [inputs.tensor(slot).data_ptr() for slot in inputs.slots]:
            return
    raise Untraceable(
        "The call changes the shape or memory of a tensor that it is given; a graph would not.",
        remedy="Return what is new instead.",
    )


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, materialized if it is lazily conjugated or negated."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.resolve_conj().resolve_neg() if lazy else tensor
