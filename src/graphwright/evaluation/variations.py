"""Variations of a sample's inputs: random, permuted, flipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from ..calls.snapshots import Call, can_hold_anything
from .accuracy import as_float64


def variations(call: Call, generator: torch.Generator, draws: int) -> Iterator[Call]:
    """Other inputs of the same kind; `generator` lives on the CPU.

    Integers are drawn from the sample's own values, so that ids stay valid (on a GPU, an invalid
    one kills the process). If all are equal, they are lowered by one in a variation of their own,
    since a value that never changes proves nothing.
    """
    changes: list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = [
        (f"random inputs {index + 1}", lambda t: drawn_like(t, generator)) for index in range(draws)
    ]
    changes.append(("the sample's values permuted", lambda t: _permuted(t, generator)))
    if any(t.dtype is torch.bool for t in call.tensors()):
        changes.append(("booleans flipped", lambda t: ~t if t.dtype is torch.bool else t))
    flags = [n for n, t in call.leaves().items() if isinstance(t, torch.Tensor) and _is_flag(t)]
    if flags:
        words = f"all of {' and '.join(flags)} lowered by one (give a sample in which it differs)"
        changes.append((words, _flipped))
    if not any(t.numel() and can_hold_anything(t) for t in call.tensors()):
        return
    for name, change in changes:
        mine = replace(call.clone(), name=name)
        with torch.no_grad():
            for tensor in mine.tensors():
                if tensor.numel() and can_hold_anything(tensor):
                    tensor.copy_(change(tensor.detach()))
        yield mine


def drawn_like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random values like a tensor's: a mask for a mask, its mean and deviation, its integers."""
    shape = tensor.shape
    values = as_float64(tensor).reshape(-1).cpu()
    if tensor.is_complex():
        parts = drawn_like(torch.view_as_real(tensor), generator)
        return torch.view_as_complex(parts.contiguous())
    ones = bool((values == 1).any())
    only_both = bool(((values == 0) | (values == 1)).all())
    if only_both and (ones or tensor.dtype is torch.bool or tensor.is_floating_point()):
        drawn = torch.rand(shape, generator=generator, device="cpu") < 0.5
    elif tensor.is_floating_point():
        finite = values[torch.isfinite(values)]
        mean = float(finite.mean()) if finite.numel() else 0.0
        deviation = float(finite.std()) if finite.numel() > 1 else 0.0
        normal = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        drawn = normal * (deviation or 1.0) + mean
    else:
        places = torch.randint(0, tensor.numel(), shape, generator=generator, device="cpu")
        return tensor.reshape(-1)[places.to(tensor.device)]
    return drawn.to(tensor.device, tensor.dtype)


def _is_flag(tensor: torch.Tensor) -> bool:
    """An integer or boolean tensor all of whose elements are one value above 0."""
    if tensor.is_floating_point() or tensor.is_complex() or not tensor.numel():
        return False
    first = tensor.reshape(-1)[:1]
    return bool((tensor == first).all()) and int(first) > 0


def _flipped(tensor: torch.Tensor) -> torch.Tensor:
    if not _is_flag(tensor):
        return tensor
    return ~tensor if tensor.dtype is torch.bool else tensor - 1


def _permuted(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    order = torch.randperm(tensor.numel(), generator=generator, device="cpu").to(tensor.device)
    return tensor.reshape(-1)[order].reshape(tensor.shape)
