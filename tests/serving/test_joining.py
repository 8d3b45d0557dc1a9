"""Joiner and PreparedModel: requests in one call give what each gives alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chosen import choosing
from hypothesis import given, settings
from hypothesis import strategies as st
from served import BY_LENGTH, AmongRows, Encoder, HardlyAmongRows, WithoutMask, config, made, sample
from test_artifacts import facts_without
from torch import nn

import graphwright as gw
from graphwright.serving.joining import Part
from graphwright.serving.model_config import ModelConfig
from graphwright.serving.prepared_model import PreparedModel
from graphwright.serving.protocol import DTYPES, ErrorKind, RequestError, TensorMetadata


@pytest.fixture(scope="module")
def prepared() -> PreparedModel:
    return PreparedModel(config())


def parts_of(prepared: PreparedModel, sizes: list[tuple[int, int]]) -> list[Part]:
    found = []
    for seed, (rows, length) in enumerate(sizes):
        ids, mask = sample(rows, length, seed)
        found.append(prepared.joiner.part({"ids": ids, "mask": mask}))
    return found


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 16)), min_size=1, max_size=6))
def test_each_request_gets_its_own_answer(
    prepared: PreparedModel, sizes: list[tuple[int, int]]
) -> None:
    parts = parts_of(prepared, sizes)
    rows = sum(n for n, _ in sizes)
    for at in ((rows, max(length for _, length in sizes)), (32, 16)):
        answers = prepared.compute(parts, at)
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
    assert caught.value.kind is ErrorKind.INVALID
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
    answers = found.compute([one, same], (2,))
    for part, answer in zip((one, same), answers, strict=True):
        torch.testing.assert_close(answer["output_0"], part.leaves[0] * 2)
        torch.testing.assert_close(answer["output_1.0"], part.leaves[0].sum(1))
        torch.testing.assert_close(answer["output_1.1"], torch.tensor([4.0]))


@pytest.mark.slow
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
    assert [each.name for each in found.inputs] == ["ids", "mask"]
    assert (found.joins, found.timings.pads, found.notes) == (True, True, [])
    parts = [
        found.joiner.part(
            dict(zip([each.name for each in found.inputs], sample(1, n), strict=True))
        )
        for n in (3, 16)
    ]
    before = tuned.calls["tuned"]
    answers = found.compute(parts, (4, 16))
    assert tuned.calls["tuned"] == before + 1
    for part, answer in zip(parts, answers, strict=True):
        with torch.no_grad():
            expected = model(*part.leaves)
        for name, value in answer.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


class _Flat(nn.Module):
    """Padding changes its answers."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (left - right).cumsum(1).mean(1)


@pytest.mark.filterwarnings("ignore")
def test_a_file_without_its_model_answers_the_sizes_that_were_saved(tmp_path: Path) -> None:
    path, sizes = tmp_path / "flat.gw", [(2, 8), (2, 16), (4, 8), (4, 16)]
    calls = [((torch.randn(size), torch.randn(size)), {}) for size in sizes]
    with choosing("torchscript"):
        tuned = gw.tune(
            _Flat().eval(),
            samples=calls,
            strategies=["torchscript"],
            remember=False,
            progress=False,
            isolate=False,
        )
    gw.save(tuned, path)
    found = PreparedModel(ModelConfig(gw.load(path, trust=True)))
    names = [each.name for each in found.inputs]
    assert names == ["left", "right"]
    assert sorted(found.timings.seconds) == sizes
    assert (found.joins, found.timings.pads, found.splits) == (True, False, True)

    def parts(rows: int, length: int) -> list[tuple[int, ...]]:
        made = [torch.randn(rows, length) for _ in names]
        return [part.sizes for part in found.parts(dict(zip(names, made, strict=True)))]

    assert parts(1, 8) == [(1, 8)]
    assert parts(9, 16) == [(4, 16), (4, 16), (1, 16)]
    for length in (4, 5):  # Some were computed before it was known that padding does harm.
        with pytest.raises(RequestError, match=rf"length {length}.* of 2×8, 2×16") as caught:
            parts(1, length)
        assert caught.value.kind is ErrorKind.INVALID
    facts_without("argument_names")(path)  # As earlier versions saved it.
    earlier = PreparedModel(ModelConfig(gw.load(path, trust=True)))
    assert [each.name for each in earlier.inputs] == ["args.0", "args.1"]


@pytest.mark.filterwarnings("ignore")
def test_sizes_that_were_never_changed_alone_may_be_any(tmp_path: Path) -> None:
    with choosing("torchscript"):
        tuned = gw.tune(
            _Same().eval(),
            samples=[((torch.randn(size),), {}) for size in ((2, 8), (4, 16))],
            strategies=["torchscript"],
            remember=False,
            progress=False,
            isolate=False,
        )
    gw.save(tuned, tmp_path / "same.gw")
    found = PreparedModel(ModelConfig(gw.load(tmp_path / "same.gw", trust=True)))
    for sizes in ((2, 8), (4, 16)):
        x = torch.randn(1, sizes[1])
        (answer,) = found.compute([found.joiner.part({found.inputs[0].name: x})], sizes)
        assert torch.equal(answer["output"], x)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (1, r"'output' has the shape \[4\] where batch is 1, and \[2, 4\] where batch is 2.*"),
        (2, r"'output' has the shape \[2, 4\] where batch is 2, and \[4\] where batch is 1.*"),
    ],
)
def test_dimensions_that_one_row_lacks_are_refused_with_the_remedy(rows: int, words: str) -> None:
    with pytest.raises(gw.OptionError, match=words + r"\n.*squeeze\(1\)"):
        PreparedModel(ModelConfig(lambda x: x.squeeze(), (torch.randn(rows, 4),)))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda x: x.squeeze(), r"'output' has the shape \[4\], which does not follow"),
        (lambda x: x if len(x) > 1 else x.double(), r"'output' is of torch.float64, and"),
    ],
)
def test_results_that_the_check_cannot_cut_are_refused(model: Any, words: str) -> None:
    with pytest.raises(gw.OptionError, match=words):
        PreparedModel(ModelConfig(model, (torch.randn(3, 4),)))


def test_outputs_that_some_sizes_lack_are_refused() -> None:
    def model(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": x, "b": x} if len(x) > 1 else {"a": x}

    words = "The outputs are a where batch is 1, and a, b where batch is 2"
    with pytest.raises(gw.OptionError, match=words):
        PreparedModel(ModelConfig(model, (torch.randn(1, 4),)))


class _Softmax(nn.Module):
    """Padding changes its answers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, 1)


class _OneIsOther(nn.Module):
    """Padding changes the answer to a single column only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (2 if x.shape[1] == 1 else 3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rows", [[1], [2], [1, 4]])
@pytest.mark.parametrize("kind", [_Softmax, _OneIsOther])
def test_padding_is_checked_whatever_the_rows_of_a_call(
    kind: type[nn.Module], rows: list[int]
) -> None:
    found = PreparedModel(
        ModelConfig(
            kind().eval(),
            (torch.randn(1, 16),),
            buckets=gw.Buckets(batch=rows, length=[8, 16]),
            dynamic_shapes={"x": {0: "batch", 1: "length"}},
        )
    )
    assert not found.timings.pads
    words = "not padded in length" if rows == [1] else "joined only where they agree in length"
    assert words in found.notes[0]
    assert found.timings.sizes_alone((1, 5)) == (1, 5)


def test_padding_that_does_no_harm_is_used_in_calls_of_one_row() -> None:
    buckets = gw.Buckets(batch=[1], length=[8, 16])
    found = PreparedModel(replace(config(), buckets=buckets))
    assert (found.joins, found.timings.pads, found.notes) == (True, True, [])
    assert found.timings.sizes_alone((1, 5)) in [(1, 8), (1, 16)]


class _AtLeast(nn.Module):
    """Refuses fewer columns."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] < self.least:
            raise ValueError(f"fewer than {self.least} columns")
        return x * 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("least", "pads"), [(3, True), (15, False)])
def test_padding_is_checked_with_requests_that_the_model_takes(least: int, pads: bool) -> None:
    found = PreparedModel(
        ModelConfig(
            _AtLeast(least).eval(),
            (torch.randn(1, 16),),
            buckets=gw.Buckets(batch=[1, 2], length=[15, 16]),
            dynamic_shapes={"x": {0: "batch", 1: "length"}},
        )
    )
    assert found.timings.pads is pads
    if not pads:
        assert (
            "The model computes no request that is shorter than batch 1, length 16"
            in (found.notes[0])
        )


class _Convolution(nn.Module):
    """Takes five columns or more, and padding changes its answers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(2, 3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).mean(2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("buckets", [None, gw.Buckets(batch=[1, 4], length=[8, 16])])
def test_no_call_is_below_the_least_size_of_a_dimension(buckets: gw.Buckets | None) -> None:
    from torch.export import Dim

    model = _Convolution().eval()
    shapes = {"x": {0: "batch", 2: Dim("length", min=5, max=16)}}
    args = (torch.randn(1, 2, 16),)
    found = PreparedModel(ModelConfig(model, args, buckets=buckets, dynamic_shapes=shapes))
    if buckets is None:
        assert sorted({length for _, length in found.timings.seconds}) == [5, 8, 16]
    part = found.joiner.part({"x": torch.randn(1, 2, 5)})
    (answer,) = found.compute([part], (1, 5))
    torch.testing.assert_close(answer["output"], model(*part.leaves).detach())
    with pytest.raises(RequestError, match="is 4; it may be 5 to 16"):
        found.joiner.part({"x": torch.randn(1, 2, 4)})


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
    answers = found.compute([first], (1,))
    found.compute([second], (1,))
    torch.testing.assert_close(answers[0]["output"], torch.full((1, 3), 2.0))


class _ByColumn(nn.Module):
    """Rows are the second dimension, two for each; what comes out first has them the first."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        answer = (x.unflatten(1, (-1, 2)).sum(-1) * scale).t()
        scale += 1  # Which is no concern of other calls.
        return answer, x, torch.tensor(3.0)


def test_parts_of_a_request_are_put_together_along_its_rows() -> None:
    from torch.export import Dim

    shapes = {"x": {1: 2 * Dim("batch")}, "scale": None}
    args = (torch.randn(3, 8), torch.tensor([2.0]))
    found = PreparedModel(ModelConfig(_ByColumn(), args, dynamic_shapes=shapes))
    assert [each.shape for each in found.outputs] == [(-1, 3), (3, -1), ()]
    x, scale = torch.randn(3, 150), torch.tensor([5.0])
    parts = found.parts({"x": x.clone(), "scale": scale.clone()})
    assert [part.sizes for part in parts] == [(32,), (32,), (11,)]
    answers = [found.compute([part], part.sizes)[0] for part in parts]
    whole = found.joiner.put_together(answers)
    expected = _ByColumn()(x, scale)
    for value, wanted in zip(whole.values(), expected, strict=True):
        torch.testing.assert_close(value, wanted)
        assert value.is_contiguous()
    with pytest.raises(RequestError, match="is 7; it may be 2 and more in steps of 2"):
        found.parts({"x": x[:, :7], "scale": scale})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "splits"), [(Encoder, True), (AmongRows, False)])
def test_where_calls_have_one_row_the_model_itself_tells_whether_rows_are_apart(
    kind: type[Encoder], splits: bool
) -> None:
    buckets = gw.Buckets(batch=[1], length=[8, 16])
    found = PreparedModel(replace(config(kind), buckets=buckets))
    assert found.splits is splits
    ids, mask = sample(3, 7)
    if splits:
        assert [part.sizes for part in found.parts({"ids": ids, "mask": mask})] == [(1, 7)] * 3
    else:
        with pytest.raises(RequestError, match="is 3; it may be 1 to 1"):
            found.parts({"ids": ids, "mask": mask})


class _Same(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_any_datatype_is_joined_and_answered(dtype: torch.dtype) -> None:
    """By a model whose result is its own input."""
    example = torch.tensor([[0, 1], [1, 1], [0, 0]]).to(dtype)
    found = PreparedModel(ModelConfig(_Same(), (example,)))
    parts = [found.joiner.part({"x": example[n : n + 2].clone()}) for n in (0, 1)]
    answers = found.compute(parts, (8,))
    for part, answer in zip(parts, answers, strict=True):
        assert torch.equal(answer["output"], part.leaves[0])
        assert answer["output"].data_ptr() != part.leaves[0].data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool], ids=str)
def test_padding_is_of_the_value_and_the_datatype_that_were_said(dtype: torch.dtype) -> None:
    seen: list[torch.Tensor] = []

    class Seen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.clone())
            return x[:, 0]

    varying = {"x": {0: "batch", 1: "length"}}
    value = True if dtype is torch.bool else -2
    sample = torch.ones(2, 4).to(dtype)
    found = PreparedModel(ModelConfig(Seen(), (sample,), dynamic_shapes=varying, pad={"x": value}))
    rows = [torch.zeros(1, length).to(dtype) for length in (2, 4, 3)]
    found.compute([found.joiner.part({"x": row}) for row in rows], (4, 4))
    pad, nil = torch.tensor(value).to(dtype).item(), torch.tensor(0).to(dtype).item()
    expected = [[nil] * 2 + [pad] * 2, [nil] * 4, [nil] * 3 + [pad], [nil] * 2 + [pad] * 2]
    assert seen[-1].dtype is dtype
    assert seen[-1].tolist() == expected


def test_results_of_any_kind_of_memory_are_cut() -> None:
    """Negative by a bit alone, without dimensions, transposed, expanded."""

    def model(x: torch.Tensor) -> dict[str, torch.Tensor]:
        pairs = torch.view_as_complex(torch.stack([x, x], -1))
        return {
            "negative": pairs.conj().imag,
            "number": torch.tensor(3.0),
            "transposed": x.t().contiguous().t(),
            "expanded": x[:, :1].expand(-1, 3),
        }

    found = PreparedModel(ModelConfig(model, (torch.randn(2, 4),)))
    asked = [torch.randn(1, 4), torch.randn(3, 4)]
    answers = found.compute([found.joiner.part({"x": x}) for x in asked], (4,))
    for x, answer in zip(asked, answers, strict=True):
        for name, value in model(x).items():
            assert torch.equal(answer[name], value)
            assert answer[name].is_contiguous()


def test_images_are_laid_out_as_those_of_the_sample() -> None:
    """Else no graph that was captured for them would be found."""
    seen: list[tuple[int, ...]] = []

    class Seen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.stride())
            return x.sum((2, 3))

    images = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    found = PreparedModel(ModelConfig(Seen(), (images,)))
    parts = [found.joiner.part({"x": torch.randn(2, 3, 5, 5)}) for _ in range(2)]
    for count in (1, 2):
        found.compute(parts[:count], (2 * count,))
        assert seen[-1] == images.stride()


def test_a_result_that_its_call_does_not_explain_is_not_cut() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x]) if x[0, 0] > 100 else x

    found = PreparedModel(ModelConfig(model, (torch.randn(2, 3),)))
    usual, other = (found.joiner.part({"x": torch.full((1, 3), n)}) for n in (1.0, 200.0))
    assert found.compute([usual], (1,))
    with pytest.raises(RequestError, match=r"shape \[2, 3\], which does not follow") as caught:
        found.compute([other], (1,))
    assert caught.value.kind is ErrorKind.FAILED


def test_a_result_of_another_datatype_is_not_sent() -> None:
    """Its bytes would be taken for numbers of the datatype that clients expect."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return x.double() if x[0, 0] > 100 else x

    found = PreparedModel(ModelConfig(model, (torch.randn(2, 3),)))
    usual, other = (found.joiner.part({"x": torch.full((1, 3), n)}) for n in (1.0, 200.0))
    assert found.compute([usual], (1,))
    words = "'output' is of torch.float64, and of torch.float32 in the sample call"
    with pytest.raises(RequestError, match=words) as caught:
        found.compute([other], (1,))
    assert caught.value.kind is ErrorKind.FAILED


class _Named:
    def __init__(self, **named: torch.Tensor) -> None:
        vars(self).update(named)


@pytest.mark.parametrize("kind", [dict, _Named])
def test_outputs_are_told_by_their_names_in_each_call(kind: Any) -> None:
    """Not by their places: keys may come in another order."""

    def model(x: torch.Tensor) -> Any:
        return kind(neg=-x, pos=x) if x[0, 0] > 100 else kind(pos=x, neg=-x)

    found = PreparedModel(ModelConfig(model, (torch.randn(2, 3),)))
    pos, neg = (output.name for output in found.outputs)
    for value in (1.0, 200.0):
        x = torch.full((1, 3), value)
        (answer,) = found.compute([found.joiner.part({"x": x})], (1,))
        assert torch.equal(answer[pos], x)
        assert torch.equal(answer[neg], -x)


@pytest.mark.parametrize(
    ("other", "given"),
    [
        (lambda x: {"score": x, "mask": None, "alt": x}, "score, alt"),
        (lambda x: {"score": x}, "score"),
        (lambda x: {"score": x, "mask": x, "alt": x}, "score, mask, alt"),
        (lambda x: None, "none"),
    ],
)
def test_an_output_that_a_call_leaves_out_or_adds_is_not_taken_for_another(
    other: Any, given: str
) -> None:
    def model(x: torch.Tensor) -> Any:
        return other(x) if x[0, 0] > 100 else {"score": x, "mask": x + 1, "alt": None}

    found = PreparedModel(ModelConfig(model, (torch.randn(2, 3),)))
    part = found.joiner.part({"x": torch.full((1, 3), 200.0)})
    words = f"the outputs {given}, and in the sample call score, mask\\."
    with pytest.raises(RequestError, match=words) as caught:
        found.compute([part], (1,))
    assert caught.value.kind is ErrorKind.FAILED


def test_values_beside_the_outputs_may_change() -> None:
    def model(x: torch.Tensor) -> Any:
        return {"kinds": {"far"} if x[0, 0] > 100 else {"near", "small"}, "score": x, "other": -x}

    found = PreparedModel(ModelConfig(model, (torch.randn(2, 3),)))
    for value in (1.0, 200.0):
        x = torch.full((1, 3), value)
        (answer,) = found.compute([found.joiner.part({"x": x})], (1,))
        assert torch.equal(next(iter(answer.values())), x)


def test_a_result_that_is_shorter_than_declared_is_not_sent() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x[:, :2] if x[0, 0] > 100 else x

    found = PreparedModel(ModelConfig(model, (torch.randn(2, 3),)))
    assert found.outputs[0].shape == (-1, 3)
    with pytest.raises(RequestError, match=r"shape \[1, 2\], which does not follow"):
        found.compute([found.joiner.part({"x": torch.full((1, 3), 200.0)})], (1,))


def test_a_model_that_is_served_twice_is_called_in_turns() -> None:
    """It may use its memory again, as in a reload of one that is not made anew."""
    first = PreparedModel(config())
    second = PreparedModel(replace(first.config))
    (part,) = parts_of(first, [(1, 4)])
    with ThreadPoolExecutor(1) as pool:
        with first.instances[0].lock:
            computing = pool.submit(second.compute, [part], (1, 4))
            assert not wait([computing], timeout=0.1).done
        assert computing.result(30)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda x: {"a": {"b": x}, "a.b": x}, "Two outputs of the model are called 'a.b'"),
        (lambda x: x * 1j, "The output 'output' is of torch.complex64"),
    ],
)
def test_what_has_no_name_of_its_own_is_refused(answer: Any, words: str) -> None:
    with pytest.raises(gw.OptionError, match=words):
        PreparedModel(ModelConfig(answer, (torch.randn(2, 3),)))


@pytest.mark.parametrize(
    ("model", "rows"), [(lambda x: x * 2, 32), (lambda x: x.t(), 0), (lambda x: (x, x[0] * 0), 0)]
)
def test_a_batch_size_is_told_where_rows_come_first(model: Any, rows: int) -> None:
    assert PreparedModel(ModelConfig(model, (torch.randn(2, 3),))).max_batch_size == rows


def test_tensors_that_no_function_makes_are_not_declared() -> None:
    with pytest.raises(gw.OptionError, match="beside a postprocess"):
        PreparedModel(replace(config(), outputs=[TensorMetadata("label", "BYTES", (-1,))]))
