"""Shapes of outputs by polynomials that fit what a function returned for several sizes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree

from .outputs import Leaf, OutputShapes, Underivable, symbols_of
from .plans import Sizes


def fit(
    names: Sequence[str],
    seen: Mapping[Sizes, tuple[Sequence[Any], pytree.TreeSpec]],
    bucket: Sizes,
) -> OutputShapes:
    """Fit expressions to the outputs that several sizes gave.

    A size of an output is taken for a sum of products of named sizes, each at most once. Some of
    the sizes seen are left out of the fit and have to agree with it.

    Args:
        names: of the sizes.
        seen: the outputs' leaves and their tree, by sizes.
        bucket: the largest sizes; those that are 1 stay fixed.

    Raises:
        Underivable: no such expressions, or no contiguous outputs.
    """
    free = [name if full > 1 else None for name, full in zip(names, bucket, strict=True)]
    trees = [spec for _, spec in seen.values()]
    if any(spec != trees[0] for spec in trees):
        raise Underivable("the tree of the outputs depends on the sizes")
    rows = [leaves for leaves, _ in seen.values()]
    found: list[Leaf | None] = []
    for index in range(len(rows[0])):
        outputs = [row[index] for row in rows]
        if not all(isinstance(output, torch.Tensor) for output in outputs):
            found.append(None)
            continue
        if len({output.dim() for output in outputs}) > 1:
            raise Underivable("the number of an output's dimensions depends on the sizes")
        shape = tuple(
            _polynomial(free, {s: o.shape[axis] for s, o in zip(seen, outputs, strict=True)})
            for axis in range(outputs[0].dim())
        )
        found.append(Leaf(shape, _strides(shape, outputs)))
    fixed = {name: 1 for name, full in zip(names, bucket, strict=True) if full == 1}
    return OutputShapes(names, found, trees[0], fixed=fixed, fitted=True)


def _strides(shape: Sequence[sympy.Expr], outputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Strides of dense outputs whose dimensions lie in memory in one order."""
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
    """The polynomial that is of degree one in each size and takes the values that were seen.

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
