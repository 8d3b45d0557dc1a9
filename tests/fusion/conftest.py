"""What passes do is tested whether it pays or not: the models are too small for that."""

from __future__ import annotations

import pytest

from graphwright.fusion import pass_manager


@pytest.fixture(autouse=True)
def not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_manager, "MEASURED", frozenset())
