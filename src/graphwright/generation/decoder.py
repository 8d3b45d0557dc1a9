"""Static tensors of a decode step: the model runs on them, and chooses its token among them.

A step reads the last token, the cache, masks and positions, and writes the next token and all of
these in place. A later call of the same form is copied into the same tensors, and runs by the same
graphs. Nothing here changes but what is in the tensors: a graph depends on the rest.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from ..errors import CaptureError
from .eager_loop import EagerLoop
from .processors import Apply, StaticProcessor, Tokens
from .static_cache import StaticCopy, length_of

# Of these a step takes what belongs to the last token.
_OF_LAST_TOKEN = ("token_type_ids", "mm_token_type_ids")
# What transformers itself makes longer from step to step.
GROWING = frozenset(
    (
        *("attention_mask", "decoder_attention_mask", "position_ids", "decoder_position_ids"),
        *_OF_LAST_TOKEN,
    )
)
_EAGERLY = "Such calls generate eagerly."


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a step passes to the model beside its token and its cache.

    Attributes:
        plain: values that stay what they are.
        tensors: those of the last token, or of all steps, by their keywords.
        encoder: what the encoder said, padded to a bucket; None without an encoder.
        mask: over all positions so far, shape (batch, positions); None if there is none.
        mask_name: its keyword.
        position_name: the keyword of the last token's position; None if it is not passed.
    """

    plain: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    encoder: Any
    mask: torch.Tensor | None
    mask_name: str
    position_name: str | None

    @classmethod
    def of(cls, loop: EagerLoop, encoder_length: int | None = None) -> Inputs:
        """Sort what a loop calls its model with.

        Args:
            loop: the loop, after its first token.
            encoder_length: positions of the encoder that its outputs are padded to.

        Raises:
            CaptureError: something can be no static tensor.
        """
        side = "decoder_" if loop.model.config.is_encoder_decoder else ""
        mask_name, position_name = f"{side}attention_mask", f"{side}position_ids"
        ours = {loop.cache_name, mask_name, "inputs_embeds", "encoder_outputs"}
        given = {
            name: value
            for name, value in loop.kwargs.items()
            if name not in ours and name not in MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL
        }
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        for name in (*_OF_LAST_TOKEN, position_name):
            if name in tensors:
                tensors[name] = tensors[name][..., -1:]
        mask = _mask_of(loop, mask_name)
        takes = inspect.signature(loop.model.forward).parameters
        if mask is not None and position_name in takes and position_name not in tensors:
            # Made of the mask by the model, it would be that of the last place in the memory.
            tensors[position_name] = mask.long().cumsum(-1)[:, -1:] - 1
        encoder = loop.kwargs.get("encoder_outputs")
        if encoder is not None and encoder_length is not None:
            encoder = _padded(encoder, encoder_length)
            tensors["attention_mask"] = _pad(tensors["attention_mask"], encoder_length)
        position = position_name if position_name in tensors else None
        return cls(_plain_of(given), tensors, encoder, mask, mask_name, position)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for two that fit the same static tensors."""
        encoder = () if self.encoder is None else _forms(_tensors_of(self.encoder))
        mask = None if self.mask is None else self.mask.dtype
        # By their text: 1, 1.0 and True are equal, and not the same to a model.
        plain = tuple((name, repr(value)) for name, value in sorted(self.plain.items()))
        return plain, _forms(self.tensors), encoder, mask


def _plain_of(given: dict[str, Any]) -> dict[str, Any]:
    """The values among a model's arguments that are no tensors."""
    plain = {name: each for name, each in given.items() if not isinstance(each, torch.Tensor)}
    for name, each in plain.items():
        if not isinstance(each, bool | int | float | str | None):
            raise CaptureError(
                f"the model takes {name}, a {type(each).__name__}, in every step", remedy=_EAGERLY
            )
    return plain


def _mask_of(loop: EagerLoop, name: str) -> torch.Tensor | None:
    """The mask over the positions of the tokens so far, made if the model takes one."""
    mask: torch.Tensor | None = loop.kwargs.get(name)
    if mask is None and name in inspect.signature(loop.model.forward).parameters:
        # A model that makes one by itself reads the length on the host.
        return torch.ones_like(loop.input_ids)
    if mask is not None and mask.ndim != 2:
        raise CaptureError(
            f"{name} has shape {tuple(mask.shape)}, and not (batch, positions)", remedy=_EAGERLY
        )
    return mask


def encoder_to_pad(loop: EagerLoop) -> int | None:
    """The positions of an encoder that a mask hides where it is told to; None if there are none."""
    encoder, mask = loop.kwargs.get("encoder_outputs"), loop.kwargs.get("attention_mask")
    if encoder is None or mask is None or encoder[0].shape[:2] != mask.shape:
        return None
    return int(mask.shape[1])


class Decoder:
    """The static tensors of the steps of one form of calls.

    Args:
        loop: a call after its first token.
        inputs: what its steps pass to the model.
        capacity: positions to have memory for.
        logits: of the token that was chosen: shape (batch, vocabulary), float32.

    Attributes:
        cache: the static cache.
        ids: shape (batch, capacity + 1): the tokens so far.
        count: shape (): how many there are.
        valid: shape (): those up to the one that ended the last sequence.
        unfinished: shape (batch,): 1 for a sequence that has not ended.
        ended: shape (), bool: whether all have.
        invalid: shape (), bool: whether a token was drawn of what is no distribution.
        logits: shape (batch, vocabulary), float32: what the model said last.
        token: shape (batch, 1): the token that was chosen last.
        plain, tensors, encoder, mask: what a step passes to the model, as in Inputs.
    """

    def __init__(
        self, loop: EagerLoop, inputs: Inputs, capacity: int, logits: torch.Tensor
    ) -> None:
        batch, device = loop.input_ids.shape[0], loop.input_ids.device

        def tensor(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.model, self.cache_name = loop.model, loop.cache_name or "past_key_values"
        states = None if inputs.encoder is None else inputs.encoder[0]
        self.capacity = capacity
        self.cache = StaticCopy(loop.cache, capacity, None if states is None else states.shape[1])
        # The token that was chosen last is not in the cache yet.
        self.ids = tensor(batch, capacity + 1)
        self.count, self.valid, self.pad = tensor(), tensor(), tensor()
        self.token = tensor(batch, 1)
        self.unfinished = tensor(batch)
        self.ended, self.invalid = tensor(dtype=torch.bool), tensor(dtype=torch.bool)
        self.logits = torch.zeros_like(logits)
        self.plain = dict(inputs.plain)
        self.tensors = {name: each.clone() for name, each in inputs.tensors.items()}
        self.encoder: Any = None if inputs.encoder is None else _cloned(inputs.encoder)
        self.mask_name, self.position_name = inputs.mask_name, inputs.position_name
        self.mask = (
            None if inputs.mask is None else tensor(batch, capacity, dtype=inputs.mask.dtype)
        )

    def read(self, loop: EagerLoop, inputs: Inputs) -> int:
        """Take over a call between two tokens; gives the positions that its cache has filled."""
        length = loop.input_ids.shape[1]
        filled = length_of(loop.cache) or length - 1
        self.cache.read(loop.cache, filled)
        self.ids[:, :length].copy_(loop.input_ids)
        self.ids[:, length:].zero_()
        self.count.fill_(length)
        self.valid.fill_(length)
        self.token.copy_(loop.input_ids[:, -1:])
        self.unfinished.copy_(loop.unfinished)
        self.ended.fill_(loop.ended)
        self.invalid.zero_()
        if loop.pad is not None:
            self.pad.copy_(loop.pad.reshape(()))
        for name, value in inputs.tensors.items():
            self.tensors[name].copy_(value)
        if inputs.encoder is not None:
            for name, value in _tensors_of(inputs.encoder).items():
                self.encoder[name].copy_(value)
        if self.mask is not None and inputs.mask is not None:
            # Some models count positions by it: what is to come is not in it yet.
            self.mask.zero_()
            self.mask[:, : inputs.mask.shape[1]].copy_(inputs.mask)
        return filled


def forward_step(decoder: Decoder, visible: int) -> Callable[[], None]:
    """A step's run of the model on the last token: logits, cache and positions change in place.

    Args:
        decoder: the static tensors. The step holds each by a name of its own: a graph watches what
            its function's names hold.
        visible: positions of the cache that the step sees, the one that is written included.
    """
    model, token, logits, clock = decoder.model, decoder.token, decoder.logits, decoder.cache.clock
    named: dict[str, Any] = {**decoder.plain, **decoder.tensors}
    named[decoder.cache_name] = decoder.cache.seeing(visible)
    if decoder.encoder is not None:
        named["encoder_outputs"] = decoder.encoder
    mask = decoder.mask
    if mask is not None:
        named[decoder.mask_name] = mask[:, :visible]
    position = None if decoder.position_name is None else decoder.tensors[decoder.position_name]

    def forward() -> None:
        if mask is not None:
            mask.index_fill_(1, clock.view(1), 1)
        inputs = model.prepare_inputs_for_generation(token, next_sequence_length=1, **named)
        outputs = model(**inputs, return_dict=True)
        logits.copy_(outputs.logits[:, -1])
        clock.add_(1)
        if position is not None:
            position.add_(1)

    return forward


class TokenChoice:
    """How a step chooses its token, inside of the graph.

    Args:
        decoder: the static tensors.
        processors: what changes the logits first.
        samples: draw from the distribution, or take the likeliest token.
        ends: the tokens that end a sequence, shape (n,); None if none does.

    Attributes:
        step: choose the next token of each sequence, and see which have ended.
    """

    def __init__(
        self,
        decoder: Decoder,
        processors: Sequence[StaticProcessor],
        samples: bool,
        ends: torch.Tensor | None,
    ) -> None:
        self._ends = None if ends is None else ends.clone()
        sizes = [len(each.numbers) for each in processors]
        self._numbers = decoder.logits.new_zeros(sum(sizes), dtype=torch.float64)
        applied = [each.apply for each in processors]
        self.step = _choice_step(decoder, applied, self._numbers.split(sizes), samples, self._ends)

    def read(self, processors: Sequence[StaticProcessor], ends: torch.Tensor | None) -> None:
        """Take over the numbers of a call that may share the graph."""
        numbers = [number for each in processors for number in each.numbers]
        self._numbers.copy_(torch.tensor(numbers, dtype=torch.float64))
        if self._ends is not None and ends is not None:
            self._ends.copy_(ends)


def _choice_step(
    decoder: Decoder,
    applied: Sequence[Apply],
    numbers: Sequence[torch.Tensor],
    samples: bool,
    ends: torch.Tensor | None,
) -> Callable[[], None]:
    logits, token, ids = decoder.logits, decoder.token, decoder.ids
    count, valid, pad = decoder.count, decoder.valid, decoder.pad
    unfinished, ended, invalid = decoder.unfinished, decoder.ended, decoder.invalid
    tokens, pairs = Tokens(ids, count), tuple(zip(applied, numbers, strict=True))

    def choose() -> None:
        scores = logits.clone()
        for apply, its in pairs:
            scores = apply(tokens, scores, its)
        if samples:
            probabilities = scores.softmax(dim=-1)
            chosen = _drawn(probabilities)
            # torch.multinomial raises for these at once; here they are told after the last step.
            invalid.logical_or_(probabilities.isnan().any().logical_and(ended.logical_not()))
        else:
            chosen = scores.argmax(dim=-1)
        if ends is not None:
            chosen = chosen * unfinished + pad * (1 - unfinished)
        valid.add_(unfinished.max())
        ids.index_copy_(1, count.view(1), chosen[:, None])
        token.copy_(chosen[:, None])
        count.add_(1)
        if ends is not None:
            unfinished.mul_((chosen[:, None] != ends).all(dim=1))
            ended.copy_(unfinished.max() == 0)

    return choose


def _drawn(probabilities: torch.Tensor) -> torch.Tensor:
    """One draw of each row's distribution, as torch.multinomial makes it, without its checks.

    The least of exponential variables with the probabilities as rates is at i with probability i.
    """
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(dim=-1)


def _tensors_of(outputs: Any) -> dict[str, torch.Tensor]:
    return {name: each for name, each in outputs.items() if isinstance(each, torch.Tensor)}


def _cloned(outputs: Any) -> Any:
    return type(outputs)(**{name: each.clone() for name, each in _tensors_of(outputs).items()})


def _padded(outputs: Any, length: int) -> Any:
    """An encoder's outputs, with zeros behind its positions."""
    own = outputs[0].shape[1]
    found = _tensors_of(outputs)
    for name, each in found.items():
        if each.ndim > 1 and each.shape[1] == own:
            found[name] = _pad(each, length)
    return type(outputs)(**found)


def _pad(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Zeros behind dimension 1."""
    missing = length - tensor.shape[1]
    return torch.cat(
        [tensor, tensor.new_zeros((tensor.shape[0], missing, *tensor.shape[2:]))], dim=1
    )


def _forms(tensors: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    return tuple((name, tuple(t.shape), t.dtype) for name, t in sorted(tensors.items()))
