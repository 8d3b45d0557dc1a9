"""Static outputs: what the work returned, and how fresh results for the caller are made of it.

Results are copied to memory that the caller owns; a view of an input, a weight or another result
stays such a view.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..calls.leaves import describe
from ..calls.objects import build, has_nodes
from ..calls.split import leaf_names
from ..errors import CaptureError, SignatureError
from .static_inputs import Geometry, StaticInputs, by_storage, is_dense, places_of

# Replays for positional arguments.
Launch = Callable[[Sequence[Any]], Any]
# Makes a result of its leaves.
Rebuild = Callable[[list[Any]], Any]
# Makes a launch of one that gives the leaves of results.
Around = Callable[[Launch, Rebuild], Launch]
# Turns the leaves of what the work returned into those that the caller gets.
Finish = Callable[[Sequence[Any]], list[Any]]
# Makes one result from the call's leaves and the copies of the bases.
_Maker = Callable[[Sequence[Any], Sequence[torch.Tensor]], Any]


class StaticOutputs:
    """What the work returned, and how to make the caller's results of it.

    Attributes:
        tree: what the work returned, in the graph's memory.
        bases: what has to be copied out: one tensor for a result, or the bytes that several results
            share.
        single: whether the work returned one tensor, which is the only base.
    """

    def __init__(
        self,
        tree: Any,
        inputs: StaticInputs,
        external: Container[int],
    ) -> None:
        """Plan how to make the caller's results.

        Args:
            tree: what the work returned.
            inputs: its static inputs.
            external: storages from outside, by identity; results in them are not copied.

        Raises:
            CaptureError: a result is an object that may hide tensors.
        """
        self.tree = tree
        refuse_results(tree)
        leaves, self._spec = pytree.tree_flatten(tree)
        self._unflatten = build if has_nodes(self._spec) else pytree.tree_unflatten
        self.bases: list[torch.Tensor] = []
        owners: dict[int, list[int]] = {}
        for slot in inputs.slots:
            if slot not in inputs.hosts:  # The caller's tensor is on the host, and no result is.
                owners.setdefault(inputs.tensor(slot).untyped_storage()._cdata, []).append(slot)
        makers: dict[int, _Maker] = {}
        for group in by_storage(leaves):
            tensors = [leaves[index] for index in group]
            storage = tensors[0].untyped_storage()
            slots = owners.get(storage._cdata)
            if slots is not None and storage.nbytes():
                made = [_view_of_input(tensor, inputs, slots) for tensor in tensors]
            elif storage._cdata in external:
                made = [_unchanged(tensor.detach()) for tensor in tensors]
            else:
                made = self._copied(tensors)
            makers |= zip(group, made, strict=True)
        self._makers = [
            makers[index] if index in makers else _unchanged(leaf)
            for index, leaf in enumerate(leaves)
        ]
        self._leaves = leaves
        self.single = len(self.bases) == 1 and tree is self.bases[0]

    def _copied(self, tensors: Sequence[torch.Tensor]) -> list[_Maker]:
        """Plan how to make results of one storage from a copy of it."""
        number = len(self.bases)
        if all(tensor is tensors[0] for tensor in tensors) and is_dense(tensors[0]):
            self.bases.append(tensors[0])
            return [_base(number)] * len(tensors)
        nbytes, places = places_of(tensors)
        self.bases.append(_range(tensors, places, nbytes))
        return [_view_of_base(number, *each) for each in zip(places, tensors, strict=True)]

    def alike(self, other: StaticOutputs) -> bool:
        """Whether both are the same tree with the same plain values; tensors are not compared."""
        if self._spec != other._spec:
            return False
        pairs = zip(self._leaves, other._leaves, strict=True)
        return all(describe(mine) == describe(its) for mine, its in pairs)

    def again_leaves(self) -> Sequence[Any]:
        """The leaves of what the work returned, in the graph's memory."""
        return self._leaves

    def again(self, finish: Finish | None = None) -> Any:
        """What the work returned, in new containers that the caller may change."""
        results = self._leaves if finish is None else finish(self._leaves)
        return self._unflatten(results, self._spec)

    def build(
        self,
        leaves: Sequence[Any],
        copies: Sequence[torch.Tensor],
        finish: Finish | None = None,
        *,
        apart: bool = False,
    ) -> Any:
        """Make the caller's results.

        Args:
            leaves: leaves of the call's arguments.
            copies: copies of the `bases` that the caller owns.
            finish: turns the leaves of the results into those that the caller gets.
            apart: whether these leaves are all that is made.
        """
        if self.single and not apart:
            return copies[0] if finish is None else finish(copies)[0]
        made: dict[int, Any] = {}
        results = []
        for leaf, make in zip(self._leaves, self._makers, strict=True):
            if id(leaf) not in made:
                made[id(leaf)] = make(leaves, copies)
            results.append(made[id(leaf)])
        if finish is not None:
            results = finish(results)
        return results if apart else self._unflatten(results, self._spec)

    def rebuilder(self) -> Rebuild:
        """Makes results of such leaves; it holds none of the graph's memory."""
        unflatten, spec = self._unflatten, self._spec
        return operator.itemgetter(0) if self.single else lambda leaves: unflatten(leaves, spec)


def refuse_results(tree: Any) -> None:
    """Raise CaptureError where results hold something that a graph could not give again.

    Args:
        tree: what the work returned.
    """
    for index, leaf in enumerate(pytree.tree_leaves(tree)):
        try:
            describe(leaf)
        except SignatureError:
            try:
                describe(leaf, leaf_names(tree, "output")[index])
            except SignatureError as error:
                raise CaptureError(
                    error.what,
                    remedy="Return tensors, plain values, and containers and objects of them.",
                ) from error


def _range(tensors: Sequence[torch.Tensor], places: Sequence[int], nbytes: int) -> torch.Tensor:
    """The bytes that tensors of one storage span together, as 1-D uint8."""
    storage = tensors[0].untyped_storage()
    start = 0
    for tensor, place in zip(tensors, places, strict=True):
        if tensor.numel():
            start = tensor.data_ptr() - place - storage.data_ptr()
    memory = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
    return memory.set_(storage, start, (nbytes,), (1,))


def _unchanged(value: Any) -> _Maker:
    if isinstance(value, torch.Tensor):
        return lambda leaves, copies: value.detach()
    return lambda leaves, copies: value


def _base(index: int) -> _Maker:
    return lambda leaves, copies: copies[index]


def _view_of_base(index: int, start: int, like: torch.Tensor) -> _Maker:
    shape = Geometry.of(like)
    return lambda leaves, copies: shape.at(copies[index], start)


def _view_of_input(tensor: torch.Tensor, inputs: StaticInputs, slots: Sequence[int]) -> _Maker:
    slot = next((s for s in slots if inputs.tensor(s) is tensor), slots[0])
    static = inputs.tensor(slot)
    if static is tensor:
        return lambda leaves, copies: leaves[slot]
    start = tensor.data_ptr() - static.data_ptr() if tensor.numel() else 0
    shape = Geometry.of(tensor)
    return lambda leaves, copies: shape.at(leaves[slot].detach(), start)
