"""Globals that code looks up by their names: watched like those that it names, or told."""

from __future__ import annotations

import importlib
import operator
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import graphwright as gw
from graphwright.calls import watch

SCALE: Any = 2.0
OTHER = 1.0
KEY = "SCALE"


class Settings:
    SCALE: Any = 2.0


settings = types.ModuleType("own_settings")
package = types.ModuleType("own_package")
package.inner = types.ModuleType("own_package.inner")  # type: ignore[attr-defined]  # made here


@pytest.fixture(autouse=True)
def files(monkeypatch: pytest.MonkeyPatch) -> None:
    for file in (settings, package, package.inner):
        monkeypatch.setitem(sys.modules, file.__name__, file)
        monkeypatch.setattr(file, "SCALE", 2.0, raising=False)
    monkeypatch.setattr(watch, "_WARNED_OF", weakref.WeakSet(), raising=False)


def helper(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = x * SCALE
    return result


def by_globals(x: torch.Tensor) -> Any:
    return x * globals()["SCALE"]


def by_get(x: torch.Tensor) -> Any:
    return x * globals().get("SCALE", 1.0)


def by_a_variable(x: torch.Tensor) -> Any:
    held = globals()
    return x * held["SCALE"]


def by_a_global_name(x: torch.Tensor) -> Any:
    return x * globals()[KEY]


def by_names_in_a_row(x: torch.Tensor) -> Any:
    for name in ("OTHER", "SCALE"):
        x = x * globals()[name]
    return x


def by_a_function_of_that_name(x: torch.Tensor) -> Any:
    return globals()["helper"](x)


def by_its_own_file(x: torch.Tensor) -> Any:
    return x * sys.modules[__name__].SCALE


def by_getattr_of_its_own_file(x: torch.Tensor) -> Any:
    return x * getattr(sys.modules[__name__], "SCALE")  # noqa: B009  # it is the point


def by_vars_of_its_own_file(x: torch.Tensor) -> Any:
    return x * vars(sys.modules[__name__])["SCALE"]


def by_eval(x: torch.Tensor) -> Any:
    return x * eval("SCALE * 2")


def by_eval_in_globals(x: torch.Tensor) -> Any:
    return x * eval("SCALE", globals())


def by_exec(x: torch.Tensor) -> Any:
    held: dict[str, Any] = {}
    exec("found = SCALE * 2", globals(), held)
    return x * held["found"]


OWN = [
    by_globals,
    by_get,
    by_a_variable,
    by_a_global_name,
    by_names_in_a_row,
    by_a_function_of_that_name,
    by_its_own_file,
    by_getattr_of_its_own_file,
    by_vars_of_its_own_file,
    by_eval,
    by_eval_in_globals,
    by_exec,
]


def by_modules(x: torch.Tensor) -> Any:
    return x * sys.modules["own_settings"].SCALE


def by_getattr(x: torch.Tensor) -> Any:
    return x * getattr(settings, "SCALE")  # noqa: B009  # it is the point


def by_vars(x: torch.Tensor) -> Any:
    return x * vars(settings)["SCALE"]


def by_dict(x: torch.Tensor) -> Any:
    return x * settings.__dict__["SCALE"]


def by_a_global_name_of_it(x: torch.Tensor) -> Any:
    return x * getattr(settings, KEY)


def by_attrgetter(x: torch.Tensor) -> Any:
    return x * operator.attrgetter("SCALE")(settings)


def by_import_module(x: torch.Tensor) -> Any:
    return x * importlib.import_module("own_settings").SCALE


def by_the_builtin(x: torch.Tensor) -> Any:
    return x * __import__("own_settings").SCALE


def by_an_import(x: torch.Tensor) -> Any:
    import own_settings  # type: ignore[import-not-found]  # made here

    return x * own_settings.SCALE


def by_an_import_of_the_name(x: torch.Tensor) -> Any:
    from own_settings import SCALE as FACTOR

    return x * FACTOR


OF_A_FILE = [
    by_modules,
    by_getattr,
    by_vars,
    by_dict,
    by_a_global_name_of_it,
    by_attrgetter,
    by_import_module,
    by_the_builtin,
    by_an_import,
    by_an_import_of_the_name,
]


def by_the_package(x: torch.Tensor) -> Any:
    return x * package.inner.SCALE


def by_a_path(x: torch.Tensor) -> Any:
    return x * operator.attrgetter("inner.SCALE")(package)


def by_an_import_of_a_part(x: torch.Tensor) -> Any:
    import own_package.inner as part  # type: ignore[import-not-found]  # made here

    return x * part.SCALE


def by_an_import_from_a_package(x: torch.Tensor) -> Any:
    from own_package import inner

    return x * inner.SCALE


OF_A_PART = [by_the_package, by_a_path, by_an_import_of_a_part, by_an_import_from_a_package]


def by_getattr_of_a_class(x: torch.Tensor) -> Any:
    return x * getattr(Settings, "SCALE")  # noqa: B009  # it is the point


def by_vars_of_a_class(x: torch.Tensor) -> Any:
    return x * vars(Settings)["SCALE"]


OF_A_CLASS = [by_getattr_of_a_class, by_vars_of_a_class]
CASES = [
    *((function, sys.modules[__name__]) for function in OWN),
    *((function, settings) for function in OF_A_FILE),
    *((function, package.inner) for function in OF_A_PART),
    *((function, Settings) for function in OF_A_CLASS),
]


class InModule(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


@pytest.mark.parametrize("in_module", [False, True], ids=["function", "module"])
@pytest.mark.parametrize(("function", "owner"), CASES, ids=lambda value: value.__name__)
def test_a_name_in_a_string_is_watched(
    function: Callable[[torch.Tensor], Any],
    owner: Any,
    in_module: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.ones(2, device=device)
    called = InModule(function).eval() if in_module else function
    graphed, captured = gw.graph(called), gw.capture(called, x)
    before = function(x)
    torch.testing.assert_close(graphed(x), before)
    monkeypatch.setattr(owner, "SCALE", 3.0)
    assert not torch.allclose(function(x), before)
    for _ in range(2):
        torch.testing.assert_close(graphed(x), function(x))
    with pytest.raises(gw.SignatureError, match="SCALE"):
        captured(x)
    assert "computed" not in graphed.explain()


def closing_over(name: str) -> Callable[[torch.Tensor], Any]:
    return lambda x: x * globals()[name] * getattr(settings, name)


@pytest.mark.parametrize("owner", [sys.modules[__name__], settings])
def test_a_name_that_a_function_closes_over_is_watched(
    owner: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, function = torch.ones(2, device=device), closing_over("SCALE")
    graphed = gw.graph(function)
    graphed(x)
    monkeypatch.setattr(owner, "SCALE", 3.0)
    torch.testing.assert_close(graphed(x), function(x))


def _name() -> str:
    return "sca" + "le"


def computed_global(x: torch.Tensor) -> Any:
    return x * globals()[_name().upper()]


def computed_with_get(x: torch.Tensor) -> Any:
    return x * globals().get(_name().upper(), 1.0)


def computed_through_a_variable(x: torch.Tensor) -> Any:
    held = globals()
    return x * held[_name().upper()]


def computed_of_all(x: torch.Tensor) -> Any:
    return x * dict(globals())[_name().upper()]


def computed_attribute(x: torch.Tensor) -> Any:
    return x * getattr(settings, _name().upper())


def computed_attribute_of_a_class(x: torch.Tensor) -> Any:
    return x * getattr(Settings, _name().upper())


def computed_item(x: torch.Tensor) -> Any:
    return x * vars(settings)[f"{KEY[:3]}LE"]


def computed_getter(x: torch.Tensor) -> Any:
    return x * operator.attrgetter(_name().upper())(settings)


def computed_file(x: torch.Tensor) -> Any:
    return x * sys.modules["own_" + KEY[:1].lower() + "ettings"].SCALE


def computed_import(x: torch.Tensor) -> Any:
    return x * importlib.import_module("own_" + KEY[:1].lower() + "ettings").SCALE


def computed_code(x: torch.Tensor) -> Any:
    return x * eval(_name().upper() + "* 2")


def computed_parameter(x: torch.Tensor, name: str = "SCALE") -> Any:
    return x * globals()[name]


COMPUTED = [
    computed_global,
    computed_with_get,
    computed_through_a_variable,
    computed_of_all,
    computed_attribute,
    computed_attribute_of_a_class,
    computed_item,
    computed_getter,
    computed_file,
    computed_import,
    computed_code,
    computed_parameter,
]


@pytest.mark.parametrize("checks", ["python"], indirect=True)
@pytest.mark.parametrize("way", ["graph", "capture", "fuse"])
@pytest.mark.parametrize("function", COMPUTED, ids=lambda value: value.__name__)
def test_a_name_that_is_computed_is_told(
    function: Callable[[torch.Tensor], Any], way: str, device: torch.device
) -> None:
    x, module = torch.ones(2, device=device), InModule(function).eval()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if way == "capture":
            gw.capture(module, x)
        else:
            made = gw.graph(module) if way == "graph" else gw.fuse(module, (x,))
            with torch.no_grad():
                made(x)
                made(x)
            assert f"that {function.__name__} looks up by a computed name" in made.explain()
    texts = [str(each.message) for each in told if "computed name" in str(each.message)]
    assert len(texts) == 1
    assert function.__name__ in texts[0]
    assert all(issubclass(each.category, RuntimeWarning) for each in told)


def test_a_computed_name_is_told_once_and_at_the_users_line(device: torch.device) -> None:
    x = torch.ones(2, device=device)
    with pytest.warns(RuntimeWarning, match="computed name") as told:
        gw.capture(computed_global, x)
    assert told[0].filename == __file__
    gw.capture(computed_global, x)  # Warnings are errors.
    gw.graph(computed_global)(x)


class Dynamic(nn.Module):
    """Looks up what is watched anyway, or is not the user's."""

    kind = "relu"

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.which = "layer"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = getattr(self, self.which)(x)
        x = getattr(functional, self.kind)(x) + getattr(torch, "fin" + "fo")(x.dtype).tiny
        assert "SCALE" in globals()
        assert "own_settings" in sys.modules
        return getattr(x, "a" + "bs")()


def test_what_is_watched_anyway_is_not_told(device: torch.device) -> None:
    module, x = Dynamic().to(device).eval(), torch.ones(2, device=device)
    graphed = gw.graph(module)
    with torch.no_grad():
        graphed(x)
        gw.capture(module, x)
    assert "computed name" not in graphed.explain()


@pytest.fixture
def library(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An installed library whose code looks up its globals by names that it computes."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    text = "FACTOR = 2.0\n\n\ndef scaled(x, name):\n    return x * globals()[name.upper()]\n"
    (folder / "own_library.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("own_library")
    sys.modules.pop("own_library", None)


def test_a_library_is_not_told_of(library: Any, device: torch.device) -> None:
    scaled = library.scaled
    graphed = gw.graph(lambda x: scaled(x, "factor"))
    graphed(torch.ones(2, device=device))
    assert "computed name" not in graphed.explain()
