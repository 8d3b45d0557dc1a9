"""Which architectures of transformers take buckets, and that those that do answer as eager does.

To spare time, those that are much like another one are left out, and lengths are tried with those
that are refused and a few that stand for the others. bench/architectures/run.py tries all, with
more calls and both at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny_architectures import CASES, Case, errors

import graphwright as gw

pytestmark = pytest.mark.usefixtures("one_thread")

CALLED = 3
DEPENDS = "of its root mean square"

# Words of the reason, where calls may not be padded to a bucket.
BATCH_EXACT = {
    "ViTMAEModel": "random numbers",  # draws what it leaves out
    "RecurrentGemmaForCausalLM": "cannot be put back",  # keeps its last state
    "SegformerForSemanticSegmentation": "strides",  # lays one image out otherwise than several
}
LENGTH_EXACT = {
    "ConvBertModel": DEPENDS,  # convolutions see the padding
    "FNetModel": DEPENDS,  # mixes all positions, and has no mask
    "Wav2Vec2Model": DEPENDS,  # normalizes over the length before the mask counts
    "SEWModel": DEPENDS,
    "Speech2TextModel": DEPENDS,  # convolutions again
    "MoonshineModel": DEPENDS,  # normalizes over the length
    "SiglipModel": DEPENDS,  # pools the last position
}
# Those beside which another one with much the same code is tried.
ALIKE = {
    "RobertaModel",
    "ElectraModel",
    "Qwen3ForCausalLM",
    "Phi3ForCausalLM",
    "PegasusModel",
    "M2M100Model",
    "DeiTModel",
    "HubertModel",
    "ChineseCLIPModel",
    "OwlViTModel",
}
LENGTH_TOO = {
    "BertModel",
    "LlamaForCausalLM",
    "MixtralForCausalLM",
    "Mamba2ForCausalLM",
    "T5ForConditionalGeneration",
    "Wav2Vec2BertModel",
    "CLIPModel",
}
TRIED = [case for case in CASES if not case.refused and case.model not in ALIKE]
LINED = [case for case in TRIED if case.model in {*LENGTH_EXACT, *LENGTH_TOO}]


# What everything goes through in a quick run: an encoder, a decoder, a CNN, what mixes positions.
QUICK = {"BertModel", "FNetModel", "GPT2LMHeadModel", "ResNetModel"}


def quickly(cases: Sequence[Case]) -> list[Any]:
    """Of all but the quick ones, every third is slow, and CI has no time for the others."""
    others = [case for case in cases if case.model not in QUICK]
    marks = {
        case.model: pytest.mark.exhaustive if n % 9 else pytest.mark.slow
        for n, case in enumerate(others)
    }
    return [pytest.param(each, marks=marks.get(each.model, ())) for each in cases]


@pytest.mark.parametrize("case", quickly(TRIED), ids=str)
def test_batches(case: Case) -> None:
    answers_as_eager_does_or_is_refused(case, "batch", BATCH_EXACT.get(case.model))


@pytest.mark.parametrize("case", quickly(LINED), ids=str)
def test_lengths(case: Case) -> None:
    answers_as_eager_does_or_is_refused(case, "length", LENGTH_EXACT.get(case.model))


@torch.no_grad()
def answers_as_eager_does_or_is_refused(case: Case, name: str, refused: str | None) -> None:
    model = case.build()
    graphed = case.bucketed(model, [name])
    model(**case.inputs(0))  # Some set themselves up in their first call.
    if refused is not None:
        with pytest.raises(gw.PaddingError) as refusal:
            graphed.prepare([case.inputs(0)])
        assert refused in str(refusal.value)
        return
    graphed.prepare([case.inputs(0)])
    for call in case.calls([name], CALLED):
        apart, _ = errors(graphed(**call), model(**call), call.get("attention_mask"))
        assert apart < 1e-4
    assert graphed.statistics.padded > 1


def test_most_take_buckets() -> None:
    assert len(TRIED) - len(BATCH_EXACT) >= 50
