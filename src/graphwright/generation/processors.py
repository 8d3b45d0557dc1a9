"""Logits processors of transformers inside of a graph.

Most of them look at the length of the sequence so far as a number of the host, which a graph would
freeze. Here each has a form that reads tokens from a buffer of a fixed size, of which a tensor says
how many are there; the arithmetic stays the processor's own wherever it can. What differs from call
to call, such as a temperature, a least length or the tokens that end a sequence, is read from a
tensor: it needs no other graph, and no copy from the host inside of one.

Source of the rules: transformers, generation/logits_process.py.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .custom_processors import of_scores_alone


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of a batch so far.

    Attributes:
        ids: shape (batch, room), int64; what lies behind `count` means nothing.
        count: shape (), int64: tokens that are there, at least one.
    """

    ids: torch.Tensor
    count: torch.Tensor

    @property
    def places(self) -> torch.Tensor:
        """The index of each token, shape (room,)."""
        return torch.arange(self.ids.shape[1], device=self.ids.device)

    def last(self, width: int) -> torch.Tensor:
        """The last tokens, shape (batch, width); what lies before the first one means nothing."""
        places = torch.arange(width, device=self.ids.device) + (self.count - width)
        return self.ids[:, places.clamp(min=0)]


Apply = Callable[[Tokens, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class StaticProcessor:
    """One processor, as a graph runs it.

    Attributes:
        key: equal for two that may share a graph.
        numbers: what may differ between two that share a graph.
        apply: from the tokens, scores (shape (batch, vocabulary), float32) and these numbers
            (shape (n,), float64) to new scores. It does not change when the processor does.
    """

    key: tuple[Any, ...]
    numbers: tuple[float, ...]
    apply: Apply


def static(processor: Any, scores: torch.Tensor | None = None) -> StaticProcessor | None:
    """The form of a processor that a graph can run; None if it has none.

    Args:
        processor: one of transformers, or of a caller's own.
        scores: such as it is given; without them, one of a caller's own has no form.
    """
    kind = type(processor)
    if kind.__module__ == "transformers.generation.logits_process":
        make = _STATIC.get(kind.__name__)
        return None if make is None else make(processor)
    return None if scores is None else _custom(processor, scores)


def _of(processor: Any, numbers: Iterable[float], apply: Apply, *constants: Any) -> StaticProcessor:
    found = tuple(map(float, numbers))
    return StaticProcessor((type(processor).__name__, len(found), *constants), found, apply)


# ------------------------------------------------------------ those that look at scores alone


def _scores_alone(*constants: str, numbers: Sequence[str] = ()) -> Callable[[Any], StaticProcessor]:
    """One that ignores the tokens: what it computes follows from these attributes of it."""

    def make(processor: Any) -> StaticProcessor:
        own = copy.copy(processor)

        def apply(tokens: Tokens, scores: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
            mine = copy.copy(own)
            for name, number in zip(numbers, given, strict=True):
                setattr(mine, name, number)
            return _tensor(mine(tokens.ids, scores))

        found = [getattr(processor, name) for name in numbers]
        return _of(processor, found, apply, *(getattr(processor, name) for name in constants))

    return make


def _custom(processor: Any, scores: torch.Tensor) -> StaticProcessor | None:
    """One of a caller's own, if it ignores the tokens."""
    found = of_scores_alone(processor, scores)
    if found is None:
        return None
    key, own = found

    def apply(tokens: Tokens, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return _tensor(own(tokens.ids, scores))

    return StaticProcessor(key, (), apply)


def _temperature(processor: Any) -> StaticProcessor:
    def apply(tokens: Tokens, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return _divided(scores, numbers[0])

    return _of(processor, [processor.temperature], apply)


def _top_h(processor: Any) -> StaticProcessor:
    most, filler = processor.top_n, processor.filter_value

    def apply(tokens: Tokens, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        top, places = scores.topk(min(most, scores.shape[-1]), dim=-1)
        found = _categorical(top)
        terms = -found.probs * found.probs.log()
        kept = terms.cumsum(dim=-1) <= (found.entropy() * numbers[0]).unsqueeze(-1)
        kept[:, 0] = True
        removed = torch.ones_like(scores, dtype=torch.bool).scatter_(1, places, ~kept)
        return scores.masked_fill(removed, filler)

    return _of(processor, [processor.top_h], apply, most, filler)


def _eta(processor: Any) -> StaticProcessor:
    least, filler = processor.min_tokens_to_keep, processor.filter_value

    def apply(tokens: Tokens, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        epsilon = numbers[0].to(scores.dtype)
        scale = torch.exp(-_categorical(scores).entropy())
        eta = torch.minimum(epsilon, epsilon.sqrt() * scale)[..., None]
        highest = scores.topk(min(least, scores.shape[-1]))[0]
        removed = (scores.softmax(dim=-1) < eta) & (scores < highest[..., -1, None])
        return scores.masked_fill(removed, filler)

    return _of(processor, [processor.epsilon], apply, least, filler)


def _suppressed(processor: Any) -> StaticProcessor:
    def apply(tokens: Tokens, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(_is_one_of(scores, numbers), -math.inf)

    return _of(processor, _listed(processor.suppress_tokens), apply)


def _early_end(processor: Any) -> StaticProcessor:
    """Nothing but an end, once one is likely enough."""

    def apply(tokens: Tokens, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        ends = _is_one_of(scores, numbers[1:])
        likely = (scores.softmax(dim=-1) > numbers[0]) & ends
        return scores.masked_fill(likely.any(dim=1, keepdim=True) & ~ends, -math.inf)

    numbers = [processor.min_eos_p or math.inf, *_listed(processor.eos_token_id)]
    return _of(processor, numbers, apply)


# ------------------------------------------------------------ those that look at the length


def _least_length(least: Callable[[Any], int]) -> Callable[[Any], StaticProcessor]:
    """No end before a least length."""

    def make(processor: Any) -> StaticProcessor:
        def apply(tokens: Tokens, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            ends = _is_one_of(scores, numbers[1:])
            return scores.masked_fill(ends & (tokens.count < numbers[0]), -math.inf)

        return _of(processor, [least(processor), *_listed(processor.eos_token_id)], apply)

    return make


def _forced_at(length: Callable[[Any], int], token: str) -> Callable[[Any], StaticProcessor]:
    """A token, or one of some tokens, that has to come at some length."""

    def make(processor: Any) -> StaticProcessor:
        def apply(tokens: Tokens, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            wanted = _is_one_of(scores, numbers[1:])
            forced = torch.zeros_like(scores).masked_fill(~wanted, -math.inf)
            return torch.where(tokens.count == numbers[0], forced, scores)

        return _of(processor, [length(processor), *_listed(getattr(processor, token))], apply)

    return make


def _suppressed_at_begin(processor: Any) -> StaticProcessor:
    def apply(tokens: Tokens, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        unwanted = _is_one_of(scores, numbers[1:])
        return scores.masked_fill(unwanted & (tokens.count == numbers[0]), -math.inf)

    numbers = [processor.begin_index, *_listed(processor.begin_suppress_tokens)]
    return _of(processor, numbers, apply)


def _decaying(processor: Any) -> StaticProcessor:
    """The end is the likelier the longer the sequence is beyond some length."""

    def apply(tokens: Tokens, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        beyond = tokens.count - numbers[0]
        growth = numbers[1] ** beyond - 1
        ends = _is_one_of(scores, numbers[2:])
        penalized = scores + torch.where(ends, scores.abs() * growth, 0)
        # An end that may not come yet is at -inf, and -inf + inf * 0 would be NaN.
        return torch.where(beyond > 0, penalized, scores)

    numbers = processor.regulation_start, processor.regulation_factor
    return _of(processor, [*numbers, *_listed(processor.eos_token_id)], apply)


def _alternating(processor: Any) -> StaticProcessor:
    """Two codebooks in turn, behind the semantic tokens."""
    first = processor.semantic_vocab_size
    second = first + processor.codebook_size

    def apply(tokens: Tokens, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        places = torch.arange(scores.shape[-1], device=scores.device)
        in_first = (places >= first) & (places < second)
        turn_of_first = (tokens.count - numbers[0]) % 2 == 0
        kept = torch.where(turn_of_first, in_first, places >= second)
        return scores.masked_fill(~kept, -math.inf)

    return _of(processor, [processor.input_start_len], apply, first, second)


# ------------------------------------------------------------ those that look at the tokens


def _repetition(processor: Any) -> StaticProcessor:
    def apply(tokens: Tokens, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        penalty, ignored = numbers
        counts = (tokens.places >= ignored) & (tokens.places < tokens.count)
        # A token that counts anyway, once more.
        ids = torch.where(counts, tokens.ids, tokens.last(1))
        return torch.where(tokens.count > ignored, _penalized(scores, ids, penalty), scores)

    return _of(processor, [processor.penalty, processor.prompt_ignore_length or 0], apply)


def _encoder_repetition(processor: Any) -> StaticProcessor:
    rows = _padded(processor.encoder_input_ids.tolist())
    shape = len(rows), len(rows[0])

    def apply(tokens: Tokens, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return _penalized(scores, numbers[1:].long().view(shape), numbers[0])

    return _of(processor, [processor.penalty, *itertools.chain(*rows)], apply, shape)


def _no_repeated_ngram(processor: Any) -> StaticProcessor:
    size = processor.ngram_size

    def apply(tokens: Tokens, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        if size > tokens.ids.shape[1]:
            return scores
        windows = tokens.ids.unfold(1, size, 1)
        whole = tokens.places[size - 1 :] < tokens.count
        matches = (windows[..., :-1] == tokens.last(size - 1).unsqueeze(1)).all(dim=-1) & whole
        return _without(scores, windows[..., -1], matches)

    return _of(processor, (), apply, size)


def _no_ngram_of_encoder(processor: Any) -> StaticProcessor:
    size = processor.ngram_size
    rows = [
        [(*prefix, token) for prefix, found in ngrams.items() for token in found]
        for ngrams in processor.generated_ngrams
    ]
    # A row without any has one that nothing matches.
    rows = _padded([row or [(-1,) * size] for row in rows])
    shape = len(rows), len(rows[0]), size

    def apply(tokens: Tokens, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        ngrams = numbers.long().view(shape).repeat_interleave(scores.shape[0] // shape[0], dim=0)
        matches = (ngrams[..., :-1] == tokens.last(size - 1).unsqueeze(1)).all(dim=-1)
        last = ngrams[..., -1]
        return _without(scores, last, matches & (last >= 0) & (tokens.count >= size - 1))

    return _of(processor, itertools.chain(*itertools.chain(*rows)), apply, shape)


def _sequence_bias(processor: Any) -> StaticProcessor:
    """A bias on the token that would complete a sequence."""
    # Biases of one token are added in this order, each in another round.
    ordered = sorted(processor.sequence_bias.items(), key=lambda item: len(item[0]) > 1)
    rounds: dict[int, list[tuple[float, ...]]] = {}
    seen = Counter[int]()
    width = max(map(len, processor.sequence_bias)) - 1
    for (*before, token), bias in ordered:
        row = (*[-1] * (width - len(before)), *before, token, bias)
        rounds.setdefault(seen[token], []).append(row)
        seen[token] += 1
    sizes = tuple(map(len, rounds.values()))

    def apply(tokens: Tokens, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        table = numbers.view(-1, width + 2)
        before, token, amount = table[:, :width], table[:, width].long(), table[:, width + 1]
        matches = ((before == tokens.last(width).unsqueeze(1)) | (before < 0)).all(dim=-1)
        # The first token of a text matches nothing: transformers asks for one more.
        matches = matches & ((before >= 0).sum(dim=-1) < tokens.count)
        biases = torch.where(matches, amount, 0).to(scores.dtype)
        total = torch.zeros_like(scores)
        for places, added in zip(token.split(sizes), biases.split(sizes, dim=1), strict=True):
            total.index_add_(1, places, added)
        return scores + total

    numbers = itertools.chain(*itertools.chain(*rounds.values()))
    return _of(processor, numbers, apply, width, sizes)


def _timestamps(processor: Any) -> StaticProcessor | None:
    """Whisper's rules: times come in pairs and never go back."""
    silent, first = processor.no_timestamps_token_id, processor.timestamp_begin
    end, latest_at_first = processor.eos_token_id, processor.max_initial_timestamp_index
    if not isinstance(end, int):
        return None
    prefers_times = bool(processor._detect_timestamp_from_logprob)

    def apply(tokens: Tokens, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        places = torch.arange(scores.shape[-1], device=scores.device)
        times = places >= first
        made = tokens.count - numbers[0]
        before, last = (tokens.last(2) >= first).split(1, dim=1)
        last, before = last & (made >= 1), before | (made < 2)
        opened = last & ~before
        banned = (places == silent) | (last & before & times) | (opened & (places < end))

        said = (tokens.places >= numbers[0]) & (tokens.places < tokens.count)
        said = said & (tokens.ids >= first)
        at = torch.where(said, tokens.places, -1).amax(dim=1, keepdim=True)
        # The time that was said last may come once more only to end its pair.
        least = tokens.ids.gather(1, at.clamp(min=0)) + torch.where(opened, 0, 1)
        banned = banned | ((at >= 0) & times & (places < least))

        begins = made == 0
        banned = banned | (begins & (places < first))
        if latest_at_first is not None:
            banned = banned | (begins & (places > first + latest_at_first))
        scores = scores.masked_fill(banned, -math.inf)
        if not prefers_times:
            return scores
        logs = scores.float().log_softmax(dim=-1)
        a_time = logs[:, first:].logsumexp(dim=-1, keepdim=True)
        likelier = a_time > logs[:, :first].amax(dim=-1, keepdim=True)
        return scores.masked_fill(likelier & ~times, -math.inf)

    constants = silent, first, end, latest_at_first, prefers_times
    return _of(processor, [processor.begin_index], apply, *constants)


# ------------------------------------------------------------ what they share


def _listed(tokens: Any) -> list[float]:
    found: list[float] = torch.as_tensor(tokens).reshape(-1).tolist()
    return found


def _padded(rows: list[list[Any]]) -> list[list[Any]]:
    """Rows as long as a power of two, so that few lengths occur; each repeats its last item."""
    length = 1 << (max(map(len, rows)) - 1).bit_length()
    return [row + row[-1:] * (length - len(row)) for row in rows]


def _is_one_of(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Which places of the vocabulary are among some tokens, shape (vocabulary,)."""
    vocabulary, tokens = scores.shape[-1], tokens.long()
    found = scores.new_zeros(vocabulary + 1, dtype=torch.bool)
    places = torch.where((tokens >= 0) & (tokens < vocabulary), tokens, vocabulary)
    # Not torch.isin, which of many tokens lists those that differ: the host reads how many.
    return found.index_fill_(0, places, True)[:vocabulary]


def _divided(scores: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Scores by a number, rounded as PyTorch rounds a division by a number of the host."""
    if scores.is_cuda:  # By a product with one over it, which the host computes in float64.
        return scores * (1 / number).to(scores.dtype)
    return scores / number


def _penalized(scores: torch.Tensor, ids: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    score = scores.gather(1, ids)
    score = torch.where(score < 0, score * penalty, _divided(score, penalty))
    return scores.scatter(1, ids, score)


def _without(scores: torch.Tensor, ids: torch.Tensor, banned: torch.Tensor) -> torch.Tensor:
    """Scores without some tokens of each row."""
    vocabulary = scores.shape[-1]
    found = scores.new_zeros((scores.shape[0], vocabulary + 1), dtype=torch.bool)
    # What is not banned goes to a column of its own, behind the vocabulary.
    found.scatter_(1, torch.where(banned, ids, vocabulary), True)
    return scores.masked_fill(found[:, :vocabulary], -math.inf)


def _categorical(scores: torch.Tensor) -> torch.distributions.Categorical:
    """The distribution of these scores, without the checks of them that the host would read."""
    return torch.distributions.Categorical(logits=scores, validate_args=False)


def _tensor(result: Any) -> torch.Tensor:
    assert isinstance(result, torch.Tensor)
    return result


_STATIC: dict[str, Callable[[Any], StaticProcessor | None]] = {
    "AlternatingCodebooksLogitsProcessor": _alternating,
    "BarkEosPrioritizerLogitsProcessor": _early_end,
    "EncoderNoRepeatNGramLogitsProcessor": _no_ngram_of_encoder,
    "EncoderRepetitionPenaltyLogitsProcessor": _encoder_repetition,
    "EpsilonLogitsWarper": _scores_alone("min_tokens_to_keep", "filter_value", numbers=["epsilon"]),
    "EtaLogitsWarper": _eta,
    "ExponentialDecayLengthPenalty": _decaying,
    "ForcedBOSTokenLogitsProcessor": _forced_at(lambda p: 1, "bos_token_id"),
    "ForcedEOSTokenLogitsProcessor": _forced_at(lambda p: p.max_length - 1, "eos_token_id"),
    "InfNanRemoveLogitsProcessor": _scores_alone(),
    "LogitNormalization": _scores_alone(),
    "MinLengthLogitsProcessor": _least_length(lambda p: int(p.min_length)),
    "MinNewTokensLengthLogitsProcessor": _least_length(
        lambda p: int(p.prompt_length_to_skip + p.min_new_tokens)
    ),
    "MinPLogitsWarper": _scores_alone("min_tokens_to_keep", "filter_value", numbers=["min_p"]),
    "NoBadWordsLogitsProcessor": _sequence_bias,
    "NoRepeatNGramLogitsProcessor": _no_repeated_ngram,
    "RepetitionPenaltyLogitsProcessor": _repetition,
    "SequenceBiasLogitsProcessor": _sequence_bias,
    "SuppressTokensAtBeginLogitsProcessor": _suppressed_at_begin,
    "SuppressTokensLogitsProcessor": _suppressed,
    "TemperatureLogitsWarper": _temperature,
    "TopHLogitsWarper": _top_h,
    "TopKLogitsWarper": _scores_alone("top_k", "filter_value"),
    "TopPLogitsWarper": _scores_alone("min_tokens_to_keep", "filter_value", numbers=["top_p"]),
    "TypicalLogitsWarper": _scores_alone("min_tokens_to_keep", "filter_value", numbers=["mass"]),
    "WhisperTimeStampLogitsProcessor": _timestamps,
}
