"""How the outputs of a bucket might be cut to the sizes asked for."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import sympy

from .dimensions import Axes
from .outputs import Leaf, OutputShapes, symbols_of
from .plans import Cut, Factors, Geometry, Sizes


def shape_at(shape: Sequence[int], axes: Axes, named: Mapping[str, int]) -> Sizes:
    """The shape of an argument with other named sizes."""
    return tuple(
        axes[axis].of(named[axes[axis].name]) if axis in axes else n for axis, n in enumerate(shape)
    )


def cuts_of(shapes: OutputShapes, sizes: Sizes, bucket: Sizes) -> list[list[Cut]]:
    """The ways in which each output might be cut, the likeliest first.

    Args:
        shapes: of the outputs.
        sizes: the named sizes that were asked for.
        bucket: those of the bucket.
    """
    found: list[list[Cut]] = []
    true, full = shapes.of(sizes), shapes.of(bucket)
    for index, (leaf, mine, theirs) in enumerate(zip(shapes.leaves, true, full, strict=True)):
        if isinstance(mine, tuple) and leaf is not None and leaf.owner is not None:
            offset = shapes.offset(index, sizes)
            found.append([Cut(*mine, owner=leaf.owner, offset=offset)])
        elif leaf is None or mine is None or mine == theirs:
            found.append([Cut(whole=True)])
        elif isinstance(mine, int):
            found.append([Cut(number=mine)])
        else:
            found.append(_cuts(shapes.names, leaf, mine, sizes, bucket))
    return found


def _cuts(
    names: Sequence[str], leaf: Leaf, geometry: Geometry, sizes: Sizes, bucket: Sizes
) -> list[Cut]:
    plain = Cut(*geometry)
    split = [
        replace(plain, factors=Factors(axis, full, true))
        for axis, expression in enumerate(leaf.shape)
        for full, true in _factors(names, expression, sizes, bucket)
    ]
    return [*split, plain]


def _factors(
    names: Sequence[str], expression: sympy.Expr, sizes: Sizes, bucket: Sizes
) -> list[tuple[Sizes, Sizes]]:
    """The factors of a dimension in the bucket and in the sizes asked for, in each order."""
    if len(expression.free_symbols) < 2:
        return []
    number, parts = sympy.factor(expression).as_coeff_mul()
    if any(len(part.free_symbols) != 1 for part in parts) or not number.is_integer:
        return []
    symbols = symbols_of(names)

    def at(part: sympy.Expr, named: Sizes) -> int:
        return int(part.xreplace(dict(zip(symbols, map(sympy.Integer, named), strict=True))))

    order = {symbol: index for index, symbol in enumerate(symbols)}
    parts = sorted(parts, key=lambda part: order[next(iter(part.free_symbols))])
    rest = () if number == 1 else (int(number),)
    return [
        (
            (*(at(part, bucket) for part in chosen), *rest),
            (*(at(part, sizes) for part in chosen), *rest),
        )
        for chosen in itertools.permutations(parts)
    ]
