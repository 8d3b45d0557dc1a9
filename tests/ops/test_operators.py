"""Our own operators beside their references, on the CPU and, with their kernels, on a GPU.

With TRITON_INTERPRET=1 and Triton installed, the kernels compute the CPU's cases too:

    TRITON_INTERPRET=1 python -m pytest tests/ops/test_operators.py -W ignore::RuntimeWarning
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import graphwright as gw
from graphwright.evaluation.accuracy import error_of, special_values
from graphwright.ops.fused import cpu_kernels, fused_operator, reference, registry
from graphwright.ops.fused.kernels import sizes
from graphwright.ops.fused.kernels.sizes import PROGRAMS, row_block, tile
from graphwright.ops.fused.operands import row_stride

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    for each in registry.OPERATORS.values():
        fused_operator.LIBRARY.impl(each.name, each.on_gpu, "CPU")
# Likewise with what C++ computes.
COMPILED = os.environ.get("OPERATORS_COMPILED") == "1"
if COMPILED:
    cpu_kernels.compile_for_cpu()

NAMES = sorted(registry.OPERATORS)
PUBLIC: dict[str, Callable[..., Any]] = {name: getattr(registry, name) for name in NAMES}
HALVES = [torch.float16, torch.bfloat16]
DTYPES = [torch.float32, *HALVES, torch.float64]
SHAPES = [(1,), (3, 1), (5, 3), (2, 3, 129), (3, 1000), (4, 768)]
IMAGES = [(1, 2, 7, 7), (2, 3, 9, 12), (2, 1, 5, 5), (1, 65, 8, 6)]
THIN = [(2, 17, 1, 9), (3, 3, 8, 1), (2, 8, 1, 1), (1, 65, 2, 1), (1, 1, 3, 3)]
WINDOWS = [
    (3, 2, 1),
    (2, None, 0),
    ((3, 2), (1, 2), (1, 0)),
    (1, 3, 0),
    *[((2, k), (3, 2), (1, p)) for k in range(1, 6) for p in range(k // 2 + 1)],
]
LAST = torch.channels_last
# Shapes of an image and of its window, stride, padding.
DEPTHWISE: list[tuple[tuple[int, ...], tuple[int, int], Any, Any]] = [
    ((2, 3, 9, 12), (3, 3), 1, 1),
    ((1, 17, 8, 6), (5, 5), 2, 2),
    ((1, 65, 5, 4), (7, 7), 1, 3),
    ((1, 64, 7, 35), (3, 3), 2, 0),
    ((3, 16, 5, 4), (3, 5), (1, 2), (0, 2)),
    ((1, 8, 3, 17), (1, 7), 1, (0, 3)),
    ((2, 4, 5, 6), (2, 2), 1, 2),
    ((1, 40, 6, 2), (1, 1), 1, 0),
]
OF_CHANNELS = ["channel_gate", "channel_mean", "to_channels_last"]


def in_steps(x: torch.Tensor) -> torch.Tensor:
    """Numbers that sum up exactly in any order: the interpreter adds one after the other."""
    return (x * 64).round() / 64


def of_names(name: str, shape: tuple[int, ...], **options: Any) -> tuple[Any, ...]:
    """Arguments of an operator whose first is of the shape; a pool has its own shapes."""

    def new(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, **options)

    if name == "relu_max_pool2d":
        shape = shape if len(shape) == 4 else (1, 2, 6, 7)
        return new(*shape), 3, 2, 1
    if name == "channel_activation":
        shape = shape if len(shape) == 4 else (0 if 0 in shape else 1, 3, 6, 7)
        x, other = (new(*shape).to(memory_format=LAST) for _ in range(2))
        return x, new(shape[1]), other, "silu"
    if name in OF_CHANNELS:
        shape = shape if len(shape) == 4 else (0 if 0 in shape else 1, 3, 6, 7)
        form = torch.contiguous_format if name == "to_channels_last" else LAST
        x = in_steps(new(*shape)).to(memory_format=form)
        more = {"channel_gate": (new(*shape[:2], 1, 1), new(shape[1]), "sigmoid")}
        return x, *more.get(name, ())
    if name == "depthwise_conv2d":
        shape = shape if len(shape) == 4 else (0 if 0 in shape else 1, 3, 6, 7)
        x, weight = new(*shape).to(memory_format=LAST), new(shape[1], 1, 3, 3)
        return x, weight, new(shape[1]), [2, 1], [1, 1], "silu"
    x, width = new(*shape), shape[-1]
    if name == "layer_norm":
        return x, new(width), new(width), 1e-5
    if name == "add_layer_norm":
        return x, new(*shape), new(width), new(width), 1e-5
    if name == "add_rms_norm":
        return x, new(*shape), new(width), 1e-6
    if name == "masked_softmax":
        mask = torch.rand(shape, device=x.device) > 0.3
        mask[..., 0] = True
        return x, mask, 0.3
    return x, new(*shape) if name == "swiglu" else new(width)


def plainly(name: str, *args: Any) -> Any:
    """The reference's result."""
    if name == "relu_max_pool2d" and args[2:3] == (None,):
        args = (*args[:2], (), *args[3:])
    return getattr(reference, name)(*args)


def as_near_as_eager(name: str, args: tuple[Any, ...]) -> None:
    """Layout and special values as the reference's; errors of at most 3 and 8 times its own."""
    wide = pytree.tree_map_only(
        torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, args
    )
    actual = pytree.tree_leaves(PUBLIC[name](*args))
    eager = pytree.tree_leaves(plainly(name, *args))
    exact = pytree.tree_leaves(plainly(name, *wide))
    on_host = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, args)
    results_on_host = iter(pytree.tree_leaves(plainly(name, *on_host)))
    for mine, theirs, right in zip(actual, eager, exact, strict=True):
        assert (mine.shape, mine.dtype, mine.device) == (theirs.shape, theirs.dtype, theirs.device)
        if mine.numel():
            assert mine.stride() == theirs.stride()
        special = theirs
        if INTERPRETED and name == "bias_gelu":
            special = right  # PyTorch's GELU of infinity is NaN on the CPU, but not on CUDA.
        if mine.is_cuda and name == "add_rms_norm":
            # On CUDA an infinity makes NaN of its whole row, on the CPU of itself.
            special = next(results_on_host).to(theirs.device)
        assert torch.equal(special_values(mine), special_values(special))
        error, _ = error_of(mine, right, theirs)
        own, _ = error_of(theirs, right, theirs)
        least = torch.finfo(mine.dtype).eps / 2
        assert error.rms <= 3 * max(own.rms, least)
        assert error.max <= 8 * max(own.max, least)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that were launched."""
    found: list[str] = []

    def noted(operator: fused_operator.FusedOperator) -> Callable[..., Any]:
        launch = operator.launch

        def run(*args: Any) -> Any:
            found.append(operator.name)
            return launch(*args)

        return run

    for operator in registry.OPERATORS.values():
        monkeypatch.setattr(operator, "launch", noted(operator))
    return found


def expected(device: torch.device, name: str, applies: bool) -> list[str]:
    return [name] * (applies and (INTERPRETED or device.type == "cuda"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name",
    [
        n
        for n in NAMES
        if n not in ("relu_max_pool2d", "channel_activation", "depthwise_conv2d", *OF_CHANNELS)
    ],
)
def test_values_of_any_size(
    name: str, dtype: torch.dtype, device: torch.device, launches: list[str]
) -> None:
    for shape in SHAPES:
        launches.clear()
        as_near_as_eager(name, of_names(name, shape, dtype=dtype, device=device))
        assert launches == expected(device, name, dtype is not torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pools_are_the_references_exactly(
    dtype: torch.dtype, device: torch.device, launches: list[str]
) -> None:
    for shape in IMAGES:
        for window in WINDOWS:
            for form in (torch.contiguous_format, LAST):
                x = torch.randn(shape, dtype=dtype, device=device)
                x.view(-1)[::13] = torch.nan
                x.view(-1)[5::17] = -torch.inf
                x = x.to(memory_format=form)
                launches.clear()
                result = registry.relu_max_pool2d(x, *window)
                takes = dtype is not torch.float64 and shape[1] > 1
                assert launches == expected(device, "relu_max_pool2d", takes)
                right = plainly("relu_max_pool2d", x, *window)
                torch.testing.assert_close(result, right, rtol=0, atol=0, equal_nan=True)
                assert shape[1] == 1 or result.stride() == right.stride()
                if window not in WINDOWS[:3]:
                    continue
                mine = registry.relu_max_pool2d(x, *window, contiguous=True)
                torch.testing.assert_close(mine, right, rtol=0, atol=0, equal_nan=True)
                assert mine.stride() == right.clone(memory_format=torch.contiguous_format).stride()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_activations_of_channels(
    activation: str, dtype: torch.dtype, device: torch.device, launches: list[str]
) -> None:
    for shape in (*IMAGES, (2, 8, 1, 1), (1, 4, 1, 3)):
        for form in (LAST, torch.contiguous_format):
            x, other = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
            x.view(-1)[::13] = torch.nan
            x, other = x.to(memory_format=form), other.to(memory_format=form)
            bias = torch.randn(shape[1], dtype=dtype, device=device)
            for args in ((x * 4, bias, other, activation), (x * 4, bias, None, activation)):
                launches.clear()
                as_near_as_eager("channel_activation", args)
                takes = dtype is not torch.float64 and not x.is_contiguous()
                assert form is LAST or x.is_contiguous()
                assert launches == expected(device, "channel_activation", takes)


def test_other_arguments_of_channels_are_the_references(
    device: torch.device, launches: list[str]
) -> None:
    x, bias = torch.randn(2, 3, 4, 5, device=device).to(memory_format=LAST), torch.randn(3)
    bias = bias.to(device)
    as_near_as_eager("channel_activation", (x, bias, x[:1], "relu"))
    as_near_as_eager("channel_activation", (x, bias, x.double(), "relu"))
    as_near_as_eager("channel_activation", (x, bias, x.contiguous(), "relu"))
    as_near_as_eager("channel_activation", (x.flatten(2), bias, None, "relu"))
    with pytest.raises(ValueError, match="not one of none, relu"):
        registry.channel_activation(x, bias, None, "softmax")
    assert launches == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_means_of_channels(dtype: torch.dtype, device: torch.device, launches: list[str]) -> None:
    for shape in (*IMAGES, *THIN, (1, 72, 15, 20), (2, 40, 33, 33)):
        for form in (LAST, torch.contiguous_format):
            for value in (0.0, torch.nan, torch.inf, -torch.inf):
                x = in_steps(torch.randn(shape, dtype=dtype, device=device))
                x = x.to(memory_format=form)
                x[0, -1, -1, 0] = value
                launches.clear()
                as_near_as_eager("channel_mean", (x,))
                takes = dtype is not torch.float64 and not x.is_contiguous()
                assert launches == expected(device, "channel_mean", takes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_gates_of_channels(
    activation: str, dtype: torch.dtype, device: torch.device, launches: list[str]
) -> None:
    for shape in (*IMAGES, *THIN, (2, 72, 5, 9)):
        for form in (LAST, torch.contiguous_format):
            x = torch.randn(shape, dtype=dtype, device=device)
            x.view(-1)[::13], x.view(-1)[1::17] = torch.nan, torch.inf
            gate = torch.randn(*shape[:2], 1, 1, dtype=dtype, device=device)
            gate[0, 0] = -torch.inf
            bias = torch.randn(shape[1], dtype=dtype, device=device)
            x, gate = x.to(memory_format=form), gate.to(memory_format=form)
            for args in ((x, gate + 1, bias, activation), (x, gate + 1, None, activation)):
                launches.clear()
                as_near_as_eager("channel_gate", args)
                takes = dtype is not torch.float64 and not x.is_contiguous()
                assert launches == expected(device, "channel_gate", takes)


def test_pools_to_contiguous_of_many_sizes(device: torch.device, launches: list[str]) -> None:
    for shape in ((2, 3, 7, 8), (1, 17, 24, 30), (3, 65, 2, 2), (2, 40, 2, 9), (1, 8, 9, 1)):
        for window in ((2, 2, 0), (3, 2, 1), (1, 1, 0)):
            if shape[-1] + 2 * window[2] < window[0]:
                continue
            x = torch.randn(shape, device=device).to(memory_format=LAST)
            args = x, *window, True
            launches.clear()
            as_near_as_eager("relu_max_pool2d", args)
            assert launches == expected(device, "relu_max_pool2d", True)
    assert registry.relu_max_pool2d(x, 1, contiguous=True).is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_in_channels_last(
    dtype: torch.dtype, device: torch.device, launches: list[str]
) -> None:
    for shape in (*IMAGES, *THIN, (3, 3, 24, 30), (2, 72, 12, 14), (1, 130, 7, 9)):
        for form in (LAST, torch.contiguous_format):
            x = torch.randn(shape, dtype=dtype, device=device)
            x.view(-1)[::13], x.view(-1)[1::17] = torch.nan, torch.inf
            x = x.to(memory_format=form)
            launches.clear()
            result, right = registry.to_channels_last(x), plainly("to_channels_last", x)
            torch.testing.assert_close(result, right, rtol=0, atol=0, equal_nan=True)
            assert result.stride() == right.stride()
            assert result.data_ptr() != x.data_ptr()
            takes = dtype is not torch.float64 and not x.is_contiguous(memory_format=LAST)
            assert launches == expected(device, "to_channels_last", takes)
    launches.clear()
    as_near_as_eager("to_channels_last", (torch.randn(2, 3, 4, 10, device=device)[..., ::2],))
    assert launches == []


def test_other_gates_are_the_references(device: torch.device, launches: list[str]) -> None:
    x = torch.randn(2, 3, 4, 5, device=device).to(memory_format=LAST)
    gate, bias = torch.randn(2, 3, 1, 1, device=device), torch.randn(3, device=device)
    as_near_as_eager("channel_gate", (x, gate[:1], bias, "sigmoid"))
    as_near_as_eager("channel_gate", (x, gate.double(), None, "sigmoid"))
    as_near_as_eager("channel_gate", (x, gate.expand(2, 3, 4, 5), bias, "relu"))
    as_near_as_eager("channel_gate", (x, gate.view(3, 2, 1, 1).transpose(0, 1), bias, "relu"))
    as_near_as_eager("channel_gate", (x, gate, bias.double(), "none"))
    with pytest.raises(ValueError, match="not one of none, relu"):
        registry.channel_gate(x, gate, bias, "softmax")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", DEPTHWISE, ids=str)
def test_convolutions_of_each_channel(
    case: Any, dtype: torch.dtype, device: torch.device, launches: list[str]
) -> None:
    shape, (high, wide), stride, padding = case
    x, bias = (torch.randn(*s, dtype=dtype, device=device) for s in (shape, shape[1:2]))
    weight = torch.randn(high, wide, shape[1], dtype=dtype, device=device)
    for form in (LAST, torch.contiguous_format):
        x = x.to(memory_format=form)
        for lies in (weight.permute(2, 0, 1)[:, None], weight.view(-1, 1, high, wide)):
            more = stride, padding
            for args in ((x, lies, bias, *more, "hardswish"), (x, lies, None, *more)):
                launches.clear()
                as_near_as_eager("depthwise_conv2d", args)
                takes = dtype is not torch.float64 and form is LAST
                assert launches == expected(device, "depthwise_conv2d", takes)


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_activations_of_convolutions(
    activation: str, device: torch.device, launches: list[str]
) -> None:
    for dtype in (torch.float32, *HALVES):
        for value in (0.0, torch.nan, torch.inf, -torch.inf):
            x, weight, bias, *_ = of_names(
                "depthwise_conv2d", (2, 5, 6, 7), dtype=dtype, device=device
            )
            x[1, 2, 3, 4] = value
            as_near_as_eager("depthwise_conv2d", (x, weight, bias, 1, 1, activation))
    assert launches == expected(device, "depthwise_conv2d", True) * 12


@pytest.mark.parametrize("strip", sizes.STRIPS, ids=str)
def test_convolutions_in_strips(
    strip: tuple[int, int],
    device: torch.device,
    launches: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As they are cut up where there are more outputs."""
    monkeypatch.setattr(sizes, "STRIPS", (strip,))
    monkeypatch.setattr(sizes, "PROGRAMS", 1)
    for dtype in (torch.float32, torch.float16):
        for shape, window in (((2, 64, 9, 28), 7), ((3, 96, 5, 17), 3), ((1, 20, 6, 16), 5)):
            x, _, bias, *_ = of_names("depthwise_conv2d", shape, dtype=dtype, device=device)
            weight = torch.randn(shape[1], 1, window, window, dtype=dtype, device=device)
            for stride in (1, 2):
                as_near_as_eager("depthwise_conv2d", (x, weight, bias, stride, window // 2, "relu"))
    assert launches == expected(device, "depthwise_conv2d", True) * 12


def test_other_arguments_of_convolutions_are_the_references(
    device: torch.device, launches: list[str]
) -> None:
    x, weight, bias, *_ = of_names("depthwise_conv2d", (2, 3, 9, 9), device=device)
    large = torch.randn(3, 1, 8, 8, device=device)
    as_near_as_eager("depthwise_conv2d", (x, large, bias, 1, 1, "relu"))
    as_near_as_eager("depthwise_conv2d", (x, weight, bias.repeat(2)[::2], 1, 1, "relu"))
    as_near_as_eager("depthwise_conv2d", (x[0], weight, bias, 1, 1, "relu"))
    one = x[:, :1].contiguous(memory_format=LAST)
    as_near_as_eager("depthwise_conv2d", (one, weight[:1], None, 1, 1, "relu"))
    as_near_as_eager("depthwise_conv2d", (x[:, :, ::2], weight, None, [1], [2], "none"))
    with pytest.raises(ValueError, match="not one of none, relu"):
        registry.depthwise_conv2d(x, weight, bias, activation="softmax")
    assert launches == []


def test_a_pool_of_one_image_without_a_batch(device: torch.device) -> None:
    x = torch.randn(3, 8, 8, device=device)
    assert torch.equal(registry.relu_max_pool2d(x, 2), plainly("relu_max_pool2d", x, 2))


def layouts(device: torch.device) -> dict[str, tuple[torch.Tensor, torch.Tensor, bool]]:
    """Pairs of tensors of one shape, and whether kernels take them."""

    def new(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=device)

    a, b = new(3, 5, 32).chunk(2, -1)
    wide = new(6, 40)
    return {
        "halves": (a, b, True),
        "a slice": (wide[1:4, 8:24], wide[2:5, 16:32], True),
        "an odd slice": (wide[1:4, 3:18], new(3, 15), True),
        "every second row": (wide[::2], new(3, 40), True),
        "expanded rows": (new(1, 24).expand(4, 24), new(4, 24), True),
        "a row": (wide[2], wide[3], True),
        "transposed": (new(24, 4).t(), new(24, 4).t(), False),
        "inner rows apart": (new(3, 5, 16)[:, 1:4], new(3, 3, 16), False),
        "heads": (new(2, 5, 3, 16).transpose(1, 2), new(2, 5, 3, 16).transpose(1, 2), False),
        "overlapping": (new(40).unfold(0, 16, 2), new(13, 16), False),
        "every second column": (wide[:, ::2], new(6, 20), False),
    }


LAYOUTS = list(layouts(torch.device("cpu")))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, device: torch.device, launches: list[str]) -> None:
    x, other, taken = layouts(device)[layout]
    row = torch.randn(x.shape[-1], device=device)
    for name, args in {
        "layer_norm": (x, row, None, 1e-5),
        "add_layer_norm": (x, other, row, None, 1e-5),
        "add_rms_norm": (x, other, row, 1e-6),
        "bias_gelu": (x, row),
        "bias_silu": (x, row),
        "swiglu": (x, other),
    }.items():
        launches.clear()
        as_near_as_eager(name, args)
        assert registry.OPERATORS[name].applies(*args) is taken
        assert launches == expected(device, name, taken)


def test_triton_is_prepared_once_and_nowhere_missed() -> None:
    thread = fused_operator.prepare_triton()
    assert fused_operator.prepare_triton() is thread
    thread.join(60)
    assert not thread.is_alive()


def test_halves_are_told_apart_by_a_stride() -> None:
    gate, up = torch.randn(2, 3, 16).chunk(2, -1)
    assert row_stride(gate) == row_stride(up) == 16
    assert row_stride(torch.randn(1, 1, 7)) == 7
    assert row_stride(torch.randn(5, 1)[::2]) == 2


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_and_silu_over_their_whole_range(approximate: str, device: torch.device) -> None:
    for dtype in (torch.float32, *HALVES):
        x = torch.linspace(-30, 30, 3000, device=device).to(dtype).view(3, -1)
        x[:, 0], x[:, 1], x[:, 2] = torch.nan, torch.inf, -torch.inf
        bias = torch.zeros_like(x[0])
        as_near_as_eager("bias_gelu", (x, bias, approximate))
        as_near_as_eager("bias_silu", (x, bias))
        as_near_as_eager("swiglu", (x, x.nan_to_num(1.0, 2.0, 3.0)))


@pytest.mark.parametrize(
    "mask_shape", [None, (2, 3, 5, 17), (2, 1, 1, 17), (3, 1, 17), (5, 17), (5, 1), (17,), ()]
)
def test_masks_of_any_shape(
    mask_shape: tuple[int, ...] | None, device: torch.device, launches: list[str]
) -> None:
    scores = torch.randn(2, 3, 5, 17, device=device)
    mask = None if mask_shape is None else torch.rand(mask_shape, device=device) > 0.5
    as_near_as_eager("masked_softmax", (scores, mask, 0.5))
    assert launches == expected(device, "masked_softmax", True)


def test_masks_and_scores_of_any_stride(device: torch.device, launches: list[str]) -> None:
    scores = torch.randn(2, 5, 3, 17, device=device).transpose(1, 2)[..., 1:14]
    mask = torch.rand(13, 5, device=device).t() > 0.3
    as_near_as_eager("masked_softmax", (scores, mask, 2.0))
    as_near_as_eager("masked_softmax", (scores, mask[:, ::2].repeat_interleave(2, 1)[:, :13], 2.0))
    as_near_as_eager("masked_softmax", (scores[0, 0, 0], mask[0], -1.0))
    assert launches == expected(device, "masked_softmax", True) * 3


def test_a_row_without_a_key_is_nan(device: torch.device) -> None:
    scores = torch.randn(3, 9, device=device)
    mask = torch.ones(3, 9, dtype=torch.bool, device=device)
    mask[1] = False
    result = registry.masked_softmax(scores, mask)
    assert result[1].isnan().all()
    assert result[[0, 2]].isfinite().all()


def test_masked_scores_do_not_matter_and_others_do(device: torch.device) -> None:
    scores = torch.randn(4, 9, device=device)
    mask = torch.ones(4, 9, dtype=torch.bool, device=device)
    mask[:, 3] = False
    scores[0, 3], scores[1, 4], scores[2, 4], scores[3, 4] = torch.nan, torch.nan, torch.inf, 1e30
    as_near_as_eager("masked_softmax", (scores, mask, 1.0))
    as_near_as_eager("masked_softmax", (scores, None, 0.0))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", NAMES)
def test_special_values_are_where_the_references_are(
    name: str, value: float, device: torch.device
) -> None:
    for dtype in (torch.float32, *HALVES):
        args = of_names(name, (3, 65), dtype=dtype, device=device)
        args[0][(0,) * (args[0].dim() - 1)][5] = value
        as_near_as_eager(name, args)


def test_a_sum_that_overflows_is_infinite_as_the_references(device: torch.device) -> None:
    x = torch.full((2, 8), 60000.0, dtype=torch.float16, device=device)
    x[1] = 1.0
    as_near_as_eager("add_layer_norm", (x, x, None, None, 1e-5))
    as_near_as_eager("add_rms_norm", (x, x, None, 1e-6))


@pytest.mark.parametrize("name", NAMES)
def test_empty_tensors(name: str, device: torch.device, launches: list[str]) -> None:
    shape = (0, 2, 6, 6) if name == "relu_max_pool2d" else (0, 8)
    as_near_as_eager(name, of_names(name, shape, device=device))
    assert launches == []


def test_optional_arguments(device: torch.device) -> None:
    x, residual, row = (torch.randn(*s, device=device) for s in [(3, 20), (3, 20), (20,)])
    as_near_as_eager("layer_norm", (x,))
    as_near_as_eager("layer_norm", (x, None, row, 1.0))
    as_near_as_eager("add_layer_norm", (x, residual))
    as_near_as_eager("add_layer_norm", (x, residual, None, row))
    as_near_as_eager("add_rms_norm", (x, residual))
    as_near_as_eager("add_rms_norm", (x, residual, row, 1.0))


def test_other_arguments_are_the_references(device: torch.device, launches: list[str]) -> None:
    """What broadcasts, or mixes dtypes, is computed as PyTorch does."""
    x = torch.randn(3, 20, device=device)
    as_near_as_eager("add_rms_norm", (x, x[0]))
    as_near_as_eager("bias_silu", (x, x))
    as_near_as_eager("bias_silu", (x, x[:, :1]))
    as_near_as_eager("swiglu", (x, x[0].double()))
    as_near_as_eager("masked_softmax", (x, torch.rand(2, 3, 20, device=device) > 0.2, 1.0))
    as_near_as_eager("masked_softmax", (x.unflatten(1, (1, 2, 2, 5)), None, 1.0))
    as_near_as_eager("add_layer_norm", (torch.randn(2, 40000, device=device),) * 2)
    as_near_as_eager("layer_norm", (torch.randn(2, 40000, device=device),))
    assert launches == []


X = torch.ones(2, 4)
Y = torch.ones(1, 3, 4, 5).to(memory_format=LAST)
WRONG: list[tuple[str, tuple[Any, ...]]] = [
    ("layer_norm", (X, torch.ones(3))),
    ("add_layer_norm", (X, torch.ones(2, 3), None, None, 1e-5)),
    ("add_layer_norm", (X, X, torch.ones(3), None, 1e-5)),
    ("add_layer_norm", (X.int(), X.int(), None, None, 1e-5)),
    ("add_rms_norm", (X, X, torch.ones(5), 1e-6)),
    ("bias_gelu", (X, torch.ones(3))),
    ("bias_gelu", (X, X[0], "cubic")),
    ("bias_gelu", (X.int(), X[0].int())),
    ("bias_silu", (X, torch.ones(3))),
    ("swiglu", (X, torch.ones(2, 3))),
    ("relu_max_pool2d", (X, 2)),
    ("relu_max_pool2d", (X[None, None], 2, 2, 2)),
    ("relu_max_pool2d", (X[None, None], 5)),
    ("relu_max_pool2d", (X[None, None].bool(), 2)),
    ("channel_gate", (X[None, None], torch.ones(2, 2, 3, 3))),
    ("channel_gate", (torch.ones(1, 3, 2, 2), torch.ones(1, 3, 1, 1), torch.ones(2))),
    ("channel_mean", (X,)),
    ("to_channels_last", (X,)),
    ("channel_mean", (X[None, None].int(),)),
    ("depthwise_conv2d", (Y, torch.ones(2, 1, 3, 3))),
    ("depthwise_conv2d", (Y, torch.ones(3, 1, 7, 7))),
    ("depthwise_conv2d", (Y, torch.ones(3, 1, 3, 3), torch.ones(2))),
    ("depthwise_conv2d", (Y, torch.ones(3, 1, 3, 3), None, 0)),
    ("depthwise_conv2d", (Y, torch.ones(3, 1, 3, 3), None, 1, -1)),
    ("depthwise_conv2d", (Y, torch.ones(3, 1, 3, 3), None, [1, 1, 1])),
    ("depthwise_conv2d", (Y, torch.ones(3, 1, 3, 3).double())),
    ("masked_softmax", (X, torch.ones(3, dtype=torch.bool), 1.0)),
    ("masked_softmax", (X, X, 1.0)),
]


@pytest.mark.parametrize(("name", "args"), WRONG)
def test_errors_are_the_references(name: str, args: tuple[Any, ...], device: torch.device) -> None:
    args = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), args)
    with pytest.raises(Exception) as right:  # noqa: PT011  # whatever the reference raises
        plainly(name, *args)
    with pytest.raises(type(right.value)) as found:
        PUBLIC[name](*args)
    if "max_pool2d" not in str(right.value) and "relu" not in str(right.value):
        assert str(found.value).splitlines()[0] == str(right.value).splitlines()[0]


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str, device: torch.device) -> None:
    args = of_names(name, (3, 5, 16), device=device)
    for tensor in args:
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.requires_grad_()
    operator = getattr(torch.ops.graphwright, name).default
    torch.library.opcheck(operator, args)
    if name == "relu_max_pool2d":
        x = args[0].detach().to(memory_format=LAST).requires_grad_()
        torch.library.opcheck(operator, (x, *args[1:]))
        torch.library.opcheck(operator, (x, *args[1:], True))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_two_orders(name: str, device: torch.device) -> None:
    args = list(of_names(name, (2, 5), dtype=torch.float64, device=device))
    places = [n for n, a in enumerate(args) if getattr(a, "dtype", None) is torch.float64]
    for n in places:
        args[n].requires_grad_()

    def function(*tensors: torch.Tensor) -> Any:
        for n, tensor in zip(places, tensors, strict=True):
            args[n] = tensor
        return PUBLIC[name](*args)

    tensors = [args[n] for n in places]
    # On CUDA some of PyTorch's gradients add up in an order that changes.
    assert torch.autograd.gradcheck(function, tensors, nondet_tol=1e-10)
    assert torch.autograd.gradgradcheck(function, tensors, nondet_tol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_references_in_float16(name: str, device: torch.device) -> None:
    def gradients(function: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        args = of_names(name, (3, 20), dtype=torch.float16, device=device)
        wanted = [a for a in args if getattr(a, "dtype", None) is torch.float16]
        for tensor in wanted:
            tensor.requires_grad_()
        outputs = pytree.tree_leaves(function(*args))
        return list(torch.autograd.grad(outputs, wanted, [o.cos().detach() for o in outputs]))

    mine, theirs = gradients(PUBLIC[name]), gradients(lambda *args: plainly(name, *args))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_an_output_or_input_that_needs_no_gradient(device: torch.device) -> None:
    x = torch.randn(3, 8, device=device, requires_grad=True)
    residual = torch.randn(3, 8, device=device)
    weight = torch.randn(8, device=device, requires_grad=True)
    normalized, total = registry.add_rms_norm(x, residual, weight)
    (found,) = torch.autograd.grad(total.sum(), x, retain_graph=True)
    assert torch.equal(found, torch.ones_like(x))
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(total.sum(), weight, retain_graph=True)
    right = torch.autograd.grad(plainly("add_rms_norm", x, residual, weight)[0].sum(), (x, weight))
    for a, b in zip(torch.autograd.grad(normalized.sum(), (x, weight)), right, strict=True):
        torch.testing.assert_close(a, b)


def test_one_tensor_as_two_arguments(device: torch.device) -> None:
    x = torch.randn(3, 8, device=device, requires_grad=True)
    for create in (False, True):
        mine = torch.autograd.grad(registry.swiglu(x, x).sum(), x, create_graph=create)
        right = torch.autograd.grad(reference.swiglu(x, x).sum(), x)
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_in_one_graph(name: str, device: torch.device) -> None:
    torch._dynamo.reset()
    args = of_names(name, (3, 20), device=device)
    args[0].requires_grad_()
    cpu_kernels = torch.compile(PUBLIC[name], fullgraph=True, backend="aot_eager")
    mine = pytree.tree_leaves(cpu_kernels(*args))
    right = pytree.tree_leaves(PUBLIC[name](*args))
    for a, b in zip(mine, right, strict=True):
        assert torch.equal(a, b)
    for outputs in (mine, right):
        outputs.append(torch.autograd.grad(outputs[0].square().sum(), args[0])[0])
    torch.testing.assert_close(mine[-1], right[-1])


def test_compiled_for_sizes_that_change(device: torch.device) -> None:
    torch._dynamo.reset()
    cpu_kernels = torch.compile(registry.swiglu, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5, 8):
        both = torch.randn(rows, 32, device=device)
        assert torch.equal(cpu_kernels(*both.chunk(2, -1)), registry.swiglu(*both.chunk(2, -1)))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter copies storages, a capture moves them")
@pytest.mark.parametrize("name", NAMES)
def test_captured(name: str, device: torch.device) -> None:
    args = of_names(name, (3, 20), device=device)

    def function(x: torch.Tensor) -> Any:
        return PUBLIC[name](x * 2, *args[1:])

    with torch.no_grad():
        graph = gw.capture(function, args[0])
        other = torch.randn_like(args[0])
        for mine, right in zip(
            pytree.tree_leaves(graph(other)), pytree.tree_leaves(function(other)), strict=True
        ):
            assert torch.equal(mine, right)


def test_autocast_leaves_the_dtype(device: torch.device) -> None:
    x = torch.randn(3, 8, device=device, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast(device.type, torch.bfloat16):
        normalized, total = registry.add_layer_norm(x, x)
        assert normalized.dtype is total.dtype is torch.bfloat16
        registry.add_layer_norm(x.float(), x.float())[0].sum().backward()
    assert x.grad is not None


def test_on_the_meta_device() -> None:
    x = torch.empty(2, 3, 8, 8, device="meta").to(memory_format=LAST)
    result = registry.relu_max_pool2d(x, 3, 2, 1)
    assert (result.shape, result.stride()) == ((2, 3, 4, 4), (48, 1, 12, 3))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(INTERPRETED or COMPILED, reason="it is what the others run in")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's kernels are what is tested there")
def test_all_of_this_holds_in_c_plus_plus(tmp_path: Path) -> None:
    environment = {**os.environ, "OPERATORS_COMPILED": "1", "GRAPHWRIGHT_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


def test_calls_go_to_c_plus_plus_once_it_is_built() -> None:
    before = torch._C._dispatch_has_kernel_for_dispatch_key
    for operator in registry.OPERATORS.values():
        built = COMPILED and operator in cpu_kernels.OPERATORS
        assert before(f"graphwright::{operator.name}", "CPU") == (built or INTERPRETED)
    assert cpu_kernels.runs_compiled() == COMPILED


def test_without_triton_the_references_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    fused_operator.triton_works.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    try:
        assert not fused_operator.triton_works()
        x = torch.randn(2, 8)
        assert torch.equal(registry.OPERATORS["swiglu"].on_gpu(x, x), reference.swiglu(x, x))
    finally:
        fused_operator.triton_works.cache_clear()


@pytest.mark.parametrize("columns", [1, 3, 128, 768, 1000, 3072, 4096, 14336, 32768])
@pytest.mark.parametrize("rows", [1, 7, 128, 8192, 10**6])
def test_how_work_is_cut_up(rows: int, columns: int) -> None:
    together, block, warps = row_block(rows, columns)
    assert columns <= block < 2 * columns
    assert together == 1 or (together * block <= 1024 and rows >= together * PROGRAMS)
    assert together * block <= 32 * 32 * warps
    height, width = tile(rows, columns)
    assert 1 <= height * width <= 2048
    assert width & (width - 1) == height & (height - 1) == 0


@pytest.mark.parametrize("channels", [1, 3, 16, 17, 72, 96, 120, 184, 768, 960])
@pytest.mark.parametrize("rows", [1, 7, 56, 112, 32 * 56])
@pytest.mark.parametrize("width", [1, 7, 14, 56, 97])
def test_how_convolutions_are_cut_up(rows: int, width: int, channels: int) -> None:
    block = sizes.channel_block(channels)
    groups = -(-channels // block)
    assert (groups - 1) * block < channels <= groups * block <= max(1.125 * channels, channels + 15)
    pixels, each = sizes.strips(rows, width, channels)
    across = -(-width // pixels)
    assert 1 <= pixels <= 8
    assert (across - 1) * pixels < width <= across * pixels < width + across
    together = sizes.strips_together(rows, across * groups, block, each)
    assert together & (together - 1) == block & (block - 1) == 0
    assert together * block <= 128 * each
    assert together == 1 or together // 2 < rows


@pytest.mark.parametrize("width", [1, 7, 112, 240, 241, 242, 500, 1023])
def test_pools_of_wide_rows_are_the_references_exactly(width: int, device: torch.device) -> None:
    """Several tiles side by side, which share what windows at their edges reach over."""
    x = torch.randn(1, 2, 5, width, device=device)
    for kernel, padding in ((1, 0), (2, 0), (3, 1), (3, 0), (7, 3), (16, 8), (17, 8)):
        window = (1, min(kernel, width)), (1, 2), (0, min(padding, width // 2))
        assert torch.equal(
            PUBLIC["relu_max_pool2d"](x, *window), reference.relu_max_pool2d(x, *window)
        )


@pytest.mark.skipif(INTERPRETED, reason="the interpreter is slow")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would make a benchmark of this")
def test_the_benchmark_runs_and_writes_every_sample(tmp_path: Path) -> None:
    from bench.operators.run import benchmark

    benchmark(tmp_path, quick=True)
    result = json.loads((tmp_path / "operators.json").read_text("utf-8"))
    assert len(result["targets"]) == len(result["bandwidth"]) + len(result["models"])
    names = {row["case"].split()[0] for row in result["bandwidth"]}
    assert names == set(NAMES) - {"depthwise_conv2d"}
    assert all(len(row["ours"]["samples"]) == 3 for row in result["models"])
    assert all(row["difference"] < 0.05 for row in result["models"])
    assert not any(target["met"] for target in result["targets"])  # No kernel was used.
