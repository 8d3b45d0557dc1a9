"""The loop of transformers' generate() from one token to the next, to be left and entered anywhere.

It does what GenerationMixin._sample does, in the same order: what graphs do not answer, and the
first token of every call, is taken here.

Source: transformers, generation/utils.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.utils import (
    ALL_CACHE_NAMES,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
    GenerationMixin,
)

# The method of a model that makes tokens one after another.
_LOOP = "_sample"


def own_loop(model: Any) -> Callable[..., Any] | None:
    """A model's own way to choose tokens; None if it has that of all models."""
    loop: Callable[..., Any] = getattr(type(model), _LOOP)
    return None if loop is getattr(GenerationMixin, _LOOP) else loop


@dataclass(eq=False)
class EagerLoop:
    """A call of generate() between two tokens.

    Args:
        model: the model.
        input_ids: shape (batch, length): the tokens so far.
        logits_processor: what changes the logits of a token before it is chosen.
        stopping_criteria: what ends a sequence.
        config: the generation's configuration, prepared by generate().
        kwargs: what the model is called with, beside the tokens.
        streamer: takes the tokens as they come.
    """

    model: Any
    input_ids: torch.Tensor
    logits_processor: Any
    stopping_criteria: Any
    config: Any
    kwargs: dict[str, Any]
    streamer: Any = None
    scores: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        device = self.input_ids.device
        self.unfinished = torch.ones(self.input_ids.shape[0], dtype=torch.long, device=device)
        pad = self.config._pad_token_tensor
        self.pad: Any = None if pad is None else pad.to(device)
        self.ends_by_token = any(hasattr(each, "eos_token_id") for each in self.stopping_criteria)
        self.ended = False

    @property
    def cache_name(self) -> str | None:
        """The keyword by which the model takes its cache."""
        return next((name for name in ALL_CACHE_NAMES if name in self.kwargs), None)

    @property
    def cache(self) -> Any:
        """The model's own cache."""
        name = self.cache_name
        return None if name is None else self.kwargs[name]

    def prefill(self) -> Any:
        """Run the model on the prompt."""
        return self.took(self.model._prefill(self.input_ids, self.config, self.kwargs))

    def forward(self) -> Any:
        """Run the model on the last token, with its own cache."""
        inputs = self.model.prepare_inputs_for_generation(
            self.input_ids, next_sequence_length=1, **self.kwargs
        )
        return self.took(self.model(**inputs, return_dict=True))

    def took(self, outputs: Any) -> torch.Tensor:
        """Note that the model has run; gives the logits of the next token, (batch, vocabulary)."""
        self.advance(outputs)
        last: torch.Tensor = outputs.logits[:, -1]
        return last.to(copy=True, dtype=torch.float32, device=self.input_ids.device)

    def advance(self, outputs: Any) -> None:
        """Make masks and positions one longer."""
        self.kwargs = self.model._update_model_kwargs_for_generation(
            outputs, dict(self.kwargs), is_encoder_decoder=self.model.config.is_encoder_decoder
        )

    def choose(self, logits: torch.Tensor) -> None:
        """Choose the next token of each sequence, and see which have ended."""
        scores = self.logits_processor(self.input_ids, logits)
        if self.config.return_dict_in_generate:
            if self.config.output_scores:
                self.scores.append(scores)
            if self.config.output_logits:
                self.logits.append(logits)
        if self.config.do_sample:
            probabilities = torch.nn.functional.softmax(scores, dim=-1)
            tokens = torch.multinomial(probabilities, num_samples=1).squeeze(1)
        else:
            tokens = torch.argmax(scores, dim=-1)
        if self.ends_by_token:
            tokens = tokens * self.unfinished + self.pad * (1 - self.unfinished)
        self.input_ids = torch.cat([self.input_ids, tokens[:, None]], dim=-1)
        if self.streamer is not None:
            self.streamer.put(tokens.cpu())
        kept = tuple(self.scores) if self._keeps("output_scores") else None
        self.unfinished = self.unfinished & ~self.stopping_criteria(self.input_ids, kept)
        self.ended = bool(self.unfinished.max() == 0)

    def run(self) -> None:
        """Go on to the end, with the model's own cache."""
        while not self.ended:
            self.choose(self.forward())

    def result(self) -> Any:
        """What generate() returns."""
        if self.streamer is not None:
            self.streamer.end()
        if not self.config.return_dict_in_generate:
            return self.input_ids
        found: dict[str, Any] = {
            "sequences": self.input_ids,
            "scores": tuple(self.scores) if self._keeps("output_scores") else None,
            "logits": tuple(self.logits) if self._keeps("output_logits") else None,
            "past_key_values": self.cache,
        }
        if self.model.config.is_encoder_decoder:
            return GenerateEncoderDecoderOutput(**found)
        return GenerateDecoderOnlyOutput(**found)

    def _keeps(self, name: str) -> bool:
        return bool(self.config.return_dict_in_generate and getattr(self.config, name))
