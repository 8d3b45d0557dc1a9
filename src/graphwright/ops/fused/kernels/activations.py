"""bias_gelu, bias_silu and swiglu: tiles of rows and columns, so that no index is divided."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch_cache import launched
from ..operands import LIMIT, row_stride
from .sizes import tile


@triton.jit
def silu(value):
    """Value times its logistic function, in float32."""
    return value / (1.0 + tl.exp(-value))


@triton.jit
def gelu(value):
    """GELU by the error function."""
    return 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))


@triton.jit
def gelu_in_half(value):
    """GELU for results in half precision, where the error function would outlast the memory.

    The logarithm to base 2 of 2 Φ(-u) as a polynomial, fitted for u up to 6.5: Φ has a relative
    error of 5e-6, and falls on beyond.
    """
    u = tl.abs(value)
    power = -1.76032309e-06 * u + 6.00019715e-05
    power = power * u - 9.17044038e-04
    power = power * u + 8.45107241e-03
    power = power * u - 5.38355280e-02
    power = power * u - 4.58597890e-01
    power = power * u - 1.15119411
    tail = tl.exp2(power * u - 1.0)
    return value * tl.where(value > 0, 1.0 - tail, tail)


@triton.jit
def gelu_tanh(value):
    """GELU by its approximation: (1 + tanh(u)) / 2 is the logistic function of 2u."""
    twice = 1.5957691216057308 * (value + 0.044715 * value * value * value)
    return value / (1.0 + tl.exp(-twice))


@triton.jit
def between(value, low, high):
    """The value, or the bound that it is beyond; NaN stays."""
    value = tl.maximum(value, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(value, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def activated(value, ACTIVATION: tl.constexpr, HALF: tl.constexpr):
    """An activation of float32 values, by its name; HALF: the result has half precision."""
    if ACTIVATION == "relu":
        value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "relu6":
        value = between(value, 0.0, 6.0)
    elif ACTIVATION == "hardswish":
        value = value * between(value + 3.0, 0.0, 6.0) * 0.16666666666666666
    elif ACTIVATION == "hardsigmoid":
        value = between(value + 3.0, 0.0, 6.0) * 0.16666666666666666
    elif ACTIVATION == "sigmoid":
        value = 1.0 / (1.0 + tl.exp(-value))
    elif ACTIVATION == "silu":
        value = silu(value)
    elif ACTIVATION == "gelu" and HALF:
        value = gelu_in_half(value)
    elif ACTIVATION == "gelu":
        value = gelu(value)
    elif ACTIVATION == "gelu_tanh":
        value = gelu_tanh(value)
    return value


@triton.jit
def bias_activation_kernel(
    x,
    bias,
    other,
    result,
    rows,
    columns,
    x_stride,
    OTHER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """An activation of x + bias, of a tile; and of another tensor, of rows side by side."""
    across = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    column = ((tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows)[:, None] & (column < columns)
    row = row.to(tl.int64)[:, None]
    value = tl.load(x + row * x_stride + column, mask=inside, eviction_policy="evict_first")
    shift = tl.load(bias + column, mask=column < columns, eviction_policy="evict_last")
    value = value.to(tl.float32) + shift.to(tl.float32)
    if OTHER:
        value += tl.load(
            other + row * columns + column, mask=inside, eviction_policy="evict_first"
        ).to(tl.float32)
    value = activated(value, ACTIVATION, result.dtype.element_ty != tl.float32)
    tl.store(result + row * columns + column, value.to(result.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_kernel(
    gate,
    up,
    result,
    rows,
    columns,
    gate_stride,
    up_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """silu(gate) * up, of a tile."""
    across = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    column = ((tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows)[:, None] & (column < columns)
    row = row.to(tl.int64)[:, None]
    a = tl.load(gate + row * gate_stride + column, mask=inside, eviction_policy="evict_first")
    b = tl.load(up + row * up_stride + column, mask=inside, eviction_policy="evict_first")
    value = silu(a.to(tl.float32)) * b.to(tl.float32)
    tl.store(result + row * columns + column, value.to(result.dtype.element_ty), mask=inside)


def bias_activation(x: torch.Tensor, bias: torch.Tensor, activation: str) -> torch.Tensor:
    """An activation, by its name, of x + bias, contiguous."""
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, bias, None, result, x.shape[-1], row_stride(x), activation)
    return result


def channel_activation(
    x: torch.Tensor, bias: torch.Tensor, other: torch.Tensor | None, activation: str
) -> torch.Tensor:
    """An activation of x + bias + other, all in channels_last."""
    result = torch.empty_like(x)
    _launch(x, bias, other, result, x.shape[1], x.shape[1], activation)
    return result


def _launch(
    x: torch.Tensor,
    bias: torch.Tensor,
    other: torch.Tensor | None,
    result: torch.Tensor,
    columns: int,
    stride: int | None,
    activation: str,
) -> None:
    rows = x.numel() // columns
    height, width = tile(rows, columns)
    grid = (triton.cdiv(rows, height) * triton.cdiv(columns, width),)
    launched(
        bias_activation_kernel,
        grid,
        x,
        bias,
        other,
        result,
        rows,
        columns,
        stride,
        OTHER=other is not None,
        ACTIVATION=activation,
        ROWS=height,
        COLUMNS=width,
        num_warps=4,
    )


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, contiguous."""
    columns = gate.shape[-1]
    rows = gate.numel() // columns
    strides = row_stride(gate), row_stride(up)
    result = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if strides == (columns, columns) and gate.numel() < LIMIT:
        # Nothing tells the rows apart: one long row fills every tile.
        rows, columns = 1, gate.numel()
        strides = columns, columns
    height, width = tile(rows, columns)
    grid = (triton.cdiv(rows, height) * triton.cdiv(columns, width),)
    launched(
        swiglu_kernel,
        grid,
        gate,
        up,
        result,
        rows,
        columns,
        *strides,
        ROWS=height,
        COLUMNS=width,
        num_warps=4,
    )
    return result
