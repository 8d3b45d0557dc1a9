"""The node of autograd that a replayed forward leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import CaptureError
from .activations import Lease

# Runs the forward: what is differentiable of its outputs, who waits for the backward, and what that
# reads where it is.
Forward = Callable[[], tuple[Sequence[torch.Tensor], Lease | None, Sequence[torch.Tensor]]]


class Replay(torch.autograd.Function):
    """Forward and backward of a graphed callable, by replay."""

    @staticmethod
    def forward(ctx: Any, run: Forward, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the forward; `tensors` is what gradients are for."""
        outputs, ctx.lease, saved = run()
        # Autograd sees whether these are written to before the backward. With nothing saved it
        # would not see a second backward either.
        ctx.save_for_backward(*saved, torch.empty(0, device="cpu"))
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """Run the backward."""
        if torch.is_grad_enabled():
            raise CaptureError(
                "Gradients of gradients (create_graph=True) go through a graphed callable, whose "
                "backward is a graph and leaves no history.",
                remedy="Leave create_graph out, or call the callable without graphs for this.",
            )
        if any(g is not None and _is_batched(g) for g in grads):
            raise CaptureError(
                "Batches of gradients (vmap, is_grads_batched=True) go through a graphed callable.",
                remedy="Ask for them one by one, or call the callable without graphs for this.",
            )
        _ = ctx.saved_tensors
        return None, *ctx.lease.backward(grads)


def _is_batched(grad: torch.Tensor) -> bool:
    """Whether it stands for many, of vmap as it is now or as autograd still uses it."""
    return grad.layout is torch.strided and not torch._C._has_storage(grad)
