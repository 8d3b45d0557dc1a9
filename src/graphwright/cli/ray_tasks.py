"""`tune --ray`: each TARGET is tuned by a task of Ray; all results are collected in one folder."""

from __future__ import annotations

import collections
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import TargetError, first_line
from ..report.report import Report
from ..report.table import NO_FIGURE, ratio
from ..report.terminal import printing
from ..serving.ray import check_installed
from .output_files import EXIT_BAD_INPUT

# Within which a cluster has to answer.
_ANSWERS_S = 5.0
# For which tasks that are cancelled may take to end.
_END_S = 10.0
# How Ray names a kind of GPU among the resources of a node.
_KIND = "accelerator_type:"
# What a task runs: `graphwright`, which ends with the task.
_COMMAND = "graphwright.cli.ray_task_main"
# What a task writes beside the choice cache's own folder.
_REPORT, _WINNER, _OUTPUT = "report.json", "winner.gw", "output.txt"


@dataclass(frozen=True)
class TargetJob:
    """A TARGET, to be tuned on one kind of GPU.

    Attributes:
        name: of its files.
        target: as for tune.
        accelerator: the kind of GPU, by Ray's name; None for any.
    """

    name: str
    target: str
    accelerator: str | None


@dataclass(frozen=True)
class JobOutcome:
    """What became of a job.

    Attributes:
        why: it failed; empty if it did not.
        files: what it wrote, by name.
    """

    why: str
    files: Mapping[str, bytes]

    @property
    def report(self) -> Report | None:
        """The report of tuning, where there is one."""
        text = self.files.get(_REPORT)
        return None if text is None else Report.from_json(text.decode())


def jobs_of(targets: Sequence[str], accelerators: Sequence[str]) -> list[TargetJob]:
    """A job for each target and accelerator, with names of their own."""
    known: collections.Counter[str] = collections.Counter()
    found = []
    for target in targets:
        for accelerator in accelerators or (None,):
            parts = (target.rpartition(":")[2], accelerator)
            name = "-".join(filter(None, parts)).replace(os.sep, "-") or "target"
            known[name] += 1
            number = f"-{known[name]}" if known[name] > 1 else ""
            found.append(TargetJob(name + number, target, accelerator))
    return found


def tune_all(
    jobs: Sequence[TargetJob], words: Sequence[str], folder: Path, address: str | None, *, cpu: bool
) -> int:
    """Tune side by side, and collect what each job wrote; the command's exit code.

    Args:
        jobs: of `jobs_of`.
        words: options of tune, for each.
        folder: gets NAME.json, NAME.gw and NAME.txt of each job, and choices/ of all.
        address: of Ray's cluster; None for one of this command's own, on this machine.
        cpu: whether GPUs are not wanted.

    Raises:
        OptionError: Ray is not installed.
        TargetError: there is no such cluster, or the folder cannot be written to.
    """
    if address is None:
        # Ray reads this when it is imported: its own cluster is to use 127.0.0.1 only.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    check_installed()
    import ray

    try:
        (folder / "choices").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TargetError(f"--out {folder} cannot be made: {error.strerror}.") from error
    _connect(address)
    outcomes: dict[TargetJob, JobOutcome] = {}
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        _check_accelerators(jobs, nodes, waits=address is not None)
        with contextlib.closing(_run_all(jobs, words, nodes, cpu=cpu)) as results:
            for job, outcome in results:
                outcomes[job] = outcome
                _keep(job, outcome, folder)
                _say(f"{len(outcomes)} of {len(jobs)}: {job.name}: {outcome.why or 'tuned'}")
    finally:
        ray.shutdown()
        if outcomes:  # After Ctrl-C as well.
            with printing():
                show(outcomes, folder)
    return EXIT_BAD_INPUT if any(outcome.why for outcome in outcomes.values()) else 0


def _connect(address: str | None) -> None:
    import ray

    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address is not None:
            host, _, port = address.rpartition(":")
            # Ray itself would try for minutes. By localhost it means this node's own address.
            if port.isdigit() and "://" not in host and host not in ("", "localhost", "127.0.0.1"):
                socket.create_connection((host, int(port)), _ANSWERS_S).close()
            ray.init(address, **quiet)
            return
        ray.init("local", include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        raise TargetError(
            f"Ray's cluster {address or 'here'} cannot be used: {first_line(error)}.",
            remedy="Start one with `ray start --head`, or leave --ray-address out.",
        ) from error


def _say(text: str) -> None:
    click.echo(f"graphwright: {text}", err=True)


def _check_accelerators(
    jobs: Sequence[TargetJob], nodes: Sequence[Mapping[str, float]], *, waits: bool
) -> None:
    """Tell of kinds of GPU that no node has; Ray waits for one, which a cluster may yet add."""
    there = {name.removeprefix(_KIND) for node in nodes for name in node if name.startswith(_KIND)}
    wanted = {job.accelerator for job in jobs if job.accelerator is not None}
    for kind in sorted(wanted - there):
        has = (
            f"no node has a GPU of the kind {kind}; there are {', '.join(sorted(there)) or 'none'}"
        )
        if not waits:
            raise TargetError(f"--accelerator: {has}.")
        _say(f"{has}. Its tasks wait until Ray's cluster adds one.")


def _run_all(
    jobs: Sequence[TargetJob],
    words: Sequence[str],
    nodes: Sequence[Mapping[str, float]],
    *,
    cpu: bool,
) -> Generator[tuple[TargetJob, JobOutcome], None, None]:
    """Each job as it ends; none is left running."""
    import ray
    from ray.exceptions import RayError

    # A process of its own for each, as what a target imports stays.
    task = ray.remote(max_calls=1, max_retries=0)(_tuned)
    threads = os.environ.get("OMP_NUM_THREADS")
    running = {}
    for job in jobs:
        placed = task.options(**resources(nodes, job.accelerator, cpu=cpu))
        running[placed.remote(job.target, words, os.getcwd(), threads)] = job
    try:
        while running:
            for ref in ray.wait(list(running))[0]:
                try:
                    outcome = ray.get(ref)
                except RayError as error:
                    outcome = JobOutcome(f"its task failed: {first_line(error)}", {})
                yield running.pop(ref), outcome
    finally:
        for ref in running:
            ray.cancel(ref)
        if running:
            ray.wait(list(running), num_returns=len(running), timeout=_END_S)


def resources(
    nodes: Sequence[Mapping[str, float]], accelerator: str | None = None, *, cpu: bool
) -> dict[str, Any]:
    """What a task takes: a GPU and its share of the processors; without GPUs a whole machine.

    Timings of tasks that share processors would disturb each other.
    """
    with_gpus = [node for node in nodes if node.get("GPU")]
    if cpu or not (with_gpus or accelerator):
        sizes = (node["CPU"] for node in nodes if node.get("CPU"))
        return {"num_cpus": max(1, min(sizes, default=1))}
    shares = (node.get("CPU", 0) // node["GPU"] for node in with_gpus)
    found: dict[str, Any] = {"num_gpus": 1, "num_cpus": max(1, min(shares, default=1))}
    return found if accelerator is None else found | {"accelerator_type": accelerator}


def _tuned(target: str, words: Sequence[str], folder: str, threads: str | None) -> JobOutcome:
    """Run `tune` for a target, in the folder of the command if it is here too.

    Ray sets the number of threads, on which choices depend: it is put back to the caller's.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": threads or ""}
    if threads is None:
        del environment["OMP_NUM_THREADS"]
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", _COMMAND, str(os.getpid()), "tune", target, *words]
        command += ["--json", os.path.join(place, _REPORT), "--save", os.path.join(place, _WINNER)]
        done = subprocess.run(
            command,
            cwd=folder if os.path.isdir(folder) else None,
            env={**environment, "GRAPHWRIGHT_CACHE_DIR": place, "COLUMNS": "80"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        root = Path(place)
        written = [root / _REPORT, root / _WINNER, *(root / "choices").glob("*.json")]
        files = {str(f.relative_to(root)): f.read_bytes() for f in written if f.is_file()}
    files[_OUTPUT] = done.stdout
    return JobOutcome("" if done.returncode == 0 else _reason(done.stdout, done.returncode), files)


def _reason(output: bytes, code: int) -> str:
    """Why a command failed: its own sentence, or what it printed last."""
    lines = [line.strip() for line in output.decode(errors="replace").splitlines()]
    own = [line.removeprefix("graphwright: ") for line in lines if line.startswith("graphwright: ")]
    return (own or [line for line in lines if line] or [f"exit status {code}"])[-1]


def _keep(job: TargetJob, outcome: JobOutcome, folder: Path) -> None:
    """Write a job's files."""
    names = {_REPORT: ".json", _WINNER: ".gw", _OUTPUT: ".txt"}
    for name, content in outcome.files.items():
        ending = names.get(name)
        (folder / (name if ending is None else job.name + ending)).write_bytes(content)


def show(outcomes: Mapping[TargetJob, JobOutcome], folder: Path) -> None:
    """Print it: a row for each job, then why some failed."""
    console = Console()
    table = Table("target", "tuned on", "chosen")
    table.add_column("vs eager", justify="right", no_wrap=True)
    for job, outcome in outcomes.items():
        table.add_row(*map(escape, (job.name, *_cells(outcome))))
    console.print(table)
    for job, outcome in outcomes.items():
        if outcome.why:
            console.print(f"[bold]{escape(job.name)}[/bold]: {escape(outcome.why)}")
    console.print(f"Reports, winners and choices/ are in {escape(str(folder))}.", style="dim")


def _cells(outcome: JobOutcome) -> tuple[str, str, str]:
    """Where a job ran, what was chosen, and how many times as fast as eager that is."""
    report = outcome.report
    if report is None or report.chosen_row is None:
        return NO_FIGURE, "failed", NO_FIGURE
    machine = report.environment.get("gpu") or report.environment.get("processor", NO_FIGURE)
    speedup = report.speedup(report.chosen_row)
    return machine, report.chosen or "", NO_FIGURE if speedup is None else ratio(speedup[0])
