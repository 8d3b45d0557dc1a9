"""Which architectures of transformers take buckets, and that those that do answer as eager does.

Every one that can be captured is tried with a bucket of batches. Lengths are tried with a few that
stand for the others and with those that are refused, to spare time; bench/architectures.py tries
all, with more calls and both at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tiny_architectures import CASES, Case, errors

import graphwright as gw

CALLED = 3
RANDOM = "draws random numbers"
A_VIEW = "shares memory with another output"
NO_RULE = "the shapes of its outputs follow no rule"
DEPENDS = "of its root mean square"

# Words of the reason, where a bucket may not be filled up.
BATCH_EXACT = {
    "ViTMAEModel": RANDOM,
    # A number for each layer that is drawn whether or not layers are dropped.
    "Wav2Vec2Model": RANDOM,
    "HubertModel": RANDOM,
    "SEWModel": RANDOM,
    "Wav2Vec2BertModel": RANDOM,
    "SegformerForSemanticSegmentation": NO_RULE,
    # logits_per_image is logits_per_text, transposed.
    "CLIPModel": A_VIEW,
    "SiglipModel": A_VIEW,
    "ChineseCLIPModel": A_VIEW,
    "OwlViTModel": A_VIEW,
}
LENGTH_EXACT = {
    "ConvBertModel": DEPENDS,  # convolutions see the padding
    "FNetModel": DEPENDS,  # mixes all positions, and has no mask
    "Wav2Vec2Model": RANDOM,
    "HubertModel": RANDOM,
    "SEWModel": RANDOM,
    "Wav2Vec2BertModel": RANDOM,
    "Speech2TextModel": DEPENDS,  # convolutions again
    "MoonshineModel": DEPENDS,  # normalizes over the length
    "SiglipModel": DEPENDS,  # pools the last position
}
LENGTH_TOO = {
    "BertModel",
    "ModernBertModel",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Mamba2ForCausalLM",
    "T5ForConditionalGeneration",
    "CLIPModel",
}
CAPTURED = [case for case in CASES if not case.refused]
LINED = [case for case in CAPTURED if case.model in {*LENGTH_EXACT, *LENGTH_TOO}]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors this small are faster on one; and no other thread draws random numbers."""
    monkeypatch.setattr("graphwright.graphs.undo.threading.active_count", lambda: 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", CAPTURED, ids=str)
def test_batches(case: Case) -> None:
    answers_as_eager_does_or_is_refused(case, "batch", BATCH_EXACT.get(case.model))


@pytest.mark.parametrize("case", LINED, ids=str)
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
    assert len(CAPTURED) - len(BATCH_EXACT) >= 50
