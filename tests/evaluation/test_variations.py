"""Variations are calls that the model could get: masks stay masks, ids ids; others judge nobody."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import planted
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from graphwright.calls.snapshots import Call, same_bits
from graphwright.evaluation.reference import Reference, reference
from graphwright.evaluation.variations import variations
from graphwright.evaluation.verification import verify


def varied(*args: torch.Tensor, draws: int = 6) -> dict[str, tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    found = variations(Call("the sample", args, {}), generator, draws)
    return {each.call.name: each.call.args for each in found}


def made(model: Callable[..., Any], *args: Any) -> Reference:
    module = model if isinstance(model, nn.Module) else nn.Module()
    return reference(model, module, Call("the sample", args, {}))


def begins_with(rows: torch.Tensor, value: bool) -> bool:
    """Whether all rows begin with a value, and none takes it up again after another one."""
    same = rows.bool() == value
    return bool(same[:, 0].all() and (same[:, 1:] <= same[:, :-1]).all())


@pytest.mark.parametrize("dtype", [torch.long, torch.int32, torch.bool, torch.float32])
@pytest.mark.parametrize("shape", [(4, 16), (1, 16), (3, 1, 1, 8), (2, 8, 1), (2, 2)])
def test_a_mask_of_ones_becomes_a_ragged_one(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    length = next(n for n in reversed(shape) if n > 1)
    for name, (mask,) in varied(torch.ones(shape, dtype=dtype)).items():
        rows = mask.reshape(-1, length)
        assert (mask.shape, mask.dtype) == (shape, dtype)
        assert begins_with(rows, True)
        if name.startswith("random"):
            assert not rows.all()
            # A batch is as long as its longest row.
            assert len(rows) == 1 or rows.bool().all(1).any()


def test_a_mask_of_padding_keeps_rows_that_begin_with_data() -> None:
    """As a key_padding_mask, in which True is what attention leaves out."""
    found = varied(torch.zeros(4, 16, dtype=torch.bool))
    assert all(begins_with(mask, False) for (mask,) in found.values())
    assert any(mask.any() for (mask,) in found.values())


def test_a_ragged_mask_is_not_flipped() -> None:
    """Its rows would begin with padding, even where each has both values."""
    found = varied(torch.tensor([[True, True, False, False], [True, True, True, False]]))
    assert all(begins_with(mask, True) for (mask,) in found.values())


def test_rows_that_end_with_data_go_on_doing_so() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    found = [each for (each,) in varied(mask).values()]
    assert all(begins_with(each.flip(1), True) for each in found)
    assert len({str(each) for each in found}) > 1


ROWS = st.lists(st.lists(st.integers(0, 1), min_size=3, max_size=3), min_size=1, max_size=5)


@settings(deadline=None, database=None)
@given(rows=ROWS, dtype=st.sampled_from([torch.long, torch.bool]))
def test_each_row_keeps_what_each_row_has(rows: list[list[int]], dtype: torch.dtype) -> None:
    mask = torch.tensor(rows, dtype=dtype)
    assume(dtype is torch.bool or mask.any())  # Integers that are all 0 may be ids.
    for (other,) in varied(mask).values():
        assert set(other.unique().tolist()) <= {0, 1}
        for value in (0, 1):
            if (mask == value).any(1).all():
                assert (other == value).any(1).all()


def test_a_random_pattern_is_drawn_and_flipped() -> None:
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(8, 32, generator=generator) < 0.5
    found = varied(mask)
    assert same_bits(found["booleans flipped"][0], ~mask)
    (drawn,) = found["random inputs 1"]
    assert not torch.equal(drawn.sum(1), mask.sum(1))


@pytest.mark.parametrize("ids", [torch.zeros(2, 8), torch.full((2, 8), 7), torch.tensor([[3, 9]])])
def test_ids_stay_in_the_range_that_was_seen(ids: torch.Tensor) -> None:
    for (other,) in varied(ids.long()).values():
        assert other.min() >= 0
        assert other.max() <= ids.max()


def pooled(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean of what is not masked: NaN for a row that is masked as a whole."""
    weights = mask[..., None].to(x.dtype)
    return (x * weights).sum(-2) / weights.sum(-2)


def test_a_mask_of_ones_is_varied_so_that_eager_survives() -> None:
    ref = made(pooled, torch.randn(4, 16, 8), torch.ones(4, 16, dtype=torch.long))
    assert ref.left_out == []
    assert ref.notes == [
        "args[1] is all ones: verified with ragged masks too, whose rows begin with ones, but with "
        "no row of zeros alone"
    ]
    assert verify(pooled, ref).ok
    assert not verify(lambda x, mask: x.mean(1), ref).ok


def test_ones_that_are_no_mask_need_no_note() -> None:
    assert made(lambda x: x * 2, torch.ones(4, 16)).notes == []


def test_what_eager_does_not_survive_judges_nobody() -> None:
    def scaled(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return x / (count - 1)

    ref = made(scaled, torch.randn(16, 8), torch.tensor(2))
    assert ref.left_out == ["args[1] of 1"]
    assert ref.notes == [
        "Not verified with args[1] of 1: eager gives NaN or Inf, unlike for your sample"
    ]
    assert verify(lambda x, count: scaled(x, count).nan_to_num(posinf=0, neginf=0), ref).ok
    assert not verify(lambda x, count: x * 2, ref).ok


@pytest.mark.parametrize("dtype", [torch.long, torch.bool])
def test_a_mask_without_a_batch_is_a_row(dtype: torch.dtype) -> None:
    sample = torch.randn(16, 8), torch.ones(16, dtype=dtype)
    for name, (_, mask) in varied(*sample).items():
        assert begins_with(mask[None], True)
        assert bool(mask.all()) is not name.startswith("random")
    ref = made(pooled, *sample)
    words = ("ones", "zeros") if dtype is torch.long else ("True", "False")
    assert ref.left_out == []
    assert ref.notes == [
        f"args[1] is all {words[0]}: verified with ragged masks too, which begin with {words[0]}, "
        f"but with none of {words[1]} alone"
    ]
    assert verify(lambda x, mask: pooled(x, mask).nan_to_num(), ref).ok
    assert not verify(lambda x, mask: x.mean(0), ref).ok


@pytest.mark.parametrize(
    "given", [torch.ones(1).long(), torch.ones(()).long(), torch.full((4,), 3), torch.full((1,), 2)]
)
def test_what_is_no_mask_is_lowered(given: torch.Tensor) -> None:
    *_, (lowered, _) = varied(given, torch.randn(4, 8)).values()
    assert torch.equal(lowered, given - 1)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_mask_of_single_ids_stays_as_it_is(rows: int) -> None:
    """Of a text of one word; without it nothing is left to attend to."""
    ids, mask = torch.full((rows, 1), 7), torch.ones(rows, 1).long()
    found = varied(ids, mask)
    assert found
    assert all(torch.equal(each, mask) for _, each in found.values())
    *_, (_, lowered) = varied(torch.ones(rows, 1).long(), mask).values()
    assert not lowered.any(), "what it may mask is not known"
    assert made(lambda ids, mask: ids * mask, ids, mask).notes == []


def test_ones_that_nothing_is_as_long_as_are_no_mask() -> None:
    *_, (lowered, _) = varied(torch.ones(3).long(), torch.randn(4, 8)).values()
    assert torch.equal(lowered, torch.zeros(3).long())


def test_a_vector_of_floats_is_data() -> None:
    """Values of a row are drawn and permuted each for itself."""
    generator = torch.Generator().manual_seed(3)
    x = (torch.rand(32, generator=generator) < 0.5).float()
    assert not torch.equal(varied(x)["the sample's values permuted"][0], x)
    assert not begins_with(varied(torch.ones(32))["random inputs 1"][0][None], True)


def test_where_eager_refuses_other_integers_the_rest_is_varied() -> None:
    class Sorted(nn.Module):
        def forward(self, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
            if not torch.equal(order, order.sort().values):
                raise ValueError("order must be sorted")
            return x[order]

    x, order = torch.randn(6), torch.arange(6)
    ref = made(Sorted().eval(), x, order)
    assert "random inputs 1" in ref.left_out
    assert (
        "Verified with random inputs 1, but your own integers: with others eager raises "
        "ValueError: order must be sorted"
    ) in ref.notes
    assert len(ref.cases) > 2
    for case in ref.cases[1:]:
        assert same_bits(case.call.args[1], order)
        assert not same_bits(case.call.args[0], x)


def test_where_eager_gives_nan_for_other_masks_the_rest_is_varied() -> None:
    def strict(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return ids * torch.where(mask.bool().all(), 1.0, math.nan)

    ids = torch.tensor([[3, 9, 5], [8, 1, 2]])
    ref = made(strict, ids, torch.ones(2, 3, dtype=torch.long))
    assert any("but your own masks: with others eager gives NaN" in note for note in ref.notes)
    assert not verify(lambda ids, mask: torch.tensor([[3.0, 9, 5], [8, 1, 2]]), ref).ok


def test_a_frozen_branch_on_a_mask_of_ones_is_found() -> None:
    model = planted.Branching().eval()
    ref = made(model, torch.randn(4, 16), torch.ones(4, 16, dtype=torch.long))
    assert not verify(planted.frozen_branch(model), ref).ok
