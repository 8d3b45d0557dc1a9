"""Logits processors of transformers inside of a graph.

Most of them look at the length of the sequence so far as a number of the host, which a graph would
freeze. Here each has a form that reads tokens from a buffer of a fixed size, of which a tensor says
how many are there; the arithmetic stays the processor's own wherever it can. Numbers that differ
from call to call, such as a temperature or a least length, are read from a tensor, so that they
need no other graph.

Source of the rules: transformers, generation/logits_process.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of a batch so far.

    Attributes:
        ids: shape (batch, room), int64; what lies behind `count` means nothing.
        count: shape (), int64: tokens that are there, at least one.
    """

    ids: torch.Tensor
    count: torch.Tensor

    def filled(self, value: torch.Tensor | int) -> torch.Tensor:
        """The ids, with another value behind the last token."""
        return torch.where(self._places() < self.count, self.ids, value)

    def last(self, width: int) -> torch.Tensor:
        """The last tokens, shape (batch, width); what lies before the first one means nothing."""
        places = self._places()[:width] + (self.count - width)
        return self.ids[:, places.clamp(min=0)]

    def _places(self) -> torch.Tensor:
        return torch.arange(self.ids.shape[1], device=self.ids.device)


Apply = Callable[[Tokens, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class StaticProcessor:
    """One processor, as a graph runs it.

    Attributes:
        key: equal for two that may share a graph.
        numbers: what may differ between two that share a graph.
        apply: from the tokens, scores (shape (batch, vocabulary), float32) and these numbers
            (shape (n,), float64) to new scores.
    """

    key: tuple[Any, ...]
    numbers: tuple[float, ...]
    apply: Apply


def static(processor: Any) -> StaticProcessor | None:
    """The form of a processor that a graph can run; None if it has none."""
    kind = type(processor)
    make = _STATIC.get(kind.__name__)
    if make is None or not kind.__module__.startswith("transformers."):
        return None
    return make(processor)


def _of(processor: Any, numbers: Sequence[float], apply: Apply, *constants: Any) -> StaticProcessor:
    key = (type(processor).__name__, *map(_plain, constants))
    return StaticProcessor(key, tuple(map(float, numbers)), apply)


def _plain(value: Any) -> Any:
    """A constant of a processor, as something to compare."""
    if isinstance(value, torch.Tensor):
        return tuple(value.reshape(-1).tolist())
    if isinstance(value, dict):
        return tuple(value.items())
    return tuple(value) if isinstance(value, list) else value


# ------------------------------------------------------------ those that look at scores alone


def _scores_alone(*names: str) -> Callable[[Any], StaticProcessor]:
    """One that ignores the tokens; the named attributes are its constants."""

    def make(processor: Any) -> StaticProcessor:
        def apply(tokens: Tokens, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            return _tensor(processor(tokens.ids, scores))

        return _of(processor, (), apply, *(getattr(processor, name) for name in names))

    return make


def _temperature(processor: Any) -> StaticProcessor:
    def apply(tokens: Tokens, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return scores / numbers[0]

    return _of(processor, [processor.temperature], apply)


# ------------------------------------------------------------ those that look at the length


def _least_length(
    least: Callable[[Any], int],
) -> Callable[[Any], StaticProcessor]:
    """No end before a least length."""

    def make(processor: Any) -> StaticProcessor:
        def apply(tokens: Tokens, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            ends = _is_one_of(scores, processor.eos_token_id)
            return torch.where(ends & (tokens.count < numbers[0]), -math.inf, scores)

        return _of(processor, [least(processor)], apply, processor.eos_token_id)

    return make


def _forced_at(length: Callable[[Any], int], token: str) -> Callable[[Any], StaticProcessor]:
    """A token, or one of some tokens, that has to come at some length."""

    def make(processor: Any) -> StaticProcessor:
        wanted = getattr(processor, token)

        def apply(tokens: Tokens, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            forced = torch.full_like(scores, -math.inf)
            forced[:, wanted] = 0
            return torch.where(tokens.count == numbers[0], forced, scores)

        return _of(processor, [length(processor)], apply, wanted)

    return make


def _suppressed_at_begin(processor: Any) -> StaticProcessor:
    def apply(tokens: Tokens, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        unwanted = _is_one_of(scores, processor.begin_suppress_tokens)
        return torch.where(unwanted & (tokens.count == numbers[0]), -math.inf, scores)

    return _of(processor, [processor.begin_index], apply, processor.begin_suppress_tokens)


def _decaying(processor: Any) -> StaticProcessor:
    """The end is the likelier the longer the sequence is beyond some length."""

    def apply(tokens: Tokens, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        beyond = (tokens.count - numbers[0]).clamp(min=0)
        growth = (numbers[1] ** beyond - 1).to(scores.dtype)
        ends = processor.eos_token_id.to(scores.device)
        penalties = torch.zeros_like(scores)
        penalties[:, ends] = scores[:, ends].abs() * growth
        return scores + penalties

    numbers = processor.regulation_start, processor.regulation_factor
    return _of(processor, numbers, apply, processor.eos_token_id)


# ------------------------------------------------------------ those that look at the tokens


def _repetition(processor: Any) -> StaticProcessor:
    ignored = processor.prompt_ignore_length or 0

    def apply(tokens: Tokens, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        # A token that is there anyway, once more.
        ids = tokens.filled(tokens.last(1))[:, ignored:]
        score = scores.gather(1, ids)
        score = torch.where(score < 0, score * numbers[0], score / numbers[0])
        return torch.where(tokens.count > ignored, scores.scatter(1, ids, score), scores)

    return _of(processor, [processor.penalty], apply, ignored)


def _no_repeated_ngram(processor: Any) -> StaticProcessor:
    size = processor.ngram_size

    def apply(tokens: Tokens, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        windows = tokens.ids.unfold(1, size, 1)
        whole = torch.arange(windows.shape[1], device=scores.device) + size <= tokens.count
        matches = (windows[..., :-1] == tokens.last(size - 1).unsqueeze(1)).all(dim=-1) & whole
        # What matches nothing goes to a column of its own, behind the vocabulary.
        vocabulary = scores.shape[-1]
        banned = scores.new_zeros((scores.shape[0], vocabulary + 1), dtype=torch.bool)
        banned.scatter_(1, torch.where(matches, windows[..., -1], vocabulary), True)
        return scores.masked_fill(banned[:, :vocabulary], -math.inf)

    return _of(processor, (), apply, size)


def _sequence_bias(processor: Any) -> StaticProcessor:
    sequences = processor.sequence_bias
    width = max(map(len, sequences))

    def apply(tokens: Tokens, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        # Of a sequence as long as all tokens are, the original compares nothing: the first token
        # matches nothing, nor does what lies before it.
        places = torch.arange(width, device=scores.device) + (tokens.count - width)
        return _tensor(processor(torch.where(places > 0, tokens.last(width), -1), scores))

    return _of(processor, (), apply, sequences)


def _is_one_of(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    vocabulary = torch.arange(scores.shape[-1], device=scores.device)
    return torch.isin(vocabulary, tokens.to(scores.device))


def _tensor(result: Any) -> torch.Tensor:
    assert isinstance(result, torch.Tensor)
    return result


_STATIC: dict[str, Callable[[Any], StaticProcessor]] = {
    "EpsilonLogitsWarper": _scores_alone("epsilon", "min_tokens_to_keep", "filter_value"),
    "EtaLogitsWarper": _scores_alone("epsilon", "min_tokens_to_keep", "filter_value"),
    "ExponentialDecayLengthPenalty": _decaying,
    "ForcedBOSTokenLogitsProcessor": _forced_at(lambda p: 1, "bos_token_id"),
    "ForcedEOSTokenLogitsProcessor": _forced_at(lambda p: p.max_length - 1, "eos_token_id"),
    "InfNanRemoveLogitsProcessor": _scores_alone(),
    "LogitNormalization": _scores_alone(),
    "MinLengthLogitsProcessor": _least_length(lambda p: int(p.min_length)),
    "MinNewTokensLengthLogitsProcessor": _least_length(
        lambda p: int(p.prompt_length_to_skip + p.min_new_tokens)
    ),
    "MinPLogitsWarper": _scores_alone("min_p", "min_tokens_to_keep", "filter_value"),
    "NoBadWordsLogitsProcessor": _sequence_bias,
    "NoRepeatNGramLogitsProcessor": _no_repeated_ngram,
    "RepetitionPenaltyLogitsProcessor": _repetition,
    "SequenceBiasLogitsProcessor": _sequence_bias,
    "SuppressTokensAtBeginLogitsProcessor": _suppressed_at_begin,
    "SuppressTokensLogitsProcessor": _scores_alone("suppress_tokens"),
    "TemperatureLogitsWarper": _temperature,
    "TopKLogitsWarper": _scores_alone("top_k", "filter_value"),
    "TopPLogitsWarper": _scores_alone("top_p", "min_tokens_to_keep", "filter_value"),
    "TypicalLogitsWarper": _scores_alone("mass", "min_tokens_to_keep", "filter_value"),
}
