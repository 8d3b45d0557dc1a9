"""How two answers of a model differ, whatever they are made of: tensors, caches, plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

RELATIVE, ABSOLUTE = 1e-4, 1e-5


def difference(found: Any, expected: Any, name: str = "output") -> str | None:
    """The first difference between two answers, in words, or None.

    Containers and objects have to be of the same types and hold the same members, tensors to agree
    but for rounding, and all else to be equal.
    """
    if type(found) is not type(expected):
        return f"{name} is {type(found).__name__} instead of {type(expected).__name__}"
    if isinstance(expected, torch.Tensor):
        return _of_tensors(found, expected, name)
    mine, theirs = _members(found), _members(expected)
    if mine is None or theirs is None:
        return None if found == expected else f"{name} is {found!r} instead of {expected!r}"
    if list(mine) != list(theirs):
        return f"{name} has {list(mine)} instead of {list(theirs)}"
    for key in theirs:
        what = difference(mine[key], theirs[key], f"{name}[{key!r}]")
        if what is not None:
            return what
    return None


def _of_tensors(found: torch.Tensor, expected: torch.Tensor, name: str) -> str | None:
    if (found.shape, found.dtype, found.device) != (
        expected.shape,
        expected.dtype,
        expected.device,
    ):
        mine, theirs = tuple(found.shape), tuple(expected.shape)
        return f"{name} is {found.dtype} {mine} instead of {expected.dtype} {theirs}"
    if torch.allclose(found, expected, RELATIVE, ABSOLUTE, equal_nan=True):
        return None
    return f"{name} is off by up to {float((found - expected).abs().max()):.1e}"


def _members(value: Any) -> dict[Any, Any] | None:
    """What a container or an object holds; None for a plain value."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) or type(value).__module__.startswith("transformers"):
        return dict(vars(value))
    return None
