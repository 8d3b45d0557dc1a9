"""Derive shapes of outputs by a run on fake tensors whose sizes are symbols.

The run also shows on which comparisons of sizes the function branched.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..calls.modes import OperationMode, SharedSwitch
from ..errors import CaptureError, first_line
from .dimensions import Axes
from .output_shapes import Leaf, OutputShapes, Underivable, symbols_of
from .padding import Sizes, memory_format
from .sampler import CallSampler


def derive(sampler: CallSampler, sizes: Sizes) -> OutputShapes:
    """Run a function on fake tensors with symbolic sizes.

    Sizes of 1 stay fixed, since what holds only for 1 would be taken for a general rule.

    Args:
        sampler: the function, which runs on tensors without memory, and its arguments.
        sizes: the named sizes; guards hold for these.

    Raises:
        Underivable: an operation cannot run on symbols, or the function asks for one exact size.
        CaptureError: the function keeps one of the tensors without memory.
    """
    made = _Made()
    try:
        with made:
            found = _derive(sampler, sizes)
    except Underivable:
        # On a GPU some of its kernels cannot be traced with symbols.
        with made, _AttentionByShape():
            found = _derive(sampler, sizes)
    if made.kept():
        raise CaptureError(
            "The function keeps a tensor in a place that cannot be put back: a cache of its class "
            "or of another module, which now holds one without values.",
            remedy="Clear that cache, and fill it for the largest sizes before graph() is called.",
        )
    return found


def _derive(sampler: CallSampler, sizes: Sizes) -> OutputShapes:
    leaves = sampler.at(sizes)
    env = ShapeEnv(duck_shape=False, specialize_zero_one=False)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    symbols, symbolic = _symbolic_sizes(env, sampler.names, sizes)
    try:
        with _quiet(), mode, enable_python_dispatcher(), _texts_noted() as texts:
            fakes = _fakes(mode, leaves, sampler.axes, symbolic)
            outputs, out_spec = pytree.tree_flatten(sampler.result(fakes))
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
    ours = set(symbols.values())
    if any(not e.free_symbols <= ours for e in _all(known)):
        raise Underivable("a shape depends on values")
    kept = {guard.xreplace(symbols) for guard in guards}
    fixed = {name: n for name, n in zip(sampler.names, sizes, strict=True) if n == 1}
    ordered = sorted((g for g in kept if set() < g.free_symbols <= ours), key=str)
    # A comparison of text leaves no guard.
    blind = bool(texts)
    return OutputShapes(sampler.names, known, out_spec, ordered, fixed=fixed, blind=blind)


def _symbolic_sizes(
    env: ShapeEnv, names: Sequence[str], sizes: Sizes
) -> tuple[dict[Any, sympy.Symbol], dict[str, Any]]:
    """Our symbols by those of PyTorch, and integers made of the latter by name; 1 stays 1."""
    symbols: dict[Any, sympy.Symbol] = {}
    symbolic: dict[str, Any] = dict.fromkeys(names, 1)
    for name, symbol, hint in zip(names, symbols_of(names), sizes, strict=True):
        if hint != 1:
            source = ConstantSource(name)
            own = env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
            symbols[own] = symbol
            symbolic[name] = env.create_symintnode(own, hint=hint, source=source)
    return symbols, symbolic


class _Made(OperationMode):
    """Remembers the tensors that a run makes, to see whether any outlives it."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[weakref.ref[torch.Tensor]] = []

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, FakeTensor):
                self._made.append(weakref.ref(leaf))
        return result

    def kept(self) -> bool:
        """Whether any of them is still alive."""
        if not self._any_lives():
            return False
        gc.collect()  # Slow, and only needed for reference cycles.
        return self._any_lives()

    def _any_lives(self) -> bool:
        return any(made() is not None for made in self._made)


class _AttentionByShape(TorchFunctionMode):
    """Replaces attention by an empty result of its shape: the queries', as wide as the values."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **named)
        query, _, value = (
            *args[:3],
            *(named[name] for name in ("query", "key", "value")[len(args[:3]) :]),
        )
        # Its kernels give the result the memory layout of the queries.
        return torch.empty_like(query[..., :1].expand(*query.shape[:-1], value.shape[-1]))


def _note_texts() -> Callable[[], None]:
    """Have texts of symbolic sizes noted for the threads that ask for it; returns the way back."""
    of_size: Callable[[torch.SymInt], str] = torch.SymInt.__repr__

    def noted(size: torch.SymInt) -> str:
        text = of_size(size)
        if (texts := getattr(_OF_THREAD, "texts", None)) is not None:
            texts.append(text)
        return text

    def put_back() -> None:
        torch.SymInt.__repr__ = of_size  # type: ignore[method-assign]

    torch.SymInt.__repr__ = noted  # type: ignore[method-assign]
    return put_back


_OF_THREAD = threading.local()
_NOTING = SharedSwitch(_note_texts)


@contextlib.contextmanager
def _texts_noted() -> Iterator[list[str]]:
    """Note the texts that are made of symbolic sizes inside the block."""
    with _NOTING.thrown():
        _OF_THREAD.texts = []
        try:
            yield _OF_THREAD.texts
        finally:
            _OF_THREAD.texts = None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence PyTorch's log of operations that fail on symbols: we handle these failures."""
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
    """A call's leaves as fake tensors; a tensor that occurs twice becomes one."""
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


def _owners(outputs: Sequence[Any]) -> dict[int, int]:
    """For each output that is a view of another one: the output that covers their whole storage."""
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
