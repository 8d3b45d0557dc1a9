"""Accelerate a program in place: what tuning finds for its modules answers their calls, if it pays.

The outermost methods that can take part are tuned for the calls that they really get, one after the
other, the one with the largest share of the time first. Each is installed, the results of the whole
program are compared with those from before, and both are timed in turns: what is wrong or gains
nothing end to end is taken out again.

It is not public yet: buckets for sizes between those seen, generation, saving and learning are
missing.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn

from ..artifacts.tuned_module import TunedModule
from ..calls.objects import flatten_result
from ..errors import GraphwrightError
from ..evaluation.accuracy import difference
from ..report.result import EAGER
from ..report.table import duration
from ..tuning.tuner import tune
from .inspection import CalledMethod, ProgramInspection
from .inspector import Inspecting, call_as_given
from .installation import Answer, install, twin_of, uninstall
from .observed_calls import FORWARD, ModuleMethod, ObservedCall

# Parts with a smaller share of the time are left as they are.
_LEAST_SHARE = 0.02
# Kinds of calls of one part that are tuned for, the most frequent first.
_MOST_KINDS = 8
# The whole has to be faster by this share for a part to be kept; rounds of both in turns, and
# seconds after which no further round begins.
_LEAST_GAIN, _ROUNDS, _TIMING_S = 0.01, 7, 10.0
_SEED = 0


@dataclass
class AcceleratedPart:
    """A method of a module in an accelerated program.

    Attributes:
        target: the method.
        share: of the program's time, before.
        kept: whether something else answers its calls now.
        chosen: the strategy that tuning has chosen; "" if it was not tuned.
        reason: why it was kept, or left as it is.
        tuned: what answers its calls, if it was kept.
    """

    target: ModuleMethod
    share: float
    kept: bool = False
    chosen: str = ""
    reason: str = ""
    tuned: TunedModule | None = None

    def __str__(self) -> str:
        chosen = f" by {self.chosen}" if self.kept else ""
        return f"{self.share:4.0%}  {self.target}: {'answered' if self.kept else 'left'}{chosen}"


class Accelerated:
    """A program whose modules' calls are answered by what tuning has found.

    A context manager whose end is `undo()`.

    Attributes:
        inspection: of the program, before anything was changed.
        parts: the methods that could take part, and what became of each.
        before_s: seconds of all calls before, the median of rounds.
        after_s: the same by now, in the same rounds.
    """

    def __init__(self, inspection: ProgramInspection, parts: Sequence[AcceleratedPart]) -> None:
        self.inspection, self.parts = inspection, list(parts)
        self.before_s = self.after_s = sum(inspection.seconds)
        self._installed: list[tuple[nn.Module, dict[str, Answer]]] = []
        self._gained = False

    def undo(self) -> None:
        """Put all modules back as they were; once is enough."""
        for module, answers in self._installed:
            uninstall(module, answers)
        self._installed.clear()
        for part in self.parts:
            part.kept, part.tuned = False, None

    def take_in(self, without_s: float, with_s: float) -> None:
        """Another part is kept: the whole took so long without it, and takes so long with it."""
        before = self.before_s / self.after_s if self._gained else 1.0
        self.before_s, self.after_s, self._gained = before * without_s, with_s, True

    def explain(self) -> str:
        """What became of each part, and the time of the whole."""
        gain = self.before_s / self.after_s
        head = f"{self.inspection.name}: {duration(self.before_s)} before, "
        lines = [f"{head}{duration(self.after_s)} now ({gain:.2f}×)"]
        for part in self.parts:
            lines += [str(part), f"        {part.reason}"]
        return "\n".join(lines)

    def __enter__(self) -> Accelerated:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()

    def __str__(self) -> str:
        return self.explain()


def accelerate(
    program: Any,
    calls: Sequence[Any],
    *,
    run: Callable[[Any, Any], Any] | None = None,
    budget_s: float | None = None,
    tolerance: float | None = None,
    **options: Any,
) -> Accelerated:
    """Tune the modules inside of a program for what they are called with, in place.

    Args:
        program: as for `inspect`.
        calls: as for `inspect`.
        run: as for `inspect`.
        budget_s: seconds for all of tuning, divided by the parts' shares of the time; None for
            what `tune` takes by default for each.
        tolerance: as for `tune`.
        options: of `tune`, for each part.

    Raises:
        OptionError: there is no call, or no module inside of the program.
    """
    inspecting = Inspecting(program, list(calls), run)
    inspection = inspecting.inspected()
    parts = [AcceleratedPart(row.target, inspection.share(row)) for row in inspection.parts()]
    found = Accelerated(inspection, parts)
    whole = _Whole(program, list(calls), run or call_as_given, inspecting.device)
    rows = {row.target: row for row in inspection.parts()}
    try:
        for part in sorted(parts, key=lambda each: each.share, reverse=True):
            module, row = inspecting.owners[part.target], rows[part.target]
            share = part.share / max(sum(each.share for each in parts), 1e-9)
            given = dict(options) | ({} if tolerance is None else {"tolerance": tolerance})
            if budget_s is not None:
                given["budget_s"] = max(1.0, share * budget_s)
            _accelerate_part(
                part, row, module, inspecting.samples[part.target], whole, found, given
            )
    except BaseException:
        found.undo()
        raise
    return found


def _accelerate_part(
    part: AcceleratedPart,
    row: CalledMethod,
    module: nn.Module,
    samples: Sequence[ObservedCall],
    whole: _Whole,
    found: Accelerated,
    options: Mapping[str, Any],
) -> None:
    """Tune a part and keep what comes of it, if the whole is right and faster with it."""
    if part.share < _LEAST_SHARE:
        part.reason = f"it takes {part.share:.1%} of the time"
        return
    try:
        tuned = _tuned(part.target, row, module, samples, options)
    except GraphwrightError as error:
        part.reason = error.what
        return
    part.chosen = tuned.report.chosen or EAGER
    if part.chosen == EAGER:
        part.reason = "eager is the fastest"
        return
    answers: dict[str, Answer] = {part.target.method: tuned}
    found._installed.append((module, answers))  # So that an interruption takes it out.
    install(module, answers)
    reason = whole.difference() or ""
    if not reason:
        without_s, with_s = whole.timed_in_turns(module, answers)
        gain = 1 - with_s / without_s
        if gain >= _LEAST_GAIN:
            found.take_in(without_s, with_s)
            part.kept, part.tuned = True, tuned
            part.reason = f"the whole takes {gain:.0%} less time with it"
            return
        reason = f"the whole gains nothing with it ({gain:+.1%})"
    found._installed.pop()
    uninstall(module, answers)
    part.reason = reason


def _tuned(
    target: ModuleMethod,
    row: CalledMethod,
    module: nn.Module,
    samples: Sequence[ObservedCall],
    options: Mapping[str, Any],
) -> TunedModule:
    """What tuning makes of a method, for the kinds of calls that it gets."""
    twin = twin_of(module)
    called: Any = twin if target.method == FORWARD else getattr(twin, target.method)
    counts = {tuple(words.items()): count for words, count in row.kinds}
    often = sorted(samples, key=lambda call: counts.get(call.kind[2], 0), reverse=True)
    chosen = often[:_MOST_KINDS]
    given = [call.sample for call in chosen if call.sample is not None]
    if len(given) == 1:
        return tune(called, *given[0], **options)
    weights = [float(counts.get(call.kind[2], 1)) for call in chosen]
    return tune(called, samples=given, weights=weights, **options)


class _Whole:
    """A program's results and times, all calls together."""

    def __init__(
        self,
        program: Any,
        calls: Sequence[Any],
        run: Callable[[Any, Any], Any],
        device: torch.device,
    ) -> None:
        self._program, self._calls, self._run, self._device = program, calls, run, device
        self._expected = [self._leaves(call) for call in calls]

    def difference(self) -> str | None:
        """How the results differ from those from before, in words; None where they do not."""
        for number, (call, expected) in enumerate(zip(self._calls, self._expected, strict=True)):
            found = self._leaves(call)
            if len(found) != len(expected):
                return f"call {number} returns another structure"
            for mine, its in zip(found, expected, strict=True):
                wrong = difference(mine, its, other_kernels=True)
                if wrong is not None:
                    return f"the result of call {number} is wrong with it: {wrong}"
        return None

    def timed_in_turns(
        self, module: nn.Module, answers: Mapping[str, Answer]
    ) -> tuple[float, float]:
        """Seconds of all calls without and with what is installed; it is installed at the end."""
        without, among = [], []
        began = time.monotonic()
        for _ in range(_ROUNDS):
            uninstall(module, answers)
            without.append(self._seconds())
            install(module, answers)
            among.append(self._seconds())
            if time.monotonic() - began > _TIMING_S:
                break
        return statistics.median(without), statistics.median(among)

    def _seconds(self) -> float:
        self._wait()
        began = time.perf_counter()
        for call in self._calls:
            self._run(self._program, call)
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _leaves(self, call: Any) -> list[Any]:
        """The leaves of a result, with tensors of their own."""
        with _same_draws():
            result = self._run(self._program, call)
        leaves, _ = flatten_result(_as_tensors(result))
        return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _as_tensors(result: Any) -> Any:
    """A result with tensors in place of NumPy's arrays."""
    if isinstance(result, np.ndarray) and result.dtype.kind in "fiub":
        return torch.from_numpy(result.copy())
    if isinstance(result, (list, tuple)):
        return [_as_tensors(each) for each in result]
    if isinstance(result, dict):
        return {key: _as_tensors(each) for key, each in result.items()}
    return result


@contextlib.contextmanager
def _same_draws() -> Iterator[None]:
    """The same random numbers in each block, and none for what comes after it."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        torch.manual_seed(_SEED)
        yield
