"""What a program does with the modules inside of it, as text, as JSON and in a notebook."""

from __future__ import annotations

import json
import os
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..calls.plurals import counted
from ..report.markup import element
from ..report.saving import save_as
from ..report.table import duration
from .observed_calls import ModuleMethod

SCHEMA, SCHEMA_VERSION = "graphwright.inspect", 1
_WIDTH = 80


@dataclass(frozen=True)
class SharedSize:
    """Dimensions that have the same size as each other in every call, and vary from call to call.

    Attributes:
        places: of the dimensions: an argument's name and the number of its dimension.
        low: the smallest size that was seen.
        high: the largest one.
    """

    places: tuple[tuple[str, int], ...]
    low: int
    high: int

    def __str__(self) -> str:
        of: dict[int, list[str]] = {}
        for name, dimension in self.places:
            of.setdefault(dimension, []).append(name)
        names = [f"dimension {n} of {_listed(each)}" for n, each in of.items()]
        return f"{', '.join(names)}: {self.low} to {self.high}"


def varying_of(sizes: Sequence[Mapping[str, tuple[int, ...]]]) -> list[SharedSize]:
    """Dimensions that vary, together with those that always have the same size."""
    places: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    for name, first in sizes[0].items():
        shapes = [each.get(name, ()) for each in sizes]
        if any(len(shape) != len(first) for shape in shapes):
            continue
        for dimension in range(len(first)):
            found = tuple(shape[dimension] for shape in shapes)
            if len({*found}) > 1:
                places.setdefault(found, []).append((name, dimension))
    return [SharedSize(tuple(each), min(found), max(found)) for found, each in places.items()]


@dataclass
class CalledMethod:
    """A method of a module in a program, and its calls inside of one other method.

    Attributes:
        target: what is called.
        module: the name of its module's class.
        inside: where it is called: the number of that row; None for the program itself.
        calls: how often it was called, in all of the program's calls.
        kinds: what its arguments are, by name, and how often: the most frequent first.
        keywords: names of arguments that were passed by keyword.
        modes: what was on: "eval" or "train", "gradients", "inference mode", "autocast".
        host_s: seconds of the host in it, in all calls.
        device_s: seconds of a GPU in it; None without one.
        varying: dimensions that vary from call to call.
        takes_part: whether it could be captured, or be tuned; None where a method around it can,
            or where that was not looked at.
        reason: why it cannot, or with what it can.
    """

    target: ModuleMethod
    module: str
    inside: int | None
    calls: int = 0
    kinds: list[tuple[dict[str, str], int]] = field(default_factory=list)
    keywords: list[str] = field(default_factory=list)
    modes: list[str] = field(default_factory=list)
    host_s: float = 0.0
    device_s: float | None = None
    varying: list[SharedSize] = field(default_factory=list)
    takes_part: bool | None = None
    reason: str = ""

    @property
    def seconds(self) -> float:
        """Seconds in it: of the GPU where there is one."""
        return self.host_s if self.device_s is None else self.device_s


class ProgramInspection:
    """What a program does with the modules inside of it: what `inspect` returns.

    `print(inspection)` shows it in 80 columns, a notebook as a table.

    Attributes:
        name: of the program.
        program_calls: how many calls it was inspected with.
        seconds: of the program's calls, in turn.
        rows: the methods that are called; those called inside of another one come after it.
        left_out: where modules are that were not looked into, with their classes: what graphwright
            has made already, and scripted modules.
    """

    def __init__(
        self,
        name: str,
        seconds: Sequence[float],
        rows: Sequence[CalledMethod],
        left_out: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.seconds, self.rows = name, list(seconds), list(rows)
        self.left_out = dict(left_out or {})
        self.program_calls = len(self.seconds)

    def share(self, row: CalledMethod) -> float:
        """The share of the program's time that is spent in a method."""
        return row.seconds / max(sum(self.seconds), 1e-12)

    def parts(self) -> list[CalledMethod]:
        """The methods that could be captured or tuned, none of them inside of another one."""
        return [row for row in self.rows if row.takes_part]

    def to_json(self) -> str:
        """All of it as JSON with a schema version."""
        rows = [
            {
                "method": str(row.target),
                "path": row.target.path,
                "name": row.target.method,
                "class": row.module,
                "inside": row.inside,
                "calls": row.calls,
                "kinds": [{"arguments": words, "calls": count} for words, count in row.kinds],
                "keywords": row.keywords,
                "modes": row.modes,
                "host_s": row.host_s,
                "device_s": row.device_s,
                "share": self.share(row),
                "varying": [
                    {"places": [list(place) for place in each.places], "low": each.low}
                    | {"high": each.high}
                    for each in row.varying
                ],
                "takes_part": row.takes_part,
                "reason": row.reason,
            }
            for row in self.rows
        ]
        found = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "program": self.name}
        found |= {"seconds": self.seconds, "rows": rows, "left_out": self.left_out}
        return json.dumps(found, indent=1, ensure_ascii=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON or as text.

        Args:
            path: of a file whose suffix is .json or .txt.

        Raises:
            GraphwrightError: the suffix is another one, or the file cannot be written.
        """
        save_as(path, {".json": self.to_json, ".txt": lambda: f"{self}\n"})

    def _shown(self) -> Iterator[tuple[int, CalledMethod]]:
        """The rows that are shown, with their depth: nothing inside of what takes part."""
        depths: dict[int, int] = {}
        for number, row in enumerate(self.rows):
            if row.inside is None:
                depths[number] = 0
            elif row.inside in depths and not self.rows[row.inside].takes_part:
                depths[number] = depths[row.inside] + 1
            else:
                continue
            yield depths[number], row

    def __str__(self) -> str:
        head = f"{self.name}: {counted(self.program_calls, 'call')}"
        head += f" of {duration(statistics.median(self.seconds))} (median)" if self.seconds else ""
        lines = [head, "", "share  calls  method"]
        for depth, row in self._shown():
            share = f"{self.share(row):4.0%}"
            lines.append(f"{share:>5}  {row.calls:>5}  {'  ' * depth}{row.target} ({row.module})")
            before = " " * (14 + 2 * depth)
            for text in _notes(row):
                lines += textwrap.wrap(
                    text,
                    _WIDTH,
                    initial_indent=before + "  ",
                    subsequent_indent=before + "    ",
                    break_long_words=False,
                    break_on_hyphens=False,
                )
        if not self.rows and not self.left_out:
            lines.append("No module inside of the program was called.")
        lines += [f"Not looked into: {place} ({cls})" for place, cls in self.left_out.items()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        parts = counted(len(self.parts()), "part")
        return f"<ProgramInspection {self.name}, {parts} that can be captured or tuned>"

    def _repr_html_(self) -> str:
        headings = ("share", "calls", "method", "class", "arguments", "what can be done")
        head = element("tr", *(element("th", heading) for heading in headings))
        body = []
        for depth, row in self._shown():
            notes = list(_notes(row))
            cells = (
                f"{self.share(row):.0%}",
                str(row.calls),
                "\u2003" * depth + str(row.target),
                row.module,
                "; ".join(notes[1:]),
                notes[0],
            )
            body.append(element("tr", *(element("td", cell) for cell in cells)))
        table = element("table", element("thead", head), element("tbody", *body))
        return element("div", element("strong", self.name), table)


def _notes(row: CalledMethod) -> Iterator[str]:
    """What is said of a method below its name: first what can be done with it."""
    if row.takes_part:
        yield f"can take part: {row.reason}"
    elif row.takes_part is None:
        yield row.reason or "not looked at"
    else:
        yield f"cannot take part: {row.reason}"
    words, count = row.kinds[0]
    first = ", ".join(f"{name} {what}" for name, what in words.items())
    more = len(row.kinds) - 1
    others = f"; and {counted(more, 'other kind')} of call" if more else ""
    often = f" ({counted(count, 'time')})" if more else ""
    yield f"arguments: {first or 'none'}{often}{others}"
    for each in row.varying:
        yield f"varies: {each}"
    unusual = [mode for mode in row.modes if mode not in ("eval", "inference mode")]
    if unusual:
        yield f"runs with: {', '.join(unusual)}"


def _listed(names: Sequence[str]) -> str:
    """Names as one reads them: a, b and c."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
