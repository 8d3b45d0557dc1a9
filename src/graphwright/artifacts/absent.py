"""What stands for the model in what was loaded without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..errors import SignatureError
from ..ranges import RangedSignature
from ..signature import CallSignature


class Absent(nn.Module):
    """Stands for a model that was not passed: it answers no call."""

    def __init__(self) -> None:
        super().__init__()
        self.training = False
        self.signatures: Sequence[CallSignature | RangedSignature] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        told = [each.differences(args, kwargs) for each in self.signatures]
        why = min(filter(None, told), key=len, default="gradients are wanted")
        raise SignatureError(
            f"This call is not like the one that was saved: {why}.",
            remedy="Pass the model to load(), which answers other calls.",
        )
