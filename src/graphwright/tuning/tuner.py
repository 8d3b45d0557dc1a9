"""tune(): try every candidate that this machine has, verify and time them, choose, and report.

`Tuning` runs these steps and holds what is known so far, so that an interrupted run can still be
shown. Candidates are tried in worker processes if possible, else in this process; both ways use
`CandidateEvaluator`.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..artifacts.tuned_module import Apart, Origin, TunedModule, assemble, put_together
from ..artifacts.untuned_calls import OnMiss
from ..calls.dependencies import Dependencies
from ..calls.fingerprint import Fingerprint, key_of
from ..calls.host_generators import generators_kept
from ..calls.modes import cached_weights_refused
from ..calls.modules import FunctionModule
from ..calls.options import flag_problem, names_checked, refuse
from ..calls.signature import Range
from ..calls.snapshots import ModuleState
from ..calls.split import Args, Kwargs
from ..calls.watch import Checks
from ..errors import GraphwrightError, ModelFailed, in_words
from ..evaluation.garbage_collection import OLD_OBJECTS_FROZEN
from ..evaluation.host_floor import host_seconds
from ..evaluation.measurement import load_average, load_note
from ..evaluation.reference import Sample, reference, refuse_changed_containers
from ..graphs.conditions import for_inference
from ..graphs.taken_apart import TakenApart, seconds_with_objects
from ..ops import compiled_checks
from ..profiler.profile import Profile
from ..profiler.profiler import profile as profile_of
from ..report.environment import environment
from ..report.progress import Progress, Silent, progress_shown
from ..report.report import Report
from ..report.result import COMPILE_DEFAULT, EAGER, OF_TIME, BestSoFar, Row, Status
from ..shapes.dimensions import within
from ..strategies.base import Built, Candidate, Compiler
from ..strategies.registry import is_ours
from . import choice_cache
from .background import begin_search
from .cold_start import ColdStarts
from .final_rounds import FinalRounds, first_to_build, least_rounds_s, seconds_here
from .request import Request
from .screening import FINALISTS_SHARE, Screening, Terms
from .search import Search
from .selection import near_best, ranked, reason_for
from .trial import CandidateEvaluator, status_of
from .workers.pool import has_cores_to_spare

if TYPE_CHECKING:
    from ..shapes.buckets import Buckets

Objective = Literal["latency", "throughput", "memory", "cold_start"]

# Whether candidates are tried in processes of their own if `isolate` is None.
ISOLATED = True
# Seconds to time one candidate in turns with eager, at most, and their share of the budget.
SCREENING_S, _SCREENING_SHARE = 1.0, 0.02
# Seconds to time each finalist in common rounds.
FINAL_S_EACH = 2.0
# The share of the budget by which the first of them may exceed it, and seconds of the last rounds.
_GRACE, _LAST_ROUNDS_S = 0.1, 2 * FINAL_S_EACH
# A default budget grows with what compilers and long calls need, up to so many seconds a sample: on
# a CPU one candidate waits for the other. Compilers begin after so many seconds, and take so many
# times as long beside others.
MOST_BUDGET_S = {"cpu": 120.0, "cuda": 90.0}
_BEFORE_SET_UPS_S, _BESIDE_OTHERS = 6.0, 1.6
# Calls with objects of what was chosen, and of the model itself, before either is taken; and the
# least where the budget is spent.
_ROUNDS_WITH_OBJECTS, _LEAST_ROUNDS = 21, 3
# How notes about calls between the buckets begin.
_BETWEEN = "Some calls between the buckets will fall back to eager:"
_RANGE = "What was built for all sizes at once answers the buckets alone:"


@names_checked
def tune(
    model: Callable[..., Any],
    args: Args = (),
    kwargs: Kwargs | None = None,
    *,
    samples: Sequence[Any] | None = None,
    weights: Sequence[float] | Mapping[Any, float] | None = None,
    dynamic_shapes: Any = None,
    buckets: Buckets | None = None,
    pad: Any = None,
    strategies: Iterable[str | Compiler | Candidate] | None = None,
    exclude: Iterable[str] = (),
    exhaustive: bool = False,
    objective: Objective = "latency",
    tolerance: float | None = None,
    allow: Sequence[str] = (),
    budget_s: float | None = None,
    timeout_s: float = 600.0,
    memory_limit: int | str | None = None,
    isolate: bool | None = None,
    remember: bool = True,
    fresh: bool = False,
    audit: int | None = None,
    on_miss: OnMiss = "eager",
    checks: Checks = "full",
    progress: bool | None = None,
    background: bool = False,
    profile: bool = False,
) -> TunedModule:
    """Benchmark the strategies that usually pay off, verify each, and return the fastest.

    The winner answers calls like the sample's (same shapes, dtypes, devices, plain values). Any
    other call falls back to the model itself and is counted. Eager always competes, so the result
    is never knowingly slower. Tuning changes neither the model nor the random-number state.

    Each candidate is tried in a process of its own; one that crashes, hangs or takes too much
    memory becomes a row of the report. The winner is built and verified again in this process.

    Args:
        model: a module in eval mode, or a plain function of tensors.
        args: positional sample inputs, real values rather than zeros; a tuple.
        kwargs: keyword sample inputs.
        samples: several calls to tune for, instead of `args` and `kwargs`: each a tuple of
            positional inputs, a dictionary of keyword inputs, or a pair of both.
        weights: the share of each sample among all calls, equal by default; with buckets a
            dictionary by size: `{1: 0.9, 16: 0.1}`, or `{(1, 128): …}` for several dimensions.
        dynamic_shapes: which dimensions of the arguments vary, as `graph()` takes it.
        buckets: sizes of these dimensions to tune for; their calls are made of the sample's values.
            Calls of other sizes are padded to a bucket, as `graph()` pads them, where padding is
            proved to be harmless.
        pad: the padding values, as `graph()` takes them.
        strategies: names such as "inductor+graph", or strategies or candidates of your own; None
            tries all that usually pay off. Eager is always added.
        exclude: names of strategies to leave out, with all that have the same parts: "inductor"
            stands for "channels_last+inductor+graph" too, "inductor+graph" not for "inductor".
        exhaustive: try every candidate. By default what cannot win is not tried: what runs the
            same kernels as something that was measured to be faster.
        objective: "latency" (one synchronized call), "throughput" (calls issued back to back),
            "memory" (peak bytes) or "cold_start" (seconds from the start of a process to the first
            right answer; what `load` can load is loaded for that).
        tolerance: accepted error relative to the output's root mean square. By default, the root
            mean square error may be 3 times, and the largest error 8 times, that of eager against
            float64.
        allow: lossy rewrites that may be tried: "tf32", "bf16", "fp16".
        budget_s: seconds that all of tuning may take; candidates that there is no time for are
            reported as not tried. None for 60 s a sample on a CPU and 50 s on a GPU, up to 120 s
            and 90 s where compilers or long calls need it, and for no limit where `strategies` are
            named, the search is `exhaustive` or the objective is "cold_start".
        timeout_s: seconds that the set-up of one candidate may take, and its timing.
        memory_limit: bytes, or a text such as "2GiB", that one candidate may take in addition to
            the model: memory of the GPU for a model there, else of the host. By default most of
            what is free.
        isolate: whether candidates are tried in processes of their own. False tries them in this
            process, without these limits; so does, with a note, a model that cannot be pickled.
        remember: whether to use the choice of an earlier run for the same model, inputs, machine
            and versions, after verifying it again, and to store the choice of this run.
        fresh: tune even if a choice is stored, and replace it.
        audit: if the winner holds a copy of the weights, compare a checksum of the module's weights
            every `audit` calls. This finds writes that PyTorch does not report
            (`weight.data.mul_()`, NumPy, a pointer).
        on_miss: what is done with a call that was not tuned, of another shape, say, or of a module
            that has changed: it goes to the model itself, is counted, and the first of each kind
            warns ("eager"), or it raises ("error"). Calls that want gradients always go there.
        checks: what is checked before the winner answers a call: "full" checks the call and the
            module; "signature" only the call, for a module that never changes; "none" only the
            number of arguments, if one call was tuned and its graph takes tensors: other calls then
            get silently wrong results.
        progress: whether to show progress on stderr: a bar on a terminal and in a notebook, else a
            line each ten seconds, or, if the logger `graphwright` takes INFO, there. None does so;
            True has a line for each candidate too.
        background: return at once a `BackgroundModule`, which is the model itself until a search in
            another process has found something faster; see there.
        profile: profile the first call before the search, which takes some seconds: the report says
            what `profile` predicted of a graph, of fusion and of other remedies, beside what was
            measured.

    Raises:
        OptionError: an option is unknown or makes no sense.
        SignatureError: the arguments or results cannot be compared.
        ModelFailed: the model fails in eager.
        VerificationError: two eager calls with the same inputs disagree.
    """
    refuse(
        "tune",
        flag_problem("progress", progress, optional=True),
        flag_problem("background", background),
        flag_problem("profile", profile),
        "profile=True is for the foreground: profile the model first"
        if profile is True and background is True
        else None,
    )
    named: dict[str, Any] = {} if background else {"profile": profile}
    make: Callable[..., Any] = begin_search if background else Tuning
    tuning = make(
        model,
        args,
        kwargs,
        samples=samples,
        weights=weights,
        dynamic_shapes=dynamic_shapes,
        buckets=buckets,
        pad=pad,
        strategies=strategies,
        exclude=exclude,
        exhaustive=exhaustive,
        objective=objective,
        tolerance=tolerance,
        allow=allow,
        budget_s=budget_s,
        timeout_s=timeout_s,
        memory_limit=memory_limit,
        isolate=isolate,
        remember=remember,
        fresh=fresh,
        audit=audit,
        on_miss=on_miss,
        checks=checks,
        **named,
    )
    tuned: TunedModule = tuning
    if not background:
        with progress_shown(progress, f"tune({tuning.asked.name})") as listener:
            tuned = tuning.run(listener)
    return tuned


class Tuning:
    """One run of `tune`, step by step. `report` holds what is known at any moment.

    Attributes:
        asked: for what.
        report: of the run.
        why_not_cached: why the cache does not have the choice; None if it has.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        args: Args = (),
        kwargs: Kwargs | None = None,
        *,
        name: str | None = None,
        repeat: Callable[[str], str] | None = None,
        profile: bool = False,
        began: float | None = None,
        **options: Any,
    ) -> None:
        """Check what is asked for; nothing runs yet.

        Args:
            model: as for `tune`.
            args: likewise.
            kwargs: likewise.
            name: of the model, in the report.
            repeat: makes the command that tries a strategy again, from its name; by default a call
                of `tune`.
            profile: as for `tune`.
            began: `time.monotonic()` from which the budget counts; None for now.
            options: as for `tune`.
        """
        self._started = time.monotonic() if began is None else began
        self._profiled = model if profile else None
        asked = self.asked = Request.of(model, args, kwargs, **options)
        self.report = Report(
            model=name or asked.name,
            inputs=asked.inputs[0],
            objective=asked.objective,
            rows=[],
            environment={},
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            shapes=asked.shapes,
            input_bytes=max(sum(t.nbytes for t in call.tensors()) for _, call in asked.calls),
        )
        # What was built in this process, by name.
        self._kept: dict[str, list[Built]] = {}
        self._budget_s = asked.limits.budget_s
        # When eager has been timed, in seconds; None until then, and where candidates are named.
        self._compilers_begin_s: float | None = None
        isolate = ISOLATED if asked.isolate is None else asked.isolate
        self._search = Search(
            self.report,
            asked.device,
            asked.candidates[1:],
            in_order=asked.named,
            exhaustive=asked.exhaustive,
            modules=sum(1 for _ in asked.module.modules()),
        )
        terms = Terms(
            isolate,
            asked.limits.timeout_s,
            asked.limits.memory_limit,
            self._budget_s,
            self._search_ends(),
        )
        self._screening = Screening(
            asked.module,
            asked.device,
            self._search,
            terms,
            repeat or asked.repeat_call,
            self.report.notes,
            self._kept,
        )
        self._evaluator: CandidateEvaluator | None = None
        self._same_under_no_grad = True
        # The ranges of sizes that the choice was proved to answer; None until then.
        self._ranges: tuple[Range, ...] | None = None
        self.why_not_cached: str | None = "the search did not end"

    # ------------------------------------------------------------ the run

    def run(self, progress: Progress | None = None) -> TunedModule:
        """Tune. On KeyboardInterrupt, complete the report with what is known and raise it again."""
        listener = progress or Silent()
        frozen = OLD_OBJECTS_FROZEN.thrown()
        reached = Dependencies(self.asked.module, training=True, whole=True)
        same = _same_random_state(self.asked.device)
        with for_inference(), same, generators_kept(reached), frozen:
            try:
                tuned = self._run(listener)
                return self._put_together(tuned) if self.asked.apart else tuned
            except KeyboardInterrupt:
                self.report.interrupted = True
                self._conclude()
                raise
            finally:
                self._kept.clear()
                self._restore()
                if not self.report.recalled:
                    self.report.seconds = time.monotonic() - self._started
                    self.report.budget_s = self._budget_s

    def _run(self, progress: Progress) -> TunedModule:
        progress.start(len(self.asked.candidates) + 3 + (self._profiled is not None))
        progress.step("environment")
        self.report.environment = environment(self.asked.device)
        key = self._key()
        recalled = None if key is None or self.asked.fresh else choice_cache.recall(key)
        if recalled is not None and recalled.chosen in self._by_name:
            progress.step("what was chosen before")
            tuned = self._tuned_from_cache(recalled)
            if tuned is not None:
                self.why_not_cached = None
                return tuned
        if not has_cores_to_spare(self.asked.device):
            self._refer(progress)  # Before workers import and the checks are compiled beside it.
        # What checks cost is timed as it will be; a compiler would disturb what is timed.
        have_checks = compiled_checks.begin()
        if self._profiled is not None:
            self._wait_for_checks(have_checks, progress)
        known = self._profile(progress)
        with self._screening as screening:
            self._refer(progress)
            self._prove_padding(progress)
            self._wait_for_checks(have_checks, progress)
            for row in screening.rows(self.evaluator, progress):
                self.report.rows.append(row)
                self._extend_curve(row)
                progress.row(row)
                self._set_budget(row)
                self._drop_the_beaten()
                self._end_in_time_for_the_best()
        if self.asked.objective == "cold_start":
            self._time_first_answers(progress)
        progress.step("finalists")
        self._final_rounds()
        chosen = self._choose()
        if known is not None:
            self.report.predictions = known.compare(self.report)
        note = load_note()
        if note:
            self.report.notes.append(note)
        self._check_other_sizes(chosen.strategy, self._kept[chosen.strategy])
        self._remember(key)
        # Only now: the watch of the result must begin after the last change that tuning makes.
        self._restore()
        return self._tuned(chosen.strategy, self._kept[chosen.strategy])

    def _remember(self, key: Fingerprint | None) -> None:
        """Cache the choice, unless a busy machine decided: the next run may have a quiet one."""
        if key is None:
            own = "a strategy of your own took part"
            self.why_not_cached = own if self.asked.remember else "remember=False"
            return
        if any(row.unsteady for row in self.report.rows):
            self.why_not_cached = "other work on this machine disturbed the timing"
            return
        self.report.seconds = time.monotonic() - self._started
        self.report.budget_s = self._budget_s
        written = choice_cache.remember(key, self.report)
        self.why_not_cached = "its file could not be written" if written is None else None

    def _wait_for_checks(self, wait: Callable[[], str | None], progress: Progress) -> None:
        """Wait until the checks in C++ are built; a note says why they are not."""
        progress.doing("building the checks in C++, once for this machine")
        why = wait()
        note = f"Each call's checks run in Python, which takes longer than in C++: {why}"
        turned_off = why == compiled_checks.why_never()
        if why is not None and not turned_off and note not in self.report.notes:
            self.report.notes.append(note)

    def _profile(self, progress: Progress) -> Profile | None:
        """A profile of the first call, if one is wanted and can be made."""
        if self._profiled is None:
            return None
        progress.step("profile")
        _, call = self.asked.calls[0]
        try:
            return profile_of(self._profiled, call.args, call.kwargs)
        except GraphwrightError as error:
            self.report.notes.append(f"Nothing is predicted: {error.what}")
            return None

    def _extend_curve(self, row: Row) -> None:
        """Note when something better than all before was found."""
        speed = self.report.speedup(row)
        best = max((step.speedup for step in self.report.curve), default=0.0)
        if row.status is Status.OK and speed is not None and speed[0] > best:
            seconds = time.monotonic() - self._started
            self.report.curve.append(BestSoFar(seconds, row.strategy, speed[0]))

    def _host_seconds(self) -> float | None:
        """What the host needs for a mean call; None if nobody asks, or nobody can tell."""
        if self.asked.limits.budgeted and self._is_late:
            return None
        found = 0.0
        try:
            for weight, call in self.asked.calls:
                seconds = host_seconds(self.asked.module, call, self.asked.device)
                if seconds is None:
                    return None
                found += weight * seconds
        finally:
            self._restore()
        return found / sum(weight for weight, _ in self.asked.calls)

    def _search_ends(self) -> float | None:
        """When no further candidate is begun, in `time.monotonic()`; None for no limit."""
        limit_s = self._limit_s()
        return None if limit_s is None else self._started + (1 - FINALISTS_SHARE) * limit_s

    def _limit_s(self) -> float | None:
        """Seconds that tuning may take by what is known: a default budget grows for a compiler.

        It does so while nothing is known of PyTorch's compiler and little was gained without it.
        """
        grows = self._budget_s is not None and not self.asked.limits.budgeted
        if grows and self._search.awaits_compiler():
            return self._most_budget_s()
        return self._budget_s

    @property
    def _is_late(self) -> bool:
        """Whether the budget is spent."""
        return self._budget_s is not None and time.monotonic() > self._started + self._budget_s

    def _end_in_time_for_the_best(self) -> None:
        """End the search early enough to build here what is the best so far.

        Unless there is no time for that at all: then others are of more use.
        """
        terms, now = self._screening.terms, time.monotonic()
        ends, needed_s = self._search_ends(), self._seconds_for_the_best()
        if self._budget_s is None or ends is None or terms.deadline is None or now > terms.deadline:
            return
        if needed_s is not None:
            self._give_the_best_time(needed_s)
            last = self._started + (self._limit_s() or self._budget_s) - needed_s
            ends = min(ends, last) if now <= last else ends
        terms.budget_s, terms.deadline = self._limit_s(), ends

    def _seconds_for_the_best(self) -> float | None:
        """Seconds to build here and to time what is the best so far; None if there is nothing."""
        report = self.report
        near = [row for row in near_best(report) if row.strategy not in self._kept]
        if report.objective in OF_TIME:
            near = [row for row in near if report.cost(row) < 1]
        if not near or self._budget_s is None:
            return None
        first = first_to_build(report, near, self._by_name)
        timed = [first, *filter(None, [report.row(EAGER)])]
        rounds_s = min(_LAST_ROUNDS_S, FINALISTS_SHARE * self._budget_s)
        rounds_s = max(rounds_s, least_rounds_s(report, timed))
        return rounds_s + seconds_here(first, self._by_name)

    def _give_the_best_time(self, needed_s: float) -> None:
        """Raise a default budget where the best so far could not be built here within it.

        The search takes no longer for that.
        """
        if self.asked.limits.budgeted or self._budget_s is None:
            return
        all_s = math.ceil(time.monotonic() - self._started + needed_s)
        if self._budget_s < all_s <= self._most_budget_s():
            self._budget_s = self._screening.terms.budget_s = all_s

    def _most_budget_s(self) -> float:
        return MOST_BUDGET_S[self.asked.device.type] * len(self.asked.calls)

    def _set_budget(self, row: Row) -> None:
        """Raise a default budget where compilers need it, by what is known now."""
        is_eager = row.strategy == EAGER and not self.asked.named
        if is_eager:
            self.report.host_s = self._host_seconds()
            self._compilers_begin_s = time.monotonic() - self._started
        self._give_compilers_time()
        if is_eager:
            self._tell_the_least()

    def _give_compilers_time(self) -> None:
        """Raise a default budget where compilers need it: the model has many operations.

        On a GPU that is for the quickest way to have PyTorch's compiler: by regions, or as a whole.
        On a CPU nothing goes on beside a set-up: there it is for one set-up of each compiler.
        """
        asked, terms, search = self.asked, self._screening.terms, self._search
        if asked.limits.budgeted or self._budget_s is None or self._compilers_begin_s is None:
            return
        search_s = self._compilers_begin_s
        if asked.device.type == "cuda":
            set_up_s = search.compiler_set_up_s() * len(asked.calls)
            search_s += _BEFORE_SET_UPS_S + _BESIDE_OTHERS * set_up_s
        else:
            search_s += search.one_after_the_other_s() * len(asked.calls)
        needed_s = min(math.ceil(search_s / (1 - FINALISTS_SHARE)), self._most_budget_s())
        if needed_s > self._budget_s:
            self._budget_s = needed_s
            terms.budget_s, terms.deadline = self._budget_s, self._search_ends()

    def _tell_the_least(self) -> None:
        """Note that the budget is less than what comes before the search."""
        took_s = time.monotonic() - self._started
        before = "the reference and"
        if self.asked.buckets is not None:
            before = "the reference, the proof that padding is harmless, and"
        if self._budget_s is not None and took_s > self._budget_s:
            self.report.notes.append(
                f"The budget of {self._budget_s:g} s is less than tune needs for this model: "
                f"{before} eager alone took {took_s:.0f} s."
            )

    def _refer(self, progress: Progress) -> None:
        """Make the references that candidates are compared with, once."""
        if self._evaluator is None:
            progress.step("float64 reference")
            self._evaluator = self._make_evaluator()
            self._same_under_no_grad = self._check_no_grad()

    def _prove_padding(self, progress: Progress) -> None:
        """Prove now that padding is harmless, if time is limited: the search gets what is left.

        It takes as long as it takes, and is remembered until the choice is known.
        """
        if self.asked.buckets is not None and self._budget_s is not None:
            progress.doing("proving that padding is harmless")
            self._restore()
            self.asked.buckets.unproved()

    def _make_evaluator(self) -> CandidateEvaluator:
        """An evaluator with a reference for every sample."""
        model = self.asked.module
        state = ModuleState(model)
        samples = []
        for weight, call in self.asked.calls:
            fn = model.function_of() if isinstance(model, FunctionModule) else model
            with cached_weights_refused():
                ref = reference(fn, model, call, tolerance=self.asked.tolerance, state=state)
            refuse_changed_containers(ref)
            self.report.notes += [note for note in ref.notes if note not in self.report.notes]
            of = f" for {call.name}" if len(self.asked.calls) > 1 else ""
            self.report.left_out += [f"{name}{of}" for name in ref.left_out]
            samples.append(Sample(call.name, weight, call, ref))
        errors = [s.reference.worst_eager_error for s in samples]
        self.report.eager_error = max(
            (error for error in errors if error), key=lambda e: e.rms, default=None
        )
        budget_s = math.inf if self._budget_s is None else self._budget_s
        return CandidateEvaluator(
            model,
            samples,
            self.asked.device,
            objective=self.asked.objective,
            screening_s=min(SCREENING_S, _SCREENING_SHARE * budget_s),
            timing_s=min(self.asked.limits.timeout_s / 2, budget_s / 10),
            dynamic_shapes=self._dynamic_shapes(),
        )

    def _dynamic_shapes(self) -> Any:
        """The dimensions that vary, with bounds from the smallest bucket to the largest."""
        known = None if self.asked.buckets is None else self.asked.buckets.ranges()
        ends = {each.name: (each.low, each.high) for each in known or ()}
        return within(self.asked.dynamic_shapes, ends) if ends else self.asked.dynamic_shapes

    @property
    def evaluator(self) -> CandidateEvaluator:
        """Evaluates candidates in this process; exists once the references are made."""
        assert self._evaluator is not None
        return self._evaluator

    def _check_no_grad(self) -> bool:
        """Whether eager under no_grad computes what it computes as the caller calls it."""
        if not self.evaluator.differs_without_grad(self.evaluator.samples[0]):
            return True
        self.report.notes.append(
            "This model's results differ with gradients off. If you serve it under "
            "torch.no_grad(), tune it there too."
        )
        return False

    # ------------------------------------------------------------ choosing

    def _drop_the_beaten(self) -> None:
        """Drop candidates that are out of the race, with the memory that they hold."""
        near = {EAGER, COMPILE_DEFAULT, *(row.strategy for row in near_best(self.report))}
        beaten = [name for name in self._kept if name not in near]
        for name in beaten:
            del self._kept[name]
        if beaten:
            gc.collect()

    def _time_first_answers(self, progress: Progress) -> None:
        """Time new processes until their first right answer, for candidates still in the race."""
        budget_s = self._budget_s
        starts = ColdStarts(
            self.evaluator,
            self._kept,
            self._tuned,
            self.asked.limits.timeout_s,
            None if budget_s is None else self._started + budget_s,
        )
        with starts:
            for row in self.report.rows:
                if row.status is Status.OK:
                    progress.doing(f"first answer of {row.strategy}")
                    starts.time(row, self._by_name[row.strategy])
                    self._screening.with_repeat(row)
                    self._drop_the_beaten()

    def _final_rounds(self) -> None:
        """Time the finalists again, here and in common rounds with eager."""
        self._drop_the_beaten()
        needed_s = self._seconds_for_the_best()
        if needed_s is None and self._is_late:  # The search went on for a compiler.
            needed_s = _LAST_ROUNDS_S
        if needed_s is not None:
            self._give_the_best_time(needed_s)
        rounds = FinalRounds(
            self.report,
            self.evaluator,
            self._kept,
            self._by_name,
            self._tuned,
            FINAL_S_EACH,
            None if self._budget_s is None else self._started + self._budget_s,
            _GRACE * (self._budget_s or 0.0),
        )
        rounds.run(self._screening.with_repeat)

    @property
    def _by_name(self) -> dict[str, Candidate]:
        return {candidate.name: candidate for candidate in self.asked.candidates}

    def _ranked(self) -> list[Row]:
        """Candidates that were built in this process, best first."""
        return ranked(self.report, [r for r in self.report.rows if r.strategy in self._kept])

    def _choose(self) -> Row:
        """The best candidate that is still right when it is verified again."""
        for row in self._ranked():
            candidate = self._by_name[row.strategy]
            if row.strategy == EAGER and self._is_late:
                # It was verified before, and is what all else is compared with.
                self._conclude(row)
                return row
            try:
                why = self._problem(candidate, self._kept[row.strategy])
            except Exception as error:
                row.status = status_of(error)
                row.reason, row.remedy = in_words(error)
                continue
            if why is None:
                self._conclude(row)
                return row
            row.status, row.reason = Status.WRONG, f"when verified again: {why}"
        failed = self.report.row(EAGER)
        why = failed.reason if failed is not None else "it was not measured"
        raise ModelFailed(f"Eager itself could not be verified or timed: {why}")

    def _problem(self, candidate: Candidate, builts: Sequence[Built]) -> str | None:
        """What is wrong with a candidate's results for the samples, in words; None if nothing."""
        for sample, built in zip(self.evaluator.samples, builts, strict=True):
            verdict = self.evaluator.verified(candidate, built, sample)
            if not verdict.ok:
                return verdict.reason
        return None

    def _conclude(self, chosen: Row | None = None) -> None:
        """Put the choice and its reason into the report; `chosen` is None after an interruption."""
        report = self.report
        if chosen is None:
            rows = ranked(report, list(report.rows))
            if not rows:
                report.reason = "Interrupted before anything was measured."
                return
            chosen = rows[0]
        report.chosen = chosen.strategy
        finalists = [r for r in report.rows if r.final is not None and r.status is Status.OK]
        report.reason = reason_for(report, chosen, finalists, load_average())

    def _possible_ranges(self, builts: Sequence[Built]) -> tuple[Range, ...]:
        """The ranges of sizes that may be answered by what was built; none if it has one size."""
        if self.asked.buckets is None or not all(built.ranged for built in builts):
            return ()
        return self.asked.buckets.ranges() or ()

    def _check_other_sizes(self, chosen: str, builts: Sequence[Built]) -> None:
        """Check how calls between the buckets may be answered; notes say where they may not."""
        notes = [note for note in self.report.notes if not note.startswith((_BETWEEN, _RANGE))]
        buckets = self.asked.buckets
        if buckets is not None and chosen != EAGER:
            self._restore()
            why = buckets.unproved()
            if why is not None:
                notes.append(f"{_BETWEEN} {why}.")
            ranges = self._possible_ranges(builts)
            for call in buckets.calls_between() if ranges else ():
                why = self.evaluator.problem_at(self._by_name[chosen], builts[0], call)
                if why is not None:
                    notes.append(f"{_RANGE} for {call.name} {why}.")
                    ranges = ()
                    break
            self._ranges = ranges
        self.report.notes[:] = notes

    # ------------------------------------------------------------ the choice cache

    def _key(self) -> Fingerprint | None:
        """The key of the choice in the cache; None if it is not cached."""
        if not self.asked.remember or not all(map(is_ours, self.asked.candidates)):
            return None
        options = {
            "strategies": [candidate.name for candidate in self.asked.candidates],
            "objective": self.asked.objective,
            "tolerance": self.asked.tolerance,
            "allow": sorted(self.asked.allow),
            "budget_s": self.asked.limits.budget_s,
            "exhaustive": self.asked.exhaustive,
            "timeout_s": self.asked.limits.timeout_s,
            "memory_limit": self.asked.limits.memory_limit,
            "weights": [weight for weight, _ in self.asked.calls],
            "grad": torch.is_grad_enabled(),
            "trees": [str(each.template.spec) for each in self.asked.apart],
        }
        # Finalists are timed with the checks that their calls will have: they may decide.
        answering = {"audit": self.asked.answering.audit, "checks": self.asked.answering.checks}
        options |= {n: value for n, value in answering.items() if value not in (None, "full")}
        calls = [(call.args, call.kwargs) for _, call in self.asked.calls]
        return key_of(self.asked.module, calls, self.asked.device, self.report.environment, options)

    def _tuned_from_cache(self, found: Report) -> TunedModule | None:
        """The choice of an earlier run, built and verified again; None if it is wrong now."""
        name = found.chosen or EAGER
        self._refer(Silent())
        unseen = [each for each in found.left_out if each not in self.report.left_out]
        if unseen:
            self.report.notes.append(
                f"The cached choice was not verified with {', '.join(unseen)}: tuned again."
            )
            return None
        trial = self.evaluator.set_up(self._by_name[name])
        if not trial.builts:
            self.report.notes.append(
                f"The cached choice {name} is no longer right ({trial.row.reason}): tuned again."
            )
            return None
        found.recalled = found.created
        found.model = self.report.model
        self.report = found
        self._check_other_sizes(name, trial.builts)
        return self._tuned(name, trial.builts)

    # ------------------------------------------------------------ the result

    def build(self, name: str) -> TunedModule | None:
        """Build a candidate here, and keep it for the final rounds; None if it is wrong here."""
        builts = self.evaluator.set_up(self._by_name[name]).builts
        if not builts:
            return None
        self._kept[name] = builts
        return self._tuned(name, builts)

    def _tuned(self, name: str, builts: Sequence[Built]) -> TunedModule:
        """The module with one candidate to answer its calls."""
        samples, buckets = self.evaluator.samples, self.asked.buckets
        ranges = self._possible_ranges(builts) if self._ranges is None else self._ranges
        return assemble(
            self.asked.module,
            self.report,
            self.asked.signatures,
            Origin(self._by_name[name], builts, samples, self.asked.device, ranges),
            pure=all(sample.reference.pure for sample in samples),
            same_under_no_grad=self._same_under_no_grad,
            pad_with=None if buckets is None else buckets.padded_calls,
            audit=self.asked.answering.audit,
            on_miss=self.asked.answering.on_miss,
            checks=self.asked.answering.checks,
        )

    def _put_together(self, tuned: TunedModule) -> TunedModule:
        """What answers calls with objects, unless the model itself is faster.

        The candidates were timed on tensors alone; to take objects apart takes time, too.
        """
        module, calls = self.asked.module, self.asked.apart
        assert isinstance(module, TakenApart)
        results = [module.made(number, each.tensors) for number, each in enumerate(calls)]
        made = put_together(module.model, Apart(tuned, calls, results))
        if self.report.chosen == EAGER or self.report.objective not in OF_TIME:
            return made
        weights = [weight for weight, _ in self.asked.calls]
        shares = [weight / sum(weights) for weight in weights]
        mine, its = 0.0, 0.0
        rounds = self._rounds_with_objects()
        for share, call in zip(shares, calls, strict=True):
            times = seconds_with_objects(made, module.model, call, rounds)
            mine, its = mine + share * times[0], its + share * times[1]
        made.calls.clear()
        if mine <= its:
            return made
        self.report.reason = (
            f"eager was chosen: with the objects taken apart, {self.report.chosen} takes "
            f"{mine * 1e6:.0f} µs a call, and eager {its * 1e6:.0f} µs."
        )
        self.report.chosen = EAGER
        builts = [
            self._by_name[EAGER].build(module, call.args, call.kwargs)
            for _, call in self.asked.calls
        ]
        return put_together(module.model, Apart(self._tuned(EAGER, builts), calls, results))

    def _rounds_with_objects(self) -> int:
        """Rounds of calls with objects: fewer where the budget leaves no time for all."""
        eager = self.report.row(EAGER)
        if self._budget_s is None or eager is None or eager.measurement is None:
            return _ROUNDS_WITH_OBJECTS
        left_s = self._started + self._budget_s - time.monotonic()
        round_s = 2 * len(self.asked.calls) * eager.measurement.typical().median
        return max(_LEAST_ROUNDS, min(_ROUNDS_WITH_OBJECTS, int(left_s / round_s)))

    def _restore(self) -> None:
        """Put the module's buffers and parameters back as they were."""
        if self._evaluator is not None:
            self._evaluator.restore()


@contextlib.contextmanager
def _same_random_state(device: torch.device) -> Iterator[None]:
    """Leave the random-number states of the CPU and of the device as they were."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
