"""The soak test of bench/serving, for a short time; `scripts/bench soak` runs it for minutes."""

from __future__ import annotations

import os
from typing import Any

import pytest

from bench.serving import soak

GIB = 2.0**10


def samples(
    rss_mib: float = GIB, threads: int = 9, files: int = 40, *, grows: str = ""
) -> list[soak.Sample]:
    """300 seconds of a process, of which something grows after the warm-up."""
    found = []
    for second in range(300):
        more = max(0, second - 75)
        found.append(
            soak.Sample(
                float(second),
                rss_mib + (0.1 * more if grows == "rss_mib" else 0.0),
                threads + (more // 4 if grows == "threads" else 0),
                files + (more // 10 if grows == "files" else 0),
            )
        )
    return found


def figures(grows: str = "", **changes: dict[str, int]) -> dict[str, Any]:
    counts = {"right": 1000, "refused": 20, "failed": 20, "left": 30, "wrong": 0, "lost": 0}
    server = {"answered": 1010, "waiting": 0, "ended": 0}
    return {
        "process": soak.summary(samples(grows=grows), 300.0),
        "requests": counts | changes.get("requests", {}),
        "server": server | changes.get("server", {}),
    }


def test_a_server_that_stays_as_it_is_has_no_problem() -> None:
    assert soak.problems(figures()) == []


@pytest.mark.parametrize("grows", ["rss_mib", "threads", "files"])
def test_what_grows_is_a_problem(grows: str) -> None:
    (found,) = soak.problems(figures(grows))
    assert found.startswith(f"{grows} grew from")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"requests": {"wrong": 1}}, "1 wrong request"),
        ({"requests": {"lost": 2}}, "2 lost requests"),
        ({"server": {"answered": 999}}, "the server counts 999 answers, not 1000"),
        ({"server": {"answered": 1031}}, "the server counts 1031 answers"),
        ({"server": {"waiting": 1}}, "1 request still waiting"),
        ({"server": {"ended": -9}}, "the server ended with -9"),
    ],
)
def test_what_is_lost_is_a_problem(changes: dict[str, dict[str, int]], words: str) -> None:
    (found,) = soak.problems(figures(**changes))
    assert found.startswith(words)


@pytest.mark.slow
def test_a_server_under_a_mixed_load_stays_as_it_is() -> None:
    found = soak.soak(float(os.environ.get("GRAPHWRIGHT_SOAK_S", "30")))
    assert found["problems"] == [], (found["process"], found["examples"])
    assert min(found["requests"][kind] for kind in ("right", "refused", "failed", "left")) > 0
    assert found["requests"]["reloads"] > 0
