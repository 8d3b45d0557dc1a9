"""`graphwright generate`: tokens of a model as they come, and how long they took."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click
import torch

from ..calls.plurals import counted
from ..errors import FallbackWarning, GraphwrightError, TargetError, first_line, user_frame
from ..generation.generator import GenerationStatistics, graph_generate
from ..report.progress import SHORT_S, progress_shown
from ..report.table import duration, ratio
from ..report.terminal import printing
from .targets import Generative

if TYPE_CHECKING:
    from ..generation.step_trial import StepReport

_SCHEMA = "graphwright.generate"
GRAPHS, EAGER = "graphs", "eager"
# Tokens of the model's own generate() before it is timed: its first call sets up what all share.
_WARM_TOKENS = 2
# Of what a tokenizer returns, what every model takes.
_OF_A_TOKENIZER = ("input_ids", "attention_mask")


@dataclass(frozen=True, eq=False)
class Generation:
    """What one call of generate() made, and how long it took.

    Attributes:
        way: "graphs", or "eager" for the model's own generate().
        tokens: those of each sequence that are new, its end included.
        seconds: that the call took, without what printing took.
        first_s: seconds until the first token was there.
        setup_s: seconds of the call before it, in which graphs are captured.
        steps: calls of the model after the prompt's; None if they were not counted.
        launches: launches that made them.
        graphed: launches that a graph answered.
        reasons: why the model's own generate() made the tokens, or chose them.
    """

    way: str
    tokens: list[list[int]]
    seconds: float
    first_s: float
    setup_s: float
    steps: int | None = None
    launches: int = 0
    graphed: int = 0
    reasons: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """New tokens of all sequences."""
        return sum(map(len, self.tokens))

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.count / self.seconds


class Timed:
    """A streamer that notes when tokens come, and hands them on.

    Args:
        shown: takes them as they come; None if nobody does.
    """

    def __init__(self, shown: Any = None) -> None:
        self._shown = shown
        self._begun = time.perf_counter()
        self._printing_s = self.first_s = 0.0
        self._prompt_came = False
        self._rows: list[torch.Tensor] = []

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, or the next token of each sequence, shape (batch,)."""
        now = time.perf_counter()
        if self._prompt_came:
            self.first_s = self.first_s or now - self._begun
            self._rows.append(value.clone())
        self._prompt_came = True
        if self._shown is not None:
            with printing():
                self._shown.put(value)
            self._printing_s += time.perf_counter() - now

    def end(self) -> None:
        """Nothing comes any more; `close` prints the rest."""

    def close(self) -> None:
        """Let what shows the tokens print the rest, after an interruption too."""
        if self._shown is not None and self._prompt_came:
            with printing():
                self._shown.end()

    @property
    def seconds(self) -> float:
        """Since it was made, without what printing took."""
        return time.perf_counter() - self._begun - self._printing_s

    @property
    def tokens(self) -> list[list[int]]:
        """All that came, for each sequence."""
        return torch.stack(self._rows, 1).tolist() if self._rows else []


class Numbers:
    """A streamer that prints tokens as numbers, for a model without a tokenizer."""

    def put(self, value: torch.Tensor) -> None:
        """Print the prompt, or the next token."""
        click.echo("".join(f"{token} " for token in value.reshape(-1).tolist()), nl=False)

    def end(self) -> None:
        """End the line."""
        click.echo()


class Prompted:
    """A model and its prompts, to be generated from by graphs and by the model itself.

    Args:
        target: what TARGET gave.
        prompts: as texts.
        ids: as tokens.
        options: of generate().
        seed: with which random numbers begin in each call.

    Raises:
        TargetError: there is no prompt, or no way to make tokens of it.
        OptionError: the model has no generate() of transformers.
    """

    def __init__(
        self,
        target: Generative,
        prompts: Sequence[str],
        ids: Sequence[Sequence[int]],
        options: Mapping[str, Any],
        seed: int,
    ) -> None:
        self._model, self._tokenizer = target.model, target.tokenizer
        self._generator = graph_generate(target.model)
        self._prompts, self._seed = prompts, seed
        self._inputs = _inputs_of(target, prompts, ids)
        ends = target.model.generation_config.eos_token_id
        self._ends = {ends} if isinstance(ends, int) else {*(ends or ())}
        self._options = dict(options)
        if self._ends and target.model.generation_config.pad_token_id is None:
            # As generate() does by itself, which logs it each time.
            self._options["pad_token_id"] = ends if isinstance(ends, int) else ends[0]

    def run(self, way: str, *, shown: bool) -> Generation:
        """Generate twice: once to set up, and once with a clock.

        Args:
            way: "graphs" or "eager".
            shown: print the tokens of the second time; those of one prompt as they come.

        Raises:
            TargetError: generate() fails.
        """
        streamed = shown and len(next(iter(self._inputs.values()))) == 1
        name = f"generate, {type(self._model).__name__}"
        with progress_shown(None, name, after_s=SHORT_S) as progress:
            begun = time.perf_counter()
            if way == GRAPHS:
                progress.doing("capturing the steps in a first run")
                self._generate(self._generator)
            else:
                progress.doing("a first run of the model's own generate()")
                self._generate(self._model, max_new_tokens=_WARM_TOKENS)
            setup_s = time.perf_counter() - begun
            if not streamed:
                progress.doing(f"generating, {way}")
                made = self._timed(way, None, setup_s)
        if streamed:
            return self._timed(way, self._streamer(), setup_s)
        if shown:
            with printing():
                self._print(made)
        return made

    def tune(self) -> StepReport:
        """Try other ways to run the steps of graphs; the next runs take the best.

        Raises:
            CaptureError: no graph answers such a call.
        """
        title = f"generate, {type(self._model).__name__}"
        with progress_shown(None, title, after_s=SHORT_S) as progress:
            progress.doing("trying ways to run a step")
            return self._generator.tune(**self._inputs, **self._options)

    def _timed(self, way: str, shown: Any, setup_s: float) -> Generation:
        before = self._generator.statistics
        streamer = Timed(shown)
        try:
            self._generate(self._generator if way == GRAPHS else self._model, streamer=streamer)
            seconds = streamer.seconds
        finally:
            streamer.close()
        tokens = [_up_to(row, self._ends) for row in streamer.tokens]
        counts = {} if way == EAGER else _counts(before, self._generator.statistics)
        return Generation(way, tokens, seconds, streamer.first_s, setup_s, **counts)

    def _generate(self, model: Any, **more: Any) -> None:
        torch.manual_seed(self._seed)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FallbackWarning)  # It is told at the end.
                model.generate(**self._inputs, **(self._options | more))
        except GraphwrightError:
            raise
        except Exception as error:
            raise TargetError(
                f"generate() of {type(self._model).__name__} fails: {first_line(error)}.",
                where=user_frame(error),
            ) from error

    def _streamer(self) -> Any:
        if self._tokenizer is None:
            return Numbers()
        from transformers import TextStreamer

        return TextStreamer(self._tokenizer, skip_special_tokens=True)

    def _print(self, made: Generation) -> None:
        """A line for each sequence, or more if it has some."""
        for number, row in enumerate(made.tokens):
            if self._tokenizer is None:
                text = " ".join(map(str, row))
            else:
                goes_on = self._prompts and not self._model.config.is_encoder_decoder
                text = (self._prompts[number] if goes_on else "") + self._tokenizer.decode(
                    row, skip_special_tokens=True
                )
            click.echo(f"[{number + 1}] {text}")


def _counts(before: GenerationStatistics, after: GenerationStatistics) -> dict[str, Any]:
    """What a call has added to a generator's statistics."""
    reasons = [
        why
        for then, now in ((before.eager, after.eager), (before.outside, after.outside))
        for why, calls in now.items()
        if calls > then.get(why, 0)
    ]
    return {
        "steps": after.steps - before.steps,
        "launches": after.launches - before.launches,
        "graphed": after.graphed - before.graphed,
        "reasons": tuple(reasons),
    }


def _up_to(row: list[int], ends: set[int]) -> list[int]:
    """The tokens of a sequence without the padding behind its end."""
    last = next((index for index, token in enumerate(row) if token in ends), len(row))
    return row[: last + 1]


def _inputs_of(
    target: Generative, prompts: Sequence[str], ids: Sequence[Sequence[int]]
) -> dict[str, torch.Tensor]:
    """What generate() is given as prompts."""
    if prompts:
        found = _tokenized(target, prompts)
    elif ids:
        found = _padded(ids, left=not target.model.config.is_encoder_decoder)
    elif target.inputs:
        return target.inputs
    else:
        way = "--ids 5,17,3" if target.tokenizer is None else "--prompt TEXT"
        raise TargetError("There is no prompt.", remedy=f"Give one with {way}.")
    if not found["input_ids"].numel():
        raise TargetError("The prompt has no tokens.", remedy="Give a longer one.")
    return {name: each.to(target.device) for name, each in found.items()}


def _tokenized(target: Generative, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
    tokenizer: Any = target.tokenizer
    if tokenizer is None:
        raise TargetError(
            "TARGET gives no tokenizer for --prompt.",
            remedy="Return (model, tokenizer), or give tokens with --ids 5,17,3.",
        )
    several = len(prompts) > 1
    try:
        if several:
            if not target.model.config.is_encoder_decoder:
                tokenizer.padding_side = "left"
            if tokenizer.pad_token is None:
                tokenizer.pad_token = tokenizer.eos_token
        found = tokenizer(list(prompts), return_tensors="pt", padding=several)
        return {name: found[name] for name in _OF_A_TOKENIZER if name in found}
    except Exception as error:
        raise TargetError(
            f"The tokenizer fails: {first_line(error)}.",
            where=user_frame(error),
            remedy="It is called as those of transformers are: with texts and return_tensors='pt'"
            f"{', padding=True' if several else ''}.",
        ) from error


def _padded(ids: Sequence[Sequence[int]], *, left: bool) -> dict[str, torch.Tensor]:
    """Prompts of tokens as one batch, and a mask of what is padding in it."""
    longest = max(map(len, ids))

    def filled(row: Sequence[int]) -> list[int]:
        padding = [0] * (longest - len(row))
        return [*padding, *row] if left else [*row, *padding]

    ones = [[1] * len(row) for row in ids]
    return {
        "input_ids": torch.tensor([filled(row) for row in ids]),
        "attention_mask": torch.tensor([filled(row) for row in ones]),
    }


def show(made: Sequence[Generation], tried: StepReport | None = None) -> None:
    """Print the figures of each way, and what they are to each other; first the ways of a step."""
    for line in () if tried is None else str(tried).splitlines():
        click.echo(line)
    for each in made:
        click.echo(
            f"{each.way:6}  {counted(each.count, 'token')} in {duration(each.seconds)}, "
            f"{each.rate:,.1f} a second, the first after {duration(each.first_s)}"
        )
        for line in _details(each):
            click.echo(f"        {line}")
    if len(made) > 1:
        click.echo(_compared(*made))


def _details(each: Generation) -> list[str]:
    lines = []
    if each.steps:
        of_graphs = "graphs" if each.graphed == each.launches else f"{each.graphed} of graphs"
        lines.append(
            f"{counted(each.steps, 'model call')} in {counted(each.launches, 'launch', 'launches')}"
            f" ({of_graphs}); the prompt ran eagerly"
        )
    if each.way == GRAPHS:
        lines.append(f"set up in {duration(each.setup_s)}")
    return [*lines, *(f"not by graphs alone: {why}" for why in each.reasons)]


def same(made: Sequence[Generation]) -> bool:
    """Whether all ways made the same tokens."""
    return all(each.tokens == made[0].tokens for each in made)


def _compared(ours: Generation, own: Generation) -> str:
    factor = f"graphs are {ratio(ours.rate / own.rate)} as fast as the model's own generate()"
    if same((ours, own)):
        return f"The tokens are equal; {factor}."
    sequence, position = _first_difference(ours.tokens, own.tokens)
    return f"The tokens differ, first at token {position} of prompt {sequence}; {factor}."


def _first_difference(ours: list[list[int]], own: list[list[int]]) -> tuple[int, int]:
    """The prompt and the token, counted from 1."""
    for number, (mine, its) in enumerate(zip(ours, own, strict=True), 1):
        if mine != its:
            pairs = enumerate(zip(mine, its, strict=False), 1)
            return number, next((n for n, (a, b) in pairs if a != b), min(len(mine), len(its)) + 1)
    raise AssertionError("unreachable: they differ")


def to_json(name: str, made: Sequence[Generation], tried: StepReport | None = None) -> str:
    """The figures and the tokens, and the ways to run a step if some were tried."""
    ways = [asdict(each) | {"tokens_per_second": each.rate} for each in made]
    found: dict[str, Any] = {"schema": _SCHEMA, "schema_version": 1, "model": name, "ways": ways}
    if len(made) > 1:
        found["tokens_equal"] = same(made)
    if tried is not None:
        found["steps"] = asdict(tried)
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"
