"""Random generators of the host's: after whatever runs a call beside the caller, where they were.

Each kind of generator, in each place that can hold it, under each way to capture, check, tune or
fuse: what comes next are the numbers of plain eager calls.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from planted import generators_stay_moved
from torch import nn
from tqdm import TMonitor, tqdm

import graphwright as gw
from graphwright import errors
from graphwright.calls import host_generators

CALLS = 20
AHEAD = 3


# Kinds of generators: how one is made, and how a number is drawn from it.


class Counting(random.Random):
    """A subclass with state in an attribute, which its numbers depend on."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.count = 0

    def random(self) -> float:
        self.count += 1
        return super().random() + self.count


class Congruential(random.Random):
    """A subclass that draws in its own way, from a state of its own."""

    def seed(self, a: Any = None, version: int = 2) -> None:
        self._box = bytearray([a])

    def random(self) -> float:
        self._box[0] = (self._box[0] * 5 + 3) % 256
        return self._box[0] / 256

    def getstate(self) -> Any:
        return bytes(self._box)

    def setstate(self, state: Any) -> None:
        self._box[:] = state


class Derived(numpy.random.Generator):
    """A subclass of NumPy's."""


def sharing(seed: int) -> list[numpy.random.Generator]:
    bits = numpy.random.PCG64(seed)
    return [numpy.random.Generator(bits), numpy.random.Generator(bits)]


def of_bits(kind: Any) -> Callable[[int], Any]:
    return lambda seed: numpy.random.Generator(kind(seed))


@dataclass(frozen=True)
class Kind:
    make: Callable[[int], Any]
    draw: Callable[[Any], float]


KINDS = {
    "random": Kind(random.Random, lambda g: g.random()),
    "gauss": Kind(random.Random, lambda g: g.gauss(0, 1)),
    "counting": Kind(Counting, lambda g: g.random()),
    "congruential": Kind(Congruential, lambda g: g.random()),
    "method": Kind(lambda seed: random.Random(seed).random, lambda g: g()),
    "PCG64": Kind(of_bits(numpy.random.PCG64), lambda g: g.random()),
    "half a draw": Kind(
        of_bits(numpy.random.PCG64DXSM), lambda g: float(g.integers(1 << 20, dtype="uint32"))
    ),
    "MT19937": Kind(of_bits(numpy.random.MT19937), lambda g: g.normal()),
    "Philox": Kind(of_bits(numpy.random.Philox), lambda g: g.random()),
    "SFC64": Kind(of_bits(numpy.random.SFC64), lambda g: g.random()),
    "derived": Kind(lambda seed: Derived(numpy.random.PCG64(seed)), lambda g: g.random()),
    "shared": Kind(sharing, lambda g: g[0].random() + g[1].random()),
    "bits": Kind(numpy.random.PCG64, lambda g: g.random_raw() / 2**64),
    "method of NumPy's": Kind(lambda seed: numpy.random.default_rng(seed).random, lambda g: g()),
    "spawning": Kind(numpy.random.default_rng, lambda g: g.spawn(1)[0].random()),
    "seeds": Kind(
        numpy.random.SeedSequence, lambda g: numpy.random.default_rng(g.spawn(1)[0]).random()
    ),
    "RandomState": Kind(numpy.random.RandomState, lambda g: g.rand()),
    "half a pair": Kind(numpy.random.RandomState, lambda g: g.randn()),
    "of torch": Kind(
        lambda seed: torch.Generator().manual_seed(seed),
        lambda g: torch.rand((), generator=g).item(),
    ),
}


# Places that hold one: what a model then calls to get it.


class Slotted:
    __slots__ = ("held",)


HELD: Any = None


def in_a_global(held: Any) -> Any:
    globals()["HELD"] = held
    return lambda: HELD


def in_a_class(held: Any) -> Any:
    class Holder:
        generator = held

    return lambda: Holder.generator


def in_a_default(held: Any) -> Any:
    def get(found: Any = held) -> Any:
        return found

    return get


def in_slots(held: Any) -> Any:
    owner = Slotted()
    owner.held = held
    return lambda: owner.held


def in_an_array(held: Any) -> Any:
    found = held if isinstance(held, list) else [held]
    made = numpy.empty(len(found), dtype=object)
    made[:] = found
    return made


def in_a_library(held: Any) -> Any:
    space = {"__name__": "elsewhere", "HELD": held}
    code = compile("def get(): return HELD", "/elsewhere/site-packages/elsewhere.py", "exec")
    exec(code, space)  # a function whose file is an installed library's
    return space["get"]


PLACES: dict[str, Callable[[Any], Any]] = {
    "an attribute": lambda held: held,
    "a list": lambda held: [held],
    "a dictionary": lambda held: {"mine": held},
    "a tuple": lambda held: (0, (held,)),
    "an object": lambda held: types.SimpleNamespace(inner=types.SimpleNamespace(held=held)),
    "slots": in_slots,
    "an array": in_an_array,
    "a closure": lambda held: lambda: held,
    "a default": in_a_default,
    "a global": in_a_global,
    "a class": in_a_class,
    "a library": in_a_library,
}


def taken_from(place: Any) -> Any:
    """What a place holds."""
    if isinstance(place, types.SimpleNamespace):
        return place.inner.held
    if isinstance(place, tuple):
        return place[1][0]
    if isinstance(place, dict):
        return place["mine"]
    if isinstance(place, numpy.ndarray):
        return place[0] if len(place) == 1 else place
    return place() if isinstance(place, types.FunctionType) else place


class Drawing(nn.Module):
    """Multiplies by a number of its own generator."""

    def __init__(self, kind: Kind, place: str, seed: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.generator = kind.make(seed)
        self.place = PLACES[place](self.generator)
        self.draw, self.in_list = kind.draw, place == "a list"
        self.fails = False
        if place != "an attribute":
            del self.generator

    def number(self) -> float:
        return self.draw(self.place[0] if self.in_list else taken_from(self.place))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = self.number()
        if self.fails:
            raise ValueError("on purpose")
        return x * self.weight * number


class Harmless(Drawing):
    """Draws a number that makes no difference, as layer drop does in eval mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number()
        return x * self.weight


# Ways to run a call: each returns how many numbers plain eager calls would have drawn.


def by_graph(model: Drawing, x: torch.Tensor, expected: Iterator[float]) -> None:
    graphed = gw.graph(model)
    with torch.no_grad():
        for _ in range(CALLS):
            torch.testing.assert_close(graphed(x), x * next(expected))


def by_capture(model: Drawing, x: torch.Tensor, _: Iterator[float]) -> None:
    with contextlib.suppress(gw.CaptureError):  # A graph draws from PyTorch's.
        gw.capture(model, x)


def by_failing(model: Drawing, x: torch.Tensor, _: Iterator[float]) -> None:
    model.fails = True
    with pytest.raises(gw.CaptureError, match="on purpose"):
        gw.capture(model, x)
    with pytest.raises(gw.GraphwrightError, match="on purpose"):
        gw.check(model, (x,))
    model.fails = False


def by_check(model: Drawing, x: torch.Tensor, _: Iterator[float]) -> None:
    assert gw.check(model, (x,))


def by_tune(model: Drawing, x: torch.Tensor, _: Iterator[float]) -> None:
    def chosen() -> str:
        tuned = gw.tune(model, (x,), strategies=["torchscript"], isolate=False, progress=False)
        return tuned.report.chosen

    if model.draw is KINDS["congruential"].draw:  # Each run begins with the same state.
        assert chosen() == "eager"
    else:
        with pytest.raises(gw.VerificationError, match="disagree"):
            chosen()


def by_profile(model: Drawing, x: torch.Tensor, _: Iterator[float]) -> None:
    gw.profile(model, (x,))


def by_fuse(model: Drawing, x: torch.Tensor, expected: Iterator[float]) -> None:
    with contextlib.suppress(gw.GraphwrightError):
        fused = gw.fuse(model, (x,))
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(fused(x), x * next(expected))


def by_graphed_callables(model: Drawing, x: torch.Tensor, _: Iterator[float]) -> None:
    with contextlib.suppress(gw.CaptureError):
        gw.make_graphed_callables(model, (x.clone().requires_grad_(),))


def by_graph_step(model: Drawing, x: torch.Tensor, _: Iterator[float]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with contextlib.suppress(gw.CaptureError):
        gw.graph_step(step, x)


def by_buckets(model: Drawing, x: torch.Tensor, expected: Iterator[float]) -> None:
    graphed = gw.graph(model, buckets=gw.Buckets(batch=[4]))
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(graphed(x), x * next(expected))


WAYS = {
    way.__name__.removeprefix("by_"): way
    for way in (
        *(by_graph, by_capture, by_failing, by_check, by_tune, by_profile, by_fuse),
        *(by_graphed_callables, by_graph_step, by_buckets),
    )
}


def compare_with_eager(kind: str, place: str, way: str, device: torch.device) -> None:
    """Check that a generator is where plain eager calls would have left it."""
    model = Drawing(KINDS[kind], place).to(device)
    model.train(way in ("graphed_callables", "graph_step"))
    mine = KINDS[kind].make(3)
    expected = (KINDS[kind].draw(mine) for _ in itertools.count())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        WAYS[way](model, torch.ones(3, 2, device=device), expected)
    following = [model.number() for _ in range(AHEAD)]
    assert following == list(itertools.islice(expected, AHEAD)), f"{kind} in {place} after {way}"


EVERY = list(itertools.product(KINDS, PLACES, WAYS))
# Of an installed library's globals, containers are not looked into.
EVERY = [each for each in EVERY if each[:2] != ("shared", "a library")]
# Each kind under each way, in one place after the other, and each place under each way.
SOME = [
    *((k, p, w) for (k, w), p in zip(itertools.product(KINDS, WAYS), itertools.cycle(PLACES))),
    *((k, p, w) for (p, w), k in zip(itertools.product(PLACES, WAYS), itertools.cycle(KINDS))),
]
SOME = [each for each in SOME if each in EVERY]


def wrong_under(
    way: str, combinations: list[tuple[str, str, str]], device: torch.device
) -> list[str]:
    """What is wrong in each combination with this way."""
    found, tried = [], 0
    for kind, place, each in combinations:
        if each == way:
            tried += 1
            try:
                compare_with_eager(kind, place, way, device)
            except AssertionError as error:
                found.append(f"{kind} in {place}: {error}")
    assert tried >= len(KINDS)
    return found


QUICK = [way for way in WAYS if way != "profile"]


@pytest.mark.parametrize("way", QUICK)
def test_a_generator_is_where_eager_calls_leave_it(way: str, device: torch.device) -> None:
    assert not wrong_under(way, SOME, device)


# Every ninth case, or all of them.
@pytest.mark.parametrize(
    "step", [pytest.param(9, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("way", WAYS)
def test_every_generator_is_where_eager_calls_leave_it(
    way: str, step: int, device: torch.device
) -> None:
    cases = [each for each in EVERY if each[2] == way]
    # A profile takes a fifth of a second.
    assert not wrong_under(way, SOME if way == "profile" else cases[::step], device)


@pytest.mark.parametrize("way", QUICK)
def test_a_generator_is_elsewhere_without_the_protection(
    way: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    generators_stay_moved(monkeypatch)
    with pytest.raises(AssertionError):
        compare_with_eager("PCG64", "an attribute", way, device)


def test_tuning_leaves_generators_alone(device: torch.device) -> None:
    model = Harmless(KINDS["PCG64"], "an object").to(device).eval()
    random.seed(5)
    numpy.random.seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gw.tune(model, (torch.ones(3, 2, device=device),), strategies=["torchscript"])
    mine = numpy.random.default_rng(3)
    assert [model.number() for _ in range(AHEAD)] == [mine.random() for _ in range(AHEAD)]
    assert random.random() == random.Random(5).random()
    assert numpy.random.rand() == numpy.random.RandomState(5).rand()


@pytest.mark.slow
def test_tuning_in_processes_leaves_generators_alone(device: torch.device) -> None:
    model = Harmless(KINDS["random"], "an attribute").to(device).eval()
    model.draw = random.Random.random
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gw.tune(model, (torch.ones(3, 2, device=device),), strategies=["torchscript"], isolate=True)
    mine = random.Random(3)
    assert [model.number() for _ in range(AHEAD)] == [mine.random() for _ in range(AHEAD)]


class Table(nn.Module):
    """Draws a table in its first call, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = numpy.random.default_rng(3)
        self.scale: float | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = self.generator.random()
        return x * self.scale


def test_what_only_the_first_call_draws_stays_drawn(device: torch.device) -> None:
    model, x, mine = Table().to(device).eval(), torch.ones(2, device=device), Table()
    graphed = gw.graph(model)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(graphed(x).cpu(), mine(torch.ones(2)))
    assert graphed.statistics.captures == 1
    assert model.generator.random() == mine.generator.random()


def test_an_interrupt_puts_generators_back(device: torch.device) -> None:
    model = Drawing(KINDS["half a pair"], "an attribute").to(device).eval()

    def interrupted(x: torch.Tensor) -> torch.Tensor:
        model(x)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gw.capture(interrupted, torch.ones(3, 2, device=device))
    assert model.number() == numpy.random.RandomState(3).randn()


def test_the_generator_stays_the_same_object(device: torch.device) -> None:
    model = Drawing(KINDS["shared"], "a list").to(device).eval()
    one, two = model.place[0]
    with pytest.raises(gw.CaptureError, match="changes with every call"):
        gw.capture(model, torch.ones(3, 2, device=device))
    assert model.place[0][0] is one
    assert model.place[0][1] is two
    assert one.bit_generator is two.bit_generator


def test_what_another_thread_may_have_drawn_is_told_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_warned", set())
    model, x = Drawing(KINDS["random"], "an attribute").to(device).eval(), torch.ones(2)
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        with pytest.warns(RuntimeWarning, match=r"generator .*was drawn from while other threads"):
            with pytest.raises(gw.CaptureError, match="changes with every call"):
                gw.capture(model, x.to(device))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(gw.CaptureError, match="changes with every call"):
                gw.capture(model, x.to(device))
    finally:
        done.set()
        other.join()
    assert model.number() != random.Random(3).random()


def test_the_monitor_of_progress_bars_draws_nothing(device: torch.device) -> None:
    model = Drawing(KINDS["random"], "an attribute").to(device).eval()
    monitor = TMonitor(tqdm, 10.0)
    try:
        with pytest.raises(gw.CaptureError, match="changes with every call"):
            gw.capture(model, torch.ones(2, device=device))
    finally:
        monitor.exit()
    assert model.number() == random.Random(3).random()


def test_the_system_s_random_numbers_have_no_state(device: torch.device) -> None:
    model = Drawing(Kind(random.SystemRandom, lambda g: g.random()), "an attribute").to(device)
    x = torch.ones(3, 2, device=device)
    with pytest.raises(gw.CaptureError, match="computes something else"):
        gw.capture(model.eval(), x)
    assert host_generators.is_host_generator(model.generator)


@pytest.mark.parametrize("maker", ["capture", pytest.param("check", marks=pytest.mark.slow)])
def test_numpys_generator_is_watched_before_its_first_use(maker: str) -> None:
    """NumPy imports `numpy.random` when it is first asked for, which may be in the call."""
    text = f"""
import sys, numpy as np, torch
import graphwright as gw
assert "numpy.random" not in sys.modules, "it is no first use"
def call(x):
    return x if np.random.rand() < 2 else -x
if "{maker}" == "check":
    print(*(finding.kind for finding in gw.check(call, (torch.ones(3),))))
else:
    try:
        gw.capture(call, torch.ones(3))
    except gw.CaptureError as error:
        print(error.what)
"""
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert {"check": "host randomness", "capture": "numpy.random"}[maker] in done.stdout
