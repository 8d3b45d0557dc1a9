"""Inspect a program: which of its modules are called, how, for how long, and what could be done."""

from __future__ import annotations

import json
import os
import statistics
import textwrap
import time
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..calls.options import callable_problem, items_problem, names_checked, refuse
from ..calls.plurals import counted
from ..checker.checker import check
from ..checker.finding import Severity
from ..errors import GraphwrightError, OptionError
from ..report.markup import element
from ..report.saving import save_as
from ..report.table import duration
from .observed_calls import FORWARD, CallsObserver, ModuleMethod, ObservedCall
from .program_modules import modules_inside

SCHEMA, SCHEMA_VERSION = "graphwright.inspect", 1
_WIDTH = 80
# How deep it is looked for modules inside of those that cannot take part.
_MAX_DEPTH = 8
_GENERATE = "generate"
# What keeps a method from being one graph; what graph() prepares before a capture does not.
_STOPS = (Severity.BLOCKS, Severity.BREAKS)


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


@names_checked
def inspect(
    program: Any,
    calls: Sequence[Any],
    *,
    run: Callable[[Any, Any], Any] | None = None,
) -> ProgramInspection:
    """Run a program on sample calls and say what it does with the modules inside of it.

    The program runs at least twice on each call, and again to look at modules inside of those that
    cannot take part. Its modules stay the same objects, and nothing of them is changed.

    Args:
        program: any object with modules inside, such as a pipeline, or a function that reaches
            some.
        calls: what it is called with, one for each call.
        run: calls the program: `run(program, call)`. By default a call that is a tuple holds
            positional arguments, a dictionary keyword arguments, and anything else is the only
            argument.

    Returns:
        For each method of a module that is called: how often, with which shapes, dtypes, keywords
        and modes, its share of the time, which dimensions vary together, and whether it could be
        captured or tuned, or why not.

    Raises:
        OptionError: there is no call, or no module inside of the program.
    """
    refuse(
        "inspect",
        callable_problem("program", program) if run is None else None,
        callable_problem("run", run) if run is not None else None,
        items_problem("calls", calls, "calls"),
    )
    return Inspecting(program, list(calls), run).inspected()


class Inspecting:
    """One inspection, and what it has seen.

    Attributes:
        owners: the modules of the methods that are called.
        samples: calls of those that can take part, one of each kind, with their arguments.
        left_out: where modules are that cannot be looked into, with their classes.

    Args:
        program: what is inspected.
        calls: what it is called with.
        run: calls it; None for what `inspect` does by default.

    Raises:
        OptionError: there is no call, or no module inside of the program.
    """

    def __init__(
        self,
        program: Any,
        calls: Sequence[Any],
        run: Callable[[Any, Any], Any] | None,
    ) -> None:
        if not calls:
            raise OptionError("calls is empty.", remedy="Pass a few calls as your users make them.")
        self._outermost = modules_inside(program, run)
        if not self._outermost:
            raise OptionError(
                f"No module was found inside of {name_of(program)}.",
                remedy="Pass the object that holds the modules, or a function that names it.",
            )
        self._program, self._calls, self._run = program, calls, run or call_as_given
        self.device = device_of(self._outermost.values())
        self.owners: dict[ModuleMethod, nn.Module] = {}
        self.samples: dict[ModuleMethod, list[ObservedCall]] = {}
        self.left_out: dict[str, str] = {}

    def inspected(self) -> ProgramInspection:
        """Run the program and look at what it calls."""
        for call in self._calls:
            self._run(self._program, call)  # First calls take longer.
        seen, seconds = self._observed(frozenset())
        rows, self.owners = _rows(seen)
        self._look_for_parts(rows)
        return ProgramInspection(name_of(self._program), seconds, rows, self.left_out)

    def _observed(self, wanted: frozenset[ModuleMethod]) -> tuple[list[ObservedCall], list[float]]:
        """What is called in a run of all calls, and the seconds of each."""
        seconds = []
        with CallsObserver(self._outermost, self.device, wanted) as observer:
            for number, call in enumerate(self._calls):
                observer.program_call = number
                began = time.perf_counter()
                self._run(self._program, call)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                seconds.append(time.perf_counter() - began)
        self.left_out = observer.left_out
        return observer.calls, seconds

    def _look_for_parts(self, rows: Sequence[CalledMethod]) -> None:
        """Say of the outermost methods whether they can take part, and of those inside if not."""
        level = [row for row in rows if row.inside is None]
        for _ in range(_MAX_DEPTH):
            if not level:
                return
            wanted = frozenset(row.target for row in level)
            calls, _ = self._observed(wanted)
            samples: dict[ModuleMethod, list[ObservedCall]] = {}
            for call in calls:
                if call.sample is not None:
                    samples.setdefault(call.target, []).append(call)
            for row in level:
                mine = samples.get(row.target, [])
                row.takes_part, row.reason = _can_take_part(row, self.owners[row.target], mine)
                if row.takes_part:
                    self.samples[row.target] = mine
            refused = {number for number, row in enumerate(rows) if row.takes_part is False}
            level = [row for row in rows if row.inside in refused and row.takes_part is None]


def _rows(
    calls: Sequence[ObservedCall],
) -> tuple[list[CalledMethod], dict[ModuleMethod, nn.Module]]:
    """The methods that were called, those called inside of another one after it; their modules."""
    numbers: dict[tuple[int | None, ModuleMethod], int] = {}
    of_call: dict[int, int] = {}
    rows: list[CalledMethod] = []
    owners: dict[ModuleMethod, nn.Module] = {}
    of_row: list[list[ObservedCall]] = []
    for call in calls:
        inside = None if call.parent is None else of_call[id(call.parent)]
        key = inside, call.target
        if key not in numbers:
            numbers[key] = len(rows)
            rows.append(CalledMethod(call.target, type(call.module).__name__, inside))
            of_row.append([])
        number = of_call[id(call)] = numbers[key]
        owners[call.target] = call.module
        of_row[number].append(call)
    for row, mine in zip(rows, of_row, strict=True):
        _fill_in(row, mine)
    return rows, owners


def _fill_in(row: CalledMethod, calls: Sequence[ObservedCall]) -> None:
    """Say of a method what its calls were."""
    row.calls = len(calls)
    kinds = Counter(tuple(call.arguments.items()) for call in calls)
    row.kinds = [(dict(kind), count) for kind, count in kinds.most_common()]
    row.keywords = sorted({name for call in calls for name in call.keywords})
    row.modes = sorted({mode for call in calls for mode in call.mode})
    row.host_s = sum(call.host_s for call in calls)
    device = [call.device_s for call in calls if call.device_s is not None]
    row.device_s = sum(device) if device else None
    row.varying = _varying([call.sizes for call in calls])


def _varying(sizes: Sequence[Mapping[str, tuple[int, ...]]]) -> list[SharedSize]:
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


def _can_take_part(
    row: CalledMethod, module: nn.Module, samples: Sequence[ObservedCall]
) -> tuple[bool, str]:
    """Whether a method could be captured or tuned; with what, or why not."""
    if row.target.method == _GENERATE and hasattr(module, "generation_config"):
        return True, "its decode steps as graphs, by graph_generate()"
    if "train" in row.modes:
        return False, "it is in train mode: call .eval()"
    if not samples:
        return False, "its calls differ from run to run"
    for call in samples:
        assert call.sample is not None
        called: Any = module if row.target.method == FORWARD else getattr(module, row.target.method)
        try:
            with torch.no_grad():
                findings = check(called, *call.sample)
        except GraphwrightError as error:
            return False, error.what
        stops = [each for each in findings if each.severity in _STOPS]
        if stops:
            at = f" ({stops[0].place.file}:{stops[0].place.line})" if stops[0].place.file else ""
            return False, f"{stops[0].what.rstrip('.')}{at}"
    what = "as a graph, or tuned"
    return True, f"{what}, with buckets for its sizes" if row.varying else what


def _listed(names: Sequence[str]) -> str:
    """Names as one reads them: a, b and c."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def call_as_given(program: Any, call: Any) -> Any:
    """Call a program as a sample says."""
    if isinstance(call, tuple):
        return program(*call)
    if isinstance(call, Mapping):
        return program(**call)
    return program(call)


def name_of(program: Any) -> str:
    """A program as it is called in texts."""
    if isinstance(program, types.FunctionType | types.MethodType):
        return program.__qualname__
    return type(program).__name__


def device_of(modules: Iterable[nn.Module]) -> torch.device:
    """The GPU that modules are on; else the CPU."""
    places = (tensor.device for module in modules for tensor in module.parameters())
    return next((place for place in places if place.type == "cuda"), torch.device("cpu"))
