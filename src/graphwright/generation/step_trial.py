"""Which way to run a decode step: each is compared with eager's own step, and timed beside it.

A way may answer calls if, fed the tokens that eager chooses, its logits are about as close to
float64 as eager's are, and if it chooses eager's token wherever eager's first two logits are
further apart than twice eager's own error. Where they are closer, rounding chooses, in eager too.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..calls.plurals import counted
from ..calls.snapshots import ModuleState
from ..calls.switches import read
from ..calls.watch import ModuleWatch
from ..errors import first_line
from ..evaluation.accuracy import error_of, special_values
from ..evaluation.error_limits import beside_eager
from ..evaluation.measurement import Timer, interleave
from ..evaluation.reference import ANOTHER_PATH, in_float64
from ..report.table import duration, ratio
from .decoder import Decoder, Inputs
from .eager_loop import EagerLoop
from .step_ways import EAGER, WAYS
from .steps import Step

# A step that is fed so many of eager's tokens has shown what it computes.
_TOKENS = 32
# Seconds to time all ways in.
_TIMING_S = 2.0
# The table of ways, in 80 columns.
_COLUMNS = "{:<14}{:>10}{:>14}{:>10}{:>14}  {}"
# Another way has to take less than this share of eager's time.
_FASTER = 0.98


@dataclass(frozen=True)
class StepRow:
    """What became of one way to run a step.

    Attributes:
        strategy: the way.
        eligible: whether it may answer calls.
        reason: why it may not; empty if it may.
        seconds: of a token of all sequences; None where it was not timed.
        agreement: the share of eager's tokens that it chooses too, fed the ones before; None where
            it did not run.
        set_up_s: seconds until it had run once.
    """

    strategy: str
    eligible: bool
    reason: str = ""
    seconds: float | None = None
    agreement: float | None = None
    set_up_s: float = 0.0


@dataclass(frozen=True)
class StepReport:
    """Ways to run the decode steps of one form of calls, and which of them answers from now on.

    Attributes:
        rows: one for each way.
        chosen: the way that was chosen.
        tokens: how many of eager's tokens each was fed, of all sequences.
        positions: the longest text that it answers, the prompt included.
        nbytes: bytes of the weights and of the cache, which a step reads.
    """

    rows: tuple[StepRow, ...]
    chosen: str
    tokens: int
    positions: int
    nbytes: int

    def row(self, strategy: str) -> StepRow:
        """The row of one way."""
        return next(row for row in self.rows if row.strategy == strategy)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        eager = self.row(EAGER).seconds
        yield _COLUMNS.format("step", "a token", "read", "vs eager", "as eager", "").rstrip()
        for row in self.rows:
            time_s = reads = faster = alike = ""
            if row.seconds is not None:
                time_s = duration(row.seconds)
                reads = f"{self.nbytes / row.seconds / 1e9:,.1f} GB/s"
                faster = "" if eager is None else ratio(eager / row.seconds)
            if row.agreement is not None:
                alike = f"{round(row.agreement * self.tokens):,} of {self.tokens:,}"
            result = "chosen" if row.strategy == self.chosen else "right" if row.eligible else ""
            yield _COLUMNS.format(row.strategy, time_s, reads, faster, alike, result).rstrip()
            if row.reason:
                yield f"  not taken: {row.reason}"


class TunedStep:
    """The way in which the steps of a form of calls run since they were tuned.

    Args:
        model: the model.
        report: of trying all ways.
        visible: positions that the last step of such a call sees.
    """

    def __init__(self, model: nn.Module, report: StepReport, visible: int) -> None:
        self.report, self._visible = report, visible
        self._watch = ModuleWatch(model, values=False)
        self._switches = read()

    def change(self) -> str | None:
        """What has changed of the model since, in words; None if nothing has."""
        return None if self._watch.unchanged() else self._watch.changed()

    def way_for(self, visible: int) -> str:
        """The way for a call whose last step sees so many positions."""
        fits = visible == self._visible and read() == self._switches
        return self.report.chosen if fits else EAGER


class ExactLogits:
    """The logits of a call with every operation in float64.

    Args:
        loop: the call, before its prompt is read.
    """

    def __init__(self, loop: EagerLoop) -> None:
        self._loop, self._why = loop, ""
        self._in_float64(lambda: [loop.prefill()])

    def of(self, first: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor | None, str]:
        """Logits of each step, shape (steps, batch, vocabulary); None, with the reason, without.

        Args:
            first: the token behind the prompt, shape (batch, 1).
            tokens: those behind it, shape (steps, batch).
        """
        loop = self._loop

        def logits() -> list[torch.Tensor]:
            found = []
            for each in (first, *(token[:, None] for token in tokens[:-1])):
                loop.input_ids = torch.cat([loop.input_ids, each], dim=-1)
                found.append(loop.forward().double())
            return found

        found = [] if self._why else self._in_float64(logits)
        return (None, self._why) if self._why else (torch.stack(found), "")

    def _in_float64(self, work: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """What some work gives; it leaves the model as it was."""
        try:
            state = ModuleState(self._loop.model)
            try:
                with in_float64():
                    return work()
            finally:
                state.restore()
        except Exception as error:
            self._why = f"eager's own error is not known ({first_line(error)})"
            return []


@dataclass(frozen=True, eq=False)
class StepTrial:
    """Runs steps from the same place in a call, the first step behind its prompt.

    Args:
        decoder: static tensors.
        loop: the call, after its first token.
        inputs: what its steps pass to the model.
        reference: the call in float64.
        steps: the most steps to run.
        exact: whether a step must give eager's logits bit for bit.
    """

    decoder: Decoder
    loop: EagerLoop
    inputs: Inputs
    reference: ExactLogits
    steps: int
    exact: bool

    def run(
        self,
        ways: Sequence[str],
        forward: Callable[[str], Step],
        launch: Callable[[str], Callable[[], None]],
        at_once: int,
    ) -> StepReport:
        """Compare and time some ways, eager's first.

        Args:
            ways: their names.
            forward: makes the model's run in a step, in one way.
            launch: makes a launch of whole steps, which it has run once.
            at_once: steps of one launch.

        Raises:
            CaptureError: there is no graph even of eager's own step.
        """
        eager, tokens = self._outputs(forward(EAGER), None)
        exact = self.reference.of(self.loop.input_ids[:, -1:], tokens)
        rows = [StepRow(EAGER, True, "", None, 1.0)]
        rows += [self._row(way, forward, tokens, eager, exact) for way in ways if way != EAGER]
        rows = self._timed(rows, launch, at_once)
        weights = sum(p.numel() * p.element_size() for p in self.decoder.model.parameters())
        report = StepReport(
            tuple(rows),
            _fastest(rows),
            eager.shape[0] * eager.shape[1],
            self.decoder.capacity,
            weights + self.decoder.cache.nbytes,
        )
        self.decoder.read(self.loop, self.inputs)
        return report

    def _row(
        self,
        way: str,
        forward: Callable[[str], Step],
        tokens: torch.Tensor,
        eager: torch.Tensor,
        exact: tuple[torch.Tensor | None, str],
    ) -> StepRow:
        """What becomes of one way, before it is timed."""
        why = WAYS[way].unavailable(eager.device)
        if why:
            return StepRow(way, False, why)
        began = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Compilers' are not about the caller's model.
                logits, _ = self._outputs(forward(way), tokens)
            seconds = time.perf_counter() - began
            share = float((logits.argmax(-1) == eager.argmax(-1)).double().mean())
            reason = self._problem(logits, eager, *exact)
        except Exception as error:
            return StepRow(way, False, first_line(error))
        return StepRow(way, not reason, reason, None, share, seconds)

    def _outputs(
        self, step: Step, tokens: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of each step, shape (steps, batch, vocabulary), and the tokens that it was fed.

        Args:
            step: the model's run.
            tokens: what it is fed behind the first token, shape (steps, batch); None for its own.
        """
        self.decoder.read(self.loop, self.inputs)
        logits, fed = [], []
        for index in range(min(self.steps, _TOKENS)):
            step()
            logits.append(self.decoder.logits.clone())
            fed.append(logits[-1].argmax(-1) if tokens is None else tokens[index])
            self.decoder.token.copy_(fed[-1][:, None])
        return torch.stack(logits), torch.stack(fed)

    def _problem(
        self,
        logits: torch.Tensor,
        eager: torch.Tensor,
        exact: torch.Tensor | None,
        why_not: str,
    ) -> str:
        """Why a way may not answer calls; empty if it may."""
        if torch.equal(logits, eager):
            return ""
        if self.exact:
            return "its logits are not eager's, bit for bit"
        if exact is None:
            return why_not
        if not torch.equal(special_values(logits), special_values(eager)):
            return "other logits are infinite"
        own, _ = error_of(eager, exact, eager)
        if not (own.rms <= ANOTHER_PATH and bool(torch.isfinite(exact).any())):
            return "the float64 run takes another path than eager"
        error, peak = error_of(logits, exact, eager)
        ulp = torch.finfo(self.loop.model.dtype).eps
        limit = beside_eager(own, ulp, peak)
        if not (error.rms <= limit.rms and error.max <= limit.max):
            return (
                f"its logits are off by {error.rms:.1e} (rms) and {error.max:.1e} (largest); "
                f"allowed {limit.rms:.1e} and {limit.max:.1e}"
            )
        off = (eager.double() - exact).nan_to_num(0.0).abs().amax(-1)
        first, second = eager.double().topk(2, dim=-1).values.unbind(-1)
        clear = first - second > 2 * off
        wrong = clear & (logits.argmax(-1) != eager.argmax(-1))
        if bool(wrong.any()):
            places = counted(int(wrong.sum()), "place")
            return f"it chooses other tokens in {places} where rounding does not decide"
        return ""

    def _timed(
        self,
        rows: Sequence[StepRow],
        launch: Callable[[str], Callable[[], None]],
        at_once: int,
    ) -> list[StepRow]:
        """The rows of all ways that are right, with their times."""
        timer, calls = Timer(self.decoder.token.device), {}
        found = list(rows)
        for index, row in enumerate(rows):
            if not row.eligible:
                continue
            try:
                calls[row.strategy] = self._from_the_start(partial(launch, row.strategy))
            except Exception as error:
                if row.strategy == EAGER:
                    raise
                found[index] = replace(row, eligible=False, reason=first_line(error))
        times = interleave(calls, timer, budget_s=_TIMING_S)
        return [
            replace(row, seconds=times[row.strategy].typical().median / at_once)
            if row.strategy in times
            else row
            for row in found
        ]

    def _from_the_start(self, make: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """A launch that stands behind the prompt before it begins."""
        decoder = self.decoder
        decoder.read(self.loop, self.inputs)
        launch = make()
        decoder.read(self.loop, self.inputs)
        moving = [decoder.cache.clock, decoder.count, decoder.valid]
        if decoder.position_name is not None:
            moving.append(decoder.tensors[decoder.position_name])
        before = [each.clone() for each in moving]

        def call() -> None:
            for mine, its in zip(moving, before, strict=True):
                mine.copy_(its)
            launch()

        return call


def _fastest(rows: Sequence[StepRow]) -> str:
    """The way to take: eager's own, unless another one is faster beyond the noise."""
    times: dict[str, Any] = {r.strategy: r.seconds for r in rows if r.seconds is not None}
    best = min(times, key=times.__getitem__)
    return best if times[best] < _FASTER * times[EAGER] else EAGER
