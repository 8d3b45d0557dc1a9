"""Ways to change a model that go around its attributes: the next call has to be eager's."""

from __future__ import annotations

import threading
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.calls import watch
from graphwright.calls.watch import ModuleWatch

ACT: Any = torch.relu
LAYER: Any = nn.ReLU
SETTINGS = types.ModuleType("settings_of_a_test")
SETTINGS.SCALE = 2.0  # type: ignore[attr-defined]  # it has no other attributes


class Held(nn.Parameter):
    """A parameter as vLLM has them: a subclass without methods of its own."""


class Slots:
    __slots__ = ("bias", "scale")


class Guarded:
    """An object that does not show its attributes."""

    def __init__(self) -> None:
        self.scale = 2.0

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            raise RuntimeError("not shown")
        return object.__getattribute__(self, name)


class Model(nn.Module):
    """Computes with whatever it is given."""

    act = staticmethod(torch.relu)
    layer: Any = nn.ReLU

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.w = more.pop("w", None)
        self.held = more.pop("held", None)
        self.slots = Slots()
        self.calls = {"n": 0}
        self.by = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls["n"] += 1
        x = ACT(self.act(self.l(x))) + LAYER()(x) + self.layer()(x)
        if self.w is not None:
            x = x * getattr(self.w, "scale", 1.0) + self.w.real.sum() + self.w.imag.sum()
        if isinstance(self.held, Guarded):
            x = x * self.held.scale
        elif isinstance(self.held, types.ModuleType):
            x = x * self.held.SCALE
        elif isinstance(self.held, frozenset):
            x = (5 * x).to(torch.tensor(list(self.held)).dtype)
        elif isinstance(self.held, np.generic):
            x = x / torch.tensor(float(self.held)) if float(self.held) == 0 else x * self.held
        elif isinstance(self.held, list):
            x = x * getattr(self.held, "scale", 1.0)
        elif self.held is not None:
            for value in self.held.values():
                x = x * (sum(value.values()) if isinstance(value, dict) else value)
        x = x * getattr(self.slots, "scale", 1.0) + getattr(self.slots, "bias", 0.0)
        return x * self.calls.get("scale", 1.0) * self.by


class Listed(list[Any]):
    pass


def other() -> nn.Linear:
    return nn.Linear(4, 4).eval()


def dictionary_anew(m: Any) -> None:
    attributes = vars(m.l)
    del m.l.__dict__
    m.l.__dict__ = attributes | vars(other())


def complex_weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))


def scaled(by: float) -> nn.Parameter:
    made: Any = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    made.scale = by
    return made  # type: ignore[no-any-return]  # it has an attribute more


def rebind(name: str, value: Any) -> Callable[[Any], None]:
    return lambda m: globals().update({name: value})


LATER = {"a": 2.0}

CASES: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[Any], object]]] = {
    "all attributes are another module's": (
        dict,
        lambda m: setattr(m.l, "__dict__", vars(other())),
    ),
    "attributes are updated": (dict, lambda m: vars(m.l).update(vars(other()))),
    "the state is set": (dict, lambda m: m.l.__setstate__(vars(other()))),
    "attributes are deleted and made": (dict, dictionary_anew),
    "other parameters": (dict, lambda m: setattr(m.l, "_parameters", other()._parameters)),
    "other submodules": (dict, lambda m: setattr(m, "_modules", {"l": other()})),
    "other hooks": (
        dict,
        lambda m: setattr(m.l, "_forward_hooks", OrderedDict({0: lambda m, x, y: y * 2})),
    ),
    "memory of a subclass": (
        lambda: {"w": Held(torch.randn(4, 4, dtype=torch.complex64))},
        lambda m: setattr(m.w, "data", torch.randn(4, 4, dtype=torch.complex64)),
    ),
    "an attribute of a tensor": (lambda: {"w": scaled(2.0)}, lambda m: setattr(m.w, "scale", 5.0)),
    "a conjugated weight": (
        lambda: {"w": complex_weight()},
        lambda m: setattr(m.w, "data", m.w.data.conj()),
    ),
    "a negated weight": (
        lambda: {"w": complex_weight()},
        lambda m: setattr(m.w, "data", torch._neg_view(m.w.data)),
    ),
    "the first item of an ordered dictionary": (
        lambda: {"held": OrderedDict()},
        lambda m: m.held.update(a=3.0),
    ),
    "an item beside one that calls count in": (dict, lambda m: m.calls.update(scale=3.0)),
    "a slot that was not set": (dict, lambda m: setattr(m.slots, "bias", 3.0)),
    "the last dictionary is emptied": (
        lambda: {"held": {"a": OrderedDict(b=2.0)}},
        lambda m: m.held["a"].clear(),
    ),
    "what a proxy shows": (
        lambda: {"held": types.MappingProxyType(LATER)},
        lambda m: LATER.update(a=LATER["a"] + 1),
    ),
    "a file's variable": (
        lambda: {"held": SETTINGS},
        lambda m: setattr(SETTINGS, "SCALE", SETTINGS.SCALE + 1),
    ),
    "the first attribute of a list": (
        lambda: {"held": Listed([1])},
        lambda m: setattr(m.held, "scale", 3.0),
    ),
    "equal numbers of another kind": (
        lambda: {"held": frozenset({3})},
        lambda m: setattr(m, "held", frozenset({3.5 - 0.5})),
    ),
    "minus zero": (
        lambda: {"held": np.float32(0.0)},
        lambda m: setattr(m, "held", np.float32(-0.0)),
    ),
    "an object that hides its attributes": (
        lambda: {"held": Guarded()},
        lambda m: setattr(m.held, "scale", 3.0),
    ),
    "a global function": (dict, rebind("ACT", torch.neg)),
    "a global class": (dict, rebind("LAYER", nn.Tanh)),
    "a function of the class": (dict, lambda m: setattr(Model, "act", staticmethod(torch.neg))),
    "a class of the class": (dict, lambda m: setattr(Model, "layer", nn.Tanh)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_change_that_goes_around_attributes_is_seen(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "ACT", torch.relu)
    monkeypatch.setitem(globals(), "LAYER", nn.ReLU)
    monkeypatch.setattr(Model, "act", staticmethod(torch.relu))
    monkeypatch.setattr(Model, "layer", nn.ReLU)
    make, change = CASES[case]
    model = Model(**make()).eval()
    fast = gw.graph(model)
    x = torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(5):
            torch.testing.assert_close(fast(x), model(x), rtol=0, atol=0, equal_nan=True)
        before, hits = model(x), fast.statistics.hits
        assert hits
        fast(x)
        assert fast.statistics.hits == hits + 1  # What did not change is no change.
        change(model)
        expected = model(x)
        assert expected.dtype != before.dtype or not torch.equal(expected, before)
        for _ in range(4):
            found = fast(x)
            assert found.dtype is expected.dtype
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("count", [1, 2])
def test_an_argument_whose_memory_was_freed_is_eager_s_to_refuse(count: int) -> None:
    class Both(nn.Linear):
        def forward(self, *given: torch.Tensor) -> torch.Tensor:
            return sum((super(Both, self).forward(each) for each in given), torch.zeros(()))

    model = Both(4, 4).eval()
    fast = gw.graph(model)
    with torch.no_grad():
        for _ in range(5):
            fast(*(torch.randn(3, 4) for _ in range(count)))
        freed = torch.randn(3, 4)
        freed.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError) as expected:
            model(freed)
        given = (*(torch.randn(3, 4) for _ in range(count - 1)), freed)
        with pytest.raises(type(expected.value)):
            fast(*given)
        with pytest.raises(type(expected.value)):
            gw.graph(model)(*given)
    with pytest.raises(gw.GraphwrightError, match="memory was freed"):
        gw.capture(model, *given)


def test_what_is_written_while_a_watch_is_made_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model().eval()
    settle = ModuleWatch._settle

    def beside(self: ModuleWatch, *given: Any) -> None:
        thread = threading.Thread(target=lambda: setattr(model, "by", model.by + 1))
        thread.start()
        thread.join()
        settle(self, *given)

    monkeypatch.setattr(ModuleWatch, "_settle", beside)
    made = ModuleWatch(model, values=False)
    assert made.changed() is not None


def test_what_is_written_while_the_check_in_c_is_made_is_seen(
    checks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if checks == "python":
        pytest.skip("there is none")
    model = Model().eval()
    made = ModuleWatch(model, values=False)
    compiled = list(watch.COMPILED)

    def beside(*given: Any) -> Any:
        model.by += 1
        return compiled[0](*given)

    monkeypatch.setattr(watch, "COMPILED", [beside])
    assert made.unchanged()  # It was so when it was looked at.
    assert made.changed() is not None
    assert made.changed() is not None


def test_an_object_that_no_check_in_c_takes_is_not_tried_again_and_again(
    checks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if checks == "python":
        pytest.skip("there is none")
    tried = [0]

    def refuses(*given: Any) -> Any:
        tried[0] += 1
        raise TypeError("For a test.")

    monkeypatch.setattr(watch, "COMPILED", [refuses])
    made = ModuleWatch(Model().eval(), values=False)
    made._patience = 2
    for _ in range(1000):
        assert made.unchanged()
    assert 1 <= tried[0] <= 10
