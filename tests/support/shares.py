"""A share of a test's cases for the quick run; the slow one has the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def share(cases: Iterable[Any], *, of: int = 2) -> list[Any]:
    """Cases as parameters of a test: one in `of` is quick, the others are slow."""
    slow, found = pytest.mark.slow, []
    for number, case in enumerate(cases):
        if number % of == 0:
            found.append(case)
        elif isinstance(case, type(pytest.param())):
            found.append(case._replace(marks=(*case.marks, slow)))
        else:
            found.append(pytest.param(case, marks=slow))
    return found
