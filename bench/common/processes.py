"""Modules of bench/ in processes of their own, with a time limit, several at once if wanted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .record import ROOT

POLL_S = 0.05
# How much of what a failed process wrote is shown.
SHOWN = 2000


def command(module: str, *words: str) -> list[str]:
    """What runs a module of bench/ under this Python, once `variables` are set."""
    return [sys.executable, "-m", module, *words]


def variables(*first: str | Path) -> dict[str, str]:
    """The environment of such a process: it finds `first`, then the repository's root."""
    path = [*map(str, first), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def figures_of(module: str, what: str, options: Sequence[str], limit_s: float) -> dict[str, Any]:
    """The JSON that `MODULE WHAT JSON OPTION …` writes; why it "failed" beside what it had by then.

    What it wrote before it failed may say under "doing" what it was at.
    """
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder) / "figures.json"
        [(_, failure)] = run_all([[module, what, str(where), *options]], at_once=1, limit_s=limit_s)
        found: dict[str, Any] = {}
        if where.exists():
            found = json.loads(where.read_text(encoding="utf-8"))
        doing = found.pop("doing", None)
        if failure is not None:
            found["failed"] = failure if doing is None else f"{failure}, at {doing}"
        return found


def run_all(
    commands: Sequence[Sequence[str]], *, at_once: int, limit_s: float
) -> Iterator[tuple[int, str | None]]:
    """Run modules of bench/; as each ends, its index and why it failed, None where it did not."""
    waiting = list(enumerate(commands))
    running: dict[int, _Process] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                index, words = waiting.pop(0)
                running[index] = _Process(words, limit_s)
            time.sleep(POLL_S)
            for index, process in list(running.items()):
                if process.over():
                    yield index, running.pop(index).failure()
    finally:
        for process in running.values():
            process.end()


class _Process:
    """A process in a session of its own, so that what it has started ends with it."""

    def __init__(self, words: Sequence[str], limit_s: float) -> None:
        # A file and no pipe: a pipe stays open as long as anything that inherited it lives.
        self.errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self.limit_s = limit_s
        self.deadline = time.monotonic() + limit_s
        self.process = subprocess.Popen(
            command(*words),
            env=variables(),
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            start_new_session=True,
        )
        self.late = False

    def over(self) -> bool:
        """Whether it has ended; one that is late is ended now."""
        if self.process.poll() is not None:
            return True
        self.late = time.monotonic() >= self.deadline
        return self.late

    def failure(self) -> str | None:
        """End it if it still runs; why it failed, None where it did not."""
        text = self.end().strip()
        if not self.late and self.process.returncode == 0:
            return None
        print(text[-SHOWN:], file=sys.stderr)
        if self.late:
            return f"took over {self.limit_s:g} s"
        last = text.splitlines()[-1:] or [""]
        return f"exit status {self.process.returncode}: {last[0]}"

    def end(self) -> str:
        """End the process and all that it has started in its session; what it wrote to stderr."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with self.errors:
            self.errors.seek(0)
            return self.errors.read()
