"""The decode steps of one form of calls: static tensors, and the graphs that run on them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import CaptureError, GraphwrightError, warn_of_fallback
from ..graphs.memory import MemoryPool
from .decoder import GROWING, Decoder, Inputs, TokenChoice, forward_step
from .eager_loop import EagerLoop
from .launches import Counts, StepGraphs, launches
from .processors import StaticProcessor, static
from .step_trial import ExactLogits, StepReport, StepTrial, TunedStep
from .step_ways import EAGER, WAYS
from .steps import Step, in_turn, lasting

# A first step is another computation if it differs by more than so many ulps: of the largest logit
# anywhere, or by half as many of the logits' root mean square on average.
_ULPS = {torch.float32: 8192, torch.bfloat16: 8, torch.float16: 32, torch.float64: 65536}
_CRITERIA = "transformers.generation.stopping_criteria"
_IN_THE_GRAPH = ("MaxLengthCriteria", "EosTokenCriteria", "MaxTimeCriteria")
# Ways to choose a token whose graphs are kept.
_MOST_CHOICES = 8
# Names of a model's greatest number of positions.
_POSITIONS = ("max_position_embeddings", "max_target_positions", "max_decoder_position_embeddings")


class DecodeSteps:
    """The static tensors of one form of calls, and the graphs of its steps."""

    def __init__(
        self, decoder: Decoder, pool: MemoryPool, at_once: int, room: Callable[[int], int]
    ) -> None:
        self.decoder, self.verified = decoder, False
        self._pool, self._at_once, self._room = pool, at_once, room
        # What trying other ways to run a step has shown; None if nobody has tried.
        self.tuned: TunedStep | None = None
        self._way = EAGER  # of the call that runs now
        self._forwards: dict[tuple[str, int], Step] = {}
        self._graphs: dict[tuple[str, int, Any], StepGraphs] = {}
        self._choices: dict[Any, TokenChoice] = {}  # least recently used first
        self._past, self._past_recaptures = Counts(), 0
        self._again = 0

    @property
    def counts(self) -> Counts:
        return Counts.total([self._past, *(each.counts for each in [*self._graphs.values()])])

    @property
    def refused(self) -> GraphwrightError | None:
        found = (each.refused for each in self._graphs.values())
        return next((error for error in found if error is not None), None)

    @property
    def refusals(self) -> Counter[str]:
        return sum((Counter(each.refusals) for each in self._graphs.values()), Counter[str]())

    def close(self) -> None:
        for graphs in self._graphs.values():
            graphs.close()

    def verify(self, loop: EagerLoop, inputs: Inputs, filled: int) -> None:
        """Compare one step with the model's own, for each bucket, and stand before it again.

        A bucket that is much longer than the text shows whether what lies behind the text, or the
        bucket's end, makes a difference.

        Raises:
            CaptureError: the static step fails, or computes something else.
        """
        decoder, problem, found = self.decoder, None, []
        try:
            for visible in self._buckets(filled + 1):
                decoder.read(loop, inputs)
                forward_step(decoder, visible)()
                found.append(decoder.logits.clone())
        except Exception as error:
            problem = f"its step fails with a static cache ({type(error).__name__}: {error})"
        decoder.read(loop, inputs)
        before = loop.kwargs
        logits = loop.forward()
        problems = (_difference(mine, logits, loop.model.dtype) for mine in found)
        problem = problem or next(filter(None, problems), None) or _handed_on(loop, before)
        if problem is not None:
            loop.choose(logits)
            raise CaptureError(problem)
        # The model's own cache is one step ahead from here on; nobody reads it any more.
        loop.kwargs = before
        self.verified = True

    def _buckets(self, positions: int) -> list[int]:
        """All prefixes that steps of this form may see, from the first one on."""
        found = [self._visible(positions)]
        while found[-1] < self.decoder.capacity:
            found.append(self._visible(found[-1] + 1))
        return found

    def run(self, loop: EagerLoop, filled: int, steps: int) -> str | None:
        """Make all tokens that are left, at most `steps`; gives why they are chosen eagerly."""
        self._way = self._way_of(filled + steps)
        try:
            why = self._run(loop, filled, steps)
        except Exception:
            # Eager's own step may be able to run, for which nothing was compiled.
            if self._way != EAGER:
                self._forget()
            raise
        again = self._recaptures
        if again > self._again:
            # The model has changed: the next call compares anew.
            self._again, self.verified = again, False
        return why

    def _run(self, loop: EagerLoop, filled: int, steps: int) -> str | None:
        processors = [static(each, self.decoder.logits) for each in loop.logits_processor]
        why = _why_outside(loop, processors)
        if why is None:
            made = self._inside(loop, [each for each in processors if each], filled, steps)
        else:
            made = self._outside(loop, filled, steps)
        if loop.config.return_dict_in_generate:
            self.decoder.cache.give(loop.cache, filled + made)
        return why

    @property
    def _recaptures(self) -> int:
        now = sum(graphs.recaptures for graphs in self._graphs.values())
        return self._past_recaptures + now

    def _way_of(self, positions: int) -> str:
        """The way in which a call runs its steps that ends at so many positions."""
        if self.tuned is None or self.tuned.report.chosen == EAGER:
            return EAGER
        change = self.tuned.change()
        if change is not None:
            name = type(self.decoder.model).__name__
            self._forget()
            warn_of_fallback(
                f"The step of {name}.generate that tune() has taken", change, "Call tune() again."
            )
            return EAGER
        return self.tuned.way_for(self._visible(positions))

    def _forget(self) -> None:
        """Run eager's own step from now on."""
        self.tuned = None
        self._keep(EAGER)

    def _inside(
        self, loop: EagerLoop, processors: list[StaticProcessor], filled: int, steps: int
    ) -> int:
        """Choose in the graph, several tokens a launch; gives the steps that count."""
        decoder, samples, ends = self.decoder, bool(loop.config.do_sample), _end_tokens(loop)
        key, choice = self._choice(processors, samples, ends)
        # States cannot be rolled back: where they are given to the caller, no step is too many.
        exact = loop.config.return_dict_in_generate and not decoder.cache.rolls_back
        at_once = 1 if exact else self._at_once
        progress = _Progress(loop, decoder, steps, ends is not None)
        looks = exact or loop.streamer is not None
        early = ends is not None or progress.timed
        for count in launches(
            lambda done: self._steps(filled + done, key, choice),
            self._rounded(loop, filled, steps, at_once),
            at_once=at_once,
            ended=decoder.ended if early and not looks else None,
        ):
            progress.done += count
            if (looks and progress.shown()) or progress.over():
                break
        return progress.finish(loop)

    def tune(
        self,
        loop: EagerLoop,
        inputs: Inputs,
        reference: ExactLogits,
        filled: int,
        ways: Sequence[str],
        *,
        exact: bool,
    ) -> StepReport:
        """Try ways to run the steps of this form, and take the fastest that is right.

        Args:
            loop: a call after its first token, whose steps have been verified.
            inputs: what its steps pass to the model.
            reference: the same call in float64.
            filled: positions that its prompt has filled.
            ways: names of ways.
            exact: whether a step must give eager's logits bit for bit.

        Raises:
            CaptureError: there is no graph even of eager's own step.
        """
        self._forget()
        steps = loop.stopping_criteria.max_length - loop.input_ids.shape[1]
        at_once = self._at_once if self._at_once <= steps else 1
        with lasting():
            key, choice = self._choice([], False, None)

        # Where a text is half made; other ways see the whole memory.
        middle = filled + max(at_once, steps // 2)

        def forward(way: str) -> Step:
            return self._forward(way, self._seen(way, middle))

        def launch(way: str) -> Callable[[], None]:
            graphs = self._steps(middle, key, choice, way)
            graphs.launch(at_once)
            if graphs.refused is not None:
                raise graphs.refused
            return lambda: graphs.launch(at_once)

        before, kept = self.counts, EAGER
        trial = StepTrial(self.decoder, loop, inputs, reference, min(steps, middle - filled), exact)
        try:
            report = trial.run(ways, forward, launch, at_once)
            self.tuned = TunedStep(self.decoder.model, report, self._visible(filled + steps))
            kept = report.chosen
        finally:
            self._keep(kept)
            self._past = Counts.total([self._past, before.without_steps(self.counts)])
        return report

    def _keep(self, way: str) -> None:
        """Free what ways but one hold."""
        for name, visible, key in [*self._graphs]:
            if name != way:
                self._drop((name, visible, key))
        for name, visible in [*self._forwards]:
            if name != way:
                del self._forwards[name, visible]

    def _choice(
        self, processors: list[StaticProcessor], samples: bool, ends: torch.Tensor | None
    ) -> tuple[Any, TokenChoice]:
        """How a call chooses its tokens, after those of calls that choose in the same way."""
        key = (samples, None if ends is None else len(ends), *(each.key for each in processors))
        choice = self._choices.pop(key, None)
        if choice is None:
            self._make_room()
            with lasting():
                choice = TokenChoice(self.decoder, processors, samples, ends)
        self._choices[key] = choice  # the one that was used last
        choice.read(processors, ends)
        return key, choice

    def _rounded(self, loop: EagerLoop, filled: int, steps: int, at_once: int) -> int:
        """So many steps in whole launches, if there are positions for those that are too many."""
        config = loop.model.config.get_text_config(decoder=True)
        known = [getattr(config, name) for name in _POSITIONS if getattr(config, name, None)]
        # Where nobody says how many positions the model has learned, it may be all that are left.
        free = known or not self.decoder.cache.has_positions
        positions = min([self.decoder.capacity, *known]) if free else 0
        rounded = -(-steps // at_once) * at_once
        return rounded if filled + rounded <= positions else steps

    def _make_room(self) -> None:
        """Close the graphs of the choice that was used least recently, if there are too many."""
        while len(self._choices) >= _MOST_CHOICES:
            oldest = next(iter(self._choices))
            del self._choices[oldest]
            for way, visible, key in [*self._graphs]:
                if key == oldest:
                    self._drop((way, visible, key))

    def _drop(self, name: tuple[str, int, Any]) -> None:
        graphs = self._graphs.pop(name)
        self._past = Counts.total([self._past, graphs.counts])
        self._past_recaptures += graphs.recaptures
        graphs.close()

    def _outside(self, loop: EagerLoop, filled: int, steps: int) -> int:
        """Let transformers choose each token from the logits of a graph."""
        for done in range(steps):
            self._steps(filled + done + 1, None, None).launch(1)
            loop.choose(self.decoder.logits.clone())
            if loop.ended:
                return done + 1
            self.decoder.token.copy_(loop.input_ids[:, -1:])
        return steps

    def _visible(self, positions: int) -> int:
        return min(self.decoder.capacity, self._room(positions))

    def _seen(self, way: str, positions: int) -> int:
        """The prefix that a step sees: what takes long to make is made for the whole memory."""
        return self._visible(positions) if way == EAGER else self.decoder.capacity

    def _forward(self, way: str, visible: int) -> Step:
        """The model's run in a step."""
        if (way, visible) not in self._forwards:
            self._forwards[way, visible] = WAYS[way].make(forward_step(self.decoder, visible))
        return self._forwards[way, visible]

    def _steps(
        self, positions: int, key: Any, choice: TokenChoice | None, way: str | None = None
    ) -> StepGraphs:
        """The graphs of a step that sees so many positions."""
        way = self._way if way is None else way
        visible = self._seen(way, positions)
        graphs = self._graphs.get((way, visible, key))
        if graphs is None:
            forward = self._forward(way, visible)
            step = forward if choice is None else in_turn(forward, choice.step)
            graphs = self._graphs[way, visible, key] = StepGraphs(step, self._pool)
        return graphs


class _Progress:
    """How far a call is whose tokens are chosen in the graph.

    Args:
        loop: the call.
        decoder: its static tensors.
        steps: the most steps that count.
        ends: whether a token may end it.

    Attributes:
        start: tokens before the first step.
        done: steps that were launched.
        timed: whether the call may take some time only.
    """

    def __init__(self, loop: EagerLoop, decoder: Decoder, steps: int, ends: bool) -> None:
        self._decoder, self._steps, self._ends = decoder, steps, ends
        self._streamer = loop.streamer
        self.start = self._sent = loop.input_ids.shape[1]
        self.done = 0
        self._limits = [
            (each.initial_timestamp, each.max_time)
            for each in loop.stopping_criteria
            if _is(each, "MaxTimeCriteria")
        ]
        self.timed = bool(self._limits)
        self._draws = _Draws(decoder.logits) if loop.config.do_sample else None

    def finish(self, loop: EagerLoop) -> int:
        """Give the loop its tokens; gives the steps that count."""
        valid = self.valid()
        loop.input_ids = self._decoder.ids[:, :valid].clone()
        made = valid - self.start
        if self._draws is not None:
            self._draws.check(self._decoder.invalid)
            if made < self.done:
                self._draws.only(made)
        return made

    def valid(self) -> int:
        """Tokens that count: none behind the end of all sequences, nor behind the last step."""
        made = self.start + min(self.done, self._steps)
        return min(made, int(self._decoder.valid)) if self._ends else made

    def shown(self) -> bool:
        """Stream what is new; gives whether all sequences have ended."""
        valid = self.valid()
        if self._streamer is not None:
            for tokens in self._decoder.ids[:, self._sent : valid].cpu().unbind(1):
                self._streamer.put(tokens)
        self._sent = valid
        return bool(self._decoder.ended)

    def over(self) -> bool:
        """Whether the time is over."""
        return any(time.time() - begun > most for begun, most in self._limits)


class _Draws:
    """The random numbers of a call, drawn from the device's default generator.

    Args:
        logits: shape (batch, vocabulary): each token takes so many numbers.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits
        self._before = self._state()

    def only(self, steps: int) -> None:
        """Leave the generator as if only so many steps had drawn: those that count."""
        if self._logits.device.type == "cuda":
            torch.cuda.set_rng_state(self._before, self._logits.device)
        else:
            torch.set_rng_state(self._before)
        numbers = torch.empty_like(self._logits)
        for _ in range(steps):
            numbers.exponential_()

    def check(self, invalid: torch.Tensor) -> None:
        """Raise, as torch.multinomial does, if a token was drawn of what is no distribution."""
        if bool(invalid):
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")

    def _state(self) -> torch.Tensor:
        if self._logits.device.type == "cuda":
            return torch.cuda.get_rng_state(self._logits.device)
        return torch.get_rng_state()


def _why_outside(loop: EagerLoop, processors: list[StaticProcessor | None]) -> str | None:
    """Why tokens cannot be chosen in the graph; None if they can."""
    for its, mine in zip(loop.logits_processor, processors, strict=True):
        if mine is None:
            return f"{type(its).__name__} looks at each token"
    for each in loop.stopping_criteria:
        if not _is(each, *_IN_THE_GRAPH):
            return f"{type(each).__name__} looks at each token"
    if loop.config.return_dict_in_generate and (
        loop.config.output_scores or loop.config.output_logits
    ):
        return "scores of each token are asked for"
    return None


def _end_tokens(loop: EagerLoop) -> torch.Tensor | None:
    found = [
        each.eos_token_id.reshape(-1)
        for each in loop.stopping_criteria
        if _is(each, "EosTokenCriteria")
    ]
    return torch.cat(found).to(loop.input_ids.device) if found else None


def _is(criterion: Any, *names: str) -> bool:
    """Whether a stopping criterion is one of these of transformers."""
    kind = type(criterion)
    return kind.__module__ == _CRITERIA and kind.__name__ in names


def _handed_on(loop: EagerLoop, before: dict[str, Any]) -> str | None:
    """What a step hands to the next one beside its cache, masks and positions; None if nothing."""
    known = {loop.cache_name, *GROWING}
    for name in {*before, *loop.kwargs} - known:
        old, new = before.get(name), loop.kwargs.get(name)
        if old is new:
            continue
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
            if old.shape == new.shape and torch.equal(old, new):
                continue
        elif type(old) is type(new) and isinstance(new, bool | int | float | str) and old == new:
            continue
        return f"each of its steps hands {name} to the next one"
    return None


def _difference(mine: torch.Tensor, its: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Why two steps' logits are not the same computation; None if they are."""
    finite = torch.isfinite(its)
    if not torch.equal(finite, torch.isfinite(mine)):
        return "its step differs with a static cache: other logits are infinite"
    if not bool(finite.any()):
        return None
    ulp = _ULPS.get(dtype, 8192) * torch.finfo(dtype).eps
    off, size = (mine - its)[finite].double(), its[finite].double()
    if off.abs().max() > ulp * size.abs().max() or off.norm() > ulp / 2 * size.norm():
        most, scale = float(off.abs().max()), float(size.abs().max())
        return f"its step differs with a static cache: a logit is off by {most:.3g} of {scale:.3g}"
    return None
