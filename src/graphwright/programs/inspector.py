"""Inspect a program: run it, note what it calls, and look which of that could take part."""

from __future__ import annotations

import math
import time
import types
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..calls.options import callable_problem, items_problem, names_checked, refuse
from ..checker.checker import check
from ..checker.finding import Severity
from ..errors import GraphwrightError, OptionError
from .inspection import CalledMethod, ProgramInspection, varying_of
from .observed_calls import FORWARD, CallsObserver, ModuleMethod, ObservedCall
from .program_modules import modules_inside
from .program_runs import run_of

# How deep it is looked for modules inside of those that cannot take part.
_MAX_DEPTH = 8
_GENERATE = "generate"
# What keeps a method from being one graph; what graph() prepares before a capture does not.
_STOPS = (Severity.BLOCKS, Severity.BREAKS)


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
            argument; a SentenceTransformer is called by its `encode`.

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
        modules: the outermost modules of the program, by where they are.
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
        self.modules = modules_inside(program, run)
        if not self.modules:
            raise OptionError(
                f"No module was found inside of {name_of(program)}.",
                remedy="Pass the object that holds the modules, or a function that names it.",
            )
        self._program, self._calls, self._run = program, calls, run_of(program, run)
        self.device = device_of(self.modules.values())
        self.owners: dict[ModuleMethod, nn.Module] = {}
        self.samples: dict[ModuleMethod, list[ObservedCall]] = {}
        self.left_out: dict[str, str] = {}
        self._rows: list[CalledMethod] = []
        # Of methods that were looked at before: whether they can take part, and why.
        self._verdicts: dict[ModuleMethod, tuple[bool, str]] = {}

    def inspected(self) -> ProgramInspection:
        """Run the program and look at what it calls."""
        for call in self._calls:
            self._run(self._program, call)  # First calls take longer.
        seen, seconds = self._observed(frozenset())
        rows, self.owners = _rows(seen)
        self._rows = rows
        self._look_for_parts(rows)
        return ProgramInspection(name_of(self._program), seconds, rows, self.left_out)

    def _observed(self, wanted: frozenset[ModuleMethod]) -> tuple[list[ObservedCall], list[float]]:
        """What is called in a run of all calls, and the seconds of each."""
        seconds = []
        with CallsObserver(self.modules, self.device, wanted) as observer:
            for call in self._calls:
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
            self._look_at(level)
            refused = {number for number, row in enumerate(rows) if row.takes_part is False}
            level = [row for row in rows if row.inside in refused and row.takes_part is None]

    def _look_at(self, level: Sequence[CalledMethod]) -> None:
        """Say of some methods whether they can take part."""
        wanted = frozenset(row.target for row in level)
        calls, _ = self._observed(wanted)
        samples: dict[ModuleMethod, list[ObservedCall]] = {}
        for call in calls:
            if call.sample is not None:
                samples.setdefault(call.target, []).append(call)
        for row in level:
            mine = samples.get(row.target, [])
            if row.target not in self._verdicts:
                module = self.owners[row.target]
                self._verdicts[row.target] = _can_take_part(row, module, mine)
            row.takes_part, row.reason = self._verdicts[row.target]
            if row.takes_part:
                self.samples[row.target] = mine

    def parts_inside(self, row: CalledMethod) -> list[CalledMethod]:
        """The methods called inside of one that cannot be tuned after all, which could be."""
        number = next(n for n, each in enumerate(self._rows) if each is row)
        level = [each for each in self._rows if each.inside == number and each.takes_part is None]
        if level:
            self._look_at(level)
        return [each for each in level if each.takes_part]


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
    row.varying = varying_of([call.sizes for call in calls])


def _can_take_part(
    row: CalledMethod, module: nn.Module, samples: Sequence[ObservedCall]
) -> tuple[bool, str]:
    """Whether a method could be captured or tuned; with what, or why not."""
    if row.target.method == _GENERATE and hasattr(module, "generation_config"):
        return True, "its decode steps as graphs, by graph_generate()"
    if "train" in row.modes:
        return False, "it is in train mode: call .eval()"
    if not samples:
        return False, "its calls differ from run to run, or their arguments cannot be copied"
    by_size = sorted(samples, key=lambda call: sum(map(math.prod, call.sizes.values())))
    for call in {id(each): each for each in (samples[0], by_size[0], by_size[-1])}.values():
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


def name_of(program: Any) -> str:
    """A program as it is called in texts."""
    if isinstance(program, types.FunctionType | types.MethodType):
        return program.__qualname__
    return type(program).__name__


def precision_of(modules: Iterable[nn.Module]) -> torch.dtype:
    """The lowest precision in which modules have parameters; float32 where none are."""
    dtypes = {p.dtype for module in modules for p in module.parameters() if p.is_floating_point()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def device_of(modules: Iterable[nn.Module]) -> torch.device:
    """The GPU that modules are on; else the CPU."""
    places = (tensor.device for module in modules for tensor in module.parameters())
    return next((place for place in places if place.type == "cuda"), torch.device("cpu"))
