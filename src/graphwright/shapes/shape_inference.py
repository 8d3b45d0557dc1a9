"""ShapeInference: derives the shapes of a function's outputs, by tracing or by fitting.

The function is traced with symbolic sizes if that works. Otherwise `fit` finds polynomials for the
shapes that it returned for several sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree

from ..calls.snapshots import layout
from ..errors import CaptureError, first_line
from .output_shapes import Leaf, OutputShapes, Underivable, steps_of, symbols_of
from .padding import Sizes
from .sampler import CallSampler
from .symbolic import derive

# The largest size seen for a fit, above a dimension's lowest, beside the bucket's own.
_FITTED_BELOW = 6
# How many other paths through the function are traced, and at how many sizes one is looked for.
_MAX_PATHS = 4
_MAX_FOLLOWED_FROM = 256


class ShapeInference:
    """Shapes of a function's outputs, for each path that was traced through it."""

    def __init__(self, sampler: CallSampler) -> None:
        self._sampler = sampler
        self._known: list[OutputShapes] = []

    def at(self, bucket: Sizes) -> OutputShapes | str:
        """The shapes on the path that a bucket takes, or why there is no rule for them.

        Raises:
            CaptureError: the function fails in that bucket, or keeps a tensor without values.
        """
        for shapes in self._known:
            if shapes.holds(bucket):
                return shapes
        try:
            shapes = self._traced(bucket)
        except Underivable as symbolic:
            try:
                # It may take another path at exactly this size: a size below tells more then.
                shapes = self._traced(tuple(n - 1 if n > 2 else n for n in bucket))
            except Underivable:
                try:
                    shapes = fit(self._sampler.names, self._observed_outputs(bucket), bucket)
                except Underivable as fitted:
                    return f"the shapes of its outputs follow no rule: {symbolic}; {fitted}"
        self._known.append(shapes)
        if not shapes.fitted:
            self._tell_ways_apart(shapes, bucket)
        return shapes

    def _traced(self, sizes: Sizes) -> OutputShapes:
        """Shapes derived on the path that some sizes take."""
        # Run it first, so that caches that the function keeps hold real values.
        real = pytree.tree_leaves(self._sampler.result(self._sampler.at(sizes)))
        found = derive(self._sampler, sizes)
        for leaf, rule in zip(real, found.of(sizes), strict=True):
            if not isinstance(leaf, torch.Tensor) or not isinstance(rule, tuple):
                continue
            if rule[0] != leaf.shape or steps_of(rule) != layout(leaf):
                raise Underivable("symbols give other shapes or strides than the function has")
        return found

    def _tell_ways_apart(self, shapes: OutputShapes, bucket: Sizes) -> None:
        """Trace the other paths of sizes below a bucket too: each may branch on further sizes."""
        places = [
            (*bucket[:index], n, *bucket[index + 1 :])
            for index, full in enumerate(bucket)
            for n in range(full - 1, 1, -max(1, full // _MAX_FOLLOWED_FROM))
        ]
        guards = set(shapes.guards)
        followed = {shapes.way(bucket)}
        for _ in range(_MAX_PATHS):
            other = next((sizes for sizes in places if shapes.way(sizes) not in followed), None)
            if other is None:
                return
            followed.add(shapes.way(other))
            try:
                found = self._traced(other)
            except Exception:
                continue  # Eager refuses these sizes, or they cannot be traced.
            if not set(found.guards) <= guards:
                guards |= set(found.guards)
                shapes.tell_apart_by(guards)
                followed = {shapes.way(bucket), shapes.way(other)}

    def _observed_outputs(self, bucket: Sizes) -> dict[Sizes, tuple[list[Any], pytree.TreeSpec]]:
        """The function's outputs for some small sizes, and for the bucket."""
        sampler = self._sampler
        ranges = []
        for name, full in zip(sampler.names, bucket, strict=True):
            low = sampler.bounds[name].low
            ranges.append([n for n in (low, low + 1, low + 2, low + _FITTED_BELOW) if n <= full])
        found = {}
        error: Exception | None = None
        for sizes in (*itertools.product(*ranges), bucket):
            leaves = sampler.at(sizes)
            try:
                found[sizes] = pytree.tree_flatten(sampler.result(leaves))
            except Exception as raised:
                error = raised
        if bucket not in found:
            assert error is not None
            raise CaptureError(
                f"The call fails in the bucket {bucket}: {first_line(error)}",
                remedy="Leave sizes out of the buckets that the function cannot take.",
            ) from error
        return found


def fit(
    names: Sequence[str],
    seen: Mapping[Sizes, tuple[Sequence[Any], pytree.TreeSpec]],
    bucket: Sizes,
) -> OutputShapes:
    """Fit expressions to the outputs that several sizes gave.

    Each size of an output is assumed to be a sum of products of named sizes, each at most once per
    product. More sizes are seen than the fit needs, and all have to agree with it.

    Args:
        names: of the sizes.
        seen: the outputs' leaves and their tree, by sizes.
        bucket: the largest sizes; those that are 1 stay fixed.

    Raises:
        Underivable: there are no such expressions, or outputs are not dense.
    """
    free = [name if full > 1 else None for name, full in zip(names, bucket, strict=True)]
    trees = [spec for _, spec in seen.values()]
    if any(spec != trees[0] for spec in trees):
        raise Underivable("the tree of the outputs depends on the sizes")
    rows = zip(*(leaves for leaves, _ in seen.values()), strict=True)
    found = [_fitted(free, dict(zip(seen, outputs, strict=True))) for outputs in rows]
    fixed = {name: 1 for name, full in zip(names, bucket, strict=True) if full == 1}
    return OutputShapes(names, found, trees[0], fixed=fixed, fitted=True)


def _fitted(free: Sequence[str | None], outputs: Mapping[Sizes, Any]) -> Leaf | None:
    """The expressions for an output, by what it is for some sizes; None if it is no tensor."""
    if not all(isinstance(output, torch.Tensor) for output in outputs.values()):
        return None
    ranks = {output.dim() for output in outputs.values()}
    if len(ranks) > 1:
        raise Underivable("the number of an output's dimensions depends on the sizes")
    shape = tuple(
        _polynomial(free, {sizes: output.shape[axis] for sizes, output in outputs.items()})
        for axis in range(ranks.pop())
    )
    return Leaf(shape, _strides(shape, list(outputs.values())))


def _strides(shape: Sequence[sympy.Expr], outputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Strides of dense outputs that all have the same order of dimensions in memory."""
    largest = max(outputs, key=torch.Tensor.numel)
    order = sorted(range(len(shape)), key=lambda axis: (-largest.stride()[axis], axis))
    for output in outputs:
        dense = output.permute(order).is_contiguous()
        if not dense:
            raise Underivable("an output is not dense")
    inner = {axis: order[place + 1 :] for place, axis in enumerate(order)}
    return tuple(
        sympy.expand(sympy.prod([shape[other] for other in inner[axis]]))
        for axis in range(len(shape))
    )


def _polynomial(names: Sequence[str | None], seen: Mapping[Sizes, int]) -> sympy.Expr:
    """The polynomial, of degree one in each size, that takes the values that were seen.

    Sizes without a name are left out.
    """
    symbols = symbols_of([name for name in names if name is not None])
    seen = {
        tuple(n for n, name in zip(sizes, names, strict=True) if name is not None): value
        for sizes, value in seen.items()
    }
    products: list[sympy.Expr] = [sympy.Integer(1)]
    for count in range(1, len(symbols) + 1):
        products += [sympy.prod(chosen) for chosen in itertools.combinations(symbols, count)]
    rows = sympy.Matrix(
        [[p.subs(dict(zip(symbols, sizes, strict=True))) for p in products] for sizes in seen]
    )
    values = sympy.Matrix(list(seen.values()))
    if len(seen) <= len(products) or rows.rank() < len(products):
        raise Underivable("too few sizes were seen to tell the rule of the outputs' shapes")
    unknown = sympy.symbols(f"c:{len(products)}")
    solution = sympy.linsolve((rows, values), *unknown)
    if not solution:
        raise Underivable("no polynomial of the sizes gives the outputs' shapes")
    factors = next(iter(solution))
    return sum((c * p for c, p in zip(factors, products, strict=True)), sympy.Integer(0))
