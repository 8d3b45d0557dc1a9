"""Models, prompts and comparisons for the tests of generation."""

from __future__ import annotations

from typing import Any

import torch
import transformers

import graphwright as gw

LENGTH = 9


def without_ends(model: Any) -> Any:
    """The model, whose texts go on until they are long enough."""
    config = model.generation_config
    config.eos_token_id = config.forced_bos_token_id = config.forced_eos_token_id = None
    config.pad_token_id, config.bos_token_id = 0, 1
    if model.config.is_encoder_decoder:
        config.decoder_start_token_id = 1
    return model


def varied(model: Any, factor: float) -> Any:
    """The model with larger weights: its tokens vary."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(factor)
    return without_ends(model)


def gpt2(**options: Any) -> Any:
    """A tiny GPT-2 with random weights."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GPT2Config(**(sizes | ends | options))
    return varied(transformers.GPT2LMHeadModel(config).eval(), 8)


def mistral(**options: Any) -> Any:
    """A tiny Mistral, whose layers see a window."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 12, "head_dim": 8,
    }  # fmt: skip
    config = transformers.MistralConfig(**(sizes | options))
    return varied(transformers.MistralForCausalLM(config).eval(), 8)


def prompts(batch: int, length: int = LENGTH, *, vocabulary: int = 60) -> dict[str, torch.Tensor]:
    """Texts of different lengths, padded on the left."""
    torch.manual_seed(batch)
    ids = torch.randint(3, vocabulary, (batch, length))
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : length // (row + 2)] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def agree(model: Any, generator: gw.GraphedGenerator, asked: dict[str, Any]) -> torch.Tensor:
    """Generate with both, from the same seed; gives the tokens, which are equal."""
    torch.manual_seed(5)
    wanted = model.generate(**asked)
    torch.manual_seed(5)
    made: torch.Tensor = generator.generate(**asked)
    assert torch.equal(made, wanted)
    return made
