"""What stands for a module or function looks like it, to whoever asks."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import typing
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import graphwright as gw

MISSING = "missing"


class Size(int):
    """A class that annotations name."""


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Base(nn.Module):
    """The base of all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def kept(self, x: torch.Tensor) -> torch.Tensor:
        """Is neither forward nor one of nn.Module's."""
        return self.layer(x)


class Plain(Base):
    """A plain one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Say what it does."""
        return self.layer(x)


class KeywordOnly(Base):
    def forward(self, x, *, scale: Size = Size(2)):  # noqa: B008  # no name of a dtype
        return self.layer(x) * scale


class Defaults(Base):
    def forward(self, x, mask=None, /, bias: float | None = 1.0):
        return self.layer(x) + bias


class Variadic(Base):
    def forward(self, *args: Size, **kwargs: typing.Any) -> torch.Tensor:
        return self.layer(args[0])


class Decorated(Base):
    @counted
    def forward(self, x: torch.Tensor, size: Size | None = None) -> torch.Tensor:
        """Decorated."""
        return self.layer(x)


class DecoratedElsewhere(Base):
    @torch.no_grad()
    def forward(self, x: torch.Tensor, size: Size | None = None) -> torch.Tensor:
        return self.layer(x)


class OwnCall(Base):
    def __call__(self, x: torch.Tensor, twice: bool = False) -> torch.Tensor:
        return super().__call__(x) * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class OwnSignature(Base):
    def forward(self, *args, **kwargs):
        return self.layer(*args, **kwargs)

    forward.__signature__ = inspect.signature(Plain.forward)  # type: ignore[attr-defined]


class Static(Base):
    @staticmethod
    def forward(x: torch.Tensor, size: Size = Size(3)) -> torch.Tensor:  # noqa: B008
        return x.relu() * size


class OfClass(Base):
    @classmethod
    def forward(cls, x: torch.Tensor) -> torch.Tensor:
        return x.relu()


def instance_forward(x: torch.Tensor, added: Size = Size(1)) -> torch.Tensor:  # noqa: B008
    return x.relu() + added


def on_instance() -> nn.Module:
    made = Plain()
    made.forward = instance_forward
    return made


def scripted() -> nn.Module:
    return torch.jit.script(Plain())


MODULES: dict[str, Callable[[], nn.Module]] = {
    made.__name__: made
    for made in (
        *(Plain, KeywordOnly, Defaults, Variadic, Decorated, DecoratedElsewhere, OwnCall),
        *(OwnSignature, Static, OfClass, on_instance, scripted),
    )
}


def function(x: torch.Tensor, size: Size = Size(2), *, more: float = 0.0) -> torch.Tensor:  # noqa: B008
    """A function."""
    return x.relu() * size + more


function.mark = "of the function"  # type: ignore[attr-defined]


@counted
def decorated(x: torch.Tensor, size: Size | None = None) -> torch.Tensor:
    return x.relu()


class Holder:
    """An object with methods."""

    scale: Size = Size(2)

    def method(self, x: torch.Tensor, size: Size | None = None) -> torch.Tensor:
        return x * self.scale

    @staticmethod
    def static(x: torch.Tensor, size: Size | None = None) -> torch.Tensor:
        return x * 2

    @classmethod
    def of_class(cls, x: torch.Tensor, size: Size | None = None) -> torch.Tensor:
        return x * cls.scale


class CallableObject(Holder):
    """An object that is called."""

    def __call__(self, x: torch.Tensor, size: Size | None = None) -> torch.Tensor:
        return x * self.scale


FUNCTIONS: dict[str, Callable[[], Callable[..., Any]]] = {
    "function": lambda: function,
    "decorated": lambda: decorated,
    "bound": lambda: Holder().method,
    "bound_forward": lambda: Decorated().eval().forward,
    "static": lambda: Holder.static,
    "of_class": lambda: Holder.of_class,
    "partial": lambda: functools.partial(function, more=1.0),
    "callable_object": CallableObject,
}


def sample() -> torch.Tensor:
    return torch.linspace(-1, 1, 8).reshape(2, 4)


def tuned(fn: Any) -> Any:
    return gw.tune(fn, (sample(),), strategies=["eager"], isolate=False, progress=False)


def loaded(fn: Any, folder: Path) -> Any:
    gw.save(tuned(fn), folder / "saved")
    return gw.load(folder / "saved", fn)


WRAPPERS: dict[str, Callable[[Any, Path], Any]] = {
    "graph": lambda fn, _: gw.graph(fn),
    "buckets": lambda fn, _: gw.graph(fn, buckets=gw.Buckets(batch=[2, 4])),
    "fuse": lambda fn, _: gw.fuse(fn, (sample(),)),
    "tune": lambda fn, _: tuned(fn),
    "load": loaded,
    "graph_of_fuse": lambda fn, _: gw.graph(gw.fuse(fn)),
    "graph_of_tune": lambda fn, _: gw.graph(tuned(fn)),
    "training": lambda fn, _: gw.make_graphed_callables(fn, (sample(),)),
}
FEW = ("graph", "fuse", "tune", "training")


def answer(ask: Callable[..., Any], *args: Any) -> Any:
    try:
        return ask(*args)
    except (AttributeError, NameError, TypeError, ValueError) as error:
        return type(error)


def asked(called: Any) -> dict[str, Any]:
    """What others learn of something callable."""
    found = {
        "signature": answer(inspect.signature, called),
        "hints": answer(typing.get_type_hints, called),
    }
    names = ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__", "mark")
    return found | {name: getattr(called, name, MISSING) for name in names}


def call(called: Any) -> torch.Tensor:
    with torch.no_grad():
        return called(sample())


def everything(module: nn.Module) -> dict[str, dict[str, Any]]:
    return {path: dict(vars(part)) for path, part in module.named_modules()}


def unsupported(kind: str, wrapper: str) -> str | None:
    """Why a wrapper refuses a kind, as it has always done."""
    if kind == "scripted" and wrapper == "training":
        return "the forward of a TorchScript module cannot be replaced"
    if kind == "DecoratedElsewhere" and wrapper == "training":
        return "its result never requires grad"
    return None


def cases(kinds: list[str], usual: str) -> list[Any]:
    """Each kind under each wrapper.

    CI's short run has those that others are made of, its long one every second of the others.
    """
    short = ("graph", "fuse", "training")
    found = []
    for m, kind in enumerate(kinds):
        for n, wrapper in enumerate(WRAPPERS):
            rest = pytest.mark.exhaustive if (m + n) % 2 else pytest.mark.slow
            marks = () if wrapper in short or kind == usual else rest
            found.append(pytest.param(kind, wrapper, marks=marks))
    return found


@pytest.mark.parametrize(("kind", "wrapper"), cases([*MODULES], "Decorated"))
def test_module_looks_like_itself(kind: str, wrapper: str, tmp_path: Path) -> None:
    if unsupported(kind, wrapper):
        pytest.skip(str(unsupported(kind, wrapper)))
    torch.manual_seed(0)
    module = MODULES[kind]().eval()
    expected, before, result = asked(module), everything(module), call(module)
    forward, methods = asked(module.forward), dir(module)
    can_be_pickled = kind != "scripted"
    stored = pickle.dumps(module) if can_be_pickled else b""
    made = WRAPPERS[wrapper](module, tmp_path)
    for _ in range(3):
        torch.testing.assert_close(call(made), result)
    if wrapper != "training":  # By PyTorch's contract it sets the module's forward.
        after = everything(module)
        assert before.keys() == after.keys()
        for path, attributes in before.items():
            assert attributes.keys() == after[path].keys()
            assert all(after[path][name] is value for name, value in attributes.items())
        assert not can_be_pickled or pickle.dumps(module) == stored
    copies = [copy.deepcopy(made)] if can_be_pickled else []
    copies += [pickle.loads(pickle.dumps(made))] if can_be_pickled else []
    for each in (made, *copies):
        assert asked(each) == expected
        assert asked(each.forward) == forward
        assert isinstance(each, type(module))
        assert set(methods) <= set(dir(each))
        assert not hasattr(each, "absent")
        assert not hasattr(each, "__wrapped__")
        torch.testing.assert_close(each.state_dict(), module.state_dict())
        torch.testing.assert_close(call(each), result)


@pytest.mark.parametrize(("kind", "wrapper"), cases([*FUNCTIONS], "bound_forward"))
def test_function_looks_like_itself(kind: str, wrapper: str, tmp_path: Path) -> None:
    fn = FUNCTIONS[kind]()
    expected, result = asked(fn), call(fn)
    made = WRAPPERS[wrapper](fn, tmp_path)
    for _ in range(3):
        torch.testing.assert_close(call(made), result)
    assert inspect.unwrap(made) is made
    for each in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert asked(each) == expected
        assert not hasattr(each, "absent")
        torch.testing.assert_close(call(each), result)
        if isinstance(each, nn.Module):
            assert inspect.signature(each.forward) == expected["signature"]


def own_methods() -> list[str]:
    """Methods that every module has, and whose results others rely on."""
    calls = ("forward", "compile", "_call_impl", "_slow_forward", "_wrapped_call_impl")
    # Transformers adds others.
    torchs = "torch.nn.modules.module"
    found = {n: v for n, v in vars(nn.Module).items() if inspect.isfunction(v)}
    names = [name for name, method in found.items() if method.__module__ == torchs]
    return [name for name in names if not name.startswith("__") and name not in calls]


def test_methods_of_the_module_s_class_run_in_its_version() -> None:
    names = own_methods()
    assert len(names) > 50
    for name in names:
        seen: list[nn.Module] = []
        asked_for = [False]

        def method(
            self: nn.Module,
            *args: Any,
            seen: list[nn.Module] = seen,
            asked_for: list[bool] = asked_for,
            name: str = name,
            **kwargs: Any,
        ) -> Any:
            if not asked_for[0]:
                return getattr(Plain, name)(self, *args, **kwargs)
            seen.append(self)
            return self

        module = type("Own", (Plain,), {name: method})()
        for made in (gw.graph(module), gw.graph(gw.graph(module))):
            seen.clear()
            asked_for[0] = True
            returned = getattr(made, name)(*([None] if name == "_apply" else []))
            asked_for[0] = False
            assert seen == [module], name
            assert returned is (module if name in ("state_dict", "load_state_dict") else made), name


def test_submodule_of_the_name_of_an_attribute_of_ours_is_found() -> None:
    module = nn.Module()
    module.pool = nn.Sequential(nn.Linear(2, 2))
    graphed = gw.graph(module)
    assert graphed.get_submodule("pool.0") is module.pool[0]
    assert graphed.get_parameter("pool.0.weight") is module.pool[0].weight
    assert isinstance(graphed.pool, gw.MemoryPool)
    assert graphed.module.pool is module.pool


def test_class_of_a_graphed_module_may_be_changed_for_a_parametrization() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    module = nn.Linear(4, 4).eval()
    graphed = gw.graph(module)
    call(graphed)
    parametrize.register_parametrization(graphed, "weight", Doubled())
    assert type(graphed) is gw.GraphedModule
    assert parametrize.is_parametrized(module, "weight")
    torch.testing.assert_close(call(graphed), call(module))


def test_a_batch_norm_among_submodules_loads_what_older_versions_saved() -> None:
    module = nn.BatchNorm1d(4).eval()
    parent = nn.Sequential(gw.graph(module))
    saved = parent.state_dict()
    assert saved._metadata["0"]["version"] == module._version
    old = OrderedDict((k, v) for k, v in saved.items() if "num_batches" not in k)
    parent.load_state_dict(old)  # BatchNorm's own version fills in what is missing.


def test_signature_is_not_looked_up_at_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[Any] = []
    for made in (gw.graph(Plain().eval()), gw.graph(function), gw.fuse(Plain().eval())):
        call(made)
        with monkeypatch.context() as patch:
            patch.setattr(inspect, "signature", looked_up.append)
            call(made)
    assert not looked_up


def test_arguments_are_listed_behind_self() -> None:
    for made in (gw.graph(KeywordOnly()), gw.fuse(KeywordOnly().eval())):
        found = inspect.getfullargspec(made.forward)
        assert (found.args, found.kwonlyargs) == (["self", "x"], ["scale"])


def test_forward_follows_a_change_of_the_class() -> None:
    class Changing(Plain):
        pass

    graphed = gw.graph(Changing())
    assert [*inspect.signature(graphed.forward).parameters] == ["x"]
    Changing.forward = KeywordOnly.forward  # type: ignore[assignment, method-assign]
    assert [*inspect.signature(graphed.forward).parameters] == ["x", "scale"]


def test_forward_of_a_module_taken_apart_and_put_together_keeps_its_graph() -> None:
    """As libraries wrap a model's forward: around the function of the method."""
    module = Plain().eval()
    module.forward = gw.graph(module.forward)
    graphed = module.forward
    module.forward = counted(graphed.__func__).__get__(module)
    assert inspect.signature(module.forward) == inspect.signature(Plain().forward)
    for _ in range(2):
        torch.testing.assert_close(call(module), module.layer(sample()))
    assert graphed.statistics.hits == 2
    other = Plain().eval()
    torch.testing.assert_close(graphed.__func__(other, sample()), other.layer(sample()))
    assert graphed.statistics.hits == 2


@pytest.mark.parametrize("wrapper", ["fuse", "tune", "load"])
def test_module_in_the_place_of_a_method_is_refused(wrapper: str, tmp_path: Path) -> None:
    module = Plain().eval()
    with pytest.raises(gw.OptionError, match="would register it as a submodule"):
        module.forward = WRAPPERS[wrapper](module.forward, tmp_path)
    assert [*module.state_dict()] == ["layer.weight", "layer.bias"]
    module.other = gw.fuse(function, (sample(),))  # Any other name is a submodule's.


def test_isinstance_of_what_stands_for_no_module_is_ours() -> None:
    fused = gw.fuse(function)
    assert fused.__class__ is type(fused) is gw.FusedModule


def test_code_compiled_around_it_sees_the_same_class() -> None:
    class Asks(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part = part

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x) + (1 if isinstance(self.part, Plain) else 0)

    asks = Asks(gw.graph(Plain().eval()))
    expected = asks.part.module.layer(sample()) + 1
    torch.testing.assert_close(call(asks), expected)
    torch.testing.assert_close(call(torch.compile(asks, backend="eager")), expected)


@pytest.mark.parametrize("wrapper", FEW)
def test_modes_and_hooks_reach_the_module(wrapper: str, tmp_path: Path) -> None:
    module = Plain().eval()
    made = WRAPPERS[wrapper](module, tmp_path)
    seen: list[nn.Module] = []
    made.register_forward_hook(lambda hooked, args, result: seen.append(hooked))
    call(made)
    assert seen == [module]
    made.requires_grad_(False)
    assert not module.layer.weight.requires_grad
    assert made.share_memory() is made
    assert module.layer.weight.is_shared()
    assert made.half() is made
    assert module.layer.weight.dtype is torch.half
    assert [path for path, _ in made.named_modules()] == ["", "layer"]
    visited: list[str] = []
    made.apply(lambda part: visited.append(part._get_name()))
    assert visited == ["Linear", "Plain"]
