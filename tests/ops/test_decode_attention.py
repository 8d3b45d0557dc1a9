"""Attention of one query for each head beside PyTorch's; with Triton's interpreter on the CPU too.

TRITON_INTERPRET=1 python -m pytest tests/ops/test_decode_attention.py -W ignore::RuntimeWarning
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from graphwright.ops.fused import fused_operator
from graphwright.ops.fused.decode_attention import DECODE_ATTENTION, applies, decode_attention

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    fused_operator.LIBRARY.impl(DECODE_ATTENTION.name, DECODE_ATTENTION.on_gpu, "CPU")
# Batch, heads, groups, positions, width.
SHAPES = [
    (1, 12, 12, 320, 64),
    (8, 4, 4, 65, 64),
    (1, 32, 4, 512, 128),
    (2, 6, 2, 1, 80),
    (1, 1, 1, 1000, 24),
    (3, 8, 1, 63, 256),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def given(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, heads, groups, positions, width = shape
    query = torch.randn(batch, 1, heads, width, device=device, dtype=dtype).transpose(1, 2)
    # A prefix of a longer cache.
    cache = torch.randn(2, batch, groups, positions + 7, width, device=device, dtype=dtype)
    return query, *cache[:, :, :, :positions]


def mask_of(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
    batch, heads, _, positions, _ = shape
    if kind == "none":
        return None
    if kind == "of each head":
        seen = torch.rand(batch, heads, 1, positions, device=device) > 0.3
        return seen | (torch.arange(positions, device=device) == 0)
    # The text begins late and ends early.
    place = torch.arange(positions, device=device)
    seen = (place >= positions // 4) & (place <= positions // 2)
    seen = seen.expand(batch, 1, 1, positions)
    if kind == "seen":
        return seen
    return torch.where(seen, 0.5, -torch.inf).to(dtype)


def difference(mine: torch.Tensor, its: torch.Tensor) -> float:
    return float((mine.double() - its.double()).abs().max())


@pytest.mark.parametrize("kind", ["none", "seen", "added", "of each head"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_near_to_float64_as_pytorch_s(
    shape: tuple[int, ...], dtype: torch.dtype, kind: str, device: torch.device
) -> None:
    if INTERPRETED and dtype is torch.bfloat16 and shape[1] != shape[2]:
        pytest.skip("the interpreter multiplies matrices of bfloat16 as integers")
    query, key, value = given(shape, dtype, device)
    mask = mask_of(kind, shape, dtype, device)
    scale = shape[-1] ** -0.5
    assert applies(query, key, value, mask, scale)
    mine = decode_attention(query, key, value, mask, scale)
    exact_mask = mask if mask is None or mask.dtype is torch.bool else mask.double()
    exact, eager = (
        torch.nn.functional.scaled_dot_product_attention(
            q, k, v, m, scale=scale, enable_gqa=shape[1] != shape[2]
        )
        for q, k, v, m in (
            (query.double(), key.double(), value.double(), exact_mask),
            (query, key, value, mask),
        )
    )
    assert (mine.shape, mine.dtype, mine.is_contiguous()) == (query.shape, dtype, True)
    own = max(difference(eager, exact), float(torch.finfo(dtype).eps))
    # Sums of so many products in float32, one after the other, differ by so much.
    sums = shape[-1] ** 0.5 * torch.finfo(torch.float32).eps
    assert difference(mine, exact) <= max(3 * own, sums)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_hidden_does_not_matter(dtype: torch.dtype, device: torch.device) -> None:
    shape = (2, 4, 2, 300, 64)
    query, key, value = given(shape, dtype, device)
    seen = torch.zeros(2, 1, 1, 300, dtype=torch.bool, device=device)
    seen[0, ..., 70:90] = True
    expected = decode_attention(query[:1], key[:1, :, 70:90], value[:1, :, 70:90], None, 0.1)
    for tensor in (key, value):
        tensor.masked_fill_(~seen.transpose(2, 3), 100.0)
    found = decode_attention(query, key, value, seen, 0.1)
    torch.testing.assert_close(found[:1], expected, rtol=2e-2, atol=2e-3)
    # Nothing is seen of the other text.
    assert torch.equal(found[1], torch.zeros_like(found[1]))


def test_what_the_kernel_does_not_take_is_pytorch_s(device: torch.device) -> None:
    query, key, value = given((2, 4, 2, 9, 16), torch.float32, device)
    others: list[tuple[Any, ...]] = [
        (query.double(), key.double(), value.double(), None),
        (query.expand(2, 4, 3, 16), key, value, None),
        (query, key, value, torch.zeros(1, 9, device=device)),
        (query, key, value, torch.ones(2, 1, 1, 9, dtype=torch.bool, device=device).mT.mT[:1]),
    ]
    assert [applies(*each, 1.0) for each in others] == [False, False, False, True]
    for each in others:
        mine = decode_attention(*each, 1.0)
        its = torch.nn.functional.scaled_dot_product_attention(*each, scale=1.0, enable_gqa=True)
        torch.testing.assert_close(mine, its)


def test_it_is_one_node_of_a_compiled_graph(device: torch.device) -> None:
    query, key, value = given((1, 4, 2, 33, 16), torch.float32, device)
    arguments = (query, key, value, None, 0.25)
    torch.library.opcheck(torch.ops.graphwright.decode_attention.default, arguments)
    compiled = torch.compile(decode_attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments), decode_attention(*arguments))
