"""TorchScript: models that are traced, whatever operation gives their result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from graphwright.strategies import torchscript

LAST: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "convolution": lambda x: functional.conv2d(x, torch.ones(4, 4, 3, 3)),
    "transposed convolution": lambda x: functional.conv_transpose2d(x, torch.ones(4, 4, 3, 3)),
    "linear": lambda x: functional.linear(x, torch.ones(3, 8)),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x),
    "norm": lambda x: functional.group_norm(x, 2),
    "pool": lambda x: functional.avg_pool2d(x, 2),
    "interpolation": lambda x: functional.interpolate(x, scale_factor=2.0),
    "embedding": lambda x: functional.embedding((x * 3).long(), torch.ones(4, 2)),
    "cat": lambda x: torch.cat([x, x.flip(0)]),
}


class LastOperation(nn.Module):
    """Ends in an operation; a closure cannot be scripted."""

    def __init__(self, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x.relu())


@pytest.mark.parametrize("last", LAST)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_traced_model_may_end_in_any_operation(last: str) -> None:
    model = LastOperation(LAST[last]).eval()
    args = (torch.rand(1, 4, 8, 8),)
    with torch.no_grad():
        built = torchscript.SCRIPT.build(model, args, {})
        torch.testing.assert_close(built.call(*args), model(*args))
