"""The shapes of a function's outputs in its buckets: traced where that works, else fitted."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import CaptureError, first_line
from ..snapshots import layout
from .fitting import fit
from .outputs import OutputShapes, Underivable, steps_of
from .plans import Sizes
from .subject import Subject
from .symbolic import derive

_FITTED_BELOW = 6
_MAX_WAYS = 4
_MAX_FOLLOWED_FROM = 256


class Traces:
    """The shapes of one subject's outputs, on each way that was traced through the function."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._known: list[OutputShapes] = []

    def at(self, bucket: Sizes) -> OutputShapes | str:
        """The shapes on the way that a bucket takes, or why there is no rule for them.

        Raises:
            CaptureError: the function fails in that bucket, or keeps what it should not.
        """
        for shapes in self._known:
            if shapes.holds(bucket):
                return shapes
        try:
            shapes = self._traced(bucket)
        except Underivable as symbolic:
            try:
                # At one exact size it may go its own way: then the way beside it tells more.
                shapes = self._traced(tuple(n - 1 if n > 2 else n for n in bucket))
            except Underivable:
                try:
                    shapes = fit(self._subject.names, self._seen(bucket), bucket)
                except Underivable as fitted:
                    return f"the shapes of its outputs follow no rule: {symbolic}; {fitted}"
        self._known.append(shapes)
        if not shapes.fitted:
            self._tell_ways_apart(shapes, bucket)
        return shapes

    def _traced(self, sizes: Sizes) -> OutputShapes:
        """Shapes derived on the way that some sizes take."""
        # Caches that the function keeps anywhere fill with real values first.
        real = pytree.tree_leaves(self._subject.result(self._subject.at(sizes)))
        found = derive(self._subject, sizes)
        for leaf, rule in zip(real, found.of(sizes), strict=True):
            if not isinstance(leaf, torch.Tensor) or not isinstance(rule, tuple):
                continue
            if rule[0] != leaf.shape or steps_of(rule) != layout(leaf):
                raise Underivable("symbols give other shapes or strides than the function has")
        return found

    def _tell_ways_apart(self, shapes: OutputShapes, bucket: Sizes) -> None:
        """Follow the other ways below a bucket too: each may branch on sizes further on."""
        places = [
            (*bucket[:index], n, *bucket[index + 1 :])
            for index, full in enumerate(bucket)
            for n in range(full - 1, 1, -max(1, full // _MAX_FOLLOWED_FROM))
        ]
        guards = set(shapes.guards)
        followed = {shapes.way(bucket)}
        for _ in range(_MAX_WAYS):
            other = next((sizes for sizes in places if shapes.way(sizes) not in followed), None)
            if other is None:
                return
            followed.add(shapes.way(other))
            try:
                found = self._traced(other)
            except Exception:
                continue  # Eager refuses these sizes, or symbols do not get through.
            if not set(found.guards) <= guards:
                guards |= set(found.guards)
                shapes.tell_apart_by(guards)
                followed = {shapes.way(bucket), shapes.way(other)}

    def _seen(self, bucket: Sizes) -> dict[Sizes, tuple[list[Any], pytree.TreeSpec]]:
        """What the function returns for some small sizes, and for the bucket."""
        subject = self._subject
        ranges = []
        for name, full in zip(subject.names, bucket, strict=True):
            low = subject.bounds[name].low
            ranges.append([n for n in (low, low + 1, low + 2, low + _FITTED_BELOW) if n <= full])
        found = {}
        error: Exception | None = None
        for sizes in (*itertools.product(*ranges), bucket):
            leaves = subject.at(sizes)
            try:
                found[sizes] = pytree.tree_flatten(subject.result(leaves))
            except Exception as raised:
                error = raised
        if bucket not in found:
            assert error is not None
            raise CaptureError(
                f"The call fails in the bucket {bucket}: {first_line(error)}",
                remedy="Leave sizes out of the buckets that the function cannot take.",
            ) from error
        return found
