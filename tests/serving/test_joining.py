"""Joiner and PreparedModel: requests in one call give what each gives alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from chosen import choosing
from hypothesis import given, settings
from hypothesis import strategies as st
from served import BY_LENGTH, AmongRows, Encoder, HardlyAmongRows, WithoutMask, config, made, sample
from torch import nn

import graphwright as gw
from graphwright.serving.joining import Part
from graphwright.serving.model_config import ModelConfig
from graphwright.serving.prepared_model import PreparedModel
from graphwright.serving.protocol import Kind, RequestError


@pytest.fixture(scope="module")
def prepared() -> PreparedModel:
    return PreparedModel(config())


def parts_of(prepared: PreparedModel, sizes: list[tuple[int, int]]) -> list[Part]:
    found = []
    for seed, (rows, length) in enumerate(sizes):
        ids, mask = sample(rows, length, seed)
        found.append(prepared.joiner.part({"ids": ids, "mask": mask}))
    return found


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 16)), min_size=1, max_size=6))
def test_each_request_gets_its_own_answer(
    prepared: PreparedModel, sizes: list[tuple[int, int]]
) -> None:
    parts = parts_of(prepared, sizes)
    rows = sum(n for n, _ in sizes)
    for at in ((rows, max(length for _, length in sizes)), (32, 16)):
        answers = prepared.joiner.cut(prepared.compute(parts, at), parts)
        for part, answer in zip(parts, answers, strict=True):
            with torch.no_grad():
                expected = made()(*part.leaves)
            assert answer.keys() == expected.keys()
            for name, value in answer.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def test_metadata_says_what_varies(prepared: PreparedModel) -> None:
    inputs = [(each.name, each.datatype, each.shape) for each in prepared.inputs]
    assert inputs == [("ids", "INT64", (-1, -1)), ("mask", "INT64", (-1, -1))]
    outputs = [(each.name, each.datatype, each.shape) for each in prepared.outputs]
    assert outputs == [("logits", "FP32", (-1, 5)), ("tokens", "FP32", (-1, -1, 5))]
    assert (prepared.joins, prepared.timings.pads, prepared.notes) == (True, True, [])


@pytest.mark.filterwarnings("ignore")
def test_what_padding_would_change_is_joined_by_length_only() -> None:
    found = PreparedModel(config(WithoutMask))
    assert (found.joins, found.timings.pads) == (True, False)
    assert "joined only where they agree in length" in found.notes[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [AmongRows, HardlyAmongRows])
def test_what_other_rows_would_change_is_not_joined(kind: type[Encoder]) -> None:
    found = PreparedModel(config(kind))
    assert not found.joins
    assert "an answer depends on other rows" in found.notes[-1]


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"ids": sample()[0]}, "The input 'mask' is missing"),
        ({"ids": sample()[0], "mask": sample()[1], "x": sample()[0]}, "no input 'x'"),
        ({"ids": sample()[0].int(), "mask": sample()[1]}, "is INT32, not INT64"),
        ({"ids": sample()[0][0], "mask": sample()[1]}, "has the shape [16], not [-1, -1]"),
        ({"ids": sample(2)[0], "mask": sample(3)[1]}, "disagree about batch: 2 and 3"),
        ({"ids": sample(2, 17)[0], "mask": sample(2, 17)[1]}, "is 17; it may be 1 to 16"),
        ({"ids": sample(33)[0], "mask": sample(33)[1]}, "is 33; it may be 1 to 32"),
        ({"ids": sample(0)[0], "mask": sample(0)[1]}, "is 0; it may be 1 to 32"),
    ],
)
def test_a_malformed_request_is_told_what_is_wrong(
    prepared: PreparedModel, inputs: dict[str, torch.Tensor], words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        prepared.joiner.part(inputs)
    assert caught.value.kind is Kind.INVALID
    assert words in str(caught.value)


class _Scaled(nn.Module):
    def forward(self, given: dict[str, torch.Tensor], scale: torch.Tensor) -> tuple[Any, ...]:
        return given["x"] * scale, (given["x"].sum(1), scale * 2)


def test_tensors_without_rows_are_shared_only_by_requests_that_agree() -> None:
    args = ({"x": torch.randn(3, 4)}, torch.tensor([2.0]))
    shapes = {"given": {"x": {0: "batch"}}, "scale": None}
    found = PreparedModel(ModelConfig(_Scaled(), args, dynamic_shapes=shapes))
    assert [each.name for each in found.inputs] == ["given.x", "scale"]
    assert [each.name for each in found.outputs] == ["output_0", "output_1.0", "output_1.1"]
    one, other, same = (
        found.joiner.part({"given.x": torch.randn(1, 4), "scale": torch.tensor([s])})
        for s in (2.0, 3.0, 2.0)
    )
    assert one.key == same.key != other.key
    answers = found.joiner.cut(found.compute([one, same], (2,)), [one, same])
    for part, answer in zip((one, same), answers, strict=True):
        torch.testing.assert_close(answer["output_0"], part.leaves[0] * 2)
        torch.testing.assert_close(answer["output_1.0"], part.leaves[0].sum(1))
        torch.testing.assert_close(answer["output_1.1"], torch.tensor([4.0]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("saved", [False, True])
def test_what_was_tuned_is_served_at_its_own_sizes(saved: bool, tmp_path: Path) -> None:
    model = made()
    with choosing("torchscript"):
        tuned = gw.tune(
            model,
            sample(4),
            buckets=gw.Buckets(batch=[1, 4], length=[8, 16]),
            dynamic_shapes=BY_LENGTH,
            pad={"mask": 0},
            strategies=["torchscript"],
            remember=False,
            progress=False,
            isolate=False,
        )
    if saved:
        gw.save(tuned, tmp_path / "served.gw")
        tuned = gw.load(tmp_path / "served.gw", trust=True)
    found = PreparedModel(ModelConfig(tuned))
    assert sorted(found.timings.seconds) == [(1, 8), (1, 16), (4, 8), (4, 16)]
    assert (found.joins, found.timings.pads, found.notes) == (True, True, [])
    parts = [
        found.joiner.part(
            dict(zip([each.name for each in found.inputs], sample(1, n), strict=True))
        )
        for n in (3, 16)
    ]
    before = tuned.calls["tuned"]
    answers = found.joiner.cut(found.compute(parts, (4, 16)), parts)
    assert tuned.calls["tuned"] == before + 1
    for part, answer in zip(parts, answers, strict=True):
        with torch.no_grad():
            expected = model(*part.leaves)
        for name, value in answer.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def test_a_model_without_a_sample_is_refused() -> None:
    with pytest.raises(gw.OptionError, match="There is no sample call"):
        PreparedModel(ModelConfig(Encoder()))
    with pytest.raises(gw.OptionError, match="joined along one named 'batch'"):
        PreparedModel(
            ModelConfig(made(), sample(), dynamic_shapes={"ids": {0: "n"}, "mask": {0: "n"}})
        )


def test_an_answer_stays_when_the_model_uses_its_memory_again() -> None:
    class Reusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory = torch.empty(32, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.mul(x, 2, out=self.memory[: len(x)])

    found = PreparedModel(ModelConfig(Reusing(), (torch.randn(4, 3),)))
    first, second = (found.joiner.part({"x": torch.full((1, 3), value)}) for value in (1.0, 5.0))
    answers = found.joiner.cut(found.compute([first], (1,)), [first])
    found.compute([second], (1,))
    torch.testing.assert_close(answers[0]["output"], torch.full((1, 3), 2.0))
