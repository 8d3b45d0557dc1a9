"""Operations that ONNX Runtime computes unlike PyTorch, for values that no sample need hold."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from ..errors import StrategyFailed

# Of floating-point numbers.
_OTHER_REALS = {
    "aten::atan2": "has the other sign for a zero beside a negative number",
    "aten::logaddexp": "overflows where the result does not",
    "aten::remainder": "loses the rest of large numbers",
}
_OTHER_INTEGERS = {
    "aten::div": "with a rounding mode goes by floating point for integers",
    "aten::fmod": "goes by floating point for integers",
}
# Numbers may come out where PyTorch gives NaN.
_LOSE_NAN = {
    f"aten::{name}"
    for name in (
        *(f"max_pool{n}d{more}" for n in (1, 2, 3) for more in ("", "_with_indices")),
        *("amax", "amin", "max", "min", "argmax", "argmin", "sort", "topk"),
    )
}


def differing(graph: fx.Graph) -> list[str]:
    """What a caller has to know of a model's operations, as notes.

    Raises:
        StrategyFailed: finite numbers would come out otherwise than PyTorch's.
    """
    losing = set()
    for name, dtype in _operations(graph):
        plain = name.removeprefix("aten::")
        others = _OTHER_REALS if dtype.is_floating_point else _OTHER_INTEGERS
        if name in others:
            raise StrategyFailed(f"ONNX Runtime's {plain} {others[name]}.")
        if name in _LOSE_NAN and dtype.is_floating_point:
            losing.add(plain)
    return [f"NaN before {', '.join(sorted(losing))} may come out as numbers"] if losing else []


def _operations(graph: fx.Graph) -> Iterator[tuple[str, torch.dtype]]:
    """The operations on tensors, with the dtype of the first one."""
    for node in graph.nodes:
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
