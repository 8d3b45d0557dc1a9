"""A share of a test's cases for the quick run; the slow one has the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def share(cases: Iterable[Any], *, of: int = 2, slow: int = 1) -> list[Any]:
    """Cases as parameters of a test: one in `of` is quick, of the others one in `slow` is slow.

    What is left is exhaustive.
    """
    found, others = [], 0
    for number, case in enumerate(cases):
        if number % of == 0:
            found.append(case)
            continue
        mark = pytest.mark.exhaustive if others % slow else pytest.mark.slow
        others += 1
        if isinstance(case, type(pytest.param())):
            found.append(case._replace(marks=(*case.marks, mark)))
        else:
            found.append(pytest.param(case, marks=mark))
    return found
