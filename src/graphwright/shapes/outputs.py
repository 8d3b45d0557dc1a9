"""The shapes of what a function returns, as expressions of the sizes of what it is given.

They come from running the function on fake tensors whose sizes are symbols, which also tells on
which comparisons of sizes it branched; or, where that fails, from fitting polynomials to the shapes
that it returned for several sizes.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import CaptureError, first_line
from ..signature import unflatten
from .dimensions import Axes

Sizes = tuple[int, ...]
Geometry = tuple[Sizes, Sizes]  # shape and strides


_ZERO = sympy.Integer(0)


class Underivable(Exception):
    """The shapes of a function's outputs could not be expressed by the sizes of its inputs."""


@dataclass(frozen=True)
class Leaf:
    """One output: its shape and strides as expressions; for a whole number, its value as shape.

    Attributes:
        shape: one expression a dimension.
        stride: likewise, in elements.
        number: whether the output is a whole number and no tensor.
        owner: the output that it is a view of, if any.
        offset: where in that one it begins, in elements.
    """

    shape: tuple[sympy.Expr, ...]
    stride: tuple[sympy.Expr, ...]
    number: bool = False
    owner: int | None = None
    offset: sympy.Expr = _ZERO

    @property
    def expressions(self) -> tuple[sympy.Expr, ...]:
        """All that depends on sizes."""
        return (*self.shape, *self.stride, self.offset)


class OutputShapes:
    """Shapes of a function's outputs for any sizes.

    Attributes:
        leaves: of the outputs that are tensors or whole numbers, None for others.
        spec: the outputs' tree.
        guards: comparisons of sizes that held where it was derived; where they all hold, the
            function takes the same way.
        fitted: whether the expressions were fitted, so that branches on sizes are unknown.
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
    ) -> None:
        self.names = tuple(names)
        self.leaves = tuple(leaves)
        self.spec = spec
        self.guards = tuple(guards)
        self.fitted = fitted
        self._fixed = dict(fixed or {})
        # One by one: what comes after a guard that does not hold may make no sense.
        self._guards = [_compiled(self.names, [guard]) for guard in self.guards]
        self._others: list[Callable[..., Sequence[Any]]] = []
        self._shapes = [
            None if leaf is None else _compiled(self.names, leaf.expressions)
            for leaf in self.leaves
        ]

    def way(self, sizes: Sizes) -> tuple[bool | None, ...]:
        """Which of the guards hold for some sizes, others' included: the same, the same way."""
        return (*_evaluated(self._guards, sizes), *_evaluated(self._others, sizes))

    def holds(self, sizes: Sizes) -> bool:
        """Whether the expressions were derived on the way that these sizes take."""
        named = dict(zip(self.names, sizes, strict=True))
        fixed = all(named[name] == n for name, n in self._fixed.items())
        return fixed and all(_evaluated(self._guards, sizes))

    def tell_apart_by(self, guards: Iterable[sympy.Basic]) -> None:
        """Other guards, of other ways through the function, that `way` shall regard too."""
        more = sorted(set(guards) - set(self.guards), key=str)
        self._others = [_compiled(self.names, [guard]) for guard in more]

    def of(self, sizes: Sizes) -> list[Geometry | int | None]:
        """Shape and strides of each output for some sizes; a whole number as it is."""
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
        """Where in its owner an output that is a view begins, in elements."""
        shape = self._shapes[index]
        assert shape is not None
        return int(shape(*sizes)[-1])


def _evaluated(
    guards: Sequence[Callable[..., Sequence[Any]]], sizes: Sizes
) -> Iterator[bool | None]:
    """Whether each guard holds; None for one that makes no sense for these sizes."""
    for guard in guards:
        try:
            yield bool(guard(*sizes)[0])
        except Exception:  # Division by zero, and the checks of torch's own functions.
            yield None


def symbols_of(names: Sequence[str]) -> list[sympy.Symbol]:
    """The symbols that stand for named sizes in expressions."""
    return [sympy.Symbol(name, integer=True, positive=True) for name in names]


def _compiled(names: Sequence[str], expressions: Sequence[Any]) -> Callable[..., Sequence[Any]]:
    """The values of some expressions as a function of the named sizes, in their order."""
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


def derive(
    fn: Callable[..., Any],
    leaves: Sequence[Any],
    spec: pytree.TreeSpec,
    axes: Sequence[Axes],
    sizes: Mapping[str, int],
) -> OutputShapes:
    """Run a function on fake tensors with symbolic sizes.

    Sizes of 1 stay fixed: whatever holds for 1 alone would be taken for the rule.

    Args:
        fn: the function; it runs once, on tensors without memory.
        leaves: of a call's arguments, with the given sizes.
        spec: their tree.
        axes: their dynamic dimensions.
        sizes: the named sizes; guards hold for these.

    Raises:
        Underivable: an operation cannot run on symbols, or the function asks for one exact size.
    """
    made = _Made()
    try:
        with made:
            found = _derive(fn, leaves, spec, axes, sizes)
    except Underivable:
        # On a GPU some of its kernels cannot be traced with symbols.
        with made, _AttentionByShape():
            found = _derive(fn, leaves, spec, axes, sizes)
    finally:
        kept = made.kept()
    if kept:
        raise CaptureError(
            "The function keeps a tensor in a place that cannot be put back: a cache of its class "
            "or of another module, which now holds one without values.",
            remedy="Clear that cache, and fill it for the largest sizes before graph() is called.",
        )
    return found


def _derive(
    fn: Callable[..., Any],
    leaves: Sequence[Any],
    spec: pytree.TreeSpec,
    axes: Sequence[Axes],
    sizes: Mapping[str, int],
) -> OutputShapes:
    env = ShapeEnv(duck_shape=False, specialize_zero_one=False)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    symbols: dict[Any, sympy.Symbol] = {}
    symbolic: dict[str, Any] = {}
    for name, symbol in zip(sizes, symbols_of(list(sizes)), strict=True):
        hint = sizes[name]
        if hint == 1:
            symbolic[name] = 1
            continue
        source = ConstantSource(name)
        own = env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        symbols[own] = symbol
        symbolic[name] = env.create_symintnode(own, hint=hint, source=source)
    try:
        with _quiet(), mode, enable_python_dispatcher():
            fakes = _fakes(mode, leaves, axes, symbolic)
            args, kwargs = unflatten(fakes, spec)
            result = fn(*args, **kwargs)
            outputs, out_spec = pytree.tree_flatten(result)
            guards = [guard.expr for guard in env.guards]
            owners = _owners(outputs)
            found = [
                _leaf(output, env, owners.get(index), outputs)
                for index, output in enumerate(outputs)
            ]
    except Exception as error:
        raise Underivable(first_line(error, 160)) from error
    pinned = [symbols[own].name for own in symbols if env.replacements.get(own, own).is_number]
    if pinned:
        raise Underivable(f"the function works for one size of {pinned[0]} alone")
    known = [_renamed(leaf, symbols) for leaf in found]
    if any(not e.free_symbols <= set(symbols.values()) for e in _all(known)):
        raise Underivable("a shape depends on values")
    kept = {guard.xreplace(symbols) for guard in guards}
    fixed = {name: n for name, n in sizes.items() if n == 1}
    ours = set(symbols.values())
    ordered = sorted((g for g in kept if g.free_symbols and g.free_symbols <= ours), key=str)
    return OutputShapes(list(sizes), known, out_spec, ordered, fixed=fixed)


class _Made(TorchDispatchMode):
    """Remembers the tensors that are made, to see whether any outlives its run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's mode has no annotations
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **dict(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, FakeTensor):
                self._made.append(weakref.ref(leaf))
        return result

    def kept(self) -> bool:
        """Whether any of them lives on."""
        gc.collect()
        return any(made() is not None for made in self._made)


class _AttentionByShape(TorchFunctionMode):
    """Takes attention for its shape: that of the queries, as wide as the values."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **named)
        query, _, value = (
            *args[:3],
            *(named[name] for name in ("query", "key", "value")[len(args[:3]) :]),
        )
        # Its kernels lay their result out as the queries are.
        return torch.empty_like(query[..., :1].expand(*query.shape[:-1], value.shape[-1]))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What fails on symbols fails for us alone: nobody wants to read of it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _fakes(
    mode: FakeTensorMode, leaves: Sequence[Any], axes: Sequence[Axes], symbolic: Mapping[str, Any]
) -> list[Any]:
    """A call's leaves as fake tensors; one that stands twice stays one."""
    made: dict[int, Any] = {}
    for leaf, own in zip(leaves, axes, strict=True):
        if id(leaf) in made or not isinstance(leaf, torch.Tensor):
            continue
        if not own:
            made[id(leaf)] = mode.from_tensor(leaf, static_shapes=True)
            continue
        shape = [
            own[axis].factor * symbolic[own[axis].name] + own[axis].offset if axis in own else n
            for axis, n in enumerate(leaf.shape)
        ]
        made[id(leaf)] = torch.empty(
            shape, dtype=leaf.dtype, device=leaf.device, memory_format=memory_format(leaf)
        )
    return [made.get(id(leaf), leaf) for leaf in leaves]


def memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """Channels last for images and volumes that are laid out so, else contiguous."""
    # As PyTorch decides it by the strides, also where both would do.
    return suggest_memory_format(tensor) if tensor.dim() in (4, 5) else torch.contiguous_format


def contiguous_stride(shape: Sequence[int], form: torch.memory_format | None) -> Sizes:
    """The strides of a new tensor of some shape and memory format."""
    made = torch.empty(tuple(shape), device="meta", memory_format=form or torch.contiguous_format)
    return made.stride()


def _owners(outputs: Sequence[Any]) -> dict[int, int]:
    """For outputs that are views of another one, which that is: one that fills its memory."""
    first: dict[int, int] = {}
    for index, output in enumerate(outputs):
        if isinstance(output, torch.Tensor):
            storage = output.untyped_storage()
            if output.numel() * output.element_size() == storage.nbytes():
                first.setdefault(storage._cdata, index)
    return {
        index: owner
        for index, output in enumerate(outputs)
        if isinstance(output, torch.Tensor)
        and (owner := first.get(output.untyped_storage()._cdata)) not in (None, index)
        and output is not outputs[owner]
        and output.dtype is outputs[owner].dtype
    }


def _leaf(output: Any, env: ShapeEnv, owner: int | None, outputs: Sequence[Any]) -> Leaf | None:
    if isinstance(output, torch.Tensor):
        begin = 0 if owner is None else output.storage_offset() - outputs[owner].storage_offset()
        return Leaf(
            tuple(_expression(n, env) for n in output.shape),
            tuple(_expression(n, env) for n in output.stride()),
            owner=owner,
            offset=_expression(begin, env),
        )
    if isinstance(output, torch.SymInt):
        return Leaf((_expression(output, env),), (), number=True)
    if isinstance(output, torch.SymFloat | torch.SymBool):
        raise Underivable("an output is a number made of sizes")
    return None


def _expression(n: Any, env: ShapeEnv) -> sympy.Expr:
    return env.simplify(n.node.expr) if isinstance(n, torch.SymInt) else sympy.Integer(int(n))


def _renamed(leaf: Leaf | None, symbols: Mapping[Any, sympy.Symbol]) -> Leaf | None:
    if leaf is None:
        return None
    named = dict(symbols)
    return replace(
        leaf,
        shape=tuple(e.xreplace(named) for e in leaf.shape),
        stride=tuple(e.xreplace(named) for e in leaf.stride),
        offset=leaf.offset.xreplace(named),
    )


def _all(leaves: Sequence[Leaf | None]) -> list[sympy.Expr]:
    return [e for leaf in leaves if leaf is not None for e in leaf.expressions]


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
