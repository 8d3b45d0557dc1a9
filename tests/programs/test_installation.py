"""Something else answers a module's calls: what stays as it was, and what is put back."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.calls.fingerprint import key_of
from graphwright.programs.installation import (
    install,
    original_class,
    twin_of,
    uninstall,
)


class Model(nn.Module):
    """Something with two methods."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.layer(x) * scale

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return self(z) - 1


class Slow(Model):
    """Takes its time in eager, as no trace does."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        time.sleep(5e-3)
        return super().forward(x, scale)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


X = torch.rand(2, 3)


def test_the_module_stays_what_it_was(model: Model) -> None:
    expected, before, state = model(X), {**vars(model)}, model.state_dict()
    calls: list[Any] = []
    model.register_forward_hook(lambda module, args, result: calls.append(module))
    twin = twin_of(model)

    def answer(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        calls.append("answer")
        result: torch.Tensor = twin.forward(x, scale)
        return result

    install(model, {"forward": answer})
    assert torch.equal(model(X), expected)
    assert calls == ["answer", model], "its hooks run"
    assert isinstance(model, Model)
    assert (type(model).__name__, type(model).__doc__) == ("Model", Model.__doc__)
    assert inspect.signature(model.forward) == inspect.signature(Model().forward)
    assert vars(model).keys() == before.keys()
    assert model.state_dict().keys() == state.keys()
    assert next(iter(model.parameters())) is before["_modules"]["layer"].weight
    uninstall(model, {"forward": answer})
    assert type(model) is Model


def test_other_methods_come_to_what_is_installed(model: Model) -> None:
    install(model, {"forward": lambda x: x * 0})
    assert torch.equal(model.decode(X), -torch.ones(2, 3))
    install(model, {"decode": lambda z: z})
    assert torch.equal(model.decode(X), X)
    assert torch.equal(model(X), X * 0)


@pytest.mark.parametrize("first", [0, 1])
def test_the_last_one_answers_and_each_is_taken_out_by_itself(first: int, model: Model) -> None:
    answers: list[dict[str, Any]] = [{"forward": lambda x: x * 0}, {"forward": lambda x: x + 1}]
    for each in answers:
        install(model, each)
    assert torch.equal(model(X), X + 1)
    uninstall(model, answers[first])
    uninstall(model, answers[first])  # It is no error.
    assert torch.equal(model(X), X + 1 if first == 0 else X * 0)
    uninstall(model, answers[1 - first])
    assert type(model) is Model


def test_a_twin_sees_every_change_and_does_not_come_back(model: Model) -> None:
    twin = twin_of(model)
    install(model, {"forward": lambda x: pytest.fail("the twin came back")})
    assert isinstance(twin, Model)
    assert original_class(twin) is original_class(model) is Model
    with torch.no_grad():
        model.layer.weight.zero_()
    model.layer.bias = nn.Parameter(torch.ones(3))
    assert torch.equal(twin(X), torch.ones(2, 3))
    model.train()
    assert twin.training
    model.double()
    assert twin(X.double()).dtype == torch.float64


@pytest.mark.parametrize("way", ["copy", "deepcopy", "pickle", "torch.save"])
def test_copies_are_of_the_old_class(way: str, model: Model) -> None:
    expected = model(X)
    install(model, {"forward": lambda x: x * 0})
    if way == "torch.save":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        made = torch.load(file, weights_only=False)
    else:
        made = {
            "copy": copy.copy,
            "deepcopy": copy.deepcopy,
            "pickle": lambda each: pickle.loads(pickle.dumps(each)),
        }[way](model)
    assert type(made) is Model
    assert torch.equal(made(X), expected)
    assert torch.equal(model(X), X * 0)


def test_two_modules_of_a_class_are_apart(model: Model) -> None:
    other = Model()
    install(model, {"forward": lambda x: x})
    assert type(other) is Model
    install(other, {"forward": lambda x: x + 1})
    assert torch.equal(model(X), X)
    assert torch.equal(other(X), X + 1)


def test_calls_on_other_threads_are_answered_while_something_is_installed(model: Model) -> None:
    expected, wrong, stop = model(X), [], threading.Event()
    twin = twin_of(model)
    through: dict[str, Any] = {"forward": lambda x: twin(x)}

    def calling() -> None:
        while not stop.is_set():
            if not torch.equal(model(X), expected):
                wrong.append(1)

    threads = [threading.Thread(target=calling) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(300):
        (uninstall if number % 2 else install)(model, through)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_graphwright_makes_of_a_twin_answers(device: torch.device) -> None:
    model = Model().eval().to(device)
    x = X.to(device)
    with torch.no_grad():
        expected = model(x)
        graphed = gw.graph(twin_of(model))
        install(model, {"forward": graphed})
        for _ in range(3):
            assert torch.allclose(model(x), expected)
        if device.type == "cuda":
            assert graphed.statistics.hits
        model.layer.weight.mul_(2)
        assert torch.allclose(model(x), Model.forward(model, x))
        model.layer.weight = nn.Parameter(torch.zeros(3, 3, device=device))
        assert torch.allclose(model(x), model.layer.bias.expand(2, 3))


def test_slots_cannot_be_shared() -> None:
    class Slotted(nn.Module):
        __slots__ = ("mine",)

    with pytest.raises(gw.OptionError, match="__slots__"):
        twin_of(Slotted())


MAKERS: dict[str, Any] = {
    "graph": lambda module, x: gw.graph(module),
    "fuse": lambda module, x: gw.fuse(module, (x,)),
    "tune": lambda module, x: gw.tune(
        *(module, (x,)), strategies=["torchscript:freeze"], isolate=False, remember=False
    ),
}


def gone_on(made: Any) -> bool:
    """Whether what was made has answered all calls as it was made at first."""
    if hasattr(made, "statistics"):
        return bool(made.statistics.captures == 1 and not made.statistics.eager)
    return not any(way.startswith("eager") for way in made.calls)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.filterwarnings("ignore::graphwright.FallbackWarning", "ignore::DeprecationWarning")
def test_what_was_made_of_a_module_around_it_goes_on(maker: str, device: torch.device) -> None:
    """Whatever is installed inside, or taken out: that is no change of the outer module."""
    outer = nn.Sequential(Slow(), nn.ReLU()).eval().to(device)
    x = X.to(device)
    answers = [{"forward": twin_of(outer[0])}, {"decode": twin_of(outer[0])}]
    with torch.no_grad():
        expected = outer(x)
        install(outer[0], answers[0])
        made = MAKERS[maker](outer, x)
        for step in (uninstall, install):
            for answer in answers:
                for _ in range(5):  # Checks in C++ are made on the way.
                    assert torch.allclose(made(x), expected)
                step(outer[0], answer)
        assert torch.allclose(made(x), expected)
        assert gone_on(made)
        outer[0].__class__ = type("Other", (Slow,), {"forward": lambda self, x: x * 0})
        assert not made(x).any()
        assert not gone_on(made)


@pytest.mark.parametrize("method", ["forward", "decode"])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.filterwarnings("ignore::graphwright.FallbackWarning", "ignore::DeprecationWarning")
def test_a_patch_of_an_installed_class_is_a_change(
    maker: str, method: str, device: torch.device
) -> None:
    outer = nn.Sequential(Slow(), nn.ReLU()).eval().to(device)
    x = X.to(device)
    answer = {method: getattr(twin_of(outer[0]), method)}
    with torch.no_grad():
        install(outer[0], answer)
        made = MAKERS[maker](outer, x)
        for _ in range(5):
            made(x)
        type(outer[0]).forward = lambda self, x: x * 0 + 7
        assert bool((made(x) == 7).all())
        uninstall(outer[0], answer)
        assert type(outer[0]) is Slow
        torch.testing.assert_close(made(x), outer(x))


def test_a_choice_is_the_same_whatever_is_installed(model: Model) -> None:
    def key() -> str:
        return key_of(nn.Sequential(model), [((X,), {})], "cpu", {}, {}).digest

    before = key()
    install(model, {"forward": twin_of(model)})
    assert key() == before
