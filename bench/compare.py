"""Two results of tune, capture or training: what became faster or slower beyond the noise."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphwright.evaluation.measurement import median_interval

from .common.record import SCHEMA
from .common.rendering import Table, aligned, bare, short

Result = dict[str, Any]

# The versions of the schema that hold models with ways.
COMPARABLE = {"tune": 2, "capture": 1, "training": 1}
# Changes below this are nothing, however certain.
WORTH_IT = 1.03
OURS = "graphwright."
SIGNS = {"faster": "+", "slower": "−", "same": "", "lost": "−", "gained": "+"}


class NotComparableError(Exception):
    """Why two files cannot be set against each other, as a sentence."""


@dataclass(frozen=True)
class Change:
    """A way of a model in two results; seconds are None where there is no figure.

    `verdict` is "faster" or "slower" where the 95 % intervals of the medians lie apart and the
    medians by over 3 %, else "same"; "lost" or "gained" where only A or only B has a figure.
    """

    model: str
    way: str
    before_s: float | None
    after_s: float | None
    verdict: str
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """B's latency over A's."""
        if self.before_s is None or self.after_s is None:
            return None
        return self.after_s / self.before_s

    @property
    def regression(self) -> bool:
        """Whether what graphwright gives is slower than it was, or gone."""
        return self.way.startswith(OURS) and self.verdict in ("slower", "lost")


def load(file: Path) -> Result:
    """A result of a benchmark.

    Raises:
        NotComparableError: the file cannot be read, or holds something else.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NotComparableError(f"{file} cannot be read: {error}.") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise NotComparableError(f"{file} is no result of scripts/bench.")
    benchmark, version = data.get("benchmark"), data.get("schema_version")
    if benchmark not in COMPARABLE:
        raise NotComparableError(
            f"{file} is a result of {benchmark}, and only {', '.join(COMPARABLE)} are compared."
        )
    if version != COMPARABLE[benchmark]:
        raise NotComparableError(
            f"{file} has schema version {version}; of {benchmark}, version "
            f"{COMPARABLE[benchmark]} can be compared."
        )
    return data


def changes(before: Result, after: Result) -> Iterator[Change]:
    """Every way of every model that both results have.

    Raises:
        NotComparableError: they are of different benchmarks.
    """
    if before["benchmark"] != after["benchmark"]:
        raise NotComparableError(
            f"A is a result of {before['benchmark']}, B of {after['benchmark']}: "
            "they measure different things."
        )
    for name, old in before["models"].items():
        if name in after["models"]:
            new = after["models"][name]
            olds, news = old.get("ways", {}), new.get("ways", {})
            for way in dict.fromkeys((*olds, *news)):
                change = _change(name, way, olds.get(way, {}), news.get(way, {}), new)
                if change is not None:
                    yield change


def _change(name: str, way: str, old: Result, new: Result, model: Result) -> Change | None:
    a, b = old.get("latency_s"), new.get("latency_s")
    if a is None and b is None:
        return None
    if a is None:
        return Change(name, way, a, b, "gained")
    if b is None:
        why = new.get("reason") or model.get("failed") or "not in B"
        return Change(name, way, a, b, "lost", f"{new.get('status', 'failed')}: {why}")
    note = ""
    if old.get("chosen") != new.get("chosen"):
        note = f"{old.get('chosen')} → {new.get('chosen')}"
    (low_a, high_a), (low_b, high_b) = _interval(old), _interval(new)
    verdict = "same"
    if b > WORTH_IT * a and low_b > high_a:
        verdict = "slower"
    elif a > WORTH_IT * b and high_b < low_a:
        verdict = "faster"
    return Change(name, way, a, b, verdict, note)


def _interval(row: Result) -> tuple[float, float]:
    """The 95 % interval of the median over the rounds, each by its own median."""
    return median_interval([statistics.median(block) for block in row["latency_samples"]])


def warnings(before: Result, after: Result) -> Iterator[str]:
    """Why the figures may differ though the code is the same."""
    a, b = before["environment"], after["environment"]
    for key in dict.fromkeys((*a, *b)):
        if key != "graphwright" and a.get(key) != b.get(key):
            yield f"other {key}: {a.get(key, 'none')} in A, {b.get(key, 'none')} in B"
    for letter, result in (("A", before), ("B", after)):
        if result.get("quick"):
            yield f"{letter} is a quick run, which is no result"
    if (a_options := before.get("options")) != (b_options := after.get("options")):
        yield f"other options of tune: {a_options} in A, {b_options} in B"
    for letter, mine, other in (("A", before, after), ("B", after, before)):
        alone = [name for name in mine["models"] if name not in other["models"]]
        if alone:
            yield f"only in {letter}: {', '.join(alone)}"


def table(found: list[Change]) -> Table:
    """Latencies in µs, model by model and way by way."""
    rows = [["model", "way", "A µs", "B µs", "B / A", "", "change"]]
    for change in found:
        ratio = "–" if change.ratio is None else f"{change.ratio:.3f}"
        told = f"{change.verdict} ({change.note})" if change.note else change.verdict
        times = [bare(change.before_s, "s"), bare(change.after_s, "s")]
        names = [change.model, short(change.way)]
        rows.append([*names, *times, ratio, SIGNS[change.verdict], told])
    return rows


def _described(letter: str, file: Path, result: Result) -> str:
    machine = result["environment"]
    place = machine.get("gpu") or machine.get("processor", "unknown machine")
    return f"{letter}: {file}, commit {result['commit']}, {place}, torch {machine.get('torch')}"


def main(before: Path, after: Path) -> int:
    """Print the comparison; 1 if something of graphwright's got slower, 2 if there is none."""
    try:
        a, b = load(before), load(after)
        found = list(changes(a, b))
    except NotComparableError as error:
        print(f"scripts/bench compare: {error}", file=sys.stderr)
        return 2
    print(f"{_described('A', before, a)}\n{_described('B', after, b)}")
    for warning in warnings(a, b):
        print(f"warning: {warning}")
    print(f"\n{aligned(table(found))}\n")
    worse = [change for change in found if change.regression]
    better = [c for c in found if c.way.startswith(OURS) and c.verdict == "faster"]
    ours = sum(change.way.startswith(OURS) for change in found)
    print(f"Of {ours} ways of graphwright, {len(better)} got faster and {len(worse)} slower.")
    return int(bool(worse))
