"""Sampling inside of graphs: the tokens of the model's own draws, and their distribution."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import graphwright as gw

transformers = pytest.importorskip("transformers")

VOCABULARY, WORD, ENDS, PAD = 31, 5, [3, 4], 0
ROWS, CALLS, COMPARED, NEW_TOKENS = 400, 10, 2, 6
LEAST_P = 0.001

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "top_h": {"top_h": 0.6},
    "typical_p": {"typical_p": 0.7},
    "epsilon_cutoff": {"epsilon_cutoff": 0.03},
    "eta_cutoff": {"eta_cutoff": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 3},
    "bad_words_ids": {"bad_words_ids": [[7], [WORD, 9], [WORD, WORD, 11]]},
    "sequence_bias": {"sequence_bias": {(7,): 1.5, (WORD, 9): 2.0, (WORD, WORD, 11): -2.0}},
    "suppress_tokens": {"suppress_tokens": [1, 7, 9]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [7, 9, 11]},
    "forced_eos_token_id": {"forced_eos_token_id": ENDS[1]},
    "exponential_decay": {"exponential_decay_length_penalty": (0, 1.5)},
    "renormalize_logits": {"renormalize_logits": True, "top_k": 9},
    "remove_invalid_values": {"remove_invalid_values": True},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.7},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "one_end": {"eos_token_id": 12},
    "no_end": {"eos_token_id": None},
}
TOGETHER: dict[str, Any] = {
    name: value for each in OPTIONS.values() for name, value in each.items()
} | {
    "eos_token_id": ENDS,
    "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 2,
    "top_k": 12,
    "top_p": 0.95,
    "top_h": 0.9,
    "typical_p": 0.9,
    # Before the least length transformers makes it NaN.
    "exponential_decay_length_penalty": (4, 1.5),
}
OPTIONS["several"] = {
    "bad_words_ids": [[7], [WORD, 9]],
    "min_new_tokens": 3,
    "repetition_penalty": 1.7,
    "temperature": 0.6,
    "top_p": 0.9,
}
FAST = {("llama", "several"), ("gpt2", "top_p")}


@functools.cache
def model(kind: str) -> Any:
    torch.manual_seed(3)
    if kind == "llama":
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
        config = transformers.LlamaConfig(
            **sizes, vocab_size=VOCABULARY, num_attention_heads=2, initializer_range=0.4
        )
        made = transformers.LlamaForCausalLM(config)
    else:
        made = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCABULARY,
                n_embd=16,
                n_layer=1,
                n_head=2,
                n_positions=64,
                initializer_range=0.4,
            )
        )
    made.generation_config.update(bos_token_id=None, eos_token_id=ENDS, pad_token_id=PAD)
    return made.eval()


@functools.cache
def graphed(kind: str) -> gw.GraphedGenerator:
    return gw.graph_generate(model(kind), steps_per_launch=2)


def asked(options: dict[str, Any]) -> dict[str, Any]:
    """A call whose second token is a draw from one distribution: its first token is forced."""
    default = {"do_sample": True, "max_new_tokens": NEW_TOKENS, "top_k": 0}
    return {**default, "forced_bos_token_id": WORD, **options}


def generate(generator: Any, options: dict[str, Any], *, seed: int, **more: Any) -> Any:
    torch.manual_seed(seed)
    return generator.generate(torch.full((ROWS, 1), WORD), **asked(options), **more)


def probabilities(kind: str, options: dict[str, Any]) -> torch.Tensor:
    """Of the second token, as transformers draws it."""
    found = generate(model(kind), options, seed=0, output_scores=True, return_dict_in_generate=True)
    return found.scores[1][0].double().softmax(dim=-1)


def p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """How likely counts differ so much from what is expected (Pearson's chi-square test)."""
    assert not counts[expected == 0].any(), "drew what has probability zero"
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(expected) - 1, dtype=torch.float64)
    return 1.0 if not freedom else float(torch.special.gammaincc(freedom / 2, statistic / 2))


def draws_p_value(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(probabilities))
    return p_value(counts, probabilities * len(tokens))


def pairs_p_value(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Of two neighbours' tokens together, if neither knows of the other."""
    pairs = tokens[::2] * len(probabilities) + tokens[1::2]
    joint = (probabilities[:, None] * probabilities).reshape(-1)
    return draws_p_value(pairs, joint)


def case(kind: str, name: str) -> Any:
    marks = () if (kind, name) in FAST else pytest.mark.slow
    return pytest.param(kind, OPTIONS.get(name, TOGETHER), id=f"{kind}-{name}", marks=marks)


@pytest.mark.parametrize(
    ("kind", "options"),
    [case(kind, name) for kind in ("llama", "gpt2") for name in [*OPTIONS, "together"]],
)
def test_draws_as_the_model_does(kind: str, options: dict[str, Any]) -> None:
    before = graphed(kind).statistics
    drawn = []
    for seed in range(CALLS):
        mine = generate(graphed(kind), options, seed=seed)
        if seed < COMPARED:
            assert torch.equal(mine, generate(model(kind), options, seed=seed))
        drawn.append(mine[:, 2])
    after = graphed(kind).statistics
    assert after.calls - before.calls == CALLS
    assert after.eager == before.eager == {}
    assert after.outside == before.outside == {}
    assert after.captures > before.captures
    its = probabilities(kind, options)
    tokens = torch.cat(drawn)
    assert draws_p_value(tokens, its) > LEAST_P
    assert pairs_p_value(tokens, its) > LEAST_P


def test_a_seed_gives_the_same_tokens_again() -> None:
    first, again = (generate(graphed("gpt2"), OPTIONS["top_p"], seed=7) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, generate(graphed("gpt2"), OPTIONS["top_p"], seed=8))


def test_another_number_needs_no_other_graph() -> None:
    generate(graphed("gpt2"), {"top_p": 0.8}, seed=0)
    before = graphed("gpt2").statistics.captures
    for top_p in (0.5, 0.95):
        mine = generate(graphed("gpt2"), {"top_p": top_p}, seed=1)
        assert torch.equal(mine, generate(model("gpt2"), {"top_p": top_p}, seed=1))
    assert graphed("gpt2").statistics.captures == before


def test_the_tests_see_another_distribution_and_draws_in_common() -> None:
    its = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0], dtype=torch.float64)
    other = torch.tensor([0.1, 0.2, 0.35, 0.35, 0.0], dtype=torch.float64)
    tokens = its.multinomial(ROWS * CALLS, replacement=True)
    assert draws_p_value(tokens, its) > LEAST_P
    assert pairs_p_value(tokens, its) > LEAST_P
    assert draws_p_value(tokens, other) < LEAST_P
    shared = tokens[: len(tokens) // 2].repeat_interleave(2)
    assert draws_p_value(shared, its) > LEAST_P / 10
    assert pairs_p_value(shared, its) < LEAST_P
    with pytest.raises(AssertionError, match="probability zero"):
        draws_p_value(tokens, torch.tensor([0.0, 0.3, 0.3, 0.4, 0.0], dtype=torch.float64))
