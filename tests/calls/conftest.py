"""Each test about what is noticed runs with the checks in Python and with those in C++."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from graphwright.calls import watch
from graphwright.ops import compiled_checks

MANY = 12


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of many cases, CI has all with the checks in Python, and every third with those in C++.

    That these see the same at each kind of place is tested in test_kinds_of_places.py.
    """
    in_c = defaultdict(list)
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if item.path.parent != Path(__file__).parent or params.get("checks") != "compiled":
            continue
        if isinstance(item, pytest.Function) and not item.get_closest_marker("gpu"):
            in_c[item.path, item.originalname].append(item)
    for cases in in_c.values():
        for number, item in enumerate(cases):
            if number % 3 and len(cases) >= MANY:
                item.add_marker(pytest.mark.exhaustive)


@pytest.fixture
def check_in_c(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Callable[[], bool]]:
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    with pytest.MonkeyPatch.context() as patch:
        # One folder for all workers: it is built once.
        shared = tmp_path_factory.getbasetemp().parent / "checks"
        patch.setenv("GRAPHWRIGHT_CACHE_DIR", str(shared))
        patch.delenv("GRAPHWRIGHT_COMPILED_CHECKS")
        compiled_checks.provide()
    seen = watch.COMPILED and watch.COMPILED_ARGUMENTS
    assert seen, "they cannot be built, or do not see what they have to"
    return watch.COMPILED[0]


@pytest.fixture(params=["python", "compiled"], autouse=True)
def checks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(watch, "COMPILED", [])
        monkeypatch.setattr(watch, "COMPILED_ARGUMENTS", [])
        return "python"
    request.getfixturevalue("check_in_c")
    # From the first call on.
    monkeypatch.setattr(watch, "_QUIET", 0)
    return "compiled"
