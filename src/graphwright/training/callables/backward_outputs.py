"""How a replayed forward's results are returned, so that autograd gets gradients for them.

Results that share memory share it again in what the caller gets, as views that autograd knows.
Where that is impossible, the call is refused.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ...calls.objects import build, has_nodes
from ...calls.split import leaf_names
from ...errors import CaptureError
from ...graphs.static_inputs import Geometry, StaticInputs, is_dense, span
from ...graphs.static_outputs import StaticOutputs


class _View(NamedTuple):
    """A result that is a view of another one."""

    root: int  # position of that one
    first: int  # position of the first occurrence of this tensor
    geometry: Geometry
    offset: int  # in elements
    detached: bool


class Outputs:
    """What a forward returned in the graph's memory, and how the caller's results are made of it.

    Attributes:
        results: the results that are not views of others.
        differentiable: positions, among these, of tensors that get a gradient, each tensor once.
    """

    def __init__(self, tree: Any, inputs: StaticInputs, external: Container[int]) -> None:
        """Plan how to return the results of a forward.

        Args:
            tree: its results.
            inputs: its static inputs.
            external: memory from outside of the call, by identity.

        Raises:
            CaptureError: two results share memory in a way that autograd cannot follow.
        """
        leaves, self._spec = pytree.tree_flatten(tree)
        self._objects = has_nodes(self._spec)
        static = {inputs.tensor(slot).untyped_storage()._cdata for slot in inputs.slots}
        self._views: dict[int, _View] = {}
        for index, storage in _trained(leaves):
            if storage._cdata in static or storage._cdata in external:
                what = "an argument" if storage._cdata in static else "a parameter"
                raise CaptureError(
                    f"{leaf_names(tree, 'output')[index]} is {what}, or a view of it, and "
                    "requires grad.",
                    remedy="Return a clone() of it.",
                )
        for group in _sharing(leaves):
            self._relate(group, leaves, tree)
        # Kept tensors must not keep autograd's graph alive.
        plain = {
            id(leaf): leaf.detach() if leaf.requires_grad else leaf
            for leaf in leaves
            if isinstance(leaf, torch.Tensor)
        }
        kept = [index for index in range(len(leaves)) if index not in self._views]
        self.results = StaticOutputs(
            [plain.get(id(leaves[i]), leaves[i]) for i in kept], inputs, external
        )
        self._kept = kept
        self.differentiable: list[int] = []
        # By position among the results, which of the differentiable ones it is.
        self._nth: dict[int, int] = {}
        self._number_differentiable([leaves[i] for i in kept])

    def _number_differentiable(self, results: Sequence[Any]) -> None:
        known: dict[int, int] = {}
        for place, leaf in enumerate(results):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                if id(leaf) not in known:
                    known[id(leaf)] = len(self.differentiable)
                    self.differentiable.append(place)
                self._nth[place] = known[id(leaf)]

    def select_differentiable(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """The differentiable ones among the leaves of another forward's results."""
        return [leaves[self._kept[place]] for place in self.differentiable]

    def finish(self, made: Sequence[Any], outputs: Sequence[torch.Tensor] | None) -> Any:
        """The results for the caller.

        Args:
            made: new tensors and values for `results`.
            outputs: the differentiable ones as autograd has returned them; None without autograd.
        """
        by_index: dict[int, Any] = {}
        for place, index in enumerate(self._kept):
            nth = self._nth.get(place)
            by_index[index] = made[place] if nth is None or outputs is None else outputs[nth]
        for index, view in self._views.items():
            if view.first != index:
                by_index[index] = by_index[view.first]
                continue
            root = by_index[view.root]
            root = root.detach() if view.detached else root
            size, stride, _ = view.geometry
            by_index[index] = root.as_strided(size, stride, root.storage_offset() + view.offset)
        leaves = [by_index[i] for i in range(len(by_index))]
        return (build if self._objects else pytree.tree_unflatten)(leaves, self._spec)

    def _relate(self, group: Sequence[int], leaves: Sequence[Any], tree: Any) -> None:
        """If some tensors of one storage overlap, plan to make all of them views of one."""
        first: dict[int, int] = {}
        for index in group:
            first.setdefault(id(leaves[index]), index)
        if len(first) < 2 or not any(leaves[index].requires_grad for index in group):
            return
        tensors = [leaves[index] for index in first.values()]
        if _are_apart(tensors):
            return
        root = _root_of(tensors)
        if root is not None:
            for index in group:
                if leaves[index] is not root:
                    known = first[id(leaves[index])]
                    self._views[index] = _view(leaves[index], root, first[id(root)], known)
            return
        names = leaf_names(tree, "output")
        raise CaptureError(
            f"{' and '.join(names[index] for index in sorted(first.values()))} share memory.",
            remedy="Return a clone() of all but one of them.",
        )


def _trained(leaves: Sequence[Any]) -> Iterator[tuple[int, torch.UntypedStorage]]:
    """Positions of tensors that require grad, with their memory, of those that have any."""
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            storage = leaf.untyped_storage()
            if storage.nbytes():
                yield index, storage


def _root_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The one of some tensors in one storage that all others may be views of, if there is one."""
    low = min(t.data_ptr() for t in tensors)
    high = max(t.data_ptr() + span(t) for t in tensors)
    for root in tensors:
        covers = root.data_ptr() == low and root.data_ptr() + span(root) == high
        if not (root.requires_grad and is_dense(root) and covers):
            continue
        if all(t is root or _is_view_of(t, root) for t in tensors):
            return root
    return None


def _view(tensor: torch.Tensor, root: torch.Tensor, at: int, first: int) -> _View:
    offset = (tensor.data_ptr() - root.data_ptr()) // root.element_size()
    return _View(at, first, Geometry.of(tensor), offset, not tensor.requires_grad)


def _is_view_of(tensor: torch.Tensor, root: torch.Tensor) -> bool:
    """Whether autograd too takes a tensor in the memory of another one for a view of it."""
    if tensor.dtype != root.dtype:
        return False
    if not tensor.requires_grad:
        return True
    return (
        tensor._base is root
        or root._base is tensor
        or (root._base is not None and tensor._base is root._base)
    )


def _sharing(leaves: Sequence[Any]) -> list[list[int]]:
    """Positions of nonempty tensors, grouped by storage."""
    groups: dict[int, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.numel():
            groups.setdefault(leaf.untyped_storage()._cdata, []).append(index)
    return list(groups.values())


def _are_apart(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no two of some tensors in one storage share an element."""
    ordered = sorted(tensors, key=torch.Tensor.data_ptr)
    ends = [t.data_ptr() + span(t) for t in ordered]
    if all(end <= t.data_ptr() for end, t in zip(ends, ordered[1:], strict=False)):
        return True
    low = ordered[0].data_ptr()
    marks = torch.zeros(max(ends) - low, dtype=torch.int8, device="cpu")
    for tensor in ordered:
        bytes_of_one = tensor.element_size()
        if any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
            return False
        strides = [step * bytes_of_one for step in tensor.stride()]
        size, offset = (*tensor.shape, bytes_of_one), tensor.data_ptr() - low
        try:
            marks.as_strided(size, (*strides, 1), offset).add_(1)
        except RuntimeError:  # It overlaps with itself.
            return False
    return int(marks.max()) < 2
