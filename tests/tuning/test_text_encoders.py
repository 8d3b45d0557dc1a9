"""Text encoders: whatever their mask is, the same strategies survive."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from planted import Planted
from torch import nn

import graphwright as gw
from graphwright.calls.snapshots import Call
from graphwright.evaluation.reference import Sample, reference
from graphwright.report.result import Status
from graphwright.strategies.base import Candidate
from graphwright.strategies.registry import parse_candidates
from graphwright.tuning.trial import CandidateEvaluator

BATCH, LENGTH, WORDS = 3, 12, 50
SMALL = {"vocab_size": WORDS, "max_position_embeddings": 32}
USUAL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


class Encoder(nn.Module):
    """Attention and a mean, written by hand; both give NaN for a row that is masked as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, 16), nn.Linear(16, 16)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.embed(input_ids)
        scores = x @ x.mT / 4
        if attention_mask is None:
            return self.out(scores.softmax(-1) @ x).mean(1)
        scores = scores.masked_fill(attention_mask[:, None] == 0, -math.inf)
        x, weights = self.out(scores.softmax(-1) @ x), attention_mask[..., None].float()
        return (x * weights).sum(1) / weights.sum(1)


class Layers(nn.Module):
    """PyTorch's own layers; without gradients, a fast path gives NaN for a masked row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        padding = None if attention_mask is None else attention_mask == 0
        return self.layers(self.embed(input_ids), src_key_padding_mask=padding)


def bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**SMALL, **USUAL))


def distilbert() -> nn.Module:
    sizes = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}
    return transformers.DistilBertModel(transformers.DistilBertConfig(**SMALL, **sizes))


def mpnet() -> nn.Module:
    return transformers.MPNetModel(transformers.MPNetConfig(**SMALL, **USUAL))


def inputs(mask: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {"input_ids": torch.randint(3, WORDS, (BATCH, LENGTH), generator=generator)}
    if mask != "none":
        lengths = torch.full((BATCH,), LENGTH) if mask == "ones" else torch.tensor([12, 9, 4])
        found["attention_mask"] = (torch.arange(LENGTH) < lengths[:, None]).long()
    return found


def other_kernels(model: nn.Module) -> Callable[..., Any]:
    """Right, but gives zeros where a row is masked as a whole, as kernels for attention may."""

    def call(**kwargs: torch.Tensor) -> Any:
        mask = kwargs.get("attention_mask")
        with torch.no_grad():
            found = model(**kwargs)
        if mask is not None and not bool(mask.any(1).all()):
            for tensor in [found] if isinstance(found, torch.Tensor) else found.values():
                tensor[~mask.any(1)] = 0
        return found

    return call


def forgets_the_mask(model: nn.Module) -> Callable[..., Any]:
    """What a trace of the branch for a mask of ones does: right for that mask alone."""

    def call(input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        with torch.no_grad():
            return model(input_ids)

    return call


def statuses(model: nn.Module, mask: str) -> dict[str, Status]:
    call = Call("the sample inputs", (), inputs(mask))
    sample = Sample(call.name, 1.0, call, reference(model, model, call))
    evaluator = CandidateEvaluator(
        model, [sample], torch.device("cpu"), objective="latency", screening_s=0.05
    )
    candidates = [
        *parse_candidates(["eager:no_grad", "torchscript"], ()),
        Candidate(Planted("other kernels", other_kernels)),
        Candidate(Planted("forgets the mask", forgets_the_mask)),
    ]
    return {each.name: evaluator.set_up(each).row.status for each in candidates}


@pytest.mark.parametrize("make", [bert, distilbert, mpnet, Encoder, Layers])
def test_the_same_strategies_survive_whatever_the_mask(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().eval()
    found = {mask: statuses(model, mask) for mask in ("ones", "ragged", "none")}
    right = dict.fromkeys(("eager:no_grad", "torchscript", "other kernels"), Status.OK)
    wrong = {"forgets the mask": Status.WRONG}
    assert found["none"] == right | {"forgets the mask": Status.OK}
    assert found["ones"] == found["ragged"] == right | wrong


def test_the_report_says_that_no_row_of_zeros_was_tried() -> None:
    report = gw.tune(Encoder().eval(), (), inputs("ones"), strategies=["eager:no_grad"]).report
    said = (
        "attention_mask is all ones: verified with ragged masks too, whose rows begin with ones, "
        "but with no row of zeros alone"
    )
    assert said in report.notes
    assert report.left_out == []
