"""Which way to run a decode step: each is compared with eager's own step, and timed beside it.

A way may answer calls if, fed the tokens that eager chooses, its logits are about as close to
float64 as eager's are, and if it chooses eager's token wherever eager's first two logits are
further apart than twice eager's own error. Where they are closer, rounding chooses, in eager too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..calls.snapshots import ModuleState
from ..errors import first_line
from ..evaluation.accuracy import error_of, special_values
from ..evaluation.measurement import Timer, interleave
from ..evaluation.reference import beside_eager, in_float64
from ..report.table import duration, ratio
from ..strategies.inductor import fresh_entry
from .decoder import Decoder, Inputs
from .eager_loop import EagerLoop
from .steps import Step

EAGER, INDUCTOR = "eager", "inductor"
# A step that is fed so many of eager's tokens has shown what it computes.
_TOKENS = 32
# Seconds to time all ways in.
_TIMING_S = 2.0
# The table of ways, in 80 columns.
_COLUMNS = "{:<12}{:>10}{:>14}{:>10}{:>14}  {}"
# Another way has to take less than this share of eager's time.
_FASTER = 0.98


def _inductor(step: Step) -> Step:
    compiled: Step = torch.compile(fresh_entry(step), dynamic=False, fullgraph=True)
    return compiled


# What makes each way of the model's own step.
WAYS: dict[str, Callable[[Step], Step]] = {EAGER: lambda step: step, INDUCTOR: _inductor}


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


@dataclass(eq=False)
class StepTrial:
    """Runs steps from the same place in a call, the first step behind its prompt.

    Args:
        decoder: static tensors.
        loop: the call, after its first token.
        inputs: what its steps pass to the model.
        prompt: the same call, before its prompt was read.
        filled: positions that its prompt has filled.
        steps: the most steps to run.
        exact: whether a step must give eager's logits bit for bit.
    """

    decoder: Decoder
    loop: EagerLoop
    inputs: Inputs
    prompt: EagerLoop
    filled: int
    steps: int
    exact: bool

    def __post_init__(self) -> None:
        self.steps = min(self.steps, _TOKENS)

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
            launch: makes a launch of whole steps.
            at_once: steps of one launch.
        """
        rows: list[StepRow] = []
        eager, tokens = self._outputs(forward(EAGER), None)
        exact, why_not = self._exact(tokens)
        for way in ways:
            began = time.perf_counter()
            try:
                logits = eager if way == EAGER else self._outputs(forward(way), tokens)[0]
            except Exception as error:
                rows.append(StepRow(way, False, first_line(error)))
                continue
            seconds = time.perf_counter() - began
            share = float((logits.argmax(-1) == eager.argmax(-1)).double().mean())
            reason = "" if way == EAGER else self._problem(logits, eager, exact, why_not)
            rows.append(StepRow(way, not reason, reason, None, share, seconds))
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
        for index in range(self.steps):
            step()
            logits.append(self.decoder.logits.clone())
            fed.append(logits[-1].argmax(-1) if tokens is None else tokens[index])
            self.decoder.token.copy_(fed[-1][:, None])
        return torch.stack(logits), torch.stack(fed)

    def _exact(self, tokens: torch.Tensor) -> tuple[torch.Tensor | None, str]:
        """The logits in float64 for the same tokens; None, with the reason, if there are none."""
        loop, logits = self.prompt, []
        state = ModuleState(loop.model)
        try:
            with in_float64():
                loop.prefill()
                first = self.loop.input_ids[:, -1:]
                for each in [first, *(token[:, None] for token in tokens[:-1])]:
                    loop.input_ids = torch.cat([loop.input_ids, each], dim=-1)
                    logits.append(loop.forward().double())
        except Exception as error:
            return None, f"eager's own error is not known ({first_line(error)})"
        finally:
            state.restore()
        return torch.stack(logits), ""

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
            return f"{int(wrong.sum())} tokens are others, where rounding does not choose"
        return ""

    def _timed(
        self,
        rows: Sequence[StepRow],
        launch: Callable[[str], Callable[[], None]],
        at_once: int,
    ) -> list[StepRow]:
        """The rows of all ways that are right, with their times."""
        timer = Timer(self.decoder.token.device)
        calls = {}
        for row in rows:
            if row.eligible:
                calls[row.strategy] = self._from_the_start(launch(row.strategy))
        found = interleave(calls, timer, budget_s=_TIMING_S)
        return [
            replace(row, seconds=found[row.strategy].typical().median / at_once)
            if row.strategy in found
            else row
            for row in rows
        ]

    def _from_the_start(self, launch: Callable[[], None]) -> Callable[[], None]:
        """A launch that stands behind the prompt before it begins."""
        decoder = self.decoder
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
