"""What is left of an inner part's gain under an outer part, seen by what runs.

A cell of the table of pairs is one outer part made of one inner part. What runs is either the
model's own `forward` or what `fuse` made of it; a graph shows by running neither.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from chosen import choosing
from torch import nn
from torch.nn.utils import parametrizations

import graphwright as gw
from graphwright.errors import GraphwrightError
from graphwright.fusion.tracing import GraphCall

# What comes of a gain. Nothing may be lost in silence.
KEPT, REFUSED, WARNED, COUNTED, LOST = "kept", "refused", "warned", "counted", "lost"
# Calls before what runs is looked at, and then.
_FIRST, _THEN = 3, 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)
        assert self.norm.running_var is not None
        self.norm.running_var.uniform_(0.5, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _LOG.info("forward")
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class _Events(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.msg)


# Loggers are no state that a call depends on, so that this is not taken for some.
_LOG, _EVENTS = logging.getLogger("gains"), _Events()
_LOG.addHandler(_EVENTS)
_LOG.propagate = False
Make = Callable[[Any, torch.Tensor], Any]


@contextlib.contextmanager
def _watching() -> Iterator[list[str]]:
    """Note each run of the model's own forward, and of what it was fused to."""
    plain = GraphCall.__call__

    def call(self: GraphCall, *args: Any, **kwargs: Any) -> Any:
        _LOG.info("fused")
        return plain(self, *args, **kwargs)

    with mock.patch.object(GraphCall, "__call__", call):
        _LOG.setLevel(logging.INFO)
        _EVENTS.found.clear()
        yield _EVENTS.found


def _tune(target: Any, x: torch.Tensor) -> Any:
    with choosing("fused"):
        return gw.tune(
            target, (x,), strategies=["fused"], isolate=False, remember=False, progress=False
        )


def _load(target: Any, x: torch.Tensor) -> Any:
    found = _tune(target, x)
    with tempfile.TemporaryDirectory() as folder:
        gw.save(found, Path(folder) / "saved.gw")
        return gw.load(Path(folder) / "saved.gw", target, trust=True)


def _block(target: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        target(x)
        target(x)
    static, out = x.clone(), []
    with torch.no_grad(), gw.capturing() as graph:
        out.append(target(static))

    def call(x: torch.Tensor) -> torch.Tensor:
        static.copy_(x)
        graph.replay()
        return out[0].clone()

    return call


def _step(target: Any, x: torch.Tensor) -> Any:
    target.train()
    optimizer = torch.optim.SGD(target.parameters(), lr=0.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        y = target(x)
        y.sum().backward()
        optimizer.step()
        return y.detach()

    return gw.graph_step(step, x)


def _traced(target: Any, x: torch.Tensor) -> Any:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(target, (x,), check_trace=False)


# Each makes a part of a model or of another part.
INNER: dict[str, Make] = {
    "graph": lambda target, x: gw.graph(target),
    "buckets": lambda target, x: gw.graph(target, buckets=gw.Buckets(batch=[2, 4])),
    "fuse": lambda target, x: gw.fuse(target),
    "tune": _tune,
    "load": _load,
}
OUTER: dict[str, Make] = {
    **INNER,
    "capture": lambda target, x: gw.capture(target, x),
    "capturing": _block,
    "make_graphed_callables": lambda target, x: gw.make_graphed_callables(target, (x,)),
    "graph_step": _step,
    "torch.compile": lambda target, x: torch.compile(target, backend="eager"),
    "torch.jit.trace": _traced,
    "torch.export": lambda target, x: torch.export.export(target, (x,)).module(),
}
# They are called with gradients on.
_TRAINS = ("make_graphed_callables", "graph_step")
# Their gain is that other operations run, and not only that no Python does.
_FUSED = ("fuse", "tune", "load")


def pair(outer: str, inner: str, device: torch.device) -> str:
    """What comes of the inner part's gain inside of the outer one."""
    model, x = _model(device)
    with _caught() as said, _watching() as events:
        part = INNER[inner](model, x)
        try:
            whole = OUTER[outer](part, x)
        except GraphwrightError:
            return REFUSED
        trains = outer in _TRAINS
        for count in range(_FIRST + _THEN):
            if count == _FIRST:
                last = events[-1]
                events.clear()
            with torch.set_grad_enabled(trains):
                found = whole(x)
            if found.requires_grad:
                found.sum().backward()
        ran = [*events]
    if not trains:
        with torch.no_grad():
            torch.testing.assert_close(found, model(x), rtol=1e-3, atol=1e-3)
    return _outcome(part, inner, ran, last, said)


def _outcome(part: Any, kind: str, ran: list[str], last: str, said: list[str]) -> str:
    """What the events of the last calls say, or the part itself where its gain is gone."""
    fused = kind in _FUSED
    if (set(ran or [last]) == {"fused"}) if fused else ("forward" not in ran):
        return KEPT
    if any("what was gained is lost" in text for text in said):
        return WARNED
    counts = [why for why in part.calls if "eager" in why] if fused else part.statistics.eager
    return COUNTED if counts else LOST


Around = Callable[[Any, nn.Module], Callable[[torch.Tensor], Any]]


def _under(context: Callable[[], Any]) -> Around:
    def around(part: Any, model: nn.Module) -> Callable[[torch.Tensor], Any]:
        def call(x: torch.Tensor) -> Any:
            with context():
                return part(x)

        return call

    return around


def _on_thread(part: Any, model: nn.Module) -> Callable[[torch.Tensor], Any]:
    threads = ThreadPoolExecutor(1)
    return lambda x: threads.submit(torch.no_grad()(part), x).result()


def _changed(change: Callable[[Any], object]) -> Around:
    def around(part: Any, model: nn.Module) -> Callable[[torch.Tensor], Any]:
        change(model)
        return part

    return around


def _parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


SURROUNDINGS: dict[str, Around] = {
    "nn.Sequential": lambda part, model: nn.Sequential(part),
    "nn.DataParallel": lambda part, model: nn.DataParallel(part),
    "copy.deepcopy": lambda part, model: copy.deepcopy(part),
    "pickle": lambda part, model: pickle.loads(pickle.dumps(part)),
    "another thread": _on_thread,
    "inference_mode": _under(torch.inference_mode),
    "autocast": _under(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "functional_call": lambda part, model: (
        lambda x: torch.func.functional_call(part, _parameters(model), (x,))
    ),
    "vmap": lambda part, model: lambda x: torch.func.vmap(part)(x[None])[0],
    "a forward hook": _changed(lambda m: m.register_forward_hook(lambda module, args, y: y)),
    "weight_norm": _changed(lambda m: parametrizations.weight_norm(m.head)),
    "other weights": _changed(lambda m: m.load_state_dict(m.state_dict(), assign=True)),
}


def surrounded(surrounding: str, inner: str, device: torch.device) -> str:
    """What comes of a part's gain in some surroundings."""
    model, x = _model(device)
    with _caught() as said, _watching() as events, torch.no_grad():
        part = INNER[inner](model, x)
        part(x)
        call = SURROUNDINGS[surrounding](part, model)
        for count in range(_FIRST + _THEN):
            if count == _FIRST:
                last = events[-1]
                events.clear()
            found = call(x)
        ran = [*events]
        tolerance = 0.1 if surrounding == "autocast" else 1e-3
        torch.testing.assert_close(found.float(), model(x), rtol=tolerance, atol=tolerance)
    return _outcome(call if isinstance(call, type(part)) else part, inner, ran, last, said)


def _model(device: torch.device) -> tuple[Model, torch.Tensor]:
    torch.manual_seed(0)
    return Model().to(device).eval(), torch.randn(2, 3, 8, 8, device=device)


@contextlib.contextmanager
def _caught() -> Iterator[list[str]]:
    """Texts of warnings, once the block has ended."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
