"""A profile as text in 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from ..calls.plurals import counted
from ..report.table import duration
from .profile_data import ProfileData
from .remedies import Remedy
from .table import OperationRow

_WIDTH = 80
# Rows that a table shows.
_ROWS = 8
_BAR = 24


def to_text(profile: ProfileData) -> str:
    """All that a person wants to see of a profile."""
    where = profile.roofs.device
    if profile.device == "cpu":
        threads = profile.roofs.threads
        where += f", {counted(threads, 'thread')}"
    what = "forward and backward" if profile.training else "forward"
    parts = [
        *_wrapped(f"{profile.name}, {what}: {duration(profile.call_s)} a call on {where}"),
        "",
        *_wrapped(profile.verdict.text),
    ]
    for line, what_there in profile.verdict.lines[:5]:
        parts += _wrapped(f"{_short(line.file)}:{line.number}  {what_there}", indent="  ")
        if line.source:
            parts.append(f"      {line.source[: _WIDTH - 6]}")
    parts += ["", "share of the time"]
    for cause, share in profile.verdict.shares.items():
        if share >= 0.005:
            parts.append(f"  {cause!s:36}{share:6.0%}  {'█' * round(_BAR * share)}".rstrip())
    graphs = any(remedy.applies and remedy.under_graph for remedy in profile.remedies)
    parts += ["", f"{'remedy':30}{'gain':>14}{'beside a graph' * graphs:>18}"]
    for remedy in sorted(profile.remedies, key=lambda r: (not r.applies, -r.high)):
        parts += _of_remedy(remedy)
    for by in ("module", "operation", "line"):
        parts += ["", *_table(by, profile.table(by), gpu=profile.device != "cpu")]
    parts += ["", *_roofs(profile)]
    for note in profile.notes:
        parts += _wrapped(note, indent="  ", first="")
    return "\n".join(line.rstrip() for line in parts)


def _short(file: str) -> str:
    """A file by its last folders."""
    path = Path(file)
    return f"…/{'/'.join(path.parts[-3:])}" if path.is_absolute() and len(file) > 50 else file


def _wrapped(text: str, indent: str = "", first: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _of_remedy(remedy: Remedy) -> list[str]:
    if not remedy.applies:
        return _wrapped(f"{remedy.name}: {remedy.why}", indent="      ", first="  ")
    beside = "" if remedy.under_graph is None else span(*remedy.under_graph)
    head = f"  {remedy.name:28}{span(remedy.low, remedy.high):>14}{beside:>18}"
    return [head, *_wrapped(remedy.why, indent="      ")]


def span(low: float, high: float) -> str:
    """A range of gains."""
    first, last = (f"{value:.2f}" if value < 10 else f"{value:.0f}" for value in (low, high))
    return f"{first}×" if first == last else f"{first}–{last}×"


def _table(by: str, rows: Sequence[OperationRow], *, gpu: bool) -> list[str]:
    count = "launches" if gpu else "ops"
    lines = [f"{'by ' + by:37}{'time':>9}{'share':>7}{count:>9}{'bytes':>9}{'of roof':>9}"]
    for row in rows[:_ROWS]:
        key = row.key if len(row.key) <= 34 else f"…{row.key[-33:]}"
        number = row.launches if gpu else row.operations
        lines.append(
            f"  {key:35}{duration(row.seconds):>9}{row.share:7.0%}{number:9}"
            f"{byte_count(row.nbytes):>9}{row.of_roof:9.0%}"
        )
    if len(rows) > _ROWS:
        rest = rows[_ROWS:]
        seconds = sum(row.seconds for row in rest)
        share = sum(row.share for row in rest)
        lines.append(f"  {counted(len(rest), 'other'):35}{duration(seconds):>9}{share:7.0%}")
    return lines


def byte_count(count: float) -> str:
    """Bytes with three figures and a unit that suits them."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def _rate(flops: float) -> str:
    return f"{flops / 1e12:.3g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.3g} GFLOP/s"


def _roofs(profile: ProfileData) -> list[str]:
    roofs = profile.roofs
    products = ", ".join(f"{_rate(value)} {name}" for name, value in roofs.flops.items())
    known = [
        f"copy {roofs.bandwidth / 1e9:.3g} GB/s",
        f"products {products}",
        f"an operation {duration(roofs.operation_s)}",
    ]
    if roofs.kernel_s:
        known.append(f"the shortest kernel {duration(roofs.kernel_s)}")
    if roofs.transfers:
        known += [f"{name} {value / 1e9:.3g} GB/s" for name, value in roofs.transfers.items()]
    when = f"measured on {roofs.measured}" if roofs.recalled else "measured now"
    return _wrapped(f"roofs, {when}: {'; '.join(known)}", indent="  ", first="")
