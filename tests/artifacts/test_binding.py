"""A call in another form: keywords in place of positions, defaults given or left out."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from chosen import choosing
from torch import nn

import graphwright as gw
from graphwright.artifacts.tuned_module import TunedModule
from graphwright.calls.binding import Form, Parameters, form_of
from graphwright.calls.modules import FunctionModule
from graphwright.calls.signature import CallSignature
from graphwright.calls.watch import ModuleWatch
from graphwright.dispatch.fast_path import shortcut
from graphwright.report.report import Report

DEFAULT = True
REFUSED = "refused"
MARK = 1000.0
BIAS = torch.zeros(3, requires_grad=True)
REPORT = Report("Model", [], "latency", [], {}, chosen="planted", reason="planted was chosen.")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(
        self, x: torch.Tensor, scale: Any = None, *, mask: Any = None, double: bool = False
    ) -> torch.Tensor:
        y = self.linear(x)
        y = y if scale is None else y * scale
        y = y if mask is None else y * mask
        return y + y if double else y


def functions() -> list[Callable[..., Any]]:
    def none() -> Any:
        return ()

    def plain(a: Any, b: Any) -> Any:
        return a, b

    def defaults(a: Any, b: Any = DEFAULT, c: Any = None) -> Any:
        return a, b, c

    def positions(a: Any, b: Any = DEFAULT, /, c: Any = None) -> Any:
        return a, b, c

    def keywords(a: Any, *, b: Any, c: Any = DEFAULT) -> Any:
        return a, b, c

    return [none, plain, defaults, positions, keywords]


def calls(function: Callable[..., Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """All calls of a function with one of two values for each argument."""
    names = [*inspect.signature(function).parameters, "other"]
    values = (DEFAULT, None)
    for count, chosen in itertools.product(range(4), powerset(names)):
        for picked in itertools.product(values, repeat=count + len(chosen)):
            yield picked[:count], dict(zip(chosen, picked[count:], strict=True))


def powerset(names: list[str]) -> Iterator[tuple[str, ...]]:
    for size in range(len(names) + 1):
        yield from itertools.combinations(names, size)


def result(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except TypeError:
        return REFUSED


@pytest.mark.parametrize("function", functions(), ids=lambda function: function.__name__)
def test_every_form_of_a_call_gives_what_the_call_gives(function: Callable[..., Any]) -> None:
    parameters = Parameters.of(FunctionModule(function))
    assert parameters is not None
    by_form: dict[Form, set[Any]] = {}
    for args, kwargs in calls(function):
        if (given := result(function, args, kwargs)) != REFUSED:
            by_form.setdefault(form_of(args, kwargs), set()).add(given)
    for (args, kwargs), (form, every) in itertools.product(calls(function), by_form.items()):
        found = parameters.in_form(form, args, kwargs)
        expected = result(function, args, kwargs)
        # Found wherever some call in that form gives the same.
        assert (found is not None) == (expected in every)
        if found is not None:
            assert form_of(*found) == form
            assert result(function, *found) == expected


def test_what_may_see_the_form_of_a_call_is_left_alone() -> None:
    class AnyArguments(nn.Module):
        def forward(self, *args: Any) -> Any:
            return args

    class AnyKeywords(nn.Module):
        def forward(self, x: Any, **kwargs: Any) -> Any:
            return x, kwargs

    class OwnCall(Model):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    class Wrapped(Model):
        @torch.no_grad()
        def forward(self, x: Any, scale: Any = None) -> Any:  # type: ignore[override]  # fewer
            return x

    class Static(nn.Module):
        @staticmethod
        def forward(x: Any) -> Any:
            return x

    class Redirected(Model):
        def __getattribute__(self, name: str) -> Any:
            return super().__getattribute__("extra_repr" if name == "forward" else name)

    own = Model()
    own.forward = lambda x, scale=None: x  # type: ignore[method-assign]  # as libraries do
    compiled = Model()
    compiled.compile()
    scripted = torch.jit.trace(nn.Linear(2, 2), torch.ones(2))
    partial = FunctionModule(functools.partial(Model(), double=True))
    for module in (
        *(AnyArguments(), AnyKeywords(), OwnCall(), Wrapped(), Static(), Redirected()),
        *(own, compiled, scripted, partial),
    ):
        assert Parameters.of(module) is None
    assert Parameters.of(Model()) is not None


HOOKS: list[Callable[[nn.Module], Any]] = [
    lambda model: model.register_forward_hook(lambda *given: None),
    lambda model: model.register_forward_pre_hook(lambda *given: None),
    lambda model: model.register_full_backward_hook(lambda *given: None),
    lambda model: model.register_full_backward_pre_hook(lambda *given: None),
    lambda model: nn.modules.module.register_module_forward_hook(lambda *given: None),
    lambda model: nn.modules.module.register_module_forward_pre_hook(lambda *given: None),
    lambda model: nn.modules.module.register_module_full_backward_hook(lambda *given: None),
    lambda model: nn.modules.module.register_module_full_backward_pre_hook(lambda *given: None),
]


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_see_the_form_of_a_call(hook: Callable[[nn.Module], Any]) -> None:
    model = Model()
    handle = hook(model)
    try:
        assert Parameters.of(model) is None
    finally:
        handle.remove()
    assert Parameters.of(model) is not None


@pytest.mark.parametrize(
    "default",
    [float("nan"), 300, "text", (1,), [], {}, torch.tensor(0.0), nn.Identity(), DEFAULT, None],
    ids=repr,
)
def test_only_defaults_that_are_one_object_are_passed_or_left_out(default: Any) -> None:
    # `scale is default` tells others from values that are equal, or are tensors of one shape.
    def function(x: Any, scale: Any = default) -> Any:
        return x, scale

    parameters = Parameters.of(FunctionModule(function))
    assert parameters is not None
    one = default is None or default is DEFAULT
    assert (parameters.in_form((2, ()), (1,), {}) is not None) == one
    assert (parameters.in_form((1, ()), (1, default), {}) is not None) == one


def test_the_module_itself_may_have_a_default() -> None:
    class Odd(nn.Module):
        def forward(self=None, x=None, y=True):  # type: ignore[no-untyped-def]  # odd on purpose
            return x, y

    parameters = Parameters.of(Odd())
    assert parameters is not None
    assert parameters.in_form((2, ()), (), {"x": 1}) == ((1, True), {})
    assert parameters.in_form((0, ("x",)), (1, True), {}) == ((), {"x": 1})


def test_a_wrapper_binds_to_its_own_parameters() -> None:
    def wrapped(a: Any, b: Any) -> Any:
        return a, b

    @functools.wraps(wrapped)
    def swapped(b: Any, a: Any) -> Any:
        return wrapped(a, b)

    parameters = Parameters.of(FunctionModule(swapped))
    assert parameters is not None
    assert parameters.in_form((2, ()), (), {"a": 1, "b": 2}) == ((2, 1), {})


def forms(x: torch.Tensor, scale: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    return [
        ((x, scale), {}),
        ((x,), {"scale": scale}),
        ((), {"scale": scale, "x": x}),
        ((x, scale), {"mask": None}),
        ((x,), {"double": False, "scale": scale}),
    ]


def tuned_for(model: nn.Module, *every: tuple[Any, Any], watched: bool = True) -> TunedModule:
    """A winner for these calls whose answers are off by MARK, so that one sees who answered."""

    def winner(*args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(*args, **kwargs) + MARK

    table = [(CallSignature.of(*call), winner) for call in every]
    return TunedModule(model, REPORT, table, ModuleWatch(model, values=True) if watched else None)


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("kind", ["tensor", "number", "none"])
@torch.no_grad()
def test_what_was_tuned_answers_every_form_of_its_call(number: int, kind: str) -> None:
    model, x = Model().eval(), torch.randn(2, 8)
    scale = {"tensor": torch.randn(8), "number": 3.5, "none": None}[kind]
    tuned = tuned_for(model, forms(x, scale)[number])
    for args, kwargs in forms(x, scale):
        torch.testing.assert_close(tuned(*args, **kwargs), model(*args, **kwargs) + MARK)
    assert tuned.calls == {"tuned": 5}


@torch.no_grad()
def test_calls_of_other_values_are_other_calls_in_every_form() -> None:
    model, x = Model().eval(), torch.randn(2, 8)
    tuned = tuned_for(model, ((x, 2.0), {}), ((x,), {"mask": x}))
    for kwargs in ({"scale": 3.0}, {"scale": 2.0, "double": True}, {"scale": 2.0, "mask": x}):
        with pytest.warns(RuntimeWarning) if not tuned.calls else nullcontext():
            torch.testing.assert_close(tuned(x=x, **kwargs), model(x=x, **kwargs))
    assert tuned.calls == {"eager: another signature": 3}
    for call in ({"scale": 2.0}, {"mask": x, "scale": None}):
        torch.testing.assert_close(tuned(x=x, **call), model(x=x, **call) + MARK)
    assert tuned.calls["tuned"] == 2


@torch.no_grad()
def test_a_hook_that_sees_the_form_gets_the_callers() -> None:
    model, x = Model().eval(), torch.randn(2, 8)
    tuned = tuned_for(model, ((x, 2.0), {}), watched=False)
    seen: list[Any] = []

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(kwargs)

    with pytest.warns(RuntimeWarning, match="signature"), hooked(model, hook):
        torch.testing.assert_close(tuned(x, scale=2.0), model(x, scale=2.0))
    assert seen == [{"scale": 2.0}] * 2
    torch.testing.assert_close(tuned(x, scale=2.0), model(x, scale=2.0) + MARK)


@torch.no_grad()
def test_the_module_gets_the_callers_form(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Model().eval(), torch.randn(2, 8)
    tuned = tuned_for(model, ((x, 2.0), {}))
    seen: list[Any] = []
    real = nn.Module.__call__

    def patched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs)
        return real(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", patched)
    with pytest.warns(RuntimeWarning, match="tuned for"):
        tuned(x[:1], scale=2.0)
    assert seen[0] == {"scale": 2.0}


@torch.no_grad()
def test_a_call_in_another_form_is_compared_even_where_no_call_is() -> None:
    model, x = Model().eval(), torch.randn(2, 8)

    def launch(tensors: Any) -> torch.Tensor:
        return model(*tensors) + MARK

    scale = torch.randn(8)
    signature = CallSignature.of((x, scale), {})
    watch = ModuleWatch(model, values=True, checks="none")
    short = shortcut(signature, launch, watch.unchanged, training=False, checks="none")
    assert short is not None
    tuned = TunedModule(model, REPORT, [(signature, model)], watch, shortcuts=[short])
    torch.testing.assert_close(tuned(x, scale), model(x, scale) + MARK)
    with pytest.warns(RuntimeWarning):
        torch.testing.assert_close(tuned(x), model(x))


def test_gradients_are_not_lost_with_a_default_that_wants_them() -> None:
    class Biased(nn.Module):
        def forward(self, x: torch.Tensor, bias: torch.Tensor = BIAS) -> torch.Tensor:
            return x + bias

    model, x = Biased().eval(), torch.randn(3)
    tuned = tuned_for(model, ((x,), {}))
    assert not tuned(x).requires_grad
    with pytest.warns(RuntimeWarning, match="grad"):
        assert tuned(x, BIAS).requires_grad


@contextmanager
def hooked(model: nn.Module, hook: Any) -> Iterator[None]:
    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.filterwarnings("ignore:What tune:RuntimeWarning")
def test_errors_are_the_models_own() -> None:
    model, x = Model().eval(), torch.randn(2, 8)
    tuned = tuned_for(model, ((x, 2.0), {}))
    for args, kwargs in (((), {}), ((x,), {"x": x}), ((x,), {"y": x}), ((x, 2.0, x), {})):
        with pytest.raises(TypeError) as theirs:
            model(*args, **kwargs)
        with pytest.raises(TypeError) as mine:
            tuned(*args, **kwargs)
        assert str(mine.value) == str(theirs.value)


def test_a_form_that_another_sample_has_is_looked_up_in_all_forms() -> None:
    model, x = Model().eval(), torch.randn(4, 8)
    samples: list[Any] = [(x,), {"x": x, "mask": x}, (x, 2.0), {"x": torch.randn(2, 8)}]
    with choosing("eager:no_grad"):
        tuned = gw.tune(
            model,
            samples=samples,
            strategies=["eager:no_grad"],
            isolate=False,
            remember=False,
            progress=False,
        )
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, None), {}),
        ((), {"x": x}),
        ((x,), {"mask": x}),
        ((x,), {"scale": 2.0}),
        ((torch.randn(2, 8),), {}),
        ((torch.randn(2, 8), None), {"mask": None}),
    ]
    with torch.no_grad():
        for args, kwargs in calls:
            torch.testing.assert_close(tuned(*args, **kwargs), model(*args, **kwargs))
        assert tuned.calls == {"tuned": len(calls)}
        other = torch.randn(3, 8)
        torch.testing.assert_close(tuned(other, None), model(other, None))
    assert tuned.calls["eager: another signature"] == 1
