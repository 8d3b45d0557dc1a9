"""Ways to run a decode step: as the model is written, and compiled by Inductor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..strategies.inductor import fresh_entry
from .attention_pass import use_decode_attention
from .steps import Step

EAGER, INDUCTOR, GEMV = "eager", "inductor", "inductor:gemv"
# Frozen weights would be copies: new values in the same memory would not be seen.
_OPTIONS: dict[str, Any] = {"freezing": False}
# Then Inductor computes products of one row itself, fused with what is around them, and chooses the
# block sizes by trial.
_GEMV_OPTIONS = _OPTIONS | {"coordinate_descent_tuning": True}


@dataclass(frozen=True)
class StepWay:
    """A way to run a step.

    Attributes:
        make: makes a function that does what the model's own step does.
        unavailable: why there is no such way on a device; empty if there is.
    """

    make: Callable[[Step], Step]
    unavailable: Callable[[torch.device], str] = lambda device: ""


def _needs_gpu(device: torch.device) -> str:
    return "" if device.type == "cuda" else "on a CPU, graphs record eager's operations"


def _compiled(step: Step, **options: Any) -> Step:
    found: Step = torch.compile(fresh_entry(step), dynamic=False, fullgraph=True, **options)
    return found


def _inductor(step: Step) -> Step:
    return _compiled(step, options=dict(_OPTIONS))


def _gemv(step: Step) -> Step:
    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        use_decode_attention(graph)
        return compile_fx(graph, inputs, config_patches=dict(_GEMV_OPTIONS))

    return _compiled(step, backend=backend)


WAYS = {
    EAGER: StepWay(lambda step: step),
    INDUCTOR: StepWay(_inductor, _needs_gpu),
    GEMV: StepWay(_gemv, _needs_gpu),
}
