"""accelerate(): what tuning finds for a program's modules answers their calls in place, if it pays.

The outermost methods that can take part are tuned for the calls that they really get, one after the
other, the one with the largest share of the time first. Each is installed, the results of the whole
program are compared with those from before, and both are timed in turns: what is wrong or gains
nothing end to end is taken out again. If a method cannot be tuned, those called inside of it are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import nn

from ..artifacts.tuned_module import TunedModule
from ..calls.options import items_problem, names_checked, nearest, refuse, texts_problem
from ..errors import GraphwrightError, OptionError, first_line
from ..report.progress import SHORT_S, progress_shown
from ..report.result import EAGER
from ..strategies.base import Candidate, Compiler
from . import remembered
from .accelerated import (
    BUDGET_S,
    Accelerated,
    AcceleratedPart,
    InstalledParts,
    PartAnswerer,
    PartLearner,
    allowed_error,
)
from .inspection import CalledMethod, ProgramInspection
from .inspector import Inspecting, name_of, precision_of
from .observed_calls import FORWARD, ModuleMethod
from .part_answer import TunedAnswer, has_hooks
from .part_calls import PartCalls, calls_of
from .part_tuning import GENERATE, GENERATE_BY, GenerateAnswer, generator_of, tuned_for
from .program_runs import ENCODE, run_of
from .sentence_batches import BATCH_SIZES, BatchSize, has_batches
from .whole import WholeProgram

# Parts with a smaller share of the time are left as they are.
_LEAST_SHARE = 0.02
# The whole has to be faster by this share for a part to be kept.
_LEAST_GAIN = 0.01


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
            argument; a SentenceTransformer is called by its `encode`.
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
    inspecting = Inspecting(program, calls := list(calls), run)
    doing = functools.partial(_doing, name_of(program), progress)
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
    held_out, device = list(held_out), inspecting.device
    precision = precision_of(inspecting.modules.values())
    with doing("running its calls"):
        whole = WholeProgram(program, calls, held_out, run_of(program, run), device, precision)
    budget_s = BUDGET_S if budget_s is None else budget_s
    learner = PartLearner({**options, "budget_s": budget_s}, buckets == "auto", whole)
    key = None
    if remember:
        own = {**options, "buckets": buckets, "modules": modules, "budget_s": budget_s}
        key = remembered.key_of(inspecting.modules, calls, run, device, own)
    if key is not None and not fresh:
        with doing("looking at what was found before"):
            recalled = remembered.recall(key, program, whole, learner)
        if recalled is not None:
            return recalled
    installed = InstalledParts()
    with doing("inspecting what it calls"):
        found = Accelerated(inspecting.inspected(), installed, learner)
    asked = _Asked(
        inspecting, whole, installed, modules, buckets == "auto", options, budget_s, doing
    )
    try:
        inspection = found.inspection
        with doing("trying batch sizes"):
            if asked.choose_batch_sizes(found):
                inspection = inspecting.inspected()
        asked.accelerate(found, inspection)
        if key is not None:
            remembered.remember(key, found)
    except BaseException:
        found.undo()
        raise
    return found


@contextlib.contextmanager
def _doing(name: str, progress: bool | None, what: str) -> Iterator[None]:
    """Say what is done, unless it is soon over; `tune` says itself what it does."""
    with progress_shown(progress, f"accelerate({name})", after_s=SHORT_S) as shown:
        shown.doing(what)
        yield


class _Asked:
    """What was asked of one acceleration, and how each part is handled."""

    def __init__(
        self,
        inspecting: Inspecting,
        whole: WholeProgram,
        installed: InstalledParts,
        modules: Sequence[str] | None,
        buckets: bool,
        options: Mapping[str, Any],
        budget_s: float,
        doing: Callable[[str], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._inspecting, self._whole, self._installed = inspecting, whole, installed
        self._wanted, self._buckets, self._options = modules, buckets, options
        self._budget_s, self._doing = budget_s, doing
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
        module = part.module = self._inspecting.owners[part.target]
        if not self._is_wanted(part.target):
            inside = any(name.startswith(f"{part.target.path}.") for name in self._wanted or ())
            part.reason, part.chosen = "it is not among modules=", "" if inside else EAGER
            return
        if part.share < _LEAST_SHARE:
            part.reason, part.chosen = f"it takes {part.share:.1%} of the time", EAGER
            return
        if part.target.method == FORWARD and has_hooks(module):
            part.reason = "it has forward hooks, which run around each call of it"
            return
        if "gradients" in row.modes and any(p.requires_grad for p in module.parameters()):
            part.reason = "gradients flow through it: call the program under torch.no_grad()"
            part.chosen = EAGER  # So they do through what is inside.
            return
        samples = self._inspecting.samples[part.target]
        calls = calls_of(part.target, samples, row.kinds, row.varying)
        try:
            share = part.share / max(all_shares, 1e-9)
            answer = self._answer_for(part, module, calls, share)
        except GraphwrightError as error:
            part.reason = error.what
            return
        if part.chosen == EAGER:
            part.reason = "eager is the fastest"
        else:
            with self._doing(f"comparing and timing the program with {part.target} answered"):
                self._keep_if_it_pays(part, module, answer, found)

    def _answer_for(
        self, part: AcceleratedPart, module: nn.Module, calls: PartCalls, share: float
    ) -> PartAnswerer:
        """What could answer a part's calls."""
        if part.target.method == GENERATE and hasattr(module, "generation_config"):
            part.chosen = GENERATE_BY
            return GenerateAnswer(generator_of(module))
        options = dict(self._options)
        options["budget_s"] = max(1.0, share * self._budget_s)
        like = type(module), part.target.method, _shapes(module), tuple(map(str, calls.sizes))
        if options["strategies"] is None and like in self._chosen:
            options["strategies"] = [self._chosen[like]]  # One of several equal blocks.
        tuned = tuned_for(module, calls, self._buckets, options)
        part.chosen = self._chosen[like] = tuned.report.chosen or EAGER
        return TunedAnswer(module, part.target.method, tuned, calls)

    def _keep_if_it_pays(
        self, part: AcceleratedPart, module: nn.Module, answer: PartAnswerer, found: Accelerated
    ) -> None:
        """Install what answers a part, and take it out again if the whole is wrong or no faster."""
        self._installed.put_in(part, module, answer)
        try:
            with self._tuned_in_each_state(part, module, answer):
                reason = self._whole.why_wrong(module, part.target.method, allowed_error(answer))
            if reason is None:
                times = self._whole.timed_in_turns(self._installed.answers[-1:])
                gain = 1 - times[1] / times[0]
                if gain >= _LEAST_GAIN:
                    _take_in(found, *times)
                    part.reason = f"the program takes {gain:.0%} less time with it"
                    return
                reason = f"the program gains nothing with {part.chosen or 'it'} ({gain:+.1%})"
        except Exception as error:  # The program's own.
            reason = f"a call of the program fails with it: {first_line(error)}"
        self._installed.take_out(part)
        part.reason = reason

    @contextlib.contextmanager
    def _tuned_in_each_state(
        self, part: AcceleratedPart, module: nn.Module, answer: PartAnswerer
    ) -> Iterator[None]:
        """Meanwhile, a call in another state of the module tunes for that, too: other adapters."""
        if not isinstance(answer, TunedAnswer) or answer.known is None:
            yield
            return
        known = answer.known
        options = {**self._options, "strategies": [part.chosen], "budget_s": self._budget_s}

        def tune_here() -> TunedModule | None:
            answer.tune_here = None  # Not for what it calls itself.
            try:
                found = tuned_for(module, known, self._buckets, options)
            except GraphwrightError:
                return None
            if found.report.chosen == EAGER:
                return None
            answer.tune_here = tune_here
            return found

        answer.tune_here = tune_here
        try:
            yield
        finally:
            answer.tune_here = None

    def _is_wanted(self, target: ModuleMethod) -> bool:
        """Whether a method may be changed."""
        names = str(target), target.path
        return self._wanted is None or any(
            name == wanted or name.startswith(f"{wanted}.")
            for name in names
            for wanted in self._wanted
        )

    def _refuse_unknown(self, inspection: ProgramInspection) -> None:
        """Refuse names of methods that the program does not call."""
        known = {name for row in inspection.rows for name in (str(row.target), row.target.path)}
        for wanted in self._wanted or ():
            if wanted not in known and not any(name.startswith(f"{wanted}.") for name in known):
                raise OptionError(
                    f"modules names {wanted!r}, and the program calls no such method.",
                    remedy=nearest(wanted, known) or "inspect() names what is called.",
                )


def _take_in(found: Accelerated, without_s: float, with_s: float) -> None:
    """Another part is kept: the whole took so long without it, and takes so long with it."""
    found.before_s, found.after_s = found.speedup * without_s, with_s


def _shapes(module: nn.Module) -> tuple[Any, ...]:
    """What modules have in common that the same strategy suits."""
    return tuple((name, t.shape, t.dtype) for name, t in module.state_dict().items())
