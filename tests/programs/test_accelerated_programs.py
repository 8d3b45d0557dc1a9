"""Programs whose modules are tuned in place: what happens to them afterwards, and meanwhile."""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.calls.switches import read
from graphwright.errors import VerificationError
from graphwright.programs import acceleration
from graphwright.programs.accelerated import Accelerated

_SLOW_S = 5e-3
OPTIONS: dict[str, Any] = {
    "strategies": ["torchscript:freeze"],
    "remember": False,
    "isolate": False,
    "progress": False,
    "budget_s": 12.0,  # Enough on a busy machine too, where eager would be taken otherwise.
}
pytestmark = pytest.mark.filterwarnings(
    "ignore::graphwright.FallbackWarning", "ignore::DeprecationWarning"
)


class Net(nn.Module):
    """Eager takes its time, a trace does not."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(_SLOW_S)
        made: torch.Tensor = self.layers(x) * self.scale
        return made

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        time.sleep(_SLOW_S)
        made: torch.Tensor = self.layers(z).tanh()
        return made


class Single:
    """Calls one module."""

    def __init__(self, net: nn.Module) -> None:
        self.net: Any = net.eval()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.net(x)
        return made


class Pair:
    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.encoder, self.decoder = Net().eval().to(device), Net().eval().to(device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder.decode(self.encoder(x))


@pytest.fixture
def pair(device: torch.device) -> Iterator[Pair]:
    with torch.no_grad():
        yield Pair(device)


def accelerated(program: Any, calls: list[Any], **given: Any) -> Accelerated:
    return gw.accelerate(program, calls, **{**OPTIONS, **given})


def answered(found: Accelerated) -> dict[str, int]:
    """How many calls what was tuned has answered, by part."""
    return {str(part.target): part.calls["tuned"] for part in found.parts if part.kept}


def test_modules_stay_the_same_objects(pair: Pair, device: torch.device) -> None:
    x = torch.rand(2, 8, device=device)
    expected, before = pair(x), dict(vars(pair.encoder))
    found = accelerated(pair, [(x,)], buckets=None)
    assert {part.kept for part in found.parts} == {True}
    torch.testing.assert_close(pair(x), expected)
    assert vars(pair.encoder) == before
    assert isinstance(pair.encoder, Net)
    assert list(pair.encoder.state_dict()) == list(Net().state_dict())
    assert "kept" not in repr(found)
    assert "2 of 2 parts answered" in repr(found)
    found.undo()
    assert torch.equal(pair(x), expected)
    assert type(pair.encoder) is type(pair.decoder) is Net


def change_weights(net: Net) -> None:
    with torch.no_grad():
        net.layers[0].weight.mul_(3)


def assign_weights(net: Net) -> None:
    net.layers[2].weight = nn.Parameter(torch.rand_like(net.layers[2].weight))


def set_attribute(net: Net) -> None:
    net.scale = 2.5


def hook_outside(net: Net) -> None:
    net.register_forward_hook(lambda module, args, result: result + 1)


def hook_before(net: Net) -> None:
    net.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def hook_inside(net: Net) -> None:
    net.layers[1].register_forward_hook(lambda module, args, result: result * 2)


def replace_layer(net: Net) -> None:
    net.layers[1] = nn.ReLU()


def train(net: Net) -> None:
    net.train()


CHANGES = [
    change_weights,
    assign_weights,
    set_attribute,
    hook_outside,
    hook_before,
    hook_inside,
    replace_layer,
    train,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_afterwards_has_its_effect_once(
    change: Callable[[Net], None], pair: Pair, device: torch.device
) -> None:
    x = torch.rand(2, 8, device=device)
    other = Pair(device)
    found = accelerated(pair, [(x,)], buckets=None)
    torch.testing.assert_close(pair(x), other(x))
    for each in (pair, other):
        torch.manual_seed(1)
        change(each.encoder)
    expected = other(x)
    torch.testing.assert_close(pair(x), expected)
    torch.testing.assert_close(pair(x), expected)
    found.undo()
    torch.testing.assert_close(pair(x), expected)


def test_hooks_that_are_there_before_leave_a_module_as_it_is(
    pair: Pair, device: torch.device
) -> None:
    x = torch.rand(2, 8, device=device)
    hook_outside(pair.encoder)
    expected = pair(x)
    found = accelerated(pair, [(x,)], buckets=None)
    (encoder,) = (part for part in found.parts if str(part.target) == "encoder")
    assert not encoder.kept
    assert "forward hooks" in encoder.reason
    torch.testing.assert_close(pair(x), expected)


def test_gradients_flow_as_before(pair: Pair, device: torch.device) -> None:
    """To inputs and to parameters, also of a part in the middle; with them on, nothing is kept."""
    x, other = torch.rand(2, 8, device=device), Pair(device)
    accelerated(pair, [(x,)], buckets=None)
    gradients = []
    for program in (pair, other):
        x.grad = None
        with torch.enable_grad():
            program(x.requires_grad_()).sum().backward()
        weights = [p.grad for m in (program.encoder, program.decoder) for p in m.parameters()]
        gradients.append([x.grad, *weights])
    for mine, its in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, its)
    with torch.enable_grad():
        found = accelerated(other, [(x.detach(),)], buckets=None)
    assert not any(part.kept for part in found.parts)
    assert "gradients flow through it" in found.parts[0].reason


def test_a_module_that_calls_itself(device: torch.device) -> None:
    class Deeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            time.sleep(_SLOW_S)
            y: torch.Tensor = self.layer(x)
            return y if depth == 0 else self(y, depth - 1)

    program, x = Single(Deeper().to(device)), torch.rand(2, 4, device=device)
    with torch.no_grad():
        expected = program(x)
        found = accelerated(program, [x])
        torch.testing.assert_close(program(x), expected)
        torch.testing.assert_close(program.net(x, 1), program.net.layer(program.net.layer(x)))
        found.undo()
        assert torch.equal(program(x), expected)


def test_other_objects_of_its_class_are_their_own(device: torch.device) -> None:
    """Made by `type(module)()`, copied, replicated, or taken from a registry of classes."""
    registry: dict[str, Any] = {}

    class Base(nn.Module):
        def __init_subclass__(cls, *, known: bool, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            if known:
                registry[cls.__name__] = cls

    class Registered(Base, known=True):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def __deepcopy__(self, memo: Any) -> Any:
            made = type(self).__new__(type(self))
            nn.Module.__init__(made)
            made.layer = copy.deepcopy(self.layer, memo)
            return made

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(_SLOW_S)
            made: torch.Tensor = self.layer(x)
            return made

    program, x = Single(Registered().to(device)), torch.rand(2, 4, device=device)
    with torch.no_grad():
        found = accelerated(program, [x])
        assert all(part.kept for part in found.parts)
        assert registry["Registered"] is Registered
        others = [type(program.net)().eval().to(device), copy.deepcopy(program.net)]
        others.append(program.net._replicate_for_data_parallel())
        others[2].layer = nn.Linear(4, 4).to(device)
        others[1].layer.weight.mul_(3)
        for _ in range(2):
            for each in others:
                torch.testing.assert_close(each(x), each.layer(x))
            found.undo()


def wrap_forward(net: Net) -> Any:
    """As offloading by accelerate and diffusers does."""
    before = net.forward

    def wrapped(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = before(x) + 1
        return made

    net.forward = wrapped  # type: ignore[method-assign]  # as they do


def parametrize(net: Net) -> Any:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    nn.utils.parametrize.register_parametrization(net.layers[0], "weight", Twice())
    net.extra = nn.Parameter(torch.zeros(1))
    nn.utils.parametrize.register_parametrization(net, "extra", Twice())


def hook_everywhere(net: Net) -> Any:
    def hook(module: nn.Module, args: Any, result: Any) -> Any:
        return result * 2 if module is net else None

    return nn.modules.module.register_module_forward_hook(hook)


@pytest.mark.parametrize("change", [wrap_forward, parametrize, hook_everywhere])
def test_what_is_put_around_a_module_afterwards_runs_once(
    change: Callable[[Net], Any], pair: Pair, device: torch.device
) -> None:
    x, other = torch.rand(2, 8, device=device), torch.rand(5, 8, device=device)
    same = Pair(device)
    found = accelerated(pair, [(x,)], buckets=None)
    handles = [change(each.encoder) for each in (pair, same)]
    try:
        for _ in range(2):
            for given in (x, other):
                torch.testing.assert_close(pair(given), same(given))
            found.undo()
    finally:
        for handle in filter(None, handles):
            handle.remove()


def test_what_the_twin_computes_otherwise_is_no_rounding(device: torch.device) -> None:
    class Counts(Net):
        known: Any

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (3.0 if self.known[0]() is self else 1.0)

    class Program:
        def __init__(self) -> None:
            self.net = Counts().eval().to(device)
            self.net.known = [weakref.ref(self.net)]

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.net(x)
            return made

    program, x = Program(), torch.rand(2, 8, device=device)
    with torch.no_grad():
        expected = program(x)
        found = accelerated(program, [x])
        assert not any(part.kept for part in found.parts)
        torch.testing.assert_close(program(x), expected)


def test_what_fails_with_a_part_is_taken_out(pair: Pair, device: torch.device) -> None:
    """A program that looks at its module's class."""
    known = {Net: 1.0}

    def run(program: Pair, x: torch.Tensor) -> torch.Tensor:
        scale = known.get(type(program.encoder), 1.0 if torch.is_grad_enabled() else None)
        if scale is None:
            raise ValueError("an unknown class")
        return program(x) * scale

    observing = acceleration.Inspecting._observed
    x = torch.rand(2, 8, device=device)
    with pytest.MonkeyPatch.context() as patched:

        def observed(self: Any, wanted: Any) -> Any:
            with torch.enable_grad():
                self._run = lambda program, call: program(call)
                try:
                    return observing(self, wanted)
                finally:
                    self._run = run

        patched.setattr(acceleration.Inspecting, "_observed", observed)
        for p in (*pair.encoder.parameters(), *pair.decoder.parameters()):
            p.requires_grad_(False)
        found = accelerated(pair, [x], run=run)
    (encoder,) = (part for part in found.parts if str(part.target) == "encoder")
    assert "fails with it: ValueError: an unknown class" in encoder.reason
    assert type(pair.encoder) is Net


def test_an_interruption_while_it_learns_leaves_what_was_there(
    pair: Pair, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.rand(2, 8, device=device)
    found = accelerated(pair, [(x,)], buckets=None)
    before = [part.answer for part in found.parts]
    pair(torch.rand(4, 8, device=device))
    monkeypatch.setattr(
        acceleration.WholeProgram, "difference", Mock(side_effect=KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        found.learn()
    assert [part.answer for part in found.parts] == before
    found.undo()
    assert type(pair.encoder) is type(pair.decoder) is Net


def test_a_call_that_raises_raises_as_before(pair: Pair, device: torch.device) -> None:
    x = torch.rand(2, 8, device=device)
    expected = pair(x)
    accelerated(pair, [(x,)])
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        pair(torch.rand(2, 3, device=device))
    torch.testing.assert_close(pair(x), expected)


def test_modules_that_may_be_changed_are_named(pair: Pair, device: torch.device) -> None:
    x = torch.rand(2, 8, device=device)
    found = accelerated(pair, [(x,)], modules=["decoder.decode"])
    assert [str(part.target) for part in found.parts if part.kept] == ["decoder.decode"]
    assert type(pair.encoder) is Net
    with pytest.raises(gw.OptionError, match="'encode', and the program calls no such method") as e:
        accelerated(pair, [(x,)], modules=["encode"])
    assert "Did you mean 'encoder'?" in str(e.value)


def test_a_module_inside_of_another_is_named(device: torch.device) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Net(), Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.second(self.first(x))
            return made

    program, x = Single(Both().to(device)), torch.rand(2, 8, device=device)
    with torch.no_grad():
        expected = program(x)
        found = accelerated(program, [x], modules=["net.first"])
        assert [str(part.target) for part in found.parts if part.kept] == ["net.first"]
        torch.testing.assert_close(program(x), expected)


def test_what_cannot_be_tuned_gives_way_to_what_is_inside(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Net(), Net()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    program, x = Single(Outer().to(device)), torch.rand(2, 8, device=device)
    asked: list[Any] = []
    original = acceleration.tuned_for

    def tuned_for(module: nn.Module, calls: Any, buckets: bool, options: Any) -> Any:
        asked.append((str(calls.target), options["strategies"]))
        if isinstance(module, Outer):
            raise gw.StrategyFailed("nothing can be made of it")
        return original(module, calls, buckets, {**options, **OPTIONS})

    monkeypatch.setattr(acceleration, "tuned_for", tuned_for)
    with torch.no_grad():
        expected = program(x)
        found = gw.accelerate(program, [x], buckets=None)
        torch.testing.assert_close(program(x), expected)
    kept = {str(part.target): part.kept for part in found.parts}
    assert kept == {"net": False, "net.blocks.0": True, "net.blocks.1": True}
    # Equal blocks are searched for once.
    assert asked[:2] == [("net", None), ("net.blocks.0", None)]
    assert asked[2][1] == [found.parts[1].tuned.report.chosen]  # type: ignore[union-attr]  # kept


def test_calls_that_were_never_seen_are_counted_and_learned(
    pair: Pair, device: torch.device
) -> None:
    x, other = torch.rand(2, 8, device=device), torch.rand(5, 8, device=device)
    found = accelerated(pair, [(x,)], buckets=None)
    expected = Pair(device)(other)
    before = answered(found)
    torch.testing.assert_close(pair(other), expected)
    assert answered(found) == before
    assert [part.missed for part in found.parts] == [1, 1]
    assert "1 other kind of call: learn() tunes" in found.explain()
    assert found.learn() == 2
    assert [part.missed for part in found.parts] == [0, 0]
    torch.testing.assert_close(pair(other), expected)
    torch.testing.assert_close(pair(x), Pair(device)(x))
    assert all(count >= 2 for count in answered(found).values())
    assert found.learn() == 0
    found.undo()
    assert type(pair.encoder) is Net
    assert found.learn() == 0


@pytest.mark.slow
def test_threads_call_while_it_learns(pair: Pair, device: torch.device) -> None:
    inputs = [torch.rand(n, 8, device=device) for n in range(1, 5)]
    expected = [Pair(device)(x) for x in inputs]
    found = accelerated(pair, [(inputs[0],)], buckets=None)
    ended, wrong = threading.Event(), []

    def call(number: int) -> None:
        with torch.no_grad():
            while not ended.is_set():
                try:
                    torch.testing.assert_close(pair(inputs[number]), expected[number])
                except BaseException as error:
                    wrong.append(error)
                    return

    threads = [threading.Thread(target=call, args=(n,)) for n in range(len(inputs))]
    for thread in threads:
        thread.start()
    try:
        ends = time.monotonic() + 20
        while any(part.missed < 3 for part in found.parts):
            assert time.monotonic() < ends
            time.sleep(0.01)
        assert found.learn() in (0, 3, 6), "on a busy machine eager may seem as fast"
        time.sleep(0.1)
        found.undo()
        time.sleep(0.1)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert type(pair.encoder) is Net


@pytest.mark.parametrize("right", [True, False])
def test_rounding_that_a_program_amplifies_is_not_wrong(
    right: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is off by a rounding, and the program makes a million of it; or it is off by more."""

    class Program:
        def __init__(self) -> None:
            self.net = Net().eval().to(device)

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.net(x)
            return made + 1e5 * torch.sin(1e4 * made)

    program, x = Program(), torch.rand(4, 8, device=device)
    original = acceleration.TunedAnswer.__call__

    def off(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs) * (1 + (1e-7 if right else 1e-3))

    monkeypatch.setattr(acceleration.TunedAnswer, "__call__", off)
    with torch.no_grad():
        found = accelerated(program, [x])
    (part,) = found.parts
    assert part.kept is right
    assert right or "differs" in part.reason


def test_held_out_calls_are_compared(
    pair: Pair, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, other = torch.rand(2, 8, device=device), torch.rand(7, 8, device=device)
    original = acceleration.TunedAnswer.__call__

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs) + (len(args[0]) == 7)

    monkeypatch.setattr(acceleration.TunedAnswer, "__call__", wrong)
    assert all(part.kept for part in accelerated(pair, [(x,)]).parts)
    pair = Pair(device)
    found = accelerated(pair, [(x,)], held_out=[(other,)])
    assert not any(part.kept for part in found.parts)
    assert "held-out call 0" in found.parts[0].reason


def test_a_program_that_never_agrees_with_itself_is_refused(device: torch.device) -> None:
    net, count = Net().eval().to(device), iter(range(99))

    def program(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = net(x) + next(count)
        return made

    with (
        torch.no_grad(),
        pytest.raises(VerificationError, match="Two runs of the program with the same calls"),
    ):
        accelerated(program, [torch.rand(2, 8, device=device)])


def test_what_it_is_asked_is_checked(pair: Pair) -> None:
    with pytest.raises(gw.OptionError, match="buckets is 'all': write 'auto' or None"):
        gw.accelerate(pair, [(torch.rand(2, 8),)], buckets="all")  # type: ignore[arg-type]  # wrong
    with pytest.raises(gw.OptionError, match="budget"):
        gw.accelerate(pair, [(torch.rand(2, 8),)], budget=9)  # type: ignore[call-arg]  # wrong


@pytest.mark.parametrize("switch", ["autocast", "mkldnn"])
def test_a_program_s_own_switches_are_those_of_what_is_tuned(
    switch: str, device: torch.device, tmp_path: Path
) -> None:
    class Program(Single):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            if switch == "autocast":
                with torch.autocast(x.device.type, dtype=torch.bfloat16):
                    made: torch.Tensor = self.net(x)
                return made
            before = torch.backends.mkldnn.enabled
            torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # typed as a function
            try:
                return super().__call__(x)
            finally:
                torch.backends.mkldnn.enabled = before  # type: ignore[assignment]  # likewise

    torch.manual_seed(0)
    program, x = Program(Net().to(device)), torch.rand(2, 8, device=device)
    with torch.no_grad():
        expected, before = program(x), read()
        found = accelerated(program, [(x,)], buckets=None, strategies=["torchscript"])
        assert [part.kept for part in found.parts] == [True], found.explain()
        assert read() == before
        calls = found.parts[0].calls["tuned"]
        torch.testing.assert_close(program(x), expected, rtol=1e-2, atol=1e-2)
        assert found.parts[0].calls["tuned"] == calls + 1
        program(torch.rand(3, 8, device=device))
        assert found.learn() == 1
        gw.save(found, tmp_path / "program.gw")
        found.undo()
        again = gw.load(tmp_path / "program.gw", program, trust=True)
        torch.testing.assert_close(program(x), expected, rtol=1e-2, atol=1e-2)
        assert again.parts[0].calls["tuned"]
        again.undo()
