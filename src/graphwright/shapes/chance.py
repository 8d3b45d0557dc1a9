"""Whether what a call returns depends on the random numbers that it draws.

Some models draw numbers that they use in training alone (layer drop), and can be filled up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..graphs.journal import generator_of, tensors
from ..modes import OperationMode
from ..snapshots import same_bits, same_value


class _Loaded(OperationMode):
    """Gives every random number the same value."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        generator = generator_of(args, kwargs)
        before = generator.get_state()
        result = func(*args, **kwargs)
        if not torch.equal(before, generator.get_state()):  # Attention without dropout draws none.
            for tensor in tensors(result):
                tensor.fill_(self._value)
        return result


def depends_on_chance(call: Callable[[], Any]) -> bool:
    """Whether a call gives other results with other random numbers, or where all are 0 or all 1."""
    found = [pytree.tree_leaves(call()) for _ in range(2)]
    for value in (0.0, 1.0):
        with _Loaded(value):
            found.append(pytree.tree_leaves(call()))
    return not all(all(map(_same, found[0], other)) for other in found[1:])


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_bits(a, b)
    return same_value(a, b)
