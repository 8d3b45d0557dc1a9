"""Where state can be: places that a watch has missed, and those that it must leave alone."""

from __future__ import annotations

import copy
import enum
import functools
import threading
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.calls.dependencies import Dependencies
from graphwright.calls.modules import FunctionModule
from graphwright.calls.watch import ModuleWatch


class Mode(enum.Enum):
    ONE = 1.0
    TWO = 2.0


class Factor:
    default = 1.0

    def __init__(self, value: float = 1.0) -> None:
        self.value = value

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.value * self.default

    @property
    def twice(self) -> float:
        return 2 * self.value


class Base(nn.Module):
    offset = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.offset


class Net(Base):
    """Reads its state in as many ways as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.mode = Mode.ONE
        self.call = functools.partial(torch.mul, other=1.0)
        self.presets = {"one": Factor(1.0), "two": Factor(2.0)}
        self.active = self.presets["one"]
        self.order = OrderedDict(a=1.0, b=2.0)
        self.long = [1.0] * 2000
        self.factor = Factor()
        self.losses: list[float] = []
        self.trainer = types.SimpleNamespace(global_step=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(self.layer(x)) * self.mode.value * self.active.value * self.long[0]
        return self.call(self.factor.apply(x)) * next(iter(self.order.values()))


def mode(net: Net, patch: pytest.MonkeyPatch) -> None:
    net.mode = Mode.TWO


def partial(net: Net, patch: pytest.MonkeyPatch) -> None:
    net.call = functools.partial(torch.mul, other=2.0)


def function_of_a_partial(net: Net, patch: pytest.MonkeyPatch) -> None:
    net.call = functools.partial(torch.add, other=1.0)


def another_of_two_presets(net: Net, patch: pytest.MonkeyPatch) -> None:
    net.active = net.presets["two"]


def long_list(net: Net, patch: pytest.MonkeyPatch) -> None:
    net.long = [2.0] * 2000


def order_of_a_dictionary(net: Net, patch: pytest.MonkeyPatch) -> None:
    net.order.move_to_end("a")


def attribute_of_a_base_class(net: Net, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Base, "offset", 1.0)


def forward_of_a_base_class(net: Net, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Base, "forward", lambda self, x: x + 3)


def method_of_an_object(net: Net, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Factor, "apply", lambda self, x: x * 5)


def attribute_of_an_object_s_class(net: Net, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Factor, "default", 2.0)


@pytest.mark.parametrize(
    "change",
    [
        mode,
        partial,
        function_of_a_partial,
        another_of_two_presets,
        long_list,
        order_of_a_dictionary,
        attribute_of_a_base_class,
        forward_of_a_base_class,
        method_of_an_object,
        attribute_of_an_object_s_class,
    ],
)
def test_a_change_is_noticed(
    change: Callable[[Net, pytest.MonkeyPatch], None],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, x = Net().to(device).eval(), torch.randn(2, 4, device=device)
    with torch.no_grad():
        graphed, fused, before = gw.graph(net), gw.fuse(net, (x,)), net(x)
        torch.testing.assert_close(graphed(x), before)
        torch.testing.assert_close(fused(x), before)
        change(net, monkeypatch)
        assert not torch.allclose(net(x), before)
        for _ in range(2):
            torch.testing.assert_close(graphed(x), net(x))
            torch.testing.assert_close(fused(x), net(x))


settings = types.ModuleType("settings")
settings.SCALE = 1.0  # type: ignore[attr-defined]  # as a file of settings has it
held = Factor()


class Settings:
    scale = 1.0


@torch.no_grad()
def decorated(x: torch.Tensor) -> torch.Tensor:
    return x * held.value


FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], None]]] = {
    "a file": (
        lambda x: x * settings.SCALE,
        lambda: setattr(settings, "SCALE", 2.0),
    ),
    "a class": (lambda x: x * Settings.scale, lambda: setattr(Settings, "scale", 2.0)),
    "a method of an object": (lambda x: held.apply(x), lambda: setattr(held, "value", 2.0)),
    "a property": (lambda x: x * held.twice, lambda: setattr(held, "value", 2.0)),
    "a decorated helper": (lambda x: decorated(x), lambda: setattr(held, "value", 2.0)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_function_names_is_followed(name: str, device: torch.device) -> None:
    function, change = FUNCTIONS[name]
    held.value = Settings.scale = settings.SCALE = 1.0  # type: ignore[attr-defined]
    graphed, x = gw.graph(function), torch.ones(3, device=device)
    before = function(x)
    assert torch.equal(graphed(x), before)
    change()
    assert torch.equal(graphed(x), function(x))
    assert torch.equal(graphed(x), 2 * before)


# What is of no consequence.


def test_what_no_code_of_the_call_names_may_change(device: torch.device) -> None:
    net, x = Net().to(device).eval(), torch.randn(2, 4, device=device)
    with torch.no_grad():
        graphed, fused = gw.graph(net), gw.fuse(net, (x,))
        for step in range(4):
            torch.testing.assert_close(graphed(x), net(x))
            torch.testing.assert_close(fused(x), net(x))
            net.losses.append(float(step))
            net.trainer.global_step += 1
    assert graphed.statistics.captures == 1
    assert dict(fused.calls) == {"fused": 4}


def test_a_counter_that_the_step_does_not_read_may_change(device: torch.device) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = nn.Linear(4, 1).to(device)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.global_step = 0
            self.history: list[float] = []

        def step(self, x: torch.Tensor) -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            return loss

    trainer, x = Trainer(), torch.randn(4, 4, device=device)
    step = gw.graph_step(trainer.step, (x,), optimizer=trainer.optimizer)
    for _ in range(6):
        trainer.history.append(float(step(x)))
        trainer.global_step += 1
    assert step.statistics.captures == 1
    assert trainer.history == sorted(trainer.history, reverse=True)


# Refused captures put back what they changed, and destroy nothing.


class Strict(dict[str, int]):
    """A dictionary that may not be written to any more."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("read only")


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.recent = OrderedDict(a=1, b=2)
        self.strict = Strict(x=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.recent[f"k{self.count}"] = self.count
        self.recent.move_to_end("a")
        self.strict[f"k{self.count}"] = 1
        return x + 1


def test_a_refused_capture_leaves_containers_whole(device: torch.device) -> None:
    net, x = Counting().eval(), torch.ones(2, device=device)
    with pytest.raises(gw.CaptureError, match="changes with every call"):
        gw.capture(net, x)
    assert list(net.recent.items()) == [("a", 1), ("b", 2)]
    assert dict(net.strict) == {"x": 1}
    assert net.count == 0


class Elusive:
    """Answers whatever it is asked for."""

    def __init__(self) -> None:
        self.scale = 1.0

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


def test_odd_objects_are_looked_into_without_asking_them(device: torch.device) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd = Elusive()
            self.ignores = ["a"]

        def function_of(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.odd.scale

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.function_of(x)

    net, x = Odd().eval(), torch.ones(2, device=device)
    graphed = gw.graph(net)
    assert torch.equal(graphed(x), x)
    net.odd.scale = 2.0
    assert torch.equal(graphed(x), x * 2)


def test_modules_that_hold_each_other_in_lists_are_followed() -> None:
    class Chain(nn.Module):
        def __init__(self, following: list[nn.Module]) -> None:
            super().__init__()
            self.following = following

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.following[0](x) if self.following else x

    chain = Chain([])
    for _ in range(600):
        chain = Chain([chain])
    assert len(Dependencies(chain).typed) == 601


# Threads.


def test_a_write_during_a_look_is_noticed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net().eval()
    watch = ModuleWatch(net, values=False)
    net.factor.value = float("1.0")  # Equal, so that the look goes on.
    compare = ModuleWatch._difference

    def meanwhile(self: ModuleWatch, *given: Any) -> Any:
        found = compare(self, *given)
        net.active.value = 7.0
        monkeypatch.setattr(ModuleWatch, "_difference", compare)
        return found

    monkeypatch.setattr(ModuleWatch, "_difference", meanwhile)
    watch.changed()
    assert watch.changed() is not None


@pytest.mark.filterwarnings("ignore:.*runs eagerly.*:RuntimeWarning")
def test_a_captured_call_may_wait_for_a_thread_that_calls_a_part_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("graphwright.graphs.capture_turns._CALL_PATIENCE_S", 0.1)
    with ThreadPoolExecutor(2) as executor:

        class Ensemble(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
                self.fast = [gw.graph(part, on_miss="eager") for part in self.parts]

            def forward(self, x: torch.Tensor) -> Any:
                with torch.no_grad():
                    waiting = [executor.submit(part, x) for part in self.fast]
                    return sum(each.result(20) for each in waiting)

        net, x = Ensemble().eval(), torch.ones(2, 4)
        with torch.no_grad():
            torch.testing.assert_close(gw.graph(net)(x), net(x))


def test_a_capture_does_not_wait_for_another_model() -> None:
    inside, leave, over = threading.Event(), threading.Event(), threading.Event()

    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            leave.wait(120)
            over.set()
            return x

    thread = threading.Thread(target=gw.graph(Slow(), on_miss="eager"), args=(torch.ones(1),))
    thread.start()
    try:
        assert inside.wait(60)
        graphed = gw.graph(nn.Linear(4, 4).eval())
        graphed(torch.ones(2, 4))
        assert graphed.statistics.captures == 1
        assert not over.is_set()
    finally:
        leave.set()
        thread.join()


def test_a_watch_of_many_items_looks_at_their_number_alone() -> None:
    many = set(range(5000))
    watch = ModuleWatch(FunctionModule(lambda x: x * len(many)), values=False)
    assert watch.changed() is None
    assert watch.unread
    many.add(-1)
    assert watch.changed() is not None


class Processor:
    """Called by a module, whose attributes it reads."""

    def __call__(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(module, x)

    def scaled(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        return x * module.options["scale"]


class Processed(nn.Module):
    def __init__(self, processor: Any) -> None:
        super().__init__()
        self.processor, self.options = processor, {"scale": 2.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.processor(self, x)


PROCESSORS = {
    "an object": Processor,
    "a partial of one": lambda: functools.partial(Processor()),
    "one under no_grad": lambda: torch.no_grad()(Processor()),
}


@pytest.mark.parametrize("kind", PROCESSORS)
def test_what_the_code_of_a_callable_object_names_is_watched(
    kind: str, device: torch.device
) -> None:
    model, x = Processed(PROCESSORS[kind]()).eval(), torch.ones(2, device=device)
    graphed = gw.graph(model)
    with torch.no_grad():
        assert torch.equal(graphed(x), 2 * x)
        model.options["scale"] = 5.0
        assert torch.equal(graphed(x), 5 * x)


# What the first call sets up.


class MergesOnce(nn.Module):
    """Gives a tensor that is held somewhere other memory, once; then counts, and is refused."""

    def __init__(self, hold: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.kept, self.merged, self.calls = hold(self, torch.ones(2)), False, 0

    def weight(self) -> torch.Tensor:
        found = self.kept[0] if isinstance(self.kept, list) else self.kept
        return found.weight if isinstance(found, nn.Module) else found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.merged:
            self.weight().data = self.weight().data * 2
            self.merged = True
        self.calls = max(self.calls + 1, 0)
        return x * self.weight().to(x.device)


class Weighted(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


HOLDERS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "a parameter": lambda module, tensor: nn.Parameter(tensor),
    "an attribute": lambda module, tensor: tensor,
    "a list": lambda module, tensor: [tensor],
    "a module in a list": lambda module, tensor: [Weighted(tensor)],
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_refused_capture_puts_other_memory_back(kind: str) -> None:
    model, x = MergesOnce(HOLDERS[kind]).eval(), torch.ones(2)
    with torch.no_grad():
        with pytest.raises(gw.CaptureError, match="calls"):
            gw.capture(model, x)
        assert not model.merged
        assert torch.equal(model.weight(), x)
        graphed = gw.graph(model)
        with pytest.warns(RuntimeWarning, match="calls"):
            assert torch.equal(graphed(x), 2 * x)
        assert torch.equal(graphed(x), 2 * x)


class SetsUp(nn.Module):
    """Fills a buffer from the first input, in place or by other memory."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(4))
        self.in_place, self.ready = in_place, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            if self.in_place:
                self.shift.copy_(-x.mean(0))
            else:
                self.shift.data = -x.mean(0)
            self.ready = True
        return x + self.shift


@pytest.mark.parametrize("buckets", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_what_the_first_call_sets_up_is_as_in_eager(
    in_place: bool, buckets: bool, device: torch.device
) -> None:
    model = SetsUp(in_place).eval().to(device)
    twin = copy.deepcopy(model)
    options: dict[str, Any] = {}
    if buckets:
        options = {
            "dynamic_shapes": {"x": {0: "batch"}},
            "buckets": gw.Buckets(batch=[4, 8]),
        }
    graphed = gw.graph(model, **options)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*runs eagerly")
        for index in range(30):
            x = torch.randn(3 + 2 * (index % 3), 4, device=device) + 5
            torch.testing.assert_close(graphed(x), twin(x))
            torch.testing.assert_close(model.shift, twin.shift)
    assert graphed.statistics.captures
