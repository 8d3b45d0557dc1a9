"""The random state of cuDNN's RNNs: generators are set unseen by them, and seeds are noticed.

A generator that is seeded, or given a state, has the next RNN with dropout make cuDNN's dropout
state anew. No capture allows that, and outside of one the RNN's dropout would begin again.
"""

from __future__ import annotations

import torch

from ..calls.operations import default_generators


def put_seed(generator: torch.Generator, seed: int) -> None:
    """Seed a generator, unseen by cuDNN's RNNs."""
    _other_handle(generator).manual_seed(seed)


def put_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """Give a generator a state, as `get_state` returns it, unseen by cuDNN's RNNs."""
    _other_handle(generator).set_state(state)


def draw_seed(generator: torch.Generator) -> None:
    """Draw what PyTorch draws to make cuDNN's dropout state."""
    torch.empty((), dtype=torch.long, device=generator.device).random_(generator=generator)


class Seeding:
    """Notices that a generator was seeded, upon which eager RNNs make their dropout state anew.

    Args:
        device: the generator is its default one.
    """

    def __init__(self, device: torch.device) -> None:
        self._generator = default_generators(device)[-1]
        self._seed = self._generator.initial_seed()
        self._offset = self._generator.get_offset()
        self._seeded = False

    def unchanged(self) -> bool:
        """Whether it was not seeded since; numbers may have been drawn from it."""
        offset, before = self._generator.get_offset(), self._offset
        self._offset = offset
        if offset < before or self._generator.initial_seed() != self._seed:
            self._seeded = True
        return not self._seeded

    def changed(self) -> str | None:
        """What has changed, in words, or None."""
        if self.unchanged():
            return None
        return "random numbers were seeded, and dropout in cuDNN's RNNs begins anew with them"


def _other_handle(generator: torch.Generator) -> torch.Generator:
    """A generator with the same state: what one is given, both have (CUDAGeneratorImpl.cpp)."""
    return generator.graphsafe_get_state() if generator.device.type == "cuda" else generator
