"""Workers that serve one candidate after the other, and builds that candidates share."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import planted
import pytest
import torch
from planted import Noted, Planted, Small, directly, short_for
from shares import share
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import graphwright as gw
from graphwright.calls.snapshots import Call, ModuleState
from graphwright.evaluation.reference import Sample, reference
from graphwright.report.result import Row, Status
from graphwright.strategies.base import AVAILABLE, Availability, Built, Candidate, Runner
from graphwright.strategies.registry import parse_candidates
from graphwright.strategies.runners import GRAPH
from graphwright.tuning.trial import CandidateEvaluator, SharedBuild
from graphwright.tuning.workers import leftovers
from graphwright.tuning.workers.leftovers import Baseline
from graphwright.tuning.workers.pool import TrialLimits, WorkerPool
from graphwright.tuning.workers.schedule import Choose, Schedule, jobs_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="candidates are forked on Linux")
CPU = torch.device("cpu")


def in_order(candidates: Sequence[Candidate]) -> Choose:
    """Chooses candidates in their order, with those that differ in the runner alone."""
    left = list(jobs_of(candidates))

    def choose(count: int) -> Sequence[Candidate]:
        chosen, left[:] = left[:count], left[count:]
        return [candidate for job in chosen for candidate in job.candidates]

    return choose


@pytest.fixture
def as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted strategies are taken for graphwright's own, which share a worker."""
    monkeypatch.setattr("graphwright.tuning.workers.pool.is_ours", lambda candidate: True)
    monkeypatch.setattr("graphwright.tuning.workers.schedule.is_ours", lambda candidate: True)
    monkeypatch.setattr("graphwright.tuning.workers.pool.cores", lambda: 1)


def make_evaluator(
    model: nn.Module, *args: torch.Tensor, objective: str = "latency"
) -> CandidateEvaluator:
    call = Call("", args, {})
    state = ModuleState(model)
    sample = Sample("", 1.0, call, reference(model, model, call, tolerance=None, state=state))
    device = args[0].device
    return CandidateEvaluator(model, [sample], device, objective=objective, screening_s=0.05)


def rows_of(strategies: Sequence[Any], *, objective: str = "latency") -> dict[str, Row]:
    """The rows that a pool of workers gives for strategies, by name."""
    candidates = [s if isinstance(s, Candidate) else Candidate(s) for s in strategies]
    model, x = Small().eval(), torch.randn(4, 16)
    with WorkerPool(model, candidates) as pool:
        evaluator = make_evaluator(model, x, objective=objective)
        pool.load(evaluator, TrialLimits(60.0, 4 << 30))
        found = {}
        for candidate, row in pool.evaluate(in_order(candidates)):
            assert isinstance(row, Row), row
            found[candidate.name] = row
    return found


def lines(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []


@dataclass(frozen=True)
class Served:
    """How a pool tried a strategy between two that are harmless.

    Attributes:
        row: its row.
        after: the row of the one after it.
        same_before: whether it had the worker of the one before it.
        same_after: whether the one after it had the same worker as it.
    """

    row: Row
    after: Row
    same_before: bool
    same_after: bool


def served(
    tmp_path: Path, makes: Mapping[str, Callable[[nn.Module], Any]], **options: Any
) -> dict[str, Served]:
    """Try strategies in one pool, each between two that are harmless."""
    file = tmp_path / "workers"
    tried = {"before": directly}
    for name, make in makes.items():
        tried |= {name: make, f"after {name}": directly}
    rows = rows_of([Planted(n, Noted(str(file), make)) for n, make in tried.items()], **options)
    assert rows["before"].status in (Status.OK, Status.SLOWER)
    workers = lines(file)
    assert len(workers) == len(tried)
    found = {}
    for place, name in enumerate(makes):
        before, between, after = workers[2 * place : 2 * place + 3]
        same = before == between, between == after
        found[name] = Served(rows[name], rows[f"after {name}"], *same)
    return found


# ---------------------------------------------------------------- whom a worker serves


@pytest.mark.slow
@pytest.mark.usefixtures("as_ours")
def test_where_memory_is_the_objective_each_has_a_worker_of_its_own(tmp_path: Path) -> None:
    [each] = served(tmp_path, {"quick": torch.no_grad()}, objective="memory").values()
    assert (each.same_before, each.same_after) == (False, False)


@pytest.mark.slow
def test_a_strategy_of_others_shares_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphwright.tuning.workers.pool.cores", lambda: 1)
    [each] = served(tmp_path, {"quick": torch.no_grad()}).values()
    assert (each.same_before, each.same_after) == (False, False)


HARMS = {
    "segfault": (planted.segfaults, Status.CRASHED),
    "exit": (planted.leaves, Status.CRASHED),
    "hang": (planted.hangs, Status.TIMED_OUT),
    "hang later": (planted.hangs_later, Status.TIMED_OUT),
    "corrupt": (planted.corrupts_weights, Status.WRONG),
    "raise": (planted.raises, Status.FAILED),
    "interrupt": (planted.interrupts, Status.CRASHED),
    "leak": (planted.leaks, Status.MEMORY_EXCEEDED),
    "print": (planted.prints_without_end, Status.FAILED),
    "kill the server": (planted.kills_its_parent, Status.CRASHED),
}
# Right, and something of them is left behind.
UNTIDY = {
    "flag": planted.leaves_a_flag,
    "vandal": planted.vandalises,
    "corrupts at its end": planted.CorruptsAtItsEnd,
    "a GiB": planted.keeps_a_gib,
}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.usefixtures("as_ours")
def test_a_worker_serves_the_next_candidate_as_long_as_it_is_clean(tmp_path: Path) -> None:
    clean = {"clean": torch.no_grad()}
    harmful = {name: make for name, (make, _) in HARMS.items()}
    with short_for("hang", "hang later"):
        found = served(tmp_path, clean | UNTIDY | harmful)
    for name, each in found.items():
        assert each.same_before, name
        assert each.same_after is (name in clean), name
        assert each.after.status in (Status.OK, Status.SLOWER), (name, each.after.reason)
        if name in HARMS:
            assert each.row.status is HARMS[name][1], (name, each.row.reason)
        else:
            assert each.row.status in (Status.OK, Status.SLOWER), (name, each.row.reason)


# ---------------------------------------------------------------- what is looked at


@pytest.fixture
def evaluator() -> CandidateEvaluator:
    return make_evaluator(Small().eval(), torch.randn(4, 16))


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@contextlib.contextmanager
def _dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def _hook() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    yield
    handle.remove()


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    before = Path.cwd()
    os.chdir("/")
    yield
    os.chdir(before)


@contextlib.contextmanager
def _variable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEFT_BEHIND", "1")
        yield


@contextlib.contextmanager
def _thread() -> Iterator[None]:
    event = threading.Event()
    thread = threading.Thread(target=event.wait, name="left")
    thread.start()
    yield
    event.set()
    thread.join()


@contextlib.contextmanager
def _process() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield
        process.kill()


@contextlib.contextmanager
def _compilers_option() -> Iterator[None]:
    import torch._dynamo.config

    with torch._dynamo.config.patch(recompile_limit=3):
        yield


LEFT: dict[str, tuple[Callable[[], Any], str]] = {
    "no gradients": (torch.no_grad, "grad"),
    "inference mode": (torch.inference_mode, "inference"),
    "autocast": (
        lambda: torch.autocast("cpu", torch.bfloat16),
        "autocast on the CPU is torch.bfloat16",
    ),
    "default device": (lambda: torch.device("meta"), "set_default_device is meta, and was cpu"),
    "default dtype": (_dtype, "the default dtype"),
    "threads": (lambda: _threads(torch.get_num_threads() + 1), "set_num_threads"),
    "flag": (lambda: _set(torch.backends.cudnn, "deterministic", True), "cudnn.deterministic"),
    "compiler's option": (_compilers_option, "recompile_limit"),
    "dispatch mode": (Mode, "modes of operations"),
    "hook": (_hook, "hooks of all modules"),
    "function": (lambda: _set(nn.functional, "linear", lambda *_: None), "functional.linear"),
    "method": (lambda: _set(torch.Tensor, "add", lambda *_: None), "Tensor.add"),
    "layer": (lambda: _set(nn.Linear, "forward", nn.Linear.forward.__get__(1)), "Linear.forward"),
    "collector": (_no_collector, "garbage collector"),
    "directory": (_elsewhere, "working directory"),
    "variable": (_variable, "environment variables"),
    "thread": (_thread, "the thread left"),
    "process": (_process, "a process is left"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_behind_is_found(name: str, evaluator: CandidateEvaluator) -> None:
    import torch._dynamo.config  # noqa: F401  # so that its options are there from the start

    leave, words = LEFT[name]
    baseline = Baseline(evaluator)
    assert baseline.difference() is None
    with leave():
        found = baseline.difference()
    assert found is not None
    assert words in found
    assert baseline.difference() is None


def test_a_changed_weight_is_found(evaluator: CandidateEvaluator) -> None:
    baseline = Baseline(evaluator)
    weight = evaluator.module.first.weight
    with torch.no_grad():
        weight[0, 0] = weight[0, 0].nextafter(torch.tensor(9.0))
    assert baseline.difference() == "first.weight was changed"
    evaluator.restore()
    weight.requires_grad_(False)
    assert baseline.difference() == "changed: gradients of weights"


def test_eager_that_answers_otherwise_is_found(evaluator: CandidateEvaluator) -> None:
    baseline = Baseline(evaluator)
    case = evaluator.samples[0].reference.cases[0]
    name = next(iter(case.eager.outputs))
    for answers in (case.eager.outputs, case.exact):
        answers[name] = answers[name] + 1
    assert str(baseline.difference()).startswith("eager differs: ")


def test_memory_that_is_kept_is_found(
    evaluator: CandidateEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline = Baseline(evaluator)
    monkeypatch.setattr(leftovers, "HOST_TOLERANCE", 64 << 20)
    kept = torch.ones(32 << 20)
    assert "of host memory are kept" in str(baseline.difference())
    assert baseline.difference(holds_build=True) is None
    del kept
    assert baseline.difference() is None


@pytest.mark.gpu
def test_memory_of_the_gpu_that_is_kept_is_found() -> None:
    evaluator = make_evaluator(Small().eval().cuda(), torch.randn(4, 16, device="cuda"))
    baseline = Baseline(evaluator)
    assert baseline.difference() is None
    kept = torch.ones(128 << 20, device="cuda")
    assert "of the GPU's memory are kept" in str(baseline.difference())
    del kept
    assert baseline.difference() is None


def test_a_thread_at_work_is_found(evaluator: CandidateEvaluator) -> None:
    baseline = Baseline(evaluator)
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            pass

    # Its name is that of one that may stay, but it is to sleep.
    thread = threading.Thread(target=work, name="tqdm_monitor")
    thread.start()
    try:
        assert baseline.difference() == "a thread is at work"
    finally:
        ended.set()
        thread.join()


# ---------------------------------------------------------------- builds that are shared


@dataclass(frozen=True)
class Builds:
    """A compiler that writes down each build, and may fail."""

    name: str
    file: str
    make: Callable[[nn.Module], Callable[..., Any]] = directly
    fails: bool = False
    complexity: int = 3

    def probe(self, device: torch.device) -> Availability:
        return AVAILABLE

    def build(self, model: nn.Module, args: Any, kwargs: Any) -> Built:
        call = Noted(self.file, self.make)(model)
        if self.fails:
            raise ValueError("planted failure of a build")
        return Built(call, ["was built"])


def _wrap(built: Built, args: Any, kwargs: Any) -> Built:
    return Built(lambda *a, **k: built.call(*a, **k), [*built.notes, "was wrapped"], inner=built)


def _wrap_and_die(built: Built, args: Any, kwargs: Any) -> Built:
    os._exit(1)


def _available(device: torch.device) -> Availability:
    return AVAILABLE


PASSES_ON = Runner("passed", 5, _available, _wrap)
DIES = Runner("dies", 5, _available, _wrap_and_die)


@pytest.mark.usefixtures("as_ours")
def test_candidates_that_differ_in_the_runner_are_built_once(tmp_path: Path) -> None:
    compiler = Builds("builds", str(tmp_path / "builds"))
    found = rows_of([Candidate(compiler, runner=PASSES_ON), Candidate(compiler)])
    assert len(lines(tmp_path / "builds")) == 1
    plain, passed = found["builds"], found["builds+passed"]
    assert {plain.status, passed.status} <= {Status.OK, Status.SLOWER}
    assert plain.notes == ["was built"]
    assert passed.notes == [
        "shares the build of builds, whose time is in the set-up of both",
        "was built",
        "was wrapped",
    ]
    assert (plain.build_s, passed.build_s > 0.0) == (0.0, True)
    for row in (plain, passed):
        assert row.screening is not None
        assert row.error is not None
        assert row.setup_s is not None


@pytest.mark.usefixtures("as_ours")
def test_a_build_that_fails_is_a_row_of_each(tmp_path: Path) -> None:
    compiler = Builds("builds", str(tmp_path / "builds"), fails=True)
    found = rows_of([Candidate(compiler), Candidate(compiler, runner=PASSES_ON)])
    assert len(lines(tmp_path / "builds")) == 1
    assert [row.status for row in found.values()] == [Status.FAILED, Status.FAILED]
    reasons = {row.reason for row in found.values()}
    assert len(reasons) == 1
    assert "planted failure of a build" in reasons.pop()


@pytest.mark.usefixtures("as_ours")
@pytest.mark.parametrize(
    ("make", "status"),
    [
        (planted.corrupts_weights, Status.WRONG),
        pytest.param(planted.hangs_later, Status.TIMED_OUT, marks=pytest.mark.slow),
    ],
)
def test_where_the_first_is_not_right_the_second_has_a_build_of_its_own(
    make: Callable[[nn.Module], Any], status: Status, tmp_path: Path
) -> None:
    compiler = Builds("builds", str(tmp_path / "builds"), make)
    hang = ("builds", "builds+passed") if status is Status.TIMED_OUT else ()
    with short_for(*hang):
        found = rows_of([Candidate(compiler), Candidate(compiler, runner=PASSES_ON)])
    assert len(set(lines(tmp_path / "builds"))) == 2
    assert [row.status for row in found.values()] == [status, status]
    assert not any("shares" in note for row in found.values() for note in row.notes)


@pytest.mark.usefixtures("as_ours")
def test_what_kills_a_shared_build_leaves_the_first_row_as_it_is(tmp_path: Path) -> None:
    compiler = Builds("builds", str(tmp_path / "builds"))
    runners = (DIES, PASSES_ON)
    found = rows_of([Candidate(compiler), *(Candidate(compiler, runner=r) for r in runners)])
    statuses = {name: row.status for name, row in found.items()}
    assert statuses.pop("builds+dies") is Status.CRASHED
    assert set(statuses) == {"builds", "builds+passed"}
    assert set(statuses.values()) <= {Status.OK, Status.SLOWER}
    assert len(set(lines(tmp_path / "builds"))) == 2


def test_time_of_a_shared_build_has_to_be_repaid_too(evaluator: CandidateEvaluator) -> None:
    report = gw.tune(evaluator.module, evaluator.samples[0].call.args, strategies=[]).report
    eager = report.row("eager")
    assert eager is not None
    assert eager.baseline is not None
    faster = replace(
        eager.baseline,
        latency=tuple(tuple(s / 2 for s in block) for block in eager.baseline.latency),
    )
    row = Row("passed", Status.OK, setup_s=0.0, screening=faster, baseline=eager.baseline)
    report.rows.append(row)
    alone = report.break_even(row)
    row.build_s = 10.0
    shared = report.break_even(row)
    row.setup_s, row.build_s = 10.0, 0.0
    assert alone is not None
    assert shared == report.break_even(row)
    assert shared is not None
    assert shared > alone


@pytest.mark.parametrize("name", share(["channels_last", "fused", "torchscript:freeze"], of=3))
def test_a_graph_runs_what_was_built_for_the_candidate_without_it(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "torchscript" in name and device.type == "cpu":
        pytest.skip("the CPU recorder sees no operation of TorchScript's")
    layer = nn.Linear(9, 9) if name == "fused" else nn.Conv2d(3, 4, 3)
    model = nn.Sequential(layer, nn.ReLU()).eval().to(device)
    evaluator = make_evaluator(model, torch.randn(2, 3, 9, 9, device=device))
    (plain,) = parse_candidates([name], ())
    graphed = replace(plain, runner=replace(GRAPH, probe=_available))
    compiled, compile_it = [], Candidate.compile

    def counted(self: Candidate, *args: Any) -> Built:
        compiled.append(self.name)
        return compile_it(self, *args)

    monkeypatch.setattr(Candidate, "compile", counted)
    shared = SharedBuild()
    trials = [evaluator.set_up(candidate, shared) for candidate in (plain, graphed)]
    for trial in trials:
        assert trial.row.status is Status.OK, trial.row.reason
        evaluator.time(trial)
        assert trial.row.screening is not None
    assert compiled == [name]
    assert trials[1].builts[0].inner is trials[0].builts[0]
    assert f"shares the build of {name}, whose time is in the set-up of both" in trials[1].row.notes


# ---------------------------------------------------------------- what is tried next


def named(*names: str) -> list[Candidate]:
    return parse_candidates(names, ())


def test_each_row_is_known_when_the_next_candidates_are_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("graphwright.tuning.workers.pool.cores", lambda: 4)
    candidates = [Candidate(Planted(name, directly)) for name in ("a", "b", "c")]
    answers = [candidates[:1], candidates[1:], []]
    known: list[str] = []
    asked: list[tuple[int, list[str]]] = []

    def choose(count: int) -> Sequence[Candidate]:
        asked.append((count, known.copy()))
        return answers.pop(0)

    model, x = Small().eval(), torch.randn(4, 16)
    with WorkerPool(model, candidates) as pool:
        pool.load(make_evaluator(model, x), TrialLimits(60.0, 4 << 30))
        for candidate, row in pool.evaluate(choose):
            assert isinstance(row, Row)
            known.append(candidate.name)
    assert asked == [(2, []), (2, ["a"]), (2, ["a", "b", "c"])]


def test_when_the_end_comes_is_asked_after_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphwright.tuning.workers.pool.cores", lambda: 2)
    candidates = [Candidate(Planted(name, directly)) for name in ("a", "b", "c")]
    model, x = Small().eval(), torch.randn(4, 16)
    ends, statuses = [time.monotonic() + 300], {}
    with WorkerPool(model, candidates) as pool:
        pool.load(make_evaluator(model, x), TrialLimits(60.0, 4 << 30))
        for candidate, row in pool.evaluate(in_order(candidates), ends=lambda: ends[-1]):
            assert isinstance(row, Row)
            statuses[candidate.name] = row.status
            ends.append(0.0)
    assert statuses.pop("a") in (Status.OK, Status.SLOWER)
    assert statuses == {"b": Status.NOT_TRIED, "c": Status.NOT_TRIED}


def late(model: nn.Module, *, seconds: float) -> Any:
    time.sleep(seconds)
    return directly(model)


def never_done(model: nn.Module) -> Any:
    time.sleep(300)
    return directly(model)


def rows_beside(
    monkeypatch: pytest.MonkeyPatch,
    slow: Callable[[nn.Module], Any],
    *,
    spare: bool,
    seconds: float,
    known: bool = True,
) -> list[tuple[str, Row]]:
    """The rows of a candidate that is slow to set up and of two others, in their order.

    Unless it is `known`, the slow one usually is not.
    """
    monkeypatch.setattr("graphwright.tuning.workers.pool.cores", lambda: 6)
    monkeypatch.setattr(
        "graphwright.tuning.workers.pool.is_slow",
        lambda candidate, device: known and candidate.name == "slow",
    )
    candidates = [
        Candidate(Planted("slow", slow)),
        *(Candidate(Planted(name, directly)) for name in ("a", "b")),
    ]
    model, x = Small().eval(), torch.randn(4, 16)
    with WorkerPool(model, candidates) as pool:
        pool.spare = spare
        pool.load(make_evaluator(model, x), TrialLimits(60.0, 4 << 30))
        deadline = time.monotonic() + seconds
        found = []
        for candidate, row in pool.evaluate(in_order(candidates), ends=lambda: deadline):
            assert isinstance(row, Row), row
            found.append((candidate.name, row))
    return found


@pytest.mark.parametrize(
    ("spare", "late_s", "order"),
    [pytest.param(True, 12.0, "a b slow", marks=pytest.mark.slow), (False, 3.0, "slow a b")],
)
def test_where_cores_are_to_spare_others_are_timed_while_one_is_set_up(
    spare: bool, late_s: float, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = functools.partial(late, seconds=late_s)
    found = rows_beside(monkeypatch, slow, spare=spare, seconds=120)
    assert [name for name, _ in found] == order.split()
    assert all(row.screening is not None for _, row in found)


@pytest.mark.slow
def test_nothing_waits_for_a_set_up_that_takes_longer_than_usual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("graphwright.tuning.workers.pool._LONG_S", 1.0)
    slow = functools.partial(late, seconds=12.0)
    found = rows_beside(monkeypatch, slow, spare=True, seconds=120, known=False)
    assert [name for name, _ in found] == ["a", "b", "slow"]


@pytest.mark.slow
def test_what_is_set_up_for_too_long_costs_nothing_but_its_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = dict(rows_beside(monkeypatch, never_done, spare=True, seconds=20))
    assert found["slow"].status is Status.NOT_TRIED
    assert all(found[name].screening is not None for name in ("a", "b"))


def test_cores_are_to_spare_on_a_gpu_with_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphwright.tuning.workers.pool.ForkServer", Mock())
    for count, device, spare in ((16, "cuda", True), (4, "cuda", False), (16, "cpu", False)):
        monkeypatch.setattr("graphwright.tuning.workers.pool.cores", lambda count=count: count)
        assert WorkerPool(Small(), [], torch.device(device)).spare is spare


@pytest.mark.slow
def test_the_caller_imports_its_compiler_while_the_fork_server_imports() -> None:
    code = """
import sys
import torch
from torch import nn
from graphwright.strategies.base import Candidate
from graphwright.strategies import inductor, torchscript
from graphwright.tuning.workers.pool import WorkerPool
for compiler in (torchscript.FREEZE, inductor.INDUCTOR):
    with WorkerPool(nn.Linear(2, 2), [Candidate(compiler)]) as pool:
        pool.wait_until_ready()
    print("torch._inductor.compile_fx" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split() == ["False", "True"], done.stderr


@pytest.mark.parametrize("spare", [True, False])
def test_with_cores_to_spare_workers_do_not_wait_for_that(
    spare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, ended = threading.Event(), []

    def imported() -> None:
        may_end.wait(60)
        ended.append("imported")

    monkeypatch.setattr("graphwright.tuning.workers.pool._import_compiler", imported)
    monkeypatch.setattr("graphwright.tuning.workers.pool.ForkServer", Mock())
    pool = WorkerPool(Small(), parse_candidates(["inductor"], ()))
    pool.spare = spare
    if not spare:
        may_end.set()
    pool.wait_until_ready()
    assert ended == ([] if spare else ["imported"])
    may_end.set()
    pool.close()
    assert ended == ["imported"]


def test_compilers_are_not_reset_where_nothing_was_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    reset = Mock()
    monkeypatch.setattr(torch._dynamo, "reset", reset)
    leftovers._let_compilers_forget()
    reset.assert_not_called()
    compiled: Any = torch.compile(lambda x: x + 1, backend="eager")
    compiled(torch.ones(2))
    leftovers._let_compilers_forget()
    reset.assert_called_once_with()


@pytest.mark.parametrize(
    ("names", "threads"),
    [
        (["inductor", "inductor+graph", "fused", "aot_autograd", "torchscript"], 16),
        (["inductor", "inductor+graph", "inductor:freeze+graph", "channels_last+inductor"], 5),
        (["eager+graph"], 16),
    ],
)
def test_builds_of_torch_compile_share_the_cores(
    names: list[str], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Mock()
    monkeypatch.setattr("graphwright.tuning.workers.pool.ForkServer", started)
    monkeypatch.setattr("graphwright.tuning.workers.pool.cores", lambda: 16)
    WorkerPool(Small(), named(*names), torch.device("cuda"))
    assert started.call_args.args[1] == threads


def test_candidates_that_share_a_build_are_one_job() -> None:
    candidates = named("inductor+graph", "fused", "inductor", "channels_last+inductor")
    jobs = [[each.name for each in job.candidates] for job in jobs_of(candidates)]
    assert jobs == [["inductor", "inductor+graph"], ["fused"], ["channels_last+inductor"]]
    chosen = in_order(candidates)(2)
    assert [each.name for each in chosen] == ["inductor", "inductor+graph", "fused"]


def groups_of(names: Sequence[str], at_once: int) -> list[list[str]]:
    schedule = Schedule(in_order(named(*names)), at_once)
    groups = []
    while group := schedule.next_group():
        groups.append([job.candidates.pop(0).name for job in group])
        for job in group:
            schedule.put_back(job)
    return groups


def test_what_shares_a_build_comes_next() -> None:
    assert groups_of(["fused", "inductor", "fused+graph", "aot_autograd"], 1) == [
        ["fused"],
        ["fused+graph"],
        ["inductor"],
        ["aot_autograd"],
    ]


def test_the_first_build_that_fills_a_cache_goes_before_those_that_find_it_filled() -> None:
    names = ["inductor", "inductor:freeze", "fused", "inductor:reduce-overhead", "eager:no_grad"]
    assert groups_of(names, 2) == [
        ["inductor", "fused"],
        ["inductor:freeze", "inductor:reduce-overhead"],
        ["eager:no_grad"],
    ]


def test_no_place_is_left_empty_for_a_cache() -> None:
    assert groups_of(["inductor", "inductor:freeze"], 2) == [["inductor", "inductor:freeze"]]
