"""How many texts a SentenceTransformer encodes at once, where the caller does not say.

`encode` sorts its texts by length and pads those of a batch to the longest. Small batches waste
less on padding, large ones launch less; which is faster depends on the machine and on the texts.
"""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

from torch import nn

from .installation import twin_of
from .program_runs import ENCODE, is_sentence_transformer

# Tried in turn, each beside the best so far; its own default is 32.
BATCH_SIZES = (8, 16, 4)
_ARGUMENT = "batch_size"


def has_batches(module: nn.Module) -> bool:
    """Whether a module is a SentenceTransformer whose encode() takes a batch size."""
    encode: Any = getattr(module, ENCODE, None)
    return is_sentence_transformer(module) and _ARGUMENT in inspect.signature(encode).parameters


class BatchSize:
    """Answers encode() by the module's own, with another batch size where none is given.

    Attributes:
        size: texts at once.
        calls: how many calls went which way.
    """

    def __init__(self, module: nn.Module, size: int) -> None:
        self.size, self.calls = size, Counter[str]()
        self._original: Any = getattr(twin_of(module), ENCODE)
        self._signature = inspect.signature(self._original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode."""
        given = _ARGUMENT in self._signature.bind_partial(*args, **kwargs).arguments
        self.calls["with the caller's batch size" if given else f"batch_size={self.size}"] += 1
        return self._original(*args, **(kwargs if given else {**kwargs, _ARGUMENT: self.size}))
