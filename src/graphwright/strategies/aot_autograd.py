"""AOT Autograd: the model's ATen graph, run without its Python modules around it.

TorchDynamo captures the calls, AOT Autograd lowers them to ATen operations, and the resulting
graph runs as generated Python: no kernel changes, only the modules' own Python is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..calls.split import Args, Kwargs
from .base import AVAILABLE, Availability, Built, tiny_model, without_grad
from .inductor import compile_and_run, fresh_entry


@dataclass(frozen=True)
class AotAutograd:
    """torch.compile with a back end that runs the ATen graph as it is."""

    name: str = "aot_autograd"
    complexity: int = 20

    def probes_late(self, device: torch.device) -> bool:
        """The probe captures, which takes as long as a build."""
        return True

    def probe(self, device: torch.device) -> Availability:
        """Capture and run a tiny model."""
        model, x = tiny_model(device)
        self.build(model, (x,), {}).call(x)
        return AVAILABLE

    def build(self, model: nn.Module, args: Args, kwargs: Kwargs) -> Built:
        """Capture the model for the sample's own shapes."""
        from torch._dynamo.backends.common import aot_autograd

        backend: Callable[..., Any] = aot_autograd(fw_compiler=_run_as_it_is)
        compiled = torch.compile(fresh_entry(model), backend=backend, dynamic=False)
        with torch.no_grad():
            notes, *_ = compile_and_run(compiled, args, kwargs, 1)
        return Built(without_grad(compiled), notes, capturable=True)


def _run_as_it_is(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    from torch._functorch._aot_autograd.utils import make_boxed_func

    boxed: Callable[..., Any] = make_boxed_func(graph.forward)
    return boxed


AOT_AUTOGRAD = AotAutograd()
