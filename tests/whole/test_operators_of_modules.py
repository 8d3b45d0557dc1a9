"""Operators of what stands for a module give what the module's give: `in`, `len`, `==`, `+`."""

from __future__ import annotations

import copy
import inspect
import operator
import pickle
from collections.abc import Callable, Container, Iterable, Reversible, Sized
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import graphwright as gw

LAYER = nn.Linear(4, 4)
PARAMETER = nn.Parameter(torch.ones(2))
# Keys of any of the containers below; the last ones of none.
KEYS = (0, 1, -1, "a", 9, "absent")


def each_key(use: Callable[[Any], Any]) -> list[Any]:
    return [answer(use, key) for key in KEYS]


def answer(ask: Callable[..., Any], *args: Any) -> Any:
    try:
        return ask(*args)
    except Exception as error:
        return type(error)


def entered(module: Any) -> Any:
    with module as inside:
        return inside


# How a special method is used.
USES: dict[str, Callable[[Any], Any]] = {
    "__len__": len,
    "__iter__": list,
    "__reversed__": lambda m: list(reversed(m)),
    "__contains__": lambda m: each_key(lambda key: key in m),
    "__getitem__": lambda m: [*each_key(lambda key: m[key]), answer(lambda: m[:1])],
    "__setitem__": lambda m: each_key(lambda key: operator.setitem(m, key, LAYER)),
    "__delitem__": lambda m: each_key(lambda key: operator.delitem(m, key)),
    "__add__": lambda m: m + m,
    "__iadd__": lambda m: operator.iadd(m, [LAYER]),
    "__mul__": lambda m: m * 2,
    "__rmul__": lambda m: 2 * m,
    "__imul__": lambda m: operator.imul(m, 2),
    "__or__": lambda m: m | nn.ParameterDict({"b": PARAMETER}),
    "__ror__": lambda m: {"b": PARAMETER} | m,
    "__ior__": lambda m: operator.ior(m, {"b": PARAMETER}),
    "__eq__": lambda m: (m == 2, m == "text", m != 2),
    "__hash__": lambda m: type(answer(hash, m)),
    "__bool__": bool,
    "__enter__": entered,
    "__int__": int,
    "__index__": lambda m: range(9)[m],
    "__lt__": lambda m: (m < 1, answer(lambda: m > 1)),
    "__matmul__": lambda m: m @ 2,
    "__format__": lambda m: f"{m:x}",
    "is iterable": lambda m: [
        (isinstance(m, kind), hasattr(m, "__iter__")) for kind in (Iterable, Reversible)
    ],
    "has a length": lambda m: [
        (isinstance(m, kind), hasattr(m, "__len__")) for kind in (Sized, Container)
    ],
}
# Of how a module is made, called, shown and copied, proxies have their own.
OF_PROXIES = frozenset(
    (
        *("__init__", "__new__", "__call__", "__dir__", "__getattr__", "__setattr__"),
        *("__delattr__", "__repr__", "__getstate__", "__setstate__"),
    )
)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Own(Plain):
    """Has operators of its own."""

    def __eq__(self, other: object) -> bool:
        return other == 2

    __hash__ = nn.Module.__hash__

    def __bool__(self) -> bool:
        return False

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __int__(self) -> int:
        return 3

    __index__ = __int__

    def __lt__(self, other: object) -> bool:
        return other == 1

    def __matmul__(self, other: Any) -> Any:
        return other, other

    def __format__(self, spec: str) -> str:
        return f"formatted {spec}"

    def __contains__(self, item: object) -> bool:
        return item == 9


class Items(Plain):
    """Is a sequence by its items alone."""

    def __getitem__(self, index: int) -> int:
        return (7, 9)[index]


class Derived(nn.Sequential):
    """Overrides one operator of its base."""

    def __len__(self) -> int:
        return 5


MODULES: dict[str, Callable[[], nn.Module]] = {
    "Sequential": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
    "Derived": lambda: Derived(nn.Linear(4, 4), nn.ReLU()),
    "ModuleList": lambda: nn.ModuleList([nn.Linear(4, 4), nn.ReLU()]),
    "ModuleDict": lambda: nn.ModuleDict({"a": nn.Linear(4, 4)}),
    "ParameterList": lambda: nn.ParameterList([nn.Parameter(torch.ones(2))]),
    "ParameterDict": lambda: nn.ParameterDict({"a": nn.Parameter(torch.ones(2))}),
    "ParametrizationList": lambda: parametrize.ParametrizationList(
        [nn.Identity()], nn.Parameter(torch.ones(2))
    ),
    "empty": nn.Sequential,
    "Plain": Plain,
    "Own": Own,
    "Items": Items,
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU())),
}
WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "graph": gw.graph,
    "fuse": gw.fuse,
    "graph of fuse": lambda module: gw.graph(gw.fuse(module)),
}


def described(value: Any, module: nn.Module, made: Any) -> Any:
    """A result in a form that is the same for two copies of a module."""
    if value is made:
        return "itself"
    if isinstance(value, list | tuple):
        return type(value), [described(each, module, made) for each in value]
    if isinstance(value, dict):
        return [(key, described(each, module, made)) for key, each in value.items()]
    if isinstance(value, torch.Tensor):
        return type(value), value.tolist()
    places = {id(part): path for path, part in module.named_modules()}
    if isinstance(value, nn.Module) and id(value) not in places:
        return type(value), repr(value)
    return places.get(id(value), value)


def used(
    name: str, make: Callable[[], nn.Module], wrap: Callable[[nn.Module], Any] = lambda m: m
) -> tuple[Any, list[str]]:
    """What a use of a special method gives or raises, and what the module has afterwards."""
    torch.manual_seed(0)
    module = make().eval()
    made = wrap(module)
    return described(answer(USES[name], made), module, made), [*module.state_dict()]


def test_every_operator_that_a_module_of_pytorch_has_is_used() -> None:
    classes = [v for v in vars(nn).values() if isinstance(v, type) and issubclass(v, nn.Module)]
    found = {n for c in classes for n, v in vars(c).items() if inspect.isfunction(v)}
    found = {name for name in found if name.startswith("__")} - OF_PROXIES
    assert len(found) > 10
    assert found <= USES.keys()


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_operators_give_what_those_of_the_module_give(wrapper: str, kind: str) -> None:
    for name in USES:
        expected = used(name, MODULES[kind])
        assert used(name, MODULES[kind], WRAPPERS[wrapper]) == expected, name


@pytest.mark.parametrize("kind", ["Sequential", "Own", "Items"])
def test_copies_and_tuned_and_loaded_modules_have_them_too(kind: str, tmp_path: Any) -> None:
    module = MODULES[kind]().eval()
    x = torch.ones(2, 4)
    tuned = gw.tune(module, (x,), strategies=["eager"], isolate=False, progress=False)
    gw.save(tuned, tmp_path / "saved")
    graphed = gw.graph(module)
    all_made = [tuned, gw.load(tmp_path / "saved", module), copy.deepcopy(graphed)]
    all_made += [pickle.loads(pickle.dumps(graphed)), copy.copy(graphed)]
    for made in all_made:
        for name in ("__len__", "__iter__", "__contains__", "__eq__", "__bool__", "__hash__"):
            here = described(answer(USES[name], made), made.module, made)
            assert here == described(answer(USES[name], made.module), made.module, made), name
        torch.testing.assert_close(made(x), made.module(x))
    assert isinstance(graphed, gw.GraphedModule)
    assert type(graphed) is type(gw.graph(MODULES[kind]()))


def test_a_module_without_operators_has_no_class_of_its_own() -> None:
    assert type(gw.graph(Plain())) is gw.GraphedModule
