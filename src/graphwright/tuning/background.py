"""tune(background=True): a search in another process, while the model goes on answering.

Tuning in this process would disturb threads that call the model: it puts the module's state and the
random-number state back, pauses garbage collection, and traces, which patches `nn.Module` for all
threads. So all of that runs in a child (`background_main`), on a copy of the model. It saves what
it finds to a file, and a thread of this process loads that, without the model. Only candidates that
can be loaded so are tried; nothing is traced, compiled or captured here.

A watch of the module begins before the copy is made and goes on for ever, so that no change of the
module between the two is missed.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import importlib
import json
import os
import random
import shutil
import socket
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

import torch
from torch import nn

from .. import errors
from ..artifacts.loading import load_beside_others
from ..artifacts.substitute import unsavable
from ..artifacts.tuned_module import Origin, TunedModule, assemble, choice_of, of_tensors
from ..calls import switches
from ..calls.modes import opaque
from ..calls.modules import FunctionModule
from ..calls.options import refuse
from ..calls.plurals import counted
from ..calls.snapshots import Call, CallOutcome, keep, outputs_by_name
from ..calls.watch import ModuleWatch
from ..dispatch.answerer import Answerer, SizesAnswered
from ..errors import GraphwrightError, first_line, in_words
from ..evaluation.measurement import median_interval
from ..evaluation.reference import Sample
from ..evaluation.verification import compare
from ..processes.child import GARBLED, Child, ending, message_of
from ..processes.environment_variables import CANDIDATE
from ..processes.pickled_files import write_pickled
from ..report.report import Report
from ..report.result import EAGER, Row, Status
from ..strategies import aot_inductor, rewrites, torchscript
from ..strategies.base import Built, Candidate
from ..strategies.onnxruntime import strategy as onnxruntime
from ..strategies.registry import without
from .request import Request
from .workers.settings import ProcessSettings

# The reason of calls of the model itself where nothing beats it so far, as `calls` counts them.
NOTHING_BETTER = "nothing better is known"
# Rounds in which what was found is timed in turns with the model, under this process's load.
_ROUNDS = 15
# What was found is not taken if the whole interval of its time relative to eager's is above this.
_SLOWER = 1.02
# How often the search begins again since the module has changed.
_RESTARTS = 2
# Seconds that the child has to end, and the thread to end what it is in.
_END_TIMEOUT_S = 10.0
# Bytes of the longest message.
_MAX_MESSAGE = 1 << 26
# cloudpickle has one registry for all threads.
_PICKLING = threading.Lock()
_MAIN = "graphwright.tuning.background_main"
_NO_SEARCH = "There is no search in the background any more"
_LIVE: weakref.WeakSet[BackgroundSearch] = weakref.WeakSet()


@dataclass
class SearchOrder:
    """What the child searches for.

    Attributes:
        model: to tune.
        samples: the calls, as `tune` takes them.
        options: of `tune`.
        name: of the model.
        settings: of the thread that called `tune`.
    """

    model: Callable[..., Any]
    samples: list[Any]
    options: dict[str, Any]
    name: str
    settings: ProcessSettings


class _Outdated(Exception):
    """The module has changed since it was copied; the text says how."""


def begin_search(
    model: Callable[..., Any], args: Any, kwargs: Any, **options: Any
) -> BackgroundModule:
    """Check what `tune` was given, and begin to search.

    Args:
        model: as for `tune`.
        args: likewise.
        kwargs: likewise.
        options: likewise.

    Raises:
        OptionError: an option is unknown, or makes no sense in the background.
        SignatureError: the arguments cannot be compared.
    """
    asked = Request.of(model, args, kwargs, **options)
    _import_what_draws()
    refuse(
        "tune(background=True)",
        "the objective cold_start measures new processes, and this one is already running"
        if asked.objective == "cold_start"
        else None,
        "buckets are only for the foreground; pass a call of each size as samples=[…]"
        if asked.buckets is not None
        else None,
        "calls with objects among their arguments are only for the foreground"
        if asked.apart
        else None,
    )
    candidates = asked.candidates
    if options.get("strategies") is None:
        also = [Candidate(aot_inductor.AOT_INDUCTOR), Candidate(aot_inductor.FREEZE)]
        candidates = [*candidates, *without(also, _names(options.get("exclude", ())))]
    search = BackgroundSearch(replace(asked, candidates=candidates))
    module = BackgroundModule(asked.module, search)
    search.start(module)
    return module


def _names(names: Any) -> Any:
    return names.split(",") if isinstance(names, str) else names


def _import_what_draws() -> None:
    """Import what reports are shown with, which draws a number from `random` when imported.

    In the thread of the search that would come between the caller's own draws.
    """
    if "rich.style" not in sys.modules:
        state = random.getstate()
        importlib.import_module("rich.style")
        random.setstate(state)


def not_in_background(candidate: Candidate) -> str | None:
    """Why a candidate is not tried in the background; None if it is."""
    if candidate.name == EAGER:
        return None
    if candidate.rewrite is rewrites.TF32:
        return "every call would set a switch that other threads see"
    if isinstance(candidate.compiler, torchscript.TorchScript):
        return "loading it changes filters of warnings and switches that other threads see"
    if candidate.runner is not None or candidate.compiler is onnxruntime.GRAPH:
        return "capturing a graph in this process would disturb other threads"
    why = unsavable(candidate)
    if why is None and candidate.loader is None:
        why = "it cannot be loaded from a file, and building it here would disturb other threads"
    return why


class _Connection:
    """The socket to the child, which ends the search where it is shut down.

    Attributes:
        lock: guards what `cancel` looks at from other threads. The garbage collector may call that
            inside of such a block.
        cancelled: whether the search is to end.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.cancelled = False
        self._socket: socket.socket | None = None
        self._pid = os.getpid()

    @property
    def is_ours(self) -> bool:
        """Whether this process has the search; a forked child only has the socket."""
        return os.getpid() == self._pid

    def open(self, ours: socket.socket) -> None:
        """Have `cancel` shut a socket down."""
        self._socket = ours

    def cancel(self) -> None:
        """End the search."""
        if self.is_ours:
            with self.lock:
                self.cancelled = True
                self._shut()

    def close(self) -> None:
        """Shut the socket down, and forget it."""
        with self.lock:
            self._shut()
            self._socket = None

    def _shut(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


class BackgroundSearch:
    """A search in a child, and the thread that follows it.

    Attributes:
        report: what is known so far.
        doing: what is under way, in words.
        error: what ended the search; None if nothing did.
        ended: set when the search is over.
    """

    def __init__(self, asked: Request) -> None:
        self.asked = asked
        self.report = Report(
            model=asked.name,
            inputs=asked.inputs[0],
            objective=asked.objective,
            rows=[],
            environment={},
            chosen=EAGER,
            reason="The search goes on; so far the model itself answers.",
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            shapes=asked.shapes,
        )
        self.doing = "starting"
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self.calls: list[Counter[str]] = []
        self._left_out = [
            Row(each.name, Status.NOT_TRIED, f"not in the background: {why}")
            for each in asked.candidates
            if (why := not_in_background(each)) is not None
        ]
        self._notes: list[str] = []
        self._settings = ProcessSettings.current()
        self._samples = [(weight, call.clone()) for weight, call in asked.calls]
        self._began = time.monotonic()
        self._watch()
        self._owner: Callable[[], BackgroundModule | None] = lambda: None
        self._answering = EAGER
        self._connection = _Connection()
        self._thread: threading.Thread | None = None
        self._scratch = ""

    def _watch(self) -> None:
        """Begin to watch the module: for what answers calls, and, whatever that looks at, fully."""
        asked = self.asked
        self._answers_watch = ModuleWatch(
            asked.module, values=True, audit=asked.answering.audit, checks=asked.answering.checks
        )
        self._full_watch = self._answers_watch
        if asked.answering.checks != "full":
            self._full_watch = ModuleWatch(asked.module, values=True)

    def start(self, owner: BackgroundModule) -> None:
        """Begin, for a module that is not kept alive."""
        self._owner = weakref.ref(owner)
        weakref.finalize(owner, self.cancel).atexit = False
        _LIVE.add(self)
        # Not one of `own_thread`: it calls the model.
        self._thread = threading.Thread(target=self._run, name="background search", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """End the search; what was found so far goes on answering."""
        self._connection.cancel()

    def close(self) -> None:
        """End the search, and wait until its process and thread are gone."""
        self.cancel()
        thread = self._thread
        if self._connection.is_ours and thread is not None and thread is not _this_thread():
            thread.join(2 * _END_TIMEOUT_S)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            with self._as_caller():
                self._search()
        except BaseException as error:
            self.error = error
            self._conclude(f"{first_line(error, 300)}")
        finally:
            self.doing = ""
            self.ended.set()

    @contextlib.contextmanager
    def _as_caller(self) -> Iterator[None]:
        """The settings of the caller's thread that belong to a thread."""
        with contextlib.ExitStack() as stack:
            stack.callback(torch.clear_autocast_cache)
            switches.apply({name: self._settings.switches[name] for name in switches.OF_THREAD})
            device = self.asked.device
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
                # Waiting for a stream of its own does not wait for other threads' work.
                stack.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
            changed = switches.differences(self._settings.switches, switches.read())
            if changed:
                raise GraphwrightError(
                    f"A setting of PyTorch changed as the search began: {'; '.join(changed)}."
                )
            yield

    def _search(self) -> None:
        """Search; again if the module has changed meanwhile."""
        for attempt in range(_RESTARTS + 1):
            try:
                self._search_once()
                return
            except _Outdated as error:
                self._answer_eagerly()
                self._notes.append(f"The module changed during the search: {error}.")
                if attempt == _RESTARTS or self._connection.cancelled:
                    self._conclude(f"The module keeps changing: {error}.")
                    return
                self._watch()

    def _search_once(self) -> None:
        with contextlib.ExitStack() as stack:
            order = stack.enter_context(self._written())
            ours, theirs = socket.socketpair()
            stack.callback(ours.close)
            with theirs, self._connection.lock:
                if self._connection.cancelled:
                    self._conclude("It was cancelled.")
                    return
                self._connection.open(ours)
                child = _start(theirs, order)
                stack.callback(self._end, child)
            self._follow(ours, child)

    @contextlib.contextmanager
    def _written(self) -> Iterator[IO[bytes]]:
        """The order, in a file without a name.

        Raises:
            GraphwrightError: the model cannot be pickled.
        """
        self.doing = "copying the model"
        asked, model = self.asked, _eager_of(self.asked.module)
        samples = [(call.args, dict(call.kwargs)) for _, call in self._samples]
        names = [each.name for each in asked.candidates if not_in_background(each) is None]
        options = {
            "weights": [weight for weight, _ in self._samples],
            "strategies": names,
            "objective": asked.objective,
            "tolerance": asked.tolerance,
            "allow": asked.allow,
            "budget_s": asked.limits.budget_s,
            "timeout_s": asked.limits.timeout_s,
            "memory_limit": asked.limits.memory_limit,
            "isolate": asked.isolate,
            "remember": asked.remember,
            "fresh": asked.fresh,
        }
        order = SearchOrder(model, samples, options, asked.name, self._settings)
        try:
            with _PICKLING:
                file = write_pickled(order)
        except Exception as error:
            raise GraphwrightError(
                "There is no search in the background, since the model cannot be copied to "
                f"another process: {first_line(error, 160)}.",
                remedy="Tune without background=True, before other threads call the model.",
            ) from error
        with file:
            yield file

    def _end(self, child: Child) -> None:
        """End the child, which ends what it has started and removes its files."""
        self._connection.close()
        status = child.status_within(_END_TIMEOUT_S)
        child.end()
        if status is None and self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _follow(self, ours: socket.socket, child: Child) -> None:
        """Do what the child says, until it is done."""
        self.doing = "starting a process"
        with ours.makefile("rb") as lines:
            for line in lines:
                try:
                    message = message_of(line)
                    say = message.pop("say")
                except (ValueError, KeyError) as error:
                    raise GraphwrightError(f"{_NO_SEARCH}: {GARBLED}.") from error
                if say == "scratch":
                    self._scratch = message["path"]
                elif say == "doing":
                    self.doing = message["what"]
                elif say == "failed":
                    raise _error_of(**message)
                elif say in ("better", "done"):
                    report = Report.from_json(message["report"])
                    if message["strategy"] != self._answering:
                        self._change(message["strategy"], message["path"], report)
                    if say == "done":
                        if self._answering != EAGER:
                            self._refuse_change()
                        self._conclude(report.reason, report)
                        return
                    self._publish(report)
        if self._connection.cancelled:
            self._conclude("It was cancelled.")
            return
        why = ending(child.status_within(_END_TIMEOUT_S), child.last_line())
        raise GraphwrightError(f"{_NO_SEARCH}: {why}.")

    def _change(self, name: str, path: str | None, report: Report) -> None:
        """Have a candidate answer calls, unless something is wrong with it here."""
        if name == EAGER:
            self._answer_eagerly()
        if path is None:  # Else the child could not save it, and its report says why.
            return
        self.doing = f"loading {name}"
        try:
            problem = self._take(name, path, report)
        except _Outdated:
            raise
        except Exception as error:  # The model or what was loaded may raise anything.
            problem = in_words(error)[0]
        if problem is not None:
            self._notes.append(f"{name} does not answer calls here: {problem}.")

    def _take(self, name: str, path: str, report: Report) -> str | None:
        """Load, verify and time a candidate, and have it answer calls; or what is wrong with it."""
        self._refuse_change()
        found = choice_of(of_tensors(load_beside_others(path)))
        assert found.origin is not None
        origin, module, device = found.origin, self.asked.module, self.asked.device
        if not found.pure:
            return "calls of the model change something, so that it cannot be compared here"
        with torch.set_grad_enabled(self._settings.grad):
            problem = _disagreement(module, origin.samples)
            if problem is None and not self._connection.cancelled:
                problem = _slower(module, origin.builts, origin.samples, device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        if problem is not None:
            return problem
        tuned = assemble(
            module,
            replace(report, chosen=name, notes=[*report.notes]),
            self.asked.signatures,
            Origin(origin.candidate, origin.builts, origin.samples, device),
            pure=True,
            same_under_no_grad=found.same_under_no_grad,
            audit=self.asked.answering.audit,
            on_miss=self.asked.answering.on_miss,
            checks=self.asked.answering.checks,
            watch=self._answers_watch,
        )
        self._refuse_change()
        if not self._connection.cancelled:
            self._swap(name, tuned, tuned)
        return None

    def _refuse_change(self) -> None:
        change = self._full_watch.changed()
        if change is not None:
            raise _Outdated(change)

    def _answer_eagerly(self) -> None:
        owner = self._owner()
        if owner is not None and self._answering != EAGER:
            untuned = TunedModule(self.asked.module, self.report)
            self._swap(EAGER, untuned, _counted(_eager_of(self.asked.module), untuned.calls))

    def _swap(self, name: str, tuned: TunedModule, answer: Callable[..., Any]) -> None:
        """Have something else answer calls; those that have begun end where they are."""
        owner = self._owner()
        if owner is not None:
            self.calls.append(tuned.calls)
            object.__setattr__(owner, "_choice", choice_of(tuned))
            object.__setattr__(owner, "_answer", answer)
            self._answering = name

    def _publish(self, report: Report) -> None:
        report.rows = [*report.rows, *self._left_out]
        report.notes = [*report.notes, *self._notes]
        report.chosen = self._answering
        report.seconds = time.monotonic() - self._began
        if not report.reason:
            report.reason = f"The search goes on; so far {self._answering} answers."
        self.report = report
        owner = self._owner()
        if owner is not None:
            choice_of(owner).report = report

    def _conclude(self, reason: str, report: Report | None = None) -> None:
        """Publish the last report."""
        if report is None:
            rows = [row for row in self.report.rows if row not in self._left_out]
            notes = [note for note in self.report.notes if note not in self._notes]
            report = replace(
                self.report, rows=rows, notes=notes, interrupted=self._connection.cancelled
            )
            reason = f"{self._answering} answers. The search ended early: {reason}"
        elif report.chosen != self._answering:
            why = f" {self._notes[-1]}" if self._notes else ""
            reason = f"{self._answering} answers, though the search says: {reason}{why}"
        report.reason = reason
        self._publish(report)


class BackgroundModule(TunedModule):
    """The model, called by the best that a search in the background has found so far.

    Until the search has found something faster, a call is a call of the model itself, gradients and
    hooks included. From then on calls are those of a `TunedModule`; each goes as a whole to what
    answered when it began. After a change of the module calls go to the model itself. It shares the
    module's attributes, as a `TunedModule` does. As a context manager it ends the search.
    """

    __slots__ = ("_answer", "_search")
    _answer: Callable[..., Any]
    _search: BackgroundSearch

    def __init__(self, module: nn.Module, search: BackgroundSearch) -> None:
        super().__init__(module, search.report)
        object.__setattr__(self, "_search", search)
        search.calls.append(choice_of(self).calls)
        object.__setattr__(self, "_answer", _counted(_eager_of(module), choice_of(self).calls))

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what answers at this moment."""
        return self._answer(*args, **kwargs)

    def __enter__(self) -> BackgroundModule:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _graphwright_answerer(self) -> Answerer:
        return _Answers(self)

    @property
    def done(self) -> bool:
        """Whether the search is over."""
        return self._search.ended.is_set()

    @property
    def report(self) -> Report:
        """What is known so far; complete once the search is over."""
        return self._search.report

    @property
    def calls(self) -> Counter[str]:
        """How many calls went which way, since the beginning; a copy."""
        total: Counter[str] = Counter()
        for each in list(self._search.calls):
            total.update(dict(each))
        return total

    def wait(self, timeout_s: float | None = None) -> Report:
        """Wait until the search is over, and return its report.

        Args:
            timeout_s: seconds to wait at most; None for as long as it takes.

        Raises:
            TimeoutError: the search goes on.
            GraphwrightError: what ended the search early, such as a model that cannot be pickled.
        """
        if not self._search.ended.wait(timeout_s):
            raise TimeoutError(f"The search goes on after {timeout_s} s: {self._search.doing}.")
        if self._search.error is not None:
            raise self._search.error
        return self._search.report

    def cancel(self) -> None:
        """End the search and return at once; what was found so far goes on answering."""
        self._search.cancel()

    def close(self) -> None:
        """End the search, and wait until its process is gone; calls are answered as before."""
        self._search.close()

    def explain(self) -> str:
        """How far the search is, what answers now and why, and how calls went so far."""
        search = self._search
        lines = [f"searching: {search.doing}"] if not self.done else []
        if choice_of(self).entries.table:
            lines.append(super().explain())
        else:
            lines += [f"strategy: {EAGER}", search.report.reason]
        lines += search.report.notes
        if not choice_of(self).entries.table:
            lines += [f"{counted(n, 'call')} {way}" for way, n in self.calls.most_common()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return super().__repr__() + ("" if self.done else f", searching: {self._search.doing}")


class _Answers:
    """What answers calls at this moment; its counts are those since the beginning."""

    def __init__(self, owner: BackgroundModule) -> None:
        self.owner = owner

    def counts(self) -> Counter[str]:
        """How many calls went which way."""
        return self.owner.calls

    def explain(self) -> str:
        """How far the search is, what answers now and why."""
        return self.owner.explain()

    def reference(self) -> Callable[..., Any] | None:
        """The module itself."""
        return choice_of(self.owner).reference()

    def sizes(self) -> SizesAnswered:
        """Which calls what answers now does."""
        return choice_of(self.owner).sizes()


def _counted(answer: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    way = f"eager: {NOTHING_BETTER}"

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[way] += 1
        return answer(*args, **kwargs)

    return call


def _eager_of(module: nn.Module) -> Callable[..., Any]:
    return module.function_of() if isinstance(module, FunctionModule) else module


def _start(theirs: socket.socket, order: IO[bytes]) -> Child:
    """Start the child, from the thread that lives as long: it ends with that."""
    order.seek(0)
    path = [os.path.abspath(entry) for entry in sys.path]
    handles = theirs.fileno(), order.fileno()
    words = [*map(str, (*handles, os.getpid())), json.dumps([path, sys.argv])]
    # Until the model is loaded: its modules must not tune.
    environment = {CANDIDATE: "1"}
    return Child(["-m", _MAIN, *words], handles=handles, environment=environment)


def _error_of(kind: str, what: str, remedy: str) -> GraphwrightError:
    """An error of the child, as this process raises it."""
    found: Any = getattr(errors, kind, None)
    known = isinstance(found, type) and issubclass(found, GraphwrightError)
    made: type[GraphwrightError] = found if known else GraphwrightError
    return made(what, remedy=remedy or None)


def _disagreement(module: nn.Module, samples: Sequence[Sample]) -> str | None:
    """How the model here differs from its copy in the child, in words; None if it agrees.

    Nothing is put back, unlike in `run`: calls of this model change nothing.
    """
    for sample in samples:
        for case in sample.reference.cases:
            call = case.call.clone()
            outputs, spec = outputs_by_name(module(*call.args, **call.kwargs))
            after = {f"{name} after the call": leaf for name, leaf in call.leaves().items()}
            outcome = CallOutcome(spec, keep(outputs), keep(after), {})
            verdict = compare(outcome, case, sample.reference)
            if not verdict.ok:
                return (
                    f"the model's copy in another process computes something else: {verdict.reason}"
                )
    return None


def _slower(
    module: nn.Module, builts: Sequence[Built], samples: Sequence[Sample], device: torch.device
) -> str | None:
    """Whether the model is faster beyond the noise, under the load of this process, in words."""
    ratios = []
    for round_ in range(-2, _ROUNDS):  # The first two warm up.
        mine = its = 0.0
        for sample, built in zip(samples, builts, strict=True):
            mine += sample.weight * _seconds(built.call, sample.call, device)
            its += sample.weight * _seconds(module, sample.call, device)
        if round_ >= 0:
            ratios.append(mine / its)
    low, high = median_interval(ratios)
    return f"it takes {low:.2f} to {high:.2f} times eager's time here" if low > _SLOWER else None


def _seconds(function: Callable[..., Any], call: Call, device: torch.device) -> float:
    mine = call.clone()
    began = time.perf_counter()
    function(*mine.args, **mine.kwargs)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter() - began


def _this_thread() -> threading.Thread:
    return threading.current_thread()


def _close_all() -> None:
    """At the end of the process no thread may be in the middle of loading a library."""
    live = list(_LIVE)
    for search in live:
        search.cancel()
    for search in live:
        search.close()


atexit.register(_close_all)
