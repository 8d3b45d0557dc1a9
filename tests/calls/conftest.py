"""Each test about what is noticed runs with the checks in Python and with those in C++."""

from __future__ import annotations

import shutil

import pytest

from graphwright.calls import watch
from graphwright.ops import compiled_checks


@pytest.fixture(params=["python", "compiled"], autouse=True)
def checks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(watch, "COMPILED", [])
    else:
        compiled_checks.wait(300)
        if shutil.which("c++") is None:
            pytest.skip("there is no C++ compiler")
        assert watch.COMPILED, "it cannot be built, or does not see what it has to"
        # From the first call on.
        monkeypatch.setattr(watch, "_QUIET", 0)
    return str(request.param)
