"""The package as a whole: what it exports, what importing it costs, how its errors read."""

from __future__ import annotations

import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import graphwright as gw
from graphwright import errors

ROOT = Path(__file__).parents[2]


def test_all_is_what_the_package_shows() -> None:
    shown = {
        name
        for name, value in vars(gw).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert shown | {"__version__"} == set(gw.__all__)
    assert list(gw.__all__) == sorted(gw.__all__)


def test_every_public_thing_has_a_docstring() -> None:
    for name in gw.__all__:
        value = getattr(gw, name)
        if callable(value):
            assert inspect.getdoc(value), name


def test_importing_initialises_no_cuda_and_is_quick() -> None:
    """By the interpreter's own account, the best of five: other load cannot shorten it."""
    code = "import sys, torch; a = {*sys.modules}; import graphwright; print({*sys.modules} - a)"
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    for name in ("rich", "click", "transformers", "torch._inductor", "triton"):
        assert f"'{name}'" not in result.stdout


def tree() -> list[type[errors.GraphwrightError]]:
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    return [value for value in classes if issubclass(value, errors.GraphwrightError)]


def test_every_error_is_exported_and_documented() -> None:
    text = (ROOT / "docs" / "reference" / "errors.md").read_text()
    documented = re.findall(r"^### `(\w+)`", text, re.MULTILINE)
    assert documented == [e.__name__ for e in tree()]
    assert all(e.__name__ in gw.__all__ for e in tree())


@pytest.mark.parametrize("kind", tree())
def test_errors_say_what_where_and_the_remedy(kind: type[errors.GraphwrightError]) -> None:
    error = kind("It broke.", where="model.py:3", remedy="Mend it.")
    assert str(error) == "It broke. (at model.py:3)\nMend it."
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (again.what, again.where, again.remedy) == ("It broke.", "model.py:3", "Mend it.")
    assert str(kind("It broke.")) == "It broke."
