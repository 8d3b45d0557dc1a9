"""Operations that ONNX Runtime computes unlike PyTorch for some values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import fx

from ...errors import StrategyFailed

_ROUNDED = "with rounding is off by one where PyTorch makes up for the error of the quotient"
_SMALL = "loses small numbers, which it is there for"
# Of floating-point numbers.
_OTHER_REALS = {
    "aten::atan2": "has the other sign for a zero beside a negative number",
    "aten::div": _ROUNDED,
    "aten::erfc": _SMALL,
    "aten::expm1": _SMALL,
    "aten::floor_divide": _ROUNDED,
    "aten::log1p": _SMALL,
    "aten::log_sigmoid": "overflows where the result does not",
    "aten::log_sigmoid_forward": "overflows where the result does not",
    "aten::logaddexp": "overflows where the result does not",
    "aten::remainder": "loses the rest of large numbers",
    "aten::signbit": "takes a negative zero for a positive one",
}
_OTHER_INTEGERS = {
    "aten::div": "with rounding goes by floating point for integers",
    "aten::fmod": "goes by floating point for integers",
    "aten::prod": "ends at the largest integer",
}
# Numbers may come out where PyTorch gives NaN.
_LOSE_NAN = {
    f"aten::{name}"
    for name in (
        *(f"max_pool{n}d{more}" for n in (1, 2, 3) for more in ("", "_with_indices")),
        *("amax", "amin", "max", "min", "argmax", "argmin", "sort", "topk", "angle"),
    )
}


def differing(module: fx.GraphModule) -> list[str]:
    """What a caller has to know of a model's operations, as notes.

    Raises:
        StrategyFailed: finite numbers would come out otherwise than PyTorch's.
    """
    losing = set()
    for name, dtype in _operations(module):
        plain = name.removeprefix("aten::")
        others = _OTHER_REALS if dtype.is_floating_point else _OTHER_INTEGERS
        if name in others:
            raise StrategyFailed(f"ONNX Runtime's {plain} {others[name]}.")
        if name in _LOSE_NAN and dtype.is_floating_point:
            losing.add(plain)
    return [f"NaN before {', '.join(sorted(losing))} may come out as numbers"] if losing else []


def _operations(module: fx.GraphModule) -> Iterator[tuple[str, torch.dtype]]:
    """The operations on tensors, branches' too, with the dtype of the first one."""
    graphs = (part.graph for part in module.modules() if isinstance(part, fx.GraphModule))
    for node in itertools.chain.from_iterable(graph.nodes for graph in graphs):
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None:
            continue
        first = next((each.meta.get("val") for each in node.all_input_nodes), None)
        if not isinstance(first, torch.Tensor):
            continue
        # Without a rounding mode division is exact.
        mode = next((a for a in (*node.args, *node.kwargs.values()) if a in ("trunc", "floor")), "")
        if schema.name != "aten::div" or mode:
            yield schema.name, first.dtype
