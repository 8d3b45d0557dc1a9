"""Single operations run again in another dtype, precision or layout: measured, not guessed.

The model itself is not touched: an operation runs on random values of the same shapes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..evaluation.clock import fastest_s
from .observation import Form, ObservedOperation, OperationSample
from .roofs import fp32_precision
from .timing import back_to_back

# Of the time of products, what has to be tried, and the most kinds of operations that are.
_COVERED, _MOST_KINDS = 0.95, 24
# Seconds of one operation's timing, about.
_EACH_S = 0.02
BF16, TF32, CHANNELS_LAST = "bf16", "TF32", "channels_last"
# The fastest of cuDNN's algorithms in either layout.
FASTEST = "the fastest algorithm"


@dataclass(frozen=True)
class FormTrial:
    """What products and convolutions take in another form.

    Attributes:
        before_s: seconds of those that were tried, in one call.
        after_s: seconds of the same in the other form.
        untried_s: seconds of the other products and convolutions.
    """

    before_s: float
    after_s: float
    untried_s: float


def try_variants(
    operations: Sequence[ObservedOperation],
    samples: Mapping[int, OperationSample],
    seconds: Mapping[int, float],
    device: torch.device,
    *,
    limit_s: float,
) -> dict[str, FormTrial]:
    """Time the operations that take most, each kind once, as they are and in other forms.

    Args:
        operations: of a call.
        samples: those of them that can run again, by index.
        seconds: of each in the call, by index.
        device: where they run.
        limit_s: seconds after which no other kind is tried.

    Returns:
        by form, what was found; forms that suit none of them are left out.
    """
    groups = _kinds(samples, seconds)
    total = sum(seconds[i] for group in groups for i in group)
    found: dict[str, list[float]] = {}
    began, covered = time.perf_counter(), 0.0
    for group in groups[:_MOST_KINDS]:
        if covered >= _COVERED * total or time.perf_counter() - began > limit_s:
            break
        spent = sum(seconds[i] for i in group)
        covered += spent
        operation, sample = operations[group[0]], samples[group[0]]
        forms = _forms(operation, sample, device)
        base = _seconds(sample, None, device) if forms else None
        for form in forms:
            other = None if base is None else _seconds(sample, form, device)
            before_after = found.setdefault(form, [0.0, 0.0])
            if base is not None and other is not None:
                before_after[0] += spent
                before_after[1] += spent * other / base
    return {
        form: FormTrial(before, after, total - before)
        for form, (before, after) in found.items()
        if before
    }


def _kinds(samples: Mapping[int, OperationSample], seconds: Mapping[int, float]) -> list[list[int]]:
    """Operations that are alike, by index; the kinds that take most first."""
    kinds: dict[str, list[int]] = {}
    for index, sample in samples.items():
        if seconds.get(index, 0.0) > 0:
            kinds.setdefault(repr((str(sample.func), sample.args, sample.kwargs)), []).append(index)
    return sorted(kinds.values(), key=lambda kind: -sum(seconds[i] for i in kind))


def _forms(
    operation: ObservedOperation, sample: OperationSample, device: torch.device
) -> list[str]:
    tensors = _tensor_forms((sample.args, sample.kwargs))
    if not tensors or not all(form.dtype.is_floating_point for form in tensors):
        return []
    forms = []
    if operation.dtype == "float32":
        forms.append(BF16)
        if device.type == "cuda" and operation.precision != "tf32":
            forms.append(TF32)
    if "convolution" in operation.name and device.type == "cuda":
        forms.append(FASTEST)
    image = [form for form in tensors if len(form.shape) == 4]
    if "convolution" in operation.name and image and not _is_channels_last(image[0]):
        forms.append(CHANNELS_LAST)
    return forms


def _is_channels_last(form: Form) -> bool:
    _, channels, _, width = form.shape
    return channels > 1 and form.stride[1] == 1 and form.stride[3] != 1 and width > 0


def _tensor_forms(tree: Any) -> list[Form]:
    if isinstance(tree, Form):
        return [tree]
    if isinstance(tree, dict):
        return [form for value in tree.values() for form in _tensor_forms(value)]
    if isinstance(tree, list | tuple):
        return [form for value in tree for form in _tensor_forms(value)]
    return []


def _seconds(sample: OperationSample, form: str | None, device: torch.device) -> float | None:
    """Seconds of an operation in some form; None if it does not run in it."""
    if form == FASTEST:
        with _trying_all_algorithms():
            found = [_seconds(sample, layout, device) for layout in (None, CHANNELS_LAST)]
        return min((seconds for seconds in found if seconds is not None), default=None)
    try:
        with torch.no_grad():
            args = _made(sample.args, form)
            kwargs = _made(sample.kwargs, form)
            precision = fp32_precision("tf32") if form == TF32 else contextlib.nullcontext()
            with precision:
                if device.type == "cuda":
                    return back_to_back(
                        lambda: sample.func(*args, **kwargs), device, times=5, repeats=2
                    )
                return fastest_s(
                    lambda: sample.func(*args, **kwargs), limit_s=_EACH_S, most=20, warmup=1
                )
    except (RuntimeError, TypeError, NotImplementedError, IndexError):
        return None


@contextlib.contextmanager
def _trying_all_algorithms() -> Iterator[None]:
    """Have cuDNN time its algorithms for each new shape inside the block."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _made(value: Any, form: str | None) -> Any:
    """Arguments with tensors of random values in the place of forms."""
    if isinstance(value, Form):
        return _tensor(value, form)
    if isinstance(value, dict):
        return {key: _made(each, form) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_made(each, form) for each in value)
    return value


def _tensor(form: Form, variant: str | None) -> torch.Tensor:
    shared = [n == 0 for n in form.stride]
    sizes = [1 if one else n for n, one in zip(form.shape, shared, strict=True)]
    dtype = torch.bfloat16 if variant == BF16 else form.dtype
    if any(shared):
        return torch.randn(sizes, dtype=dtype, device=form.device).expand(form.shape)
    made = torch.empty_strided(form.shape, form.stride, dtype=dtype, device=form.device)
    made.normal_()
    if variant == CHANNELS_LAST and made.dim() == 4:
        return made.contiguous(memory_format=torch.channels_last)
    return made
