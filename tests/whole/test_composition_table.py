"""The tables of docs/explanation/composition.md: what comes of a part's gain, seen by what runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import gains
import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "composition.md"


def documented() -> dict[tuple[str, str], str]:
    """The words of all tables, by row and column."""
    text = PAGE.read_text("utf-8").partition("## Pairs")[2]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    found: dict[tuple[str, str], str] = {}
    columns: list[str] = []
    for line in lines:
        name, *words = [cell.strip(" `") for cell in line.split("|")[1:-1]]
        if words[0] == "graph":
            columns = words
        elif set(name) != {"-"}:
            found |= {(name, column): word for column, word in zip(columns, words, strict=True)}
    return found


def cases(rows: Iterable[str]) -> list[object]:
    """Each row with each inner part; to tune takes seconds, so that only some of it runs always."""
    return [
        pytest.param(row, inner, marks=[pytest.mark.slow] * (row != "graph" and inner in SECONDS))
        for row in rows
        for inner in gains.INNER
    ]


SECONDS = ("tune", "load")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("outer", "inner"), cases(gains.OUTER))
def test_pair(outer: str, inner: str, device: torch.device) -> None:
    found = gains.pair(outer, inner, device)
    assert found != gains.LOST
    assert found == documented()[outer, inner]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("surrounding", "inner"), cases(gains.SURROUNDINGS))
def test_surroundings(surrounding: str, inner: str, device: torch.device) -> None:
    found = gains.surrounded(surrounding, inner, device)
    assert found != gains.LOST
    assert found == documented()[surrounding, inner]


def test_page_has_all_pairs_and_no_other() -> None:
    wanted = {(row, inner) for row in (*gains.OUTER, *gains.SURROUNDINGS) for inner in gains.INNER}
    assert set(documented()) == wanted
