"""Each kind of place that a watch looks at, alone: nothing else of the module changes with it."""

from __future__ import annotations

import array
import functools
import operator
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import nn
from torch.nn.modules import module as nn_module

from graphwright.calls import dependencies
from graphwright.calls.dependencies import Dependencies
from graphwright.calls.host_generators import HostGenerators
from graphwright.calls.iterators import Iterators
from graphwright.calls.modules import FunctionModule
from graphwright.calls.watch import ModuleWatch

LIBRARY = "/somewhere/site-packages/library.py"
Change = Callable[[], object]
Place = tuple[Any, Change]


@pytest.fixture(autouse=True)
def checks() -> None:
    """None of this is compiled."""


class Box:
    """An object with attributes."""

    def __init__(self, value: Any = 1) -> None:
        self.value = value

    def scaled(self, x: Any) -> Any:
        return x * self.value


class Slotted:
    """An object with a slot."""

    __slots__ = ("value",)


class Holds(nn.Module):
    """Holds something, and reads it."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held
        self.notes = [1]

    def forward(self, x: Any) -> Any:
        return x if self.held else x + 1


def file(**content: Any) -> Any:
    """A file of the user's."""
    made = types.ModuleType("a_file_of_the_user_s")
    vars(made).update(content)
    return made


def function(text: str, name: str = "<user>", **names: Any) -> Any:
    """What some code defines as `made`, with names that it knows."""
    names |= {"torch": torch, "nn": nn, "__name__": "a_file_of_the_user_s"}
    exec(compile(text, name, "exec"), names)
    return names["made"]


def _object() -> Place:
    box = Box()
    return Holds(box), lambda: setattr(box, "value", 2)


def _slots() -> Place:
    held = Slotted()
    held.value = 1
    return Holds(held), lambda: setattr(held, "value", 2)


def _class_of_an_object() -> Place:
    class Other(Box):
        """Another class."""

    box = Box()
    return Holds(box), lambda: setattr(box, "__class__", Other)


def _method_of_an_object() -> Place:
    class Own(Box):
        """A class of its own."""

        def read(self) -> Any:
            return self.value

    return Holds(Own()), lambda: setattr(Own, "read", lambda self: 2)


def _method_of_a_container() -> Place:
    class Own(list[Any]):
        """A list with a method and attributes."""

        def read(self) -> Any:
            return self[0]

    return Holds(Own([1])), lambda: setattr(Own, "read", lambda self: 2)


def _attribute_of(kind: type, *content: Any) -> Callable[[], Place]:
    def make() -> Place:
        held = type("Own", (kind,), {})(*content)
        held.scale = 1
        return Holds(held), lambda: setattr(held, "scale", 2)

    return make


def _item(held: Any, change: Callable[[Any], object]) -> Callable[[], Place]:
    def make() -> Place:
        mine = held()
        return Holds(mine), lambda: change(mine)

    return make


def _file_in_an_attribute() -> Place:
    class Reads(Holds):
        """Reads a file that it holds."""

        def forward(self, x: Any) -> Any:
            return x * self.held.SCALE

    settings = file(SCALE=1)
    return Reads(settings), lambda: setattr(settings, "SCALE", 2)


def _class_in_an_attribute() -> Place:
    class Settings:
        """Values of a class."""

        SCALE = 1

    class Reads(Holds):
        """Reads a class that it holds."""

        def forward(self, x: Any) -> Any:
            return x * self.held.SCALE

    return Reads(Settings), lambda: setattr(Settings, "SCALE", 2)


def _closure() -> Place:
    scale = 1

    def call(x: Any) -> Any:
        return x * scale

    def change() -> None:
        nonlocal scale
        scale = 2

    return FunctionModule(call), change


def _global() -> Place:
    call = function("def made(x): return x * SCALE", SCALE=1)
    return FunctionModule(call), lambda: call.__globals__.update(SCALE=2)


def _file_that_a_function_names() -> Place:
    settings = file(SCALE=1)
    call = function("def made(x): return x * settings.SCALE", settings=settings)
    return FunctionModule(call), lambda: setattr(settings, "SCALE", 2)


def _file_that_a_function_closes_over() -> Place:
    settings = file(SCALE=1)

    def call(x: Any) -> Any:
        return x * settings.SCALE

    return FunctionModule(call), lambda: setattr(settings, "SCALE", 2)


def _file_in_a_file() -> Place:
    inner = file(SCALE=1)
    settings = file(inner=inner)
    call = function("def made(x): return x * settings.inner.SCALE", settings=settings)
    return FunctionModule(call), lambda: setattr(inner, "SCALE", 2)


def _default() -> Place:
    def call(x: Any, scale: int = 1) -> Any:
        return x * scale

    return FunctionModule(call), lambda: setattr(call, "__defaults__", (2,))


def _partial() -> Place:
    held = functools.partial(max, [1])
    return Holds(held), lambda: held.args[0].append(2)


def _bound_method() -> Place:
    box = Box()
    return FunctionModule(box.scaled), lambda: setattr(box, "value", 2)


def _function_of_a_bound_method() -> Place:
    call = function("def made(self, x): return x * SCALE", SCALE=1)
    held = types.MethodType(call, Box())
    return Holds(held), lambda: call.__globals__.update(SCALE=2)


def _owner_of_a_method_in_c() -> Place:
    held: list[int] = [1]
    return Holds(held.count), lambda: held.append(1)


def _decorated() -> Place:
    scale = [1]
    held = torch.no_grad()(lambda x: x * scale[0])
    return Holds(held), lambda: scale.append(2)


def _disabled() -> Place:
    scale = [1]

    def call(x: Any) -> Any:
        return x * scale[0]

    held: Any = functools.wraps(call)(lambda *args: None)
    held._torchdynamo_orig_callable = call
    return Holds(held), lambda: scale.append(2)


def _hook_reads_an_attribute() -> Place:
    model = Holds(1)

    def hook(module: Any, args: Any, result: Any) -> Any:
        return result * len(module.notes)

    model.register_forward_hook(hook)
    return model, lambda: model.notes.append(2)


def _function_reads_an_attribute() -> Place:
    model = Holds(1)

    def call(x: Any) -> Any:
        return model(x) * len(model.notes)

    return FunctionModule(call), lambda: model.notes.append(2)


def _another_method_reads_an_attribute() -> Place:
    class Own(Box):
        """Reads its notes in a helper."""

        def call(self, x: Any) -> Any:
            return self.helper(x)

        def helper(self, x: Any) -> Any:
            return x * self.notes

    own: Any = Own()
    own.notes = 1
    return FunctionModule(own.call), lambda: setattr(own, "notes", 2)


def _autograd_function() -> Place:
    class Twice(torch.autograd.Function):
        """A function whose methods nobody names."""

        @staticmethod
        def backward(ctx: Any, x: Any) -> Any:
            return x * 2

    call = function("def made(x): return Twice.apply(x)", Twice=Twice)
    return FunctionModule(call), lambda: setattr(Twice, "backward", staticmethod(lambda c, x: x))


def _method_that_a_method_names() -> Place:
    class Tools:
        """Functions that name one another, three deep."""

        @classmethod
        def first(cls, x: Any) -> Any:
            return cls.second(x)

        @classmethod
        def second(cls, x: Any) -> Any:
            return cls.third(x)

        @classmethod
        def third(cls, x: Any) -> Any:
            return x

    call = function("def made(x): return Tools.first(x)", Tools=Tools)
    return FunctionModule(call), lambda: setattr(Tools, "third", classmethod(lambda cls, x: -x))


def _global_of_a_method() -> Place:
    text = "class made(nn.Module):\n def forward(self, x): return x * SCALE"
    cls = function(text, SCALE=1)
    return cls(), lambda: cls.forward.__globals__.update(SCALE=2)


def _global_of_a_library_s_method() -> Place:
    text = "class made(nn.Module):\n def forward(self, x): return x * SCALE"
    cls = function(text, LIBRARY, SCALE=1)
    sys.modules["a_library_s_file"] = file(__file__=LIBRARY)
    cls.__module__ = "a_library_s_file"
    return cls(), lambda: cls.forward.__globals__.update(SCALE=2)


def _method_of_the_module() -> Place:
    class Own(Holds):
        """A module whose method is replaced."""

    class More(Own):
        """One that inherits it."""

    return More(1), lambda: setattr(Own, "forward", lambda self, x: -x)


def _method_that_comes_to_be_overridden() -> Place:
    class Own(Holds):
        """A module that may override what it inherits."""

    return Own(1), lambda: setattr(Own, "forward", lambda self, x: -x)


def _hook_for_all_modules() -> Place:
    return Holds(1), lambda: nn_module.register_module_forward_hook(lambda *_: None)


def _what_a_hook_for_all_modules_reads() -> Place:
    scale = [1]
    nn_module.register_module_forward_hook(lambda module, args, result: result * scale[0])
    return Holds(1), lambda: scale.append(2)


def _attribute_of_a_weight() -> Place:
    class Own(Holds):
        """Reads an attribute of its weight."""

        def forward(self, x: Any) -> Any:
            return x * self.held.scale

    weight: Any = nn.Parameter(torch.ones(2))
    weight.scale = 1
    return Own(weight), lambda: setattr(weight, "scale", 2)


def _buffer() -> Place:
    model = nn.BatchNorm1d(2)
    return model, lambda: model.register_buffer("running_mean", torch.zeros(2))


def _child() -> Place:
    model = nn.Sequential(nn.Linear(2, 2))
    return model, lambda: setattr(model[0], "in_features", 3)


def _hook() -> Place:
    model = Holds(1)
    return model, lambda: model.register_forward_hook(lambda *_: None)


def _class_of_a_child() -> Place:
    class Other(Holds):
        """Another class."""

    child = Holds(1)
    return nn.Sequential(child), lambda: setattr(child, "__class__", Other)


def _class_of_a_container() -> Place:
    class Own(list[Any]):
        """A list with attributes."""

    class Other(list[Any]):
        """Another one."""

    held = Own([1])
    return Holds(held), lambda: setattr(held, "__class__", Other)


def _slot_of_a_container() -> Place:
    class Own(list[Any]):
        """A list with a slot."""

        __slots__ = ("scale",)

    held = Own([1])
    held.scale = 1
    return Holds(held), lambda: setattr(held, "scale", 2)


def _memory_of_a_weight() -> Place:
    model = nn.Linear(2, 2)
    return model, lambda: setattr(model.weight, "data", torch.zeros(2, 2))


def _module_in_a_list() -> Place:
    child = nn.Linear(2, 2)
    return Holds([child]), lambda: setattr(child, "in_features", 3)


def _function_as_a_child() -> Place:
    scale = [1]
    return nn.Sequential(FunctionModule(lambda x: x * scale[0])), lambda: scale.append(2)


class Wrapper(torch.Tensor):
    """A tensor around another one, which it holds where Python has no attribute."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.grad = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["grad"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def _tensor_in_a_wrapper() -> Place:
    inner = torch.ones(2)
    return Holds([Wrapper(inner)]), lambda: setattr(inner, "data", torch.zeros(2))


def _list_of_a_class() -> Place:
    class Own(Holds):
        """Reads a list of its class."""

        table: ClassVar[list[int]] = [1]

        def forward(self, x: Any) -> Any:
            return x * self.table[0]

    return Own(1), lambda: Own.table.append(2)


def _global_of_a_library_s_object() -> Place:
    text = "class made:\n def __call__(self, x): return x * SCALE"
    cls = function(text, LIBRARY, SCALE=1)
    sys.modules["a_library_s_file"] = file(__file__=LIBRARY)
    cls.__module__ = "a_library_s_file"
    return Holds(cls()), lambda: cls.__call__.__globals__.update(SCALE=2)


def _file_that_a_function_imports() -> Place:
    settings = sys.modules["a_library_s_file"] = file(SCALE=1)
    call = function("def made(x):\n from a_library_s_file import SCALE\n return x * SCALE")
    return FunctionModule(call), lambda: setattr(settings, "SCALE", 2)


# Beside such code it is not known which names count.
DYNAMIC = "def made(x):\n getattr(x, 'shape')\n return "


def _class_that_dynamic_code_names() -> Place:
    class Settings:
        """Values of a class."""

        SCALE = 1

    call = function(DYNAMIC + "x * Settings.SCALE", Settings=Settings)
    return FunctionModule(call), lambda: setattr(Settings, "SCALE", 2)


def _class_that_dynamic_code_closes_over() -> Place:
    class Settings:
        """Values of a class."""

        SCALE = 1

    def call(x: Any) -> Any:
        getattr(x, "shape")  # noqa: B009  # as it is meant
        return x * Settings.SCALE

    return FunctionModule(call), lambda: setattr(Settings, "SCALE", 2)


def _method_caller() -> Place:
    scale = [1]
    return Holds(operator.methodcaller("mul", scale)), lambda: scale.append(2)


def _argument_of_an_exception() -> Place:
    scale = [1]
    return Holds(ValueError(scale)), lambda: scale.append(2)


def _other_gelu() -> None:
    vars(nn.functional)["gelu"] = lambda x: x


def _function_of_pytorch() -> Place:
    call = function("def made(x): return functional.gelu(x)", functional=nn.functional)
    return FunctionModule(call), _other_gelu


def _function_of_pytorch_by_its_whole_name() -> Place:
    return FunctionModule(function("def made(x): return torch.nn.functional.gelu(x)")), _other_gelu


def _function_that_one_of_pytorch_calls() -> Place:
    call = function("def made(x): return functional.upsample(x)", functional=nn.functional)
    return FunctionModule(call), lambda: vars(nn.functional).update(interpolate=lambda x: x)


def _function_of_pytorch_in_a_library() -> Place:
    text = "class made(nn.Module):\n def forward(self, x): return functional.gelu(x)"
    cls = function(text, LIBRARY, functional=nn.functional)
    sys.modules["a_library_s_file"] = file(__file__=LIBRARY)
    cls.__module__ = "a_library_s_file"
    return cls(), _other_gelu


PLACES: dict[str, Callable[[], Place]] = {
    "object": _object,
    "slots": _slots,
    "class of an object": _class_of_an_object,
    "method of an object": _method_of_an_object,
    "method of a container": _method_of_a_container,
    "attribute of text": _attribute_of(str, "a"),
    "attribute of a float": _attribute_of(float, 1.0),
    "attribute of a tuple": _attribute_of(tuple, (1,)),
    "attribute of a frozenset": _attribute_of(frozenset, (1,)),
    "attribute of a list": _attribute_of(list, [1]),
    "attribute of a set": _attribute_of(set, (1,)),
    "attribute of a dictionary": _attribute_of(dict, {1: 2}),
    "attribute of bytes": _attribute_of(bytearray, b"a"),
    "attribute of a partial": _attribute_of(functools.partial, max),
    "item of a list": _item(lambda: [1], lambda held: held.append(2)),
    "item of a set": _item(lambda: {1}, lambda held: held.add(2)),
    "item of a dictionary": _item(lambda: {1: 2}, lambda held: held.update({1: 3})),
    "list in a tuple": _item(lambda: ([1],), lambda held: held[0].append(2)),
    "long list": _item(lambda: [1] * 2000, lambda held: held.append(2)),
    "bytes": _item(lambda: bytearray(b"a"), lambda held: held.extend(b"b")),
    "array": _item(lambda: array.array("i", [1]), lambda held: held.append(2)),
    "array of NumPy's": _item(lambda: numpy.ones(2), lambda held: held.fill(2)),
    "file in an attribute": _file_in_an_attribute,
    "class in an attribute": _class_in_an_attribute,
    "closure": _closure,
    "global": _global,
    "file that a function names": _file_that_a_function_names,
    "file that a function closes over": _file_that_a_function_closes_over,
    "file in a file": _file_in_a_file,
    "default": _default,
    "partial": _partial,
    "bound method": _bound_method,
    "function of a bound method": _function_of_a_bound_method,
    "owner of a method in C": _owner_of_a_method_in_c,
    "decorated": _decorated,
    "kept from TorchDynamo": _disabled,
    "attribute that a hook reads": _hook_reads_an_attribute,
    "attribute that a function reads": _function_reads_an_attribute,
    "attribute that another method reads": _another_method_reads_an_attribute,
    "autograd function": _autograd_function,
    "method that a method names": _method_that_a_method_names,
    "global of a method": _global_of_a_method,
    "global of a library's method": _global_of_a_library_s_method,
    "method of the module": _method_of_the_module,
    "method that is overridden": _method_that_comes_to_be_overridden,
    "hook for all modules": _hook_for_all_modules,
    "what a hook for all modules reads": _what_a_hook_for_all_modules_reads,
    "attribute of a weight": _attribute_of_a_weight,
    "buffer": _buffer,
    "child": _child,
    "hook": _hook,
    "method caller": _method_caller,
    "argument of an exception": _argument_of_an_exception,
    "function of PyTorch's": _function_of_pytorch,
    "function of PyTorch's by its whole name": _function_of_pytorch_by_its_whole_name,
    "function that one of PyTorch's calls": _function_that_one_of_pytorch_calls,
    "function of PyTorch's in a library": _function_of_pytorch_in_a_library,
    "class of a child": _class_of_a_child,
    "class of a container": _class_of_a_container,
    "slot of a container": _slot_of_a_container,
    "memory of a weight": _memory_of_a_weight,
    "module in a list": _module_in_a_list,
    "function as a child": _function_as_a_child,
    "tensor in a wrapper": _tensor_in_a_wrapper,
    "list of a class": _list_of_a_class,
    "global of a library's object": _global_of_a_library_s_object,
    "file that a function imports": _file_that_a_function_imports,
    "class that dynamic code names": _class_that_dynamic_code_names,
    "class that dynamic code closes over": _class_that_dynamic_code_closes_over,
}


@pytest.fixture
def put_back() -> Iterator[None]:
    """What a test changes of PyTorch and of the process is as it was afterwards."""
    functions = dict(vars(nn.functional))
    before = {kind: dict(getattr(nn_module, kind)) for kind in dependencies.GLOBAL_HOOKS}
    yield
    vars(nn.functional).update(functions)
    for kind, held in before.items():
        getattr(nn_module, kind).clear()
        getattr(nn_module, kind).update(held)
    sys.modules.pop("a_library_s_file", None)


@pytest.mark.usefixtures("put_back")
@pytest.mark.parametrize("name", PLACES)
def test_a_change_there_is_noticed(name: str) -> None:
    model, change = PLACES[name]()
    watch = ModuleWatch(model, values=False)
    assert watch.changed() is None
    change()
    assert not watch.unchanged()
    assert watch.changed() is not None


@pytest.mark.usefixtures("put_back", "check_in_c")
@pytest.mark.parametrize("name", PLACES)
def test_the_checks_in_c_and_in_python_see_the_same(name: str) -> None:
    model, change = PLACES[name]()
    compared = ModuleWatch(model, values=False)._compared
    in_c = compared.in_c()
    assert in_c is not None
    assert in_c()
    assert compared.unchanged()
    change()
    assert not in_c()
    assert not compared.unchanged()


def test_what_the_code_does_not_name_does_not_count() -> None:
    model = Holds(1)
    watch = ModuleWatch(model, values=False)
    model.notes.append(2)
    assert watch.changed() is None


def test_what_is_beyond_the_limits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Dependencies(Holds([Box(), [Box()]])).unread == []
    monkeypatch.setattr(dependencies, "_MAX_PLACES", 1)
    assert any("beyond" in each for each in Dependencies(Holds([Box(), [Box()]])).unread)
    monkeypatch.undo()
    many = Dependencies(Holds([0] * 2000)).unread
    assert any("2,000 items" in each for each in many)
    assert any("ndarray" in each for each in Dependencies(Holds(numpy.ones(2000))).unread)
    assert any("iterator" in each for each in Dependencies(Holds(iter([1]))).unread)


def test_optimizers_are_listed() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert Dependencies(Holds(optimizer)).optimizers == [optimizer]


def test_whoever_draws_is_named() -> None:
    kept = HostGenerators(Dependencies(Holds(1)))
    numpy.random.rand()
    assert kept.moved_of_process() == "numpy.random"
    kept.put_back()
    assert kept.moved_of_process() is None


def test_who_draws_from_an_array_of_objects_is_named() -> None:
    drawn = random.Random(0)
    kept = HostGenerators(Dependencies(Holds(numpy.array([drawn], dtype=object))))
    drawn.random()
    assert "Random" in str(kept.moved())


def test_a_trace_function_is_put_back() -> None:
    batches = iter([1])
    iterators, before = Iterators(Dependencies(Holds(batches))), sys.gettrace()
    with iterators.guarded():
        assert sys.gettrace() is not before
    assert sys.gettrace() is before
