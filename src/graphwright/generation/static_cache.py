"""A cache of transformers whose tensors stay where they are: a graph of a decode step writes to it.

A prompt is read with the model's own cache, whose content is copied into this one. All layers share
one clock, a number on the device, which the step advances once. Each layer shows a prefix of its
memory, as long as the bucket of the step: it grows without a copy. A layer with a sliding window
keeps all positions, since the model's mask hides what is outside of the window: what transformers
keeps (StaticSlidingWindowLayer) branches on a number of the host when the window is full.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionLayer,
)

from ..errors import CaptureError


class PositionedLayer(CacheLayerMixin):
    """Keys and values of one layer, written at the position that a tensor says.

    Args:
        like: the layer that the prompt has filled.
        capacity: positions to have memory for.
        clock: shape (), int64: positions that are filled, for all layers.
    """

    is_compileable = True
    is_sliding = False

    def __init__(self, like: Any, capacity: int, clock: torch.Tensor) -> None:
        super().__init__()
        self.keys = _room(like.keys, capacity)
        self.values = _room(like.values, capacity)
        self.clock = clock
        self.visible = capacity
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: its memory is there from the beginning."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write those of one position, shape (batch, heads, 1, size), and give all of them."""
        at = self.clock.view(1)
        # As where they are joined: the wider type of the two.
        self.keys.index_copy_(2, at, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, at, value_states.to(self.values.dtype))
        return self.keys[:, :, : self.visible], self.values[:, :, : self.visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many positions a mask covers, and the first of them."""
        return self.visible, 0

    def get_seq_length(self) -> Any:
        """Positions that are filled: a tensor on the device."""
        return self.clock

    def get_max_length(self) -> int:
        """Positions that a step sees."""
        return self.visible

    def read(self, filled: Any, length: int) -> None:
        """Take over what a prompt has left in the model's own layer; nothing else is kept."""
        for mine, its in ((self.keys, filled.keys), (self.values, filled.values)):
            # A sliding window has forgotten the positions before it.
            first = length - its.shape[2]
            if first < 0:
                raise CaptureError("its cache holds more than its length", remedy="Pass none.")
            # NaN times a weight of zero is NaN: what an earlier call has left has to go.
            mine.zero_()
            mine[:, :, first:length].copy_(its)

    def give(self, filled: Any, length: int) -> None:
        """Fill the model's own layer with what is here, as if it had been used itself."""
        first = 0
        if isinstance(filled, DynamicSlidingWindowLayer):
            filled.cumulative_length = length
            first = max(0, length - filled.sliding_window + 1)
        filled.keys = self.keys[:, :, first:length].clone()
        filled.values = self.values[:, :, first:length].clone()


class LinearLayer(LinearAttentionLayer):
    """The states of one layer without attention; they are written in place as it is."""

    def __init__(self, like: Any, capacity: int, clock: torch.Tensor) -> None:
        super().__init__(number_of_states=like.number_of_states)
        self.device, self.dtype = like.device, like.dtype
        self.conv_kernel_size = dict(like.conv_kernel_size)
        self.conv_states = {k: _copied(v) for k, v in like.conv_states.items()}
        self.recurrent_states = {k: _copied(v) for k, v in like.recurrent_states.items()}
        self.is_conv_states_initialized = dict(like.is_conv_states_initialized)
        self.is_recurrent_states_initialized = dict(like.is_recurrent_states_initialized)
        self.has_previous_state = dict(like.has_previous_state)

    def read(self, filled: Any, length: int) -> None:
        """Take over the states that a prompt has left in the model's own layer."""
        _copy_states(filled, self)

    def give(self, filled: Any, length: int) -> None:
        """Copy the states into the model's own layer."""
        _copy_states(self, filled)


class LinearAndPositionedLayer(LinearLayer, PositionedLayer):
    """A layer with attention and states."""

    def __init__(self, like: Any, capacity: int, clock: torch.Tensor) -> None:
        PositionedLayer.__init__(self, like, capacity, clock)
        LinearLayer.__init__(self, like, capacity, clock)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: its memory is there from the beginning."""

    def read(self, filled: Any, length: int) -> None:
        """Take over what a prompt has left in the model's own layer."""
        LinearLayer.read(self, filled, length)
        PositionedLayer.read(self, filled, length)

    def give(self, filled: Any, length: int) -> None:
        """Fill the model's own layer with what is here."""
        LinearLayer.give(self, filled, length)
        PositionedLayer.give(self, filled, length)


class CrossLayer(CacheLayerMixin):
    """Keys and values that a decoder reads of its encoder: filled once, before the steps.

    Args:
        like: the layer that the prompt has filled.
        length: positions of the encoder, padding included.
    """

    is_compileable = True
    is_sliding = False

    def __init__(self, like: Any, length: int) -> None:
        super().__init__()
        self.keys, self.values = _room(like.keys, length), _room(like.values, length)
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: its memory is there from the beginning."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Raises: a step of the decoder does not change what the encoder said."""
        raise CaptureError(
            "The decode step writes to the keys and values of its encoder.",
            remedy="Such a model generates eagerly.",
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many positions a mask covers, and the first of them."""
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        """Positions of the encoder."""
        return int(self.keys.shape[2])

    def get_max_length(self) -> int:
        """Positions of the encoder."""
        return int(self.keys.shape[2])

    def read(self, filled: Any, length: int) -> None:
        """Take over what the first step has left in the model's own layer."""
        for mine, its in ((self.keys, filled.keys), (self.values, filled.values)):
            mine.zero_()
            mine[:, :, : its.shape[2]].copy_(its)


class StaticCopy:
    """The static cache that stands for one of the model's own.

    Args:
        filled: the cache of the model that a prompt has filled.
        capacity: positions to have memory for.
        encoder_length: positions of the encoder, padding included; None without an encoder.

    Raises:
        CaptureError: there is no static layer for one of its layers.
    """

    def __init__(self, filled: Any, capacity: int, encoder_length: int | None = None) -> None:
        own, cross = _caches(filled)
        device = next((t.device for t in map(_tensor_of, own.layers) if t is not None), None)
        self.clock = torch.zeros((), dtype=torch.int64, device=device)
        self.capacity = capacity
        self._own = [_static(layer)(layer, capacity, self.clock) for layer in own.layers]
        self._cross: list[CrossLayer] | None = None
        if cross is not None:
            self._cross = [CrossLayer(layer, encoder_length or 0) for layer in cross.layers]

    @property
    def has_positions(self) -> bool:
        """Whether a layer keeps positions; others keep states alone."""
        return any(isinstance(layer, PositionedLayer) for layer in self._own)

    @property
    def rolls_back(self) -> bool:
        """Whether a step too many leaves no trace: positions can be cut off, states cannot."""
        return not any(isinstance(layer, LinearAttentionLayer) for layer in self._own)

    @property
    def nbytes(self) -> int:
        """Bytes of what a step reads of it at most."""
        layers = [*self._own, *(self._cross or ())]
        tensors = [tensor for layer in layers for tensor in _tensors_in(layer)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def seeing(self, visible: int) -> Any:
        """The cache for a model whose steps see a prefix of so many positions."""
        layers = [copy.copy(layer) for layer in self._own]
        for layer in layers:
            layer.visible = visible
        cache = Cache(layers=layers)
        return cache if self._cross is None else EncoderDecoderCache(cache, Cache(self._cross))

    def read(self, filled: Any, length: int) -> None:
        """Take over what a prompt of some length has left in the model's own cache."""
        own, cross = _caches(filled)
        self.clock.fill_(length)
        for mine, its in zip(self._own, own.layers, strict=True):
            mine.read(its, length)
        if self._cross is not None:
            for layer, its in zip(self._cross, cross.layers, strict=True):
                layer.read(its, length)

    def give(self, filled: Any, length: int) -> None:
        """Fill the model's own cache with what is here, up to some length."""
        own, _ = _caches(filled)
        for mine, its in zip(self._own, own.layers, strict=True):
            mine.give(its, length)


_Made = Callable[[Any, int, torch.Tensor], Any]
# By the name of the model's own layer, since older versions of transformers lack some.
_STATIC: dict[str, _Made] = {
    "DynamicLayer": PositionedLayer,
    "DynamicSlidingWindowLayer": PositionedLayer,
    "LinearAttentionLayer": LinearLayer,
    "LinearAttentionAndFullAttentionLayer": LinearAndPositionedLayer,
    "LinearAttentionAndSlidingWindowAttentionLayer": LinearAndPositionedLayer,
}


def _static(layer: Any) -> _Made:
    if isinstance(layer, CacheLayerMixin) and (layer.keys is None or layer.keys.ndim != 4):
        raise CaptureError("a layer of its cache holds no keys", remedy="It generates eagerly.")
    made = _STATIC.get(type(layer).__name__)
    if made is None or type(layer).__module__ != cache_utils.__name__:
        raise CaptureError(
            f"There is no static cache for {type(layer).__name__}.",
            remedy="Such a model generates eagerly.",
        )
    return made


def _caches(filled: Any) -> tuple[Any, Any]:
    """The cache of the decoder's own positions, and that of its encoder's."""
    if isinstance(filled, EncoderDecoderCache):
        return filled.self_attention_cache, filled.cross_attention_cache
    return filled, None


def form_of(filled: Any) -> tuple[Any, ...]:
    """Equal for two caches whose content fits the same static tensors, but for their lengths."""
    own, cross = _caches(filled)
    layers = [*own.layers, *(() if cross is None else cross.layers)]
    return tuple((type(layer).__name__, *_forms(layer)) for layer in layers)


def _forms(layer: Any) -> Iterator[tuple[Any, ...]]:
    for name in ("keys", "values"):
        tensor = getattr(layer, name, None)
        if tensor is not None:
            shape = (*tensor.shape[:2], *tensor.shape[3:])
            yield name, shape, tensor.dtype, tensor.device
    for name in ("conv_states", "recurrent_states"):
        for index, tensor in getattr(layer, name, {}).items():
            if tensor is not None:
                yield name, index, tensor.shape, tensor.dtype, tensor.device


def length_of(filled: Any) -> int:
    """The positions that the model's own cache has filled."""
    own, _ = _caches(filled)
    for layer in own.layers:
        if isinstance(layer, CacheLayerMixin):
            return int(layer.get_seq_length())
    return 0


def _tensor_of(layer: Any) -> torch.Tensor | None:
    if isinstance(layer, CacheLayerMixin):
        keys: torch.Tensor | None = layer.keys
        return keys
    states: Sequence[Any] = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return next((state for state in states if state is not None), None)


def _tensors_in(layer: Any) -> Iterator[torch.Tensor]:
    for name in ("keys", "values"):
        tensor = getattr(layer, name, None)
        if tensor is not None:
            yield tensor
    for name in ("conv_states", "recurrent_states"):
        yield from (each for each in getattr(layer, name, {}).values() if each is not None)


def _room(like: torch.Tensor, length: int) -> torch.Tensor:
    shape = (*like.shape[:2], length, *like.shape[3:])
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


def _copied(state: torch.Tensor | None) -> torch.Tensor | None:
    return None if state is None else state.clone()


def _copy_states(source: Any, target: Any) -> None:
    for name in ("conv_states", "recurrent_states"):
        for index, state in getattr(source, name).items():
            if state is not None:
                getattr(target, name)[index].copy_(state)
