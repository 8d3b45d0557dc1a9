"""accelerate(): what tuning finds for a program's modules answers their calls in place, if it pays.

The outermost methods that can take part are tuned for the calls that they really get, one after the
other, the one with the largest share of the time first. Each is installed, the results of the whole
program are compared with those from before, and both are timed in turns: what is wrong or gains
nothing end to end is taken out again. If a method cannot be tuned, those called inside of it are.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Protocol

from torch import nn

from ..artifacts.tuned_module import TunedModule
from ..calls.options import items_problem, names_checked, nearest, refuse, texts_problem
from ..calls.plurals import counted
from ..errors import GraphwrightError, OptionError
from ..generation.generator import GraphedGenerator
from ..report.result import EAGER
from ..report.table import duration
from ..strategies.base import Candidate, Compiler
from .inspection import CalledMethod, ProgramInspection
from .inspector import Inspecting, call_as_given
from .installation import Answer, install, uninstall
from .observed_calls import FORWARD, ModuleMethod
from .part_answer import TunedAnswer, has_hooks
from .part_tuning import GENERATE, PartCalls, calls_of, generator_of, tuned_for
from .sentence_batches import BATCH_SIZES, ENCODE, BatchSize, has_batches
from .whole import WholeProgram

# Parts with a smaller share of the time are left as they are.
_LEAST_SHARE = 0.02
# The whole has to be faster by this share for a part to be kept.
_LEAST_GAIN = 0.01
# Seconds for all parts, unless another budget is given.
_BUDGET_S = 90.0
# How far a part's results may be off, relative to eager's own error (as in tune), and that error
# where nothing was measured.
_OFF, _OWN_ERROR = 3.0, 1e-6


class PartAnswerer(Protocol):
    """What answers a method's calls, and counts which way they went."""

    @property
    def calls(self) -> Counter[str]:
        """How many calls went which way."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a call."""


class GenerateAnswer:
    """Answers calls of generate() by graphs."""

    def __init__(self, generator: GraphedGenerator) -> None:
        self.generator = generator

    @property
    def calls(self) -> Counter[str]:
        """How many calls went which way."""
        made = self.generator.statistics
        eager = {f"eager: {why}": count for why, count in made.eager.items()}
        return Counter({"generated": made.calls, **eager})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate."""
        return self.generator.generate(*args, **kwargs)


@dataclass
class AcceleratedPart:
    """A method of a module in an accelerated program.

    Attributes:
        target: the method.
        share: of the program's time, before.
        kept: whether something else answers its calls now.
        chosen: what was found for it: a strategy, or "graph_generate"; "" for nothing.
        reason: why it was kept, or left as it is.
        tuned: what tuning has made of it; None if nothing is kept, and for generate().
    """

    target: ModuleMethod
    share: float
    kept: bool = False
    chosen: str = ""
    reason: str = ""
    tuned: TunedModule | None = None
    _module: nn.Module | None = field(default=None, repr=False)
    _calls: PartCalls | None = field(default=None, repr=False)
    _answer: PartAnswerer | None = field(default=None, repr=False)

    @property
    def calls(self) -> Counter[str]:
        """How many calls went which way since it is installed."""
        return Counter() if self._answer is None else Counter(self._answer.calls)

    @property
    def missed(self) -> int:
        """How many kinds of calls were seen that it was not tuned for, and could be learned."""
        return len(self._answer.missed) if isinstance(self._answer, TunedAnswer) else 0

    def __str__(self) -> str:
        chosen = f" by {self.chosen}" if self.kept else ""
        return f"{self.share:4.0%}  {self.target}: {'answered' if self.kept else 'left'}{chosen}"


class Accelerated:
    """A program whose modules' calls are answered by what tuning has found: `accelerate` makes it.

    Calls that nothing was tuned for go to the module itself and are counted; `learn` tunes for
    them. A context manager whose end is `undo()`.

    Attributes:
        inspection: of the program, before anything was changed.
        parts: the methods that could take part, and what became of each.
        before_s: seconds of all calls before, the median of rounds.
        after_s: the same by now, in the same rounds.
    """

    def __init__(self, inspection: ProgramInspection) -> None:
        self.inspection = inspection
        self.parts: list[AcceleratedPart] = []
        self.before_s = self.after_s = sum(inspection.seconds)
        self._installed: list[tuple[nn.Module, dict[str, Answer]]] = []
        self._gained = False
        self._lock = threading.RLock()
        self._asked: _Asked | None = None

    @property
    def speedup(self) -> float:
        """How many times as fast the whole program is, end to end."""
        return self.before_s / self.after_s if self.after_s else 1.0

    def undo(self) -> None:
        """Put all modules back as they were; once is enough."""
        with self._lock:
            for module, answers in self._installed:
                uninstall(module, answers)
            self._installed.clear()
            for part in self.parts:
                part.kept, part.tuned, part._answer = False, None, None

    def learn(self) -> int:
        """Tune for the calls that were seen since and were not tuned for.

        Other threads may call the program meanwhile: what answers is exchanged between calls.

        Returns:
            for how many kinds of calls something is tuned now that was not before.
        """
        with self._lock:
            asked = self._asked
            if asked is None:
                return 0
            return sum(asked.learn(part, self) for part in self.parts if part.missed)

    def explain(self) -> str:
        """What became of each part, the time of the whole, and how calls went since."""
        head = f"{self.inspection.name}: {duration(self.before_s)} before, "
        lines = [f"{head}{duration(self.after_s)} now ({self.speedup:.2f}×)"]
        for part in self.parts:
            lines += [str(part), f"        {part.reason}"]
            ways = part.calls.most_common()
            if ways:
                lines.append(
                    "        " + ", ".join(f"{counted(n, 'call')} {way}" for way, n in ways)
                )
            if part.missed:
                lines.append(f"        {counted(part.missed, 'other kind')} of call: learn() tunes")
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

    def __repr__(self) -> str:
        kept = sum(part.kept for part in self.parts)
        of = counted(len(self.parts), "part")
        return f"<Accelerated {self.inspection.name}, {kept} of {of} answered>"


@names_checked
def accelerate(
    program: Any,
    calls: Sequence[Any],
    *,
    run: Callable[[Any, Any], Any] | None = None,
    held_out: Sequence[Any] = (),
    modules: Sequence[str] | None = None,
    buckets: Literal["auto"] | None = "auto",
    strategies: Sequence[str | Compiler | Candidate] | None = None,
    exclude: Sequence[str] = (),
    objective: Literal["latency", "throughput"] = "latency",
    tolerance: float | None = None,
    allow: Sequence[str] = (),
    budget_s: float | None = None,
    remember: bool = True,
    fresh: bool = False,
    isolate: bool | None = None,
    progress: bool | None = None,
) -> Accelerated:
    """Tune the modules inside of a program for what they are called with, in place.

    The module objects stay the same: parameters, hooks, `state_dict()`, `.to()`, `isinstance`,
    copies and pickles are as before. Only what answers their calls changes. A part is kept if the
    whole program's results are right with it and the whole is faster with it.

    Args:
        program: any object with modules inside, such as a pipeline, or a function that reaches
            some.
        calls: what it is called with, as your users call it: tuned for, compared and timed.
        run: calls the program: `run(program, call)`. By default a call that is a tuple holds
            positional arguments, a dictionary keyword arguments, and anything else is the only
            argument.
        held_out: other calls, whose results are compared too.
        modules: the only methods that may be changed, as `inspect` names them: "unet",
            "vae.decode"; a name stands for what is inside of it, too. None for all.
        buckets: "auto" also prepares for sizes between those of the calls; None for those alone.
        strategies: as for `tune`, for each part.
        exclude: likewise.
        objective: likewise.
        tolerance: likewise.
        allow: likewise.
        budget_s: seconds for tuning all parts, divided by their shares of the time; None for 90 s.
        remember: as for `tune`.
        fresh: likewise.
        isolate: likewise.
        progress: likewise.

    Returns:
        an `Accelerated`: `undo()` puts everything back, `learn()` tunes for calls seen since.

    Raises:
        OptionError: there is no call, or no module inside of the program, or an option is wrong.
        VerificationError: two runs of the program with the same calls disagree.
    """
    refuse(
        "accelerate",
        items_problem("calls", calls, "calls"),
        items_problem("held_out", held_out, "calls"),
        None if modules is None else texts_problem("modules", modules),
        None if buckets in ("auto", None) else f"buckets is {buckets!r}: write 'auto' or None",
    )
    inspecting = Inspecting(program, list(calls), run)
    options: dict[str, Any] = {
        "strategies": strategies,
        "exclude": exclude,
        "objective": objective,
        "tolerance": tolerance,
        "allow": allow,
        "remember": remember,
        "fresh": fresh,
        "isolate": isolate,
        "progress": progress,
    }
    found = Accelerated(inspecting.inspected())
    whole = WholeProgram(
        program, list(calls), list(held_out), run or call_as_given, inspecting.device
    )
    asked = _Asked(inspecting, whole, modules, buckets == "auto", options, budget_s)
    found._asked = asked
    try:
        inspection = found.inspection
        if asked.choose_batch_sizes(found):
            inspection = inspecting.inspected()
        asked.accelerate(found, inspection)
    except BaseException:
        found.undo()
        raise
    return found


class _Asked:
    """What was asked of one acceleration, and how each part is handled."""

    def __init__(
        self,
        inspecting: Inspecting,
        whole: WholeProgram,
        modules: Sequence[str] | None,
        buckets: bool,
        options: Mapping[str, Any],
        budget_s: float | None,
    ) -> None:
        self._inspecting, self._whole = inspecting, whole
        self._modules, self._buckets, self._options = modules, buckets, options
        self._budget_s = budget_s
        # What was chosen for parts of a class and of calls that others have too.
        self._chosen: dict[Any, str] = {}

    def choose_batch_sizes(self, found: Accelerated) -> bool:
        """Choose how many texts a SentenceTransformer encodes at once; whether that has changed."""
        changed = False
        self._refuse_unknown(found.inspection)
        for path, module in self._inspecting.modules.items():
            target = ModuleMethod(path, ENCODE)
            if not has_batches(module) or not self._is_wanted(target):
                continue
            part = AcceleratedPart(target, 1.0, reason="its own batch size is the fastest")
            for size in BATCH_SIZES:
                tried = AcceleratedPart(target, 1.0, chosen=f"batch_size={size}")
                answer = BatchSize(module, size)
                self._keep_if_it_pays(tried, module, answer, found)
                if tried.kept:
                    part.kept, changed = False, True
                    part = tried
            found.parts.append(part)
        return changed

    def accelerate(self, found: Accelerated, inspection: ProgramInspection) -> None:
        """Tune all parts, the one with the largest share first."""
        rows = inspection.parts()
        share = sum(map(inspection.share, rows))
        rows.sort(key=inspection.share, reverse=True)
        while rows:
            row = rows.pop(0)
            part = AcceleratedPart(row.target, inspection.share(row))
            found.parts.append(part)
            self._handle(part, row, found, share)
            if not part.kept and not part.chosen:  # It cannot be tuned: what is inside may be.
                rows += self._inspecting.parts_inside(row)

    def _handle(
        self, part: AcceleratedPart, row: CalledMethod, found: Accelerated, all_shares: float
    ) -> None:
        """Tune a part and keep what comes of it, if the whole is right and faster with it."""
        module = part._module = self._inspecting.owners[part.target]
        if not self._is_wanted(part.target):
            part.reason, part.chosen = "it is not among modules=", EAGER
            return
        if part.share < _LEAST_SHARE:
            part.reason, part.chosen = f"it takes {part.share:.1%} of the time", EAGER
            return
        if part.target.method == FORWARD and has_hooks(module):
            part.reason = "it has forward hooks, which run around each call of it"
            return
        samples = self._inspecting.samples[part.target]
        part._calls = calls_of(part.target, samples, row.kinds, row.varying)
        try:
            answer = self._answer_for(part, module, part.share / max(all_shares, 1e-9))
        except GraphwrightError as error:
            part.reason = error.what
            return
        if part.chosen == EAGER:
            part.reason = "eager is the fastest"
        else:
            self._keep_if_it_pays(part, module, answer, found)

    def _answer_for(self, part: AcceleratedPart, module: nn.Module, share: float) -> PartAnswerer:
        """What could answer a part's calls."""
        if part.target.method == GENERATE and hasattr(module, "generation_config"):
            part.chosen = "graph_generate"
            return GenerateAnswer(generator_of(module))
        assert part._calls is not None
        options = dict(self._options)
        budget_s = _BUDGET_S if self._budget_s is None else self._budget_s
        options["budget_s"] = max(1.0, share * budget_s)
        like = type(module), part.target.method, _shapes(module), tuple(map(str, part._calls.sizes))
        if options["strategies"] is None and like in self._chosen:
            options["strategies"] = [self._chosen[like]]  # One of several equal blocks.
        tuned = tuned_for(module, part._calls, self._buckets, options)
        part.chosen = self._chosen[like] = tuned.report.chosen or EAGER
        return TunedAnswer(module, part.target.method, tuned)

    def _keep_if_it_pays(
        self, part: AcceleratedPart, module: nn.Module, answer: PartAnswerer, found: Accelerated
    ) -> None:
        """Install what answers a part, and take it out again if the whole is wrong or no faster."""
        answers: dict[str, Answer] = {part.target.method: answer}
        found._installed.append((module, answers))  # So that an interruption takes it out.
        install(module, answers)
        reason = self._whole.difference()
        if reason is not None:
            off = _OFF * _own_error(answer)
            allowed = self._whole.errors_by_rounding(module, part.target.method, off)
            reason = self._whole.difference(allowed)
        if reason is None:
            without_s, with_s = self._whole.timed_in_turns(module, answers)
            gain = 1 - with_s / without_s
            if gain >= _LEAST_GAIN:
                _take_in(found, without_s, with_s)
                part.kept, part._answer = True, answer
                part.tuned = answer.tuned if isinstance(answer, TunedAnswer) else None
                part.reason = f"the whole takes {gain:.0%} less time with it"
                return
            reason = f"the whole gains nothing with it ({gain:+.1%})"
        found._installed.pop()
        uninstall(module, answers)
        part.reason = reason

    def learn(self, part: AcceleratedPart, found: Accelerated) -> int:
        """Tune a part for the calls it was not tuned for; the number of their kinds, or 0."""
        answer, module, known = part._answer, part._module, part._calls
        assert isinstance(answer, TunedAnswer)
        assert module is not None
        assert known is not None
        missed = list(answer.missed)
        calls = PartCalls(
            part.target,
            [*missed, *known.samples],
            [*(1 for _ in missed), *known.counts],
            known.sizes,
            (),
        )
        try:
            tuned = tuned_for(module, calls, False, self._options)
        except GraphwrightError as error:
            part.reason = f"it could not learn: {error.what}"
            return 0
        if (tuned.report.chosen or EAGER) == EAGER:
            answer.missed.clear()
            return 0
        following = TunedAnswer(module, part.target.method, tuned)
        before: dict[str, Answer] = {part.target.method: answer}
        after: dict[str, Answer] = {part.target.method: following}
        install(module, after)
        if self._whole.difference() is not None:
            uninstall(module, after)
            return 0
        uninstall(module, before)
        found._installed = [
            (each, after if answers.get(part.target.method) is answer else answers)
            for each, answers in found._installed
        ]
        part._answer, part._calls, part.tuned = following, calls, tuned
        part.chosen = tuned.report.chosen or EAGER
        return len(missed)

    def _is_wanted(self, target: ModuleMethod) -> bool:
        """Whether a method may be changed."""
        names = str(target), target.path
        return self._modules is None or any(
            name == wanted or name.startswith(f"{wanted}.")
            for name in names
            for wanted in self._modules
        )

    def _refuse_unknown(self, inspection: ProgramInspection) -> None:
        """Refuse names of methods that the program does not call."""
        known = {name for row in inspection.rows for name in (str(row.target), row.target.path)}
        for wanted in self._modules or ():
            if wanted not in known and not any(name.startswith(f"{wanted}.") for name in known):
                raise OptionError(
                    f"modules names {wanted!r}, and the program calls no such method.",
                    remedy=nearest(wanted, known) or "inspect() names what is called.",
                )


def _take_in(found: Accelerated, without_s: float, with_s: float) -> None:
    """Another part is kept: the whole took so long without it, and takes so long with it."""
    before = found.speedup if found._gained else 1.0
    found.before_s, found.after_s, found._gained = before * without_s, with_s, True


def _own_error(answer: PartAnswerer) -> float:
    """Eager's own error in a part, relative to the root mean square of its results."""
    error = answer.tuned.report.eager_error if isinstance(answer, TunedAnswer) else None
    return max(error.rms, _OWN_ERROR) if error is not None else _OWN_ERROR


def _shapes(module: nn.Module) -> tuple[Any, ...]:
    """What modules have in common that the same strategy suits."""
    return tuple((name, t.shape, t.dtype) for name, t in module.state_dict().items())
