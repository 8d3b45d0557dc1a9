"""graph_generate(): the tokens of many architectures are the model's own, and graphs make them."""

from __future__ import annotations

import random
import warnings
from typing import Any

import generative
import pytest
import torch
import transformers
from generating import LENGTH, agree, gpt2, prompts, varied

import graphwright as gw

NEW = 48
# Of all that tests/support/generative.py names; what refuses static caches is named below.
DRAWN = 40
# Why these are generated eagerly: they are counted, and their tokens are right, too.
LEFT = {
    "MiniMaxForCausalLM": "MiniMax uses cache of its own",
    "AriaTextForCausalLM": "segments between its reads of values",
    "DeepseekV4ForCausalLM": "There is no static cache for DeepseekV4HCACache",
    "LEDForConditionalGeneration": "its step differs with a static cache",
    "Llama4ForCausalLM": "its step fails with a static cache",
    "MptForCausalLM": "use_cache=False",
    "OpenAIGPTLMHeadModel": "a layer of its cache holds no keys",
    "SeamlessM4TForTextToText": "its step reads a value on the host",
    "TrOCRForCausalLM": "its step reads a value on the host",
}
# The configuration of the first asks for beams; the others fail by themselves when they are tiny.
APART = (
    "FSMTForConditionalGeneration",
    "MarianMTModel",
    "SwitchTransformersForConditionalGeneration",
)
FAST = (
    "BartForConditionalGeneration",  # a decoder that reads its encoder
    "Cohere2ForCausalLM",  # sliding windows and whole attention by turns
    "FalconMambaForCausalLM",  # states, and no attention
    "GPTBigCodeForCausalLM",  # learned positions, one key for all heads
    "Lfm2ForCausalLM",  # convolutions beside attention
    "MiniMaxForCausalLM",
    "OlmoHybridForCausalLM",  # linear attention beside attention
    "OlmoeForCausalLM",  # a mixture of experts
)


def drawn() -> list[str]:
    """The architectures of a run of all: by a seed, with those of the fast set."""
    names = [n for n in (*generative.FEW, *generative.MORE) if n not in APART]
    more = random.Random(61).sample([n for n in names if n not in FAST], DRAWN - len(FAST))
    return [*FAST, *more]


def model_of(name: str) -> Any:
    """A tiny model whose tokens vary."""
    return varied(generative.build(name), 3)


@pytest.mark.parametrize(
    "name",
    [n if n in FAST else pytest.param(n, marks=pytest.mark.exhaustive) for n in drawn()],
)
def test_its_tokens_are_the_model_s_own(name: str) -> None:
    model = model_of(name)
    generator = gw.graph_generate(model, steps_per_launch=2)
    asked = {"max_new_tokens": NEW, "do_sample": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gw.FallbackWarning)
        agree(model, generator, prompts(1) | asked)
        # Each token once: the order of many logits counts, not only that of the first.
        made = agree(model, generator, prompts(3) | asked | {"no_repeat_ngram_size": 1})
    assert all(len(set(row[-NEW:].tolist())) == NEW for row in made)
    statistics = generator.statistics
    if name in LEFT:
        assert sum(statistics.eager.values()) == 2
        assert all(LEFT[name] in reason for reason in statistics.eager)
    else:
        assert (statistics.calls, dict(statistics.eager)) == (2, {})
        assert statistics.graphed == statistics.launches
        # Where nobody says how many positions there are, no step is too many.
        assert statistics.steps in (2 * NEW, 2 * (NEW - 1))


@pytest.mark.exhaustive
def test_few_are_left_to_transformers() -> None:
    assert len(drawn()) >= DRAWN
    assert len(set(LEFT) & set(drawn())) <= 4


@pytest.fixture(scope="module")
def shared() -> tuple[Any, gw.GraphedGenerator]:
    """A model and its generator, for what needs no other."""
    model = gpt2()
    return model, gw.graph_generate(model, steps_per_launch=2)


def test_a_text_grows_over_the_buckets_without_a_copy(shared: Any) -> None:
    model, _ = shared
    generator = gw.graph_generate(model, buckets=[16, 32, 64], steps_per_launch=2)
    agree(model, generator, prompts(2) | {"max_new_tokens": 50, "do_sample": False})
    assert generator.statistics.captures == 3
    # Later calls find all of them, whatever their length.
    for new in (3, 20, 50):
        agree(model, generator, prompts(2, 12) | {"max_new_tokens": new, "do_sample": False})
    assert generator.statistics.captures == 3
    with pytest.warns(gw.FallbackWarning, match="68 positions are more than the largest bucket"):
        agree(model, generator, prompts(2) | {"max_new_tokens": 60, "do_sample": False})
    assert sum(generator.statistics.eager.values()) == 1


def test_positions_end_where_the_model_s_do() -> None:
    model = gpt2(n_positions=64)
    generator = gw.graph_generate(model, steps_per_launch=8)
    # The last launch would go beyond the last position that the model has learned.
    made = agree(model, generator, prompts(2) | {"max_length": 64, "do_sample": False})
    assert made.shape[1] == 64
    assert generator.statistics.eager == {}


@pytest.mark.parametrize("new", [1, 2, 3, 4, 5, 8])
def test_any_number_of_tokens(shared: Any, new: int) -> None:
    model, generator = shared
    agree(model, generator, prompts(2) | {"max_new_tokens": new, "do_sample": False})


def test_sequences_end_at_different_steps(shared: Any) -> None:
    model, generator = shared
    free = model.generate(**prompts(4), max_new_tokens=30, do_sample=False)[:, LENGTH:]
    # Tokens that come late in one text, early in another one.
    for ends in ([int(free[0, 0])], [int(free[1, 12])], [int(t) for t in free[:, 7]], [63]):
        asked = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": ends}
        agree(model, generator, prompts(4) | asked)


def test_several_sequences_of_a_prompt(shared: Any) -> None:
    model, generator = shared
    asked = {"max_new_tokens": 12, "do_sample": True, "num_return_sequences": 3}
    made = agree(model, generator, prompts(2) | asked)
    assert made.shape[0] == 6
    assert len({tuple(row.tolist()) for row in made}) > 2


class Streamer:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.found: list[list[int]] = []
        self.ended = 0

    def put(self, tokens: torch.Tensor) -> None:
        self.found.append(tokens.reshape(-1).tolist())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("ends", [None, 7])
def test_a_streamer_is_given_what_the_model_gives_it(shared: Any, ends: int | None) -> None:
    model, generator = shared
    free = model.generate(**prompts(1), max_new_tokens=30, do_sample=False)[0, LENGTH:]
    end = {} if ends is None else {"eos_token_id": int(free[ends])}
    asked = prompts(1) | {"max_new_tokens": 30, "do_sample": False} | end
    mine, its = Streamer(), Streamer()
    generator.generate(**asked, streamer=mine)
    model.generate(**asked, streamer=its)
    assert (mine.found, mine.ended) == (its.found, its.ended)


@pytest.mark.parametrize(
    "name",
    [
        "GPTBigCodeForCausalLM",
        "BartForConditionalGeneration",
        "FalconMambaForCausalLM",
        "Cohere2ForCausalLM",
    ],
)
def test_scores_and_the_cache_are_returned(name: str) -> None:
    model = model_of(name)
    generator = gw.graph_generate(model, steps_per_launch=2)
    each_once = {"max_new_tokens": 12, "do_sample": False, "no_repeat_ngram_size": 1}
    free = model.generate(**prompts(2), **each_once)[:, -12:]
    for more in ({}, {"output_scores": True, "output_logits": True}):
        asked = prompts(2) | each_once | {"return_dict_in_generate": True}
        asked |= {"eos_token_id": [int(free[0, 5]), int(free[1, 9])]}
        mine, its = generator.generate(**asked, **more), model.generate(**asked, **more)
        assert type(mine) is type(its)
        assert mine.keys() == its.keys()
        assert torch.equal(mine.sequences, its.sequences)
        for key in ("scores", "logits"):
            for a, b in zip(mine.get(key) or (), its.get(key) or (), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        for a, b in zip(tensors(mine), tensors(its), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert generator.statistics.outside == {"scores of each token are asked for": 1}


def tensors(result: Any) -> list[torch.Tensor]:
    """Those of a result's cache."""
    cache = result.get("past_key_values") or result.get("cache_params")
    own = getattr(cache, "self_attention_cache", cache)
    found = []
    for layer in own.layers:
        for name in ("keys", "values"):
            found += [getattr(layer, name)] if hasattr(layer, name) else []
        for name in ("conv_states", "recurrent_states"):
            found += [t for t in getattr(layer, name, {}).values() if t is not None]
    assert found
    return found


def test_what_is_left_to_transformers_is_counted_and_told_once(shared: Any) -> None:
    model, _ = shared
    generator = gw.graph_generate(model)
    asked = prompts(1) | {"max_new_tokens": 5, "do_sample": False}
    for more, reason in (
        ({"num_beams": 2}, "beam search is left to transformers"),
        ({"prompt_lookup_num_tokens": 2}, "assisted generation is left to transformers"),
        ({"use_cache": False}, "use_cache=False"),
        (
            {"return_dict_in_generate": True, "output_attentions": True},
            "attentions or hidden states of every step are asked for",
        ),
    ):
        with pytest.warns(gw.FallbackWarning, match=reason):
            generator.generate(**asked, **more)
        with warnings.catch_warnings():
            warnings.simplefilter("error", gw.FallbackWarning)
            generator.generate(**asked, **more)
        assert generator.statistics.eager[reason] == 2
        assert reason in generator.explain()
    assert generator.statistics.calls == 0


def test_an_unknown_processor_and_criterion_see_every_token(shared: Any) -> None:
    model, generator = shared

    def bans_the_last(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, ids[:, -1:], float("-inf"))

    class AfterSeven(transformers.StoppingCriteria):
        def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full((len(ids),), ids.shape[1] >= LENGTH + 7)

    before = generator.statistics.calls
    asked = prompts(2) | {"max_new_tokens": 20, "do_sample": False}
    agree(model, generator, asked | {"logits_processor": [bans_the_last]})
    made = agree(model, generator, asked | {"stopping_criteria": [AfterSeven()]})
    assert made.shape[1] == LENGTH + 7
    assert generator.statistics.calls == before + 2
    outside = generator.statistics.outside
    assert outside["function looks at each token"] == 1
    assert outside["AfterSeven looks at each token"] == 1


def test_it_is_the_model_to_whoever_asks(shared: Any) -> None:
    model, generator = shared
    assert generator.config is model.config
    assert generator.device == model.device
    assert "GPT2LMHeadModel" in repr(generator)
    with pytest.raises(AttributeError):
        _ = generator.no_such_thing


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 0}, "max_length is 0"),
        ({"buckets": []}, "buckets is"),
        ({"buckets": [4, -1]}, "buckets is"),
        ({"steps_per_launch": "many"}, "steps_per_launch is 'many'"),
        ({"batch": 3}, "there is no batch"),
    ],
)
def test_bad_options_are_named(shared: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(gw.OptionError, match=message):
        gw.graph_generate(shared[0], **options)


def test_a_model_without_generate_is_refused() -> None:
    with pytest.raises(gw.OptionError, match=r"no generate\(\) of transformers"):
        gw.graph_generate(torch.nn.Linear(2, 2))


def test_release_and_close(shared: Any) -> None:
    model, _ = shared
    generator = gw.graph_generate(model, steps_per_launch=2)
    asked = prompts(1) | {"max_new_tokens": 8, "do_sample": False}
    agree(model, generator, asked)
    steps = generator.statistics.steps
    generator.release()
    assert generator.pool.in_use == 0
    assert generator.statistics.steps == steps
    agree(model, generator, asked)
    generator.close()
    assert generator.pool.in_use == 0
    with pytest.warns(gw.FallbackWarning, match="the generator is closed"):
        agree(model, generator, asked)


def test_encoders_of_any_length_share_a_graph() -> None:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, pad_token_id=0
    )
    torch.manual_seed(0)
    model = varied(transformers.T5ForConditionalGeneration(config).eval(), 3)
    generator = gw.graph_generate(model, steps_per_launch=2)
    asked = {"max_new_tokens": 21, "do_sample": False, "no_repeat_ngram_size": 1}
    for length in (5, 9, 40):
        agree(model, generator, prompts(2, length) | asked)
    assert generator.statistics.captures == 1


@pytest.mark.parametrize("each_once", [{}, {"no_repeat_ngram_size": 1}])
def test_speech(each_once: dict[str, int]) -> None:
    """Whisper counts its positions by the mask, if there is one."""
    config = transformers.WhisperConfig(
        vocab_size=120, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8,
        max_source_positions=50, max_target_positions=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=3, suppress_tokens=None,
        begin_suppress_tokens=[5, 6],
    )  # fmt: skip
    torch.manual_seed(0)
    model = varied(transformers.WhisperForConditionalGeneration(config).eval(), 4)
    generator = gw.graph_generate(model, steps_per_launch=2)
    asked = {"input_features": torch.randn(2, 8, 100), "max_new_tokens": 30, "do_sample": False}
    agree(model, generator, asked | each_once)
    assert generator.statistics.eager == {}
    assert generator.statistics.graphed == generator.statistics.launches > 0
