"""Candidates in processes of their own: what they do there harms nobody, and is told."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import planted
import pytest
import torch
from planted import Branching, Planted, Roundabout, Small, directly, short_for
from torch import nn

import graphwright as gw
from graphwright.report.report import Report
from graphwright.report.result import Row, Status
from graphwright.strategies.base import Availability, Built
from graphwright.strategies.registry import parse_candidates
from graphwright.tuning.workers import pool
from graphwright.tuning.workers.pool import WorkerPool
from graphwright.tuning.workers.settings import ProcessSettings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="candidates are forked on Linux")


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphwright.tuning.tuner.ISOLATED", True)


@pytest.fixture
def before() -> set[int]:
    """Processes that are there beforehand: Inductor keeps some that compile."""
    return _children()


QUICK = Planted("quick", directly)


def tune(strategies: list[Any], device: torch.device | str = "cpu", **options: Any) -> Report:
    model = Roundabout().eval().to(device)
    if model.offset.is_cuda:  # Other tests may share the GPU: 50 are lost in their noise.
        model.steps = 200
    x = torch.randn(4, 16, device=device)
    return gw.tune(model, (x,), strategies=strategies, **options).report


@pytest.mark.slow
def test_each_planted_harm_gets_its_status_and_the_run_goes_on(
    device: torch.device, before: set[int]
) -> None:
    harms = {
        "segfault": (planted.segfaults, Status.CRASHED),
        "exit": (planted.leaves, Status.CRASHED),
        "hang": (planted.hangs, Status.TIMED_OUT),
        "hang later": (planted.hangs_later, Status.TIMED_OUT),
        "corrupt": (planted.corrupts_weights, Status.WRONG),
        "raise": (planted.raises, Status.FAILED),
        "interrupt": (planted.interrupts, Status.CRASHED),
    }
    strategies = [Planted(name, make) for name, (make, _) in harms.items()]
    with short_for("hang", "hang later"):
        report = tune([*strategies, QUICK], device, timeout_s=60)
    found = {row.strategy: row.status for row in report.rows}
    wanted = {name: status for name, (_, status) in harms.items()}
    assert found == {"eager": Status.OK, "quick": Status.OK} | wanted
    assert report.chosen == "quick", report.reason
    for row in report.rows:
        if row.strategy in harms:
            assert row.reason
            assert row.strategy in row.repeat
    crashed = report.row("segfault")
    assert crashed is not None
    assert "SIGSEGV" in crashed.reason
    assert _children() <= before


@pytest.mark.slow
def test_a_leak_past_the_limit_is_a_row() -> None:
    leak = Planted("leak", planted.leaks)
    report = tune([leak, QUICK], memory_limit="1GiB")
    row = report.row("leak")
    assert row is not None
    assert row.status is Status.MEMORY_EXCEEDED
    assert "host memory" in row.reason
    assert report.chosen == "quick"


@pytest.mark.slow
def test_a_slow_leak_is_found_without_a_limit() -> None:
    row = tune([Planted("leak", planted.leaks)]).row("leak")
    assert row is not None
    assert row.status is Status.MEMORY_EXCEEDED
    assert "leaks" in row.reason


@pytest.mark.gpu
def test_a_candidate_that_exhausts_the_gpu_is_a_row() -> None:
    report = tune([Planted("hog", planted.exhausts_the_gpu), QUICK], "cuda")
    row = report.row("hog")
    assert row is not None
    assert row.status is Status.MEMORY_EXCEEDED
    assert report.chosen == "quick"
    report = tune([Planted("leak", planted.leaks), QUICK], "cuda", memory_limit="1GiB")
    row = report.row("leak")
    assert row is not None
    assert row.status is Status.MEMORY_EXCEEDED
    assert report.chosen == "quick"


@pytest.mark.gpu
def test_an_illegal_memory_access_is_a_crash() -> None:
    report = tune([Planted("stray", planted.writes_astray), QUICK], "cuda")
    row = report.row("stray")
    assert row is not None
    assert row.status is Status.CRASHED
    assert "illegal memory access" in row.reason
    assert report.chosen == "quick"


def test_a_frozen_branch_is_wrong(device: torch.device) -> None:
    x, mask = torch.randn(4, 16, device=device), torch.ones(4, 16, dtype=torch.bool, device=device)
    strategies = [Planted("frozen", planted.frozen_branch)]
    report = gw.tune(Branching().eval(), (x, mask), strategies=strategies).report
    assert {row.strategy: row.status for row in report.rows}["frozen"] is Status.WRONG
    assert report.chosen == "eager"


@pytest.mark.slow
def test_one_zeroed_element_of_eight_million_is_wrong(device: torch.device) -> None:
    model = nn.Sequential(nn.ReLU()).eval()
    x = torch.rand(8, 1 << 20, device=device) + 0.1
    strategies = [Planted("zero", planted.one_element_zeroed)]
    report = gw.tune(model, (x,), strategies=strategies, isolate=False, remember=False).report
    assert {row.strategy: row.status for row in report.rows}["zero"] is Status.WRONG


@pytest.mark.slow
def test_what_a_candidate_does_to_its_process_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, folder = torch.get_num_threads(), Path.cwd()
    temporary, children, daemon = tmp_path / "tmp", tmp_path / "pids", tmp_path / "pid"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    made = {
        "vandal": planted.vandalises,
        "litters": planted.leaves_files,
        "spawn": planted.Spawns(str(children)),
        "daemon": planted.Daemonises(str(daemon)),
    }
    report = tune([Planted(name, make) for name, make in made.items()])
    assert {row.strategy for row in report.rows} == {"eager", *made}
    assert torch.get_num_threads() == threads
    assert Path.cwd() == folder
    assert "VANDAL" not in os.environ
    row = report.row("litters")
    assert row is not None
    assert f"in {temporary}" in row.reason
    assert not list(temporary.iterdir())
    pids = [int(line) for line in children.read_text().split()]
    assert pids
    assert not any(map(_alive, [*pids, int(daemon.read_text())]))


@pytest.mark.slow
def test_what_is_aimed_at_the_watch_is_a_row_too(before: set[int]) -> None:
    harms = {
        "kill": (planted.kills_its_parent, Status.CRASHED),
        "close": (planted.closes_everything, Status.CRASHED),
        "babble": (planted.babbles, Status.TIMED_OUT),
        "fork": (planted.forks_and_dies, Status.CRASHED),
        "print": (planted.prints_without_end, Status.FAILED),
    }
    strategies = [Planted(name, make) for name, (make, _) in harms.items()]
    with short_for("babble"):
        report = tune([*strategies, QUICK], timeout_s=60)
    found = {row.strategy: row.status for row in report.rows}
    wanted = {name: status for name, (_, status) in harms.items()}
    assert found == {"eager": Status.OK, "quick": Status.OK} | wanted
    assert report.notes == [note for note in report.notes if "in this process" not in note]
    assert _children() <= before


@pytest.mark.slow
def test_a_candidate_that_ends_the_fork_server_is_told_from_the_others_of_its_group() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graphwright.tuning.workers.pool.cores", lambda: 4)
        report = tune([QUICK, Planted("kill", planted.kills_its_parent)])
    statuses = {row.strategy: row.status for row in report.rows}
    assert statuses == {"eager": Status.OK, "quick": Status.OK, "kill": Status.CRASHED}


@pytest.mark.slow
def test_what_exceeds_its_share_alone_is_tried_with_all_of_it() -> None:
    limits = gw.tuning.workers.pool.TrialLimits(5.0, 800 << 20, shared=True)
    assert limits.split(4).host_bytes == 200 << 20
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graphwright.tuning.workers.pool.cores", lambda: 4)
        patch.setattr("graphwright.tuning.workers.pool._free_host_bytes", lambda: 1 << 30)
        report = tune([Planted("large", planted.takes_half_a_gib), QUICK])
    statuses = {row.strategy: row.status for row in report.rows}
    assert statuses["large"] in (Status.OK, Status.SLOWER)


CALLER = """
import signal, sys
sys.path[:0] = {path!r}
{before}
import planted, torch
from planted import Planted, Small
import graphwright as gw
if __name__ == "__main__":
    strategies = [Planted("segfault", planted.segfaults), Planted("own", torch.no_grad())]
    report = gw.tune(Small().eval(), (torch.randn(4, 16),), strategies=strategies).report
    print(*[row.status for row in report.rows], sep=",")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "before",
    [
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
        "import os; os.close(0)",
    ],
)
def test_odd_callers_are_as_safe(before: str) -> None:
    path = [str(Path(gw.__file__).parent.parent), str(Path(planted.__file__).parent)]
    source = CALLER.format(path=path, before=before)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    statuses = done.stdout.strip().split(",")
    assert statuses[:2] == ["ok", "crashed"]


GLOBALS = """
import torch
import graphwright as gw

class Doubling:
    def __call__(self, x):
        return x * 2

double = Doubling()

def helper(x):
    return double(x) + 1

class Net(torch.nn.Module):
    def forward(self, x):
        return helper(x).relu()

if __name__ == "__main__":
    report = gw.tune(Net().eval(), (torch.randn(4),), strategies=["aot_autograd"]).report
    print([row.reason for row in report.rows if row.status == "failed"], len(report.rows))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["script", "module that nobody else finds"])
def test_dynamo_finds_the_globals_of_a_script(how: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    text = GLOBALS
    if how != "script":
        text = "import sys, types\nnet = sys.modules['net'] = types.ModuleType('net')\n"
        text += f"net.__file__ = 'net.py'\nexec({GLOBALS!r}, vars(net))\n"
        text += "globals().update(vars(net)); __name__ = '__main__'\n"
        text += GLOBALS[GLOBALS.index("if __name__") :]
    script.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(Path(gw.__file__).parent.parent)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[] 2", done.stdout + done.stderr


@pytest.mark.slow
def test_tuning_where_a_module_is_imported_does_not_start_processes_without_end(
    tmp_path: Path,
) -> None:
    (tmp_path / "served.py").write_text(
        "import torch\nimport graphwright as gw\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, x):\n        return x * 2\n"
        "open('imports', 'a').write('x')\n"
        "FAST = gw.tune(Net().eval(), (torch.randn(4),), strategies=['eager:no_grad'])\n"
        "print(FAST.report.chosen)\n"
    )
    root = str(Path(gw.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((root, str(tmp_path)))}
    command = [sys.executable, "-c", "import served"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "imports").read_text()) <= 4


@pytest.mark.slow
def test_what_comes_too_late_does_not_run_beside_the_timings(tmp_path: Path) -> None:
    beats, calls = tmp_path / "beats", tmp_path / "calls"
    strategies = [
        Planted("s", planted.Logs(str(calls), beside=(str(beats),))),
        Planted("late", planted.Beats(str(beats))),
    ]
    evaluate = WorkerPool.evaluate

    def soon_over(pool: WorkerPool, *args: Any, ends: Callable[[], float], **kwargs: Any) -> Any:
        """The time that is left is no more than one timing needs, on a slow host too."""
        deadline = ends()
        now = deadline - pool._timing_s / 2
        patch.setattr("graphwright.tuning.workers.pool.time", Mock(monotonic=lambda: now))
        return evaluate(pool, *args, ends=lambda: deadline, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graphwright.tuning.workers.pool.cores", lambda: 4)
        patch.setattr(WorkerPool, "evaluate", soon_over)
        report = gw.tune(
            Small().eval(), (torch.randn(4, 16),), strategies=strategies, budget_s=120
        ).report
    assert {row.strategy: row.status for row in report.rows}["late"] is Status.NOT_TRIED
    # The calls that are timed come last.
    times = [float(line) for line in calls.read_text().split()]
    assert float(beats.read_text()) < times[-20]


@pytest.mark.slow
def test_set_ups_overlap_and_timings_do_not(tmp_path: Path) -> None:
    model, x = Small().eval(), torch.randn(4, 16)
    files = tuple(str(tmp_path / f"{n}") for n in range(3))
    strategies = [Planted(f"s{n}", planted.Logs(files[n], beside=files)) for n in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graphwright.tuning.workers.pool.cores", lambda: 6)
        gw.tune(model, (x,), strategies=strategies)
    spans = {}
    for n in range(3):
        times = [float(line) for line in (tmp_path / f"{n}").read_text().split()]
        # Set-up waits between the first two; the calls that are timed come last.
        spans[n] = (times[0], times[1], times[-20], times[-1])
    assert max(s[0] for s in spans.values()) < min(s[1] for s in spans.values())
    timings = sorted((s[2], s[3]) for s in spans.values())
    assert all(a[1] < b[0] for a, b in itertools.pairwise(timings))
    assert timings[0][0] > max(s[1] for s in spans.values())


def test_a_model_that_cannot_be_pickled_is_tuned_here_with_a_note() -> None:
    model = Roundabout().eval()
    model.lock = threading.Lock()  # type: ignore[assignment]
    report = gw.tune(model, (torch.randn(4, 16),), strategies=[QUICK]).report
    assert report.chosen == "quick"
    assert any("in this process" in note and "pickle" in note for note in report.notes)


@pytest.mark.slow
def test_a_model_that_is_another_one_elsewhere_is_tuned_here_with_a_note() -> None:
    here = os.getpid()

    class Homesick(Roundabout):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1 if os.getpid() == here else 2)

    def quick(model: nn.Module) -> Callable[..., Any]:
        return torch.no_grad()(lambda x: Small.forward(model, x))

    report = gw.tune(Homesick().eval(), (torch.randn(4, 16),), strategies=[QUICK]).report
    assert {row.strategy: row.status for row in report.rows} == {
        "eager": Status.OK,
        "quick": Status.OK,
    }
    assert any("in this process" in note for note in report.notes)


@pytest.mark.slow
def test_a_strategy_that_cannot_be_pickled_is_tried_here_with_a_note() -> None:
    lock = threading.Lock()

    class Locked:
        name, complexity = "locked", 3

        def probe(self, device: torch.device) -> Availability:
            return Availability(True)

        def build(self, model: nn.Module, args: Any, kwargs: Any) -> Built:
            with lock:
                return Built(directly(model))

    report = tune([Locked(), Planted("segfault", planted.segfaults)])
    assert {row.strategy: row.status for row in report.rows} == {
        "eager": Status.OK,
        "locked": Status.OK,
        "segfault": Status.CRASHED,
    }
    assert any("in this process" in note for note in report.notes)


@pytest.mark.slow
def test_a_candidate_that_works_only_elsewhere_is_not_chosen() -> None:
    report = tune([Planted("away", planted.OnlyElsewhere(os.getpid()))])
    row = report.row("away")
    assert row is not None
    assert row.status is Status.FAILED
    assert "in this process" in row.reason
    assert report.chosen == "eager"


@pytest.mark.slow
def test_settings_are_the_caller_s(tmp_path: Path) -> None:
    file = tmp_path / "settings"
    torch.use_deterministic_algorithms(True, warn_only=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model, x = Small().eval(), torch.randn(4, 16)
        with torch.no_grad(), torch.device("meta"):
            gw.tune(model, (x,), strategies=[Planted("settings", planted.Tells(str(file)))])
            here = ProcessSettings.current()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    assert file.read_text() == repr((here.switches, False))
    assert here.switches["torch.set_default_device"] == torch.device("meta")
    assert here.threads == 1


class Endless:
    """A worker that never says what became of its candidate."""

    def __init__(self, *, ready: bool) -> None:
        self.candidate = parse_candidates(["torchscript"], ())[0]
        self.loaded, self.ready, self.row, self.phase_began = True, ready, None, 0.0

    @property
    def settled(self) -> bool:
        return self.row is not None

    def go_on(self) -> None: ...

    def stop(self, row: Row) -> None:
        self.row = row


def test_what_is_timed_or_set_up_is_stopped_when_the_budget_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A timing goes on beyond the end of the search by as much as one may take, no longer."""
    now = 90.0

    def poll(found: Any) -> None:
        nonlocal now
        now += 1.0

    monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=lambda: now))
    workers = object.__new__(WorkerPool)
    workers.spare, workers._timing_s, workers._most_timing_s = False, 2.0, 10.0
    monkeypatch.setattr(workers, "_poll", poll)
    timed: Any = Endless(ready=True)
    workers._time(timed, [], 95.0)
    assert now == 106.0
    assert (timed.row.status, timed.row.reason) == (Status.NOT_TRIED, "")
    now = 90.0
    set_up: Any = Endless(ready=False)
    monkeypatch.setattr(pool, "_sets_up", lambda found: not found.settled)
    monkeypatch.setattr(pool, "_waits", lambda found: False)
    workers._wait_for_set_up([pool._Trial(pool.Job([set_up.candidate]), set_up, False)], 95.0)
    assert now == 96.0
    assert set_up.row.status is Status.NOT_TRIED
    assert set_up.row.reason == "its set-up was stopped after 96.0 s"


@pytest.mark.slow
def test_the_budget_is_kept_and_what_was_not_tried_says_so() -> None:
    began = time.monotonic()
    tune([QUICK])
    # What the first of them takes on this machine, as busy as it is, and enough for the hang.
    budget_s = 2 * (time.monotonic() - began) + 5
    began = time.monotonic()
    hangs = [Planted("hang", planted.hangs), Planted("never", directly)]
    report = tune([QUICK, *hangs], budget_s=budget_s)
    assert time.monotonic() - began < 1.1 * budget_s + 2
    statuses = {row.strategy: row.status for row in report.rows}
    assert statuses == {
        "eager": Status.OK,
        "quick": Status.OK,
        "hang": Status.NOT_TRIED,
        "never": Status.NOT_TRIED,
    }
    assert all("budget" in row.reason for row in report.rows if row.status is Status.NOT_TRIED)
    assert report.chosen == "quick"


SCRIPT = """
import sys
sys.path[:0] = {path!r}
import planted, torch
from planted import Planted, Small
import graphwright as gw
x = torch.randn(4, 16)
print("begun", flush=True)
gw.tune(Small().eval(), (x,), strategies=[Planted("spawn", planted.Spawns({file!r}, hang=True))])
"""


@pytest.mark.slow
@pytest.mark.usefixtures("heeding_ctrl_c")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_when_the_caller_ends_nothing_is_left(tmp_path: Path, signum: int) -> None:
    file = tmp_path / "pids"
    path = [str(Path(gw.__file__).parent.parent), str(Path(planted.__file__).parent)]
    source = SCRIPT.format(path=path, file=str(file))
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", source], stderr=subprocess.DEVNULL, env=environment
    )
    try:
        _until(lambda: file.exists() and len(file.read_text().split()) >= 2, 180)
        children = [pid for pid in _descendants(process.pid) if pid != process.pid]
        assert len(children) >= 3  # The fork server, the worker, and what that has started.
        os.kill(process.pid, signum)
        process.wait(60)
        _until(lambda: not any(map(_alive, children)), 60)
    finally:
        process.kill()
    assert not list((tmp_path / "tmp").iterdir())


ENDING = """
import os, signal, sys
from graphwright.processes import linux
from graphwright.tuning.workers import fork_server_main
ended = []
def kill_children(spared=()):
    if ended:
        return  # A second one would interrupt the first, and end the process in its place.
    ended.append(os.kill(os.getpid(), signal.SIGTERM))
    linux.kill_children(spared)
    os.write(1, b"at once" if "encodings.ascii" in sys.modules else b"once")
fork_server_main.kill_children = kill_children
sys.modules.pop("encodings.ascii", None)
sys.argv[1:] = [sys.argv[1], str(os.getppid())]
fork_server_main.main()
"""


def test_a_fork_server_that_is_told_twice_to_end_ends_once_and_imports_nothing_for_it() -> None:
    """The kernel tells it once for each thread of its parent that ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", ENDING, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdout=subprocess.PIPE,
        )
        theirs.close()  # Else nothing would tell that the process has ended.
        prepare = {"path": sys.path, "argv": [""], "modules": [], "environment": {}, "scratch": ""}
        ours.send(json.dumps({"request": "prepare", **prepare}).encode())
        assert ours.recv(1 << 10), "it has ended"
        process.terminate()
        assert process.communicate(timeout=60)[0] == b"once"


def _until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").iterdir():
            with contextlib.suppress(OSError):  # The thread has ended meanwhile.
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def _children() -> set[int]:
    return {pid for pid in _descendants(os.getpid())[1:] if _alive(pid)}
