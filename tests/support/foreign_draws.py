"""The host's random numbers as they are for a GPU: no graph repeats them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from graphwright.calls.operations import tensors
from graphwright.graphs import host_draws, python_state, warmup
from graphwright.graphs.cpu.recorder import _Tape
from graphwright.graphs.segments import tree
from graphwright.graphs.segments.tracer import Tracer
from graphwright.shapes import eligibility


def make_foreign(patch: pytest.MonkeyPatch) -> None:
    """Have the CPU recorder leave out what draws on the host, as a CUDA capture does."""
    record, trace = _Tape.run, Tracer.run

    def foreign(generator: torch.Generator, device: torch.device) -> bool:
        return True

    def on_tape(self: _Tape, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if _draws_on_host(func, args, kwargs):
            return func(*args, **kwargs)
        return record(self, func, args, kwargs)

    def traced(self: Tracer, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if _draws_on_host(func, args, kwargs):
            return self._run_on_host(func, args, kwargs, constant=False)
        return trace(self, func, args, kwargs)

    for module in (host_draws, python_state, warmup, tree, eligibility):
        patch.setattr(module, "is_foreign", foreign)
    patch.setattr(_Tape, "run", on_tape)
    patch.setattr(Tracer, "run", traced)


def _draws_on_host(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    drawn = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
    return drawn and not tensors((args, kwargs))
