"""OutputShapes: shapes of a function's outputs as expressions of the named sizes.

`cuts_of` derives from them how a bucket's outputs can be sliced to the sizes of a call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree

from .padding import Cut, Factors, Geometry, Sizes

_ZERO = sympy.Integer(0)


class Underivable(Exception):
    """The shapes of a function's outputs cannot be expressed by the sizes of its inputs."""


@dataclass(frozen=True)
class Leaf:
    """One output: its shape and strides as expressions.

    Attributes:
        shape: one expression per dimension; for an integer, its value.
        stride: one expression per dimension, in elements.
        number: whether the output is an integer and no tensor.
        owner: index of the output that it is a view of, if any.
        offset: where in that one it begins, in elements.
    """

    shape: tuple[sympy.Expr, ...]
    stride: tuple[sympy.Expr, ...]
    number: bool = False
    owner: int | None = None
    offset: sympy.Expr = _ZERO

    @property
    def expressions(self) -> tuple[sympy.Expr, ...]:
        """All expressions of the output."""
        return (*self.shape, *self.stride, self.offset)


class OutputShapes:
    """Shapes of a function's outputs for any sizes.

    Attributes:
        leaves: of the outputs that are tensors or integers, None for others.
        spec: the outputs' tree.
        guards: comparisons of sizes that held where the expressions were derived; where all of them
            hold, the function takes the same branches.
        fitted: whether the expressions were fitted.
        blind: whether branches on sizes are unknown, as if fitted.
    """

    def __init__(
        self,
        names: Sequence[str],
        leaves: Sequence[Leaf | None],
        spec: pytree.TreeSpec,
        guards: Sequence[sympy.Basic] = (),
        *,
        fixed: Mapping[str, int] | None = None,
        fitted: bool = False,
        blind: bool = False,
    ) -> None:
        self.names = tuple(names)
        self.leaves = tuple(leaves)
        self.spec = spec
        self.guards = tuple(guards)
        self.fitted = fitted
        self.blind = fitted or blind
        self._fixed = dict(fixed or {})
        # Evaluated one by one: if one does not hold, a later one may raise.
        self._guards = [_compiled(self.names, [guard]) for guard in self.guards]
        self._others: list[Callable[..., Sequence[Any]]] = []
        self._shapes = [
            None if leaf is None else _compiled(self.names, leaf.expressions)
            for leaf in self.leaves
        ]

    def way(self, sizes: Sizes) -> tuple[bool | None, ...]:
        """Which guards hold for some sizes; equal results mean that the same branches are taken.

        They include the guards given to `tell_apart_by`.
        """
        return (*_evaluated(self._guards, sizes), *_evaluated(self._others, sizes))

    def holds(self, sizes: Sizes) -> bool:
        """Whether the expressions hold for these sizes: the function takes the same branches."""
        named = dict(zip(self.names, sizes, strict=True))
        fixed = all(named[name] == n for name, n in self._fixed.items())
        return fixed and all(_evaluated(self._guards, sizes))

    def tell_apart_by(self, guards: Iterable[sympy.Basic]) -> None:
        """Have `way` also evaluate guards that were found for other branches of the function."""
        more = sorted(set(guards) - set(self.guards), key=str)
        self._others = [_compiled(self.names, [guard]) for guard in more]

    def of(self, sizes: Sizes) -> list[Geometry | int | None]:
        """Shape and strides of each output for some sizes; an integer as it is."""
        found: list[Geometry | int | None] = []
        for leaf, shape in zip(self.leaves, self._shapes, strict=True):
            if leaf is None or shape is None:
                found.append(None)
                continue
            values = tuple(map(int, shape(*sizes)))
            rank = len(leaf.shape)
            found.append(values[0] if leaf.number else (values[:rank], values[rank : 2 * rank]))
        return found

    def offset(self, index: int, sizes: Sizes) -> int:
        """Where an output that is a view begins in its owner, in elements."""
        shape = self._shapes[index]
        assert shape is not None
        return int(shape(*sizes)[-1])


def _evaluated(
    guards: Sequence[Callable[..., Sequence[Any]]], sizes: Sizes
) -> Iterator[bool | None]:
    """Whether each guard holds; None for one that raises for these sizes."""
    for guard in guards:
        try:
            yield bool(guard(*sizes)[0])
        except Exception:  # Division by zero, and the checks of torch's own functions.
            yield None


def symbols_of(names: Sequence[str]) -> list[sympy.Symbol]:
    """The symbols that stand for named sizes in expressions."""
    return [sympy.Symbol(name, integer=True, positive=True) for name in names]


def _compiled(names: Sequence[str], expressions: Sequence[Any]) -> Callable[..., Sequence[Any]]:
    """A function of the named sizes, in order, that returns the values of some expressions."""
    from torch.utils._sympy.printers import PythonPrinter

    symbols = symbols_of(names)
    places = [sympy.Symbol(f"n{index}", integer=True, positive=True) for index in range(len(names))]
    renamed = [
        sympy.sympify(e).xreplace(dict(zip(symbols, places, strict=True))) for e in expressions
    ]

    def slowly(*sizes: int) -> Sequence[Any]:
        known = {place: sympy.Integer(n) for place, n in zip(places, sizes, strict=True)}
        return [expression.xreplace(known) for expression in renamed]

    try:
        printer = PythonPrinter()
        text = ", ".join(f"({printer.doprint(expression)})" for expression in renamed)
        source = f"lambda {', '.join(map(str, places))}: ({text}{',' if text else ''})"
        quickly: Callable[..., Sequence[Any]] = eval(source, {"math": math, "torch": torch})
        tried = tuple(7 + 3 * index for index, _ in enumerate(names))
        if list(quickly(*tried)) == list(slowly(*tried)):
            return quickly
    except Exception:
        return slowly  # An expression that the printer does not know.
    return slowly


def steps_of(geometry: Geometry) -> list[int]:
    """The strides that matter, as `snapshots.layout` gives them for a tensor."""
    shape, stride = geometry
    return [step for step, n in zip(stride, shape, strict=True) if n > 1]


def cuts_of(shapes: OutputShapes, sizes: Sizes, bucket: Sizes) -> list[list[Cut]]:
    """The ways in which each output might be sliced, the likeliest first.

    Args:
        shapes: of the outputs.
        sizes: the named sizes of the call.
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
    """The factors of a dimension, in the bucket and in the call, in each possible order."""
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
