"""Setting random generators without a trace: cuDNN's RNNs notice when one is seeded.

A generator that is seeded, or given a state, has the next RNN with dropout make cuDNN's dropout
state anew. No capture allows that, and outside of one the RNN's dropout would begin again.
"""

from __future__ import annotations

import torch


def put_seed(generator: torch.Generator, seed: int) -> None:
    """Seed a generator, unseen by cuDNN's RNNs."""
    _other_handle(generator).manual_seed(seed)


def put_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """Give a generator a state, as `get_state` returns it, unseen by cuDNN's RNNs."""
    _other_handle(generator).set_state(state)


def _other_handle(generator: torch.Generator) -> torch.Generator:
    """A generator with the same state: what one is given, both have (CUDAGeneratorImpl.cpp)."""
    return generator.graphsafe_get_state() if generator.device.type == "cuda" else generator
