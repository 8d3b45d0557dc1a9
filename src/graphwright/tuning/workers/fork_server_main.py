"""Candidates are tried under this process.

Run as `python -m graphwright.tuning.workers.fork_server_main CONTROL PARENT`.

It imports what the model needs, once, and forks a child for each candidate that it is asked to
try; it runs nothing of the candidate's itself. A child loads the model and its references from a
file, evaluates one candidate, and sends the row. CONTROL is a socket to the process that tunes,
PARENT that process's number: when it ends, so does all that was started here.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import mmap
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import warnings
from typing import Any

import torch

from ...errors import first_line
from .fork_server import MESSAGE
from .process import _CHILD_SUBREAPER, _prctl, when_parent_ends
from .task import Task, lend_globals

# How often what was left by what was left is looked for.
_GENERATIONS = 50


class _ForkingServer:
    """Forks children on request, says how they ended, and ends what is left of them."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: set[int] = set()
        self._scratch = ""
        self._environment: dict[str, str] = {}

    def run(self) -> None:
        """Answer requests until the other side is gone."""
        while message := _receive(self._control):
            request, handles = message
            answer = getattr(self, request.pop("do"))(handles, **request)
            self._control.sendall(json.dumps(answer).encode())

    def prepare(
        self,
        handles: list[int],
        path: list[str],
        argv: list[str],
        modules: list[str],
        environment: dict[str, str],
        scratch: str,
    ) -> dict[str, Any]:
        """Import what children will need; what cannot be imported is left to them.

        Their temporary files are put in a folder that is removed with this process.
        """
        sys.path[:], sys.argv[1:] = path, argv[1:]
        self._scratch = scratch
        self._environment = {**environment, "TMPDIR": scratch}
        for name in modules:
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(name)
        if "torch._inductor" in sys.modules:
            from torch._inductor.runtime.cache_dir_utils import default_cache_dir

            # What is compiled is kept where it always is, which is among temporary files.
            self._environment.setdefault("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
        # Children need not look for garbage in what is there already, nor copy its pages.
        gc.collect()
        gc.freeze()
        return {"forks": not torch.cuda.is_initialized()}

    def fork(self, handles: list[int]) -> dict[str, Any]:
        """Start a child that talks, prints, loads its task and writes through these handles."""
        mother = os.getpid()
        child = os.fork()
        if child:
            self._children.add(child)
            for handle in handles:
                os.close(handle)
            return {"child": child}
        channel, log, payload, paper = handles
        try:
            os.setsid()
            when_parent_ends(signal.SIGKILL, mother)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._control.close()
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            os.environ.clear()
            os.environ.update(self._environment)
            tempfile.tempdir = None  # It is asked for again.
            serve(socket.socket(fileno=channel), payload, paper)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        except BaseException as error:
            with contextlib.suppress(Exception):
                sys.excepthook(type(error), error, error.__traceback__)
                sys.stderr.flush()
            os._exit(1)

    def reap(self, handles: list[int], child: int) -> dict[str, Any]:
        """How a child ended: its exit status, or minus the signal that ended it."""
        _, status = os.waitpid(child, 0)
        self._children.discard(child)
        self._end_orphans()
        return {"status": os.waitstatus_to_exitcode(status)}

    def end(self) -> None:
        """Kill every child with whatever it has started."""
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        self._children.clear()
        self._end_orphans()
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _end_orphans(self) -> None:
        """Kill what a candidate has started in a session apart; it is this process's by now."""
        for _ in range(_GENERATIONS):
            with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as listed:
                orphans = set(map(int, listed.read().split())) - self._children
            if not orphans:
                return
            for orphan in orphans:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(orphan, signal.SIGKILL)
                    os.waitpid(orphan, 0)


def _receive(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    data, handles, _, _ = socket.recv_fds(control, MESSAGE, 4)
    return (json.loads(data), handles) if data else None


def serve(channel: socket.socket, payload: int, paper: int) -> None:
    """Evaluate the candidate that is pickled in a file, and leave its row there."""

    def say(what: str, **more: str) -> None:
        channel.send(json.dumps({"say": what, **more}).encode())

    try:
        with mmap.mmap(payload, 0, access=mmap.ACCESS_READ) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # A warning would stand in the log as the last word.
            readable: Any = file
            task: Task = torch.load(readable, weights_only=False)
            lend_globals()
        task.settings.apply()
        mode = torch.inference_mode if task.settings.inference else contextlib.nullcontext
        with mode():
            evaluator = task.evaluator()
            why = evaluator.disagreement()
        packed = os.pread(paper, os.fstat(paper).st_size, 0)
        candidate, device_bytes = pickle.loads(packed)
    except Exception as error:
        why = first_line(error, 160)
    if why is not None:
        say("unfit", why=why)
        return
    say("loaded")
    channel.recv(1)
    if device_bytes is not None:
        place = evaluator.device
        total = torch.cuda.get_device_properties(place).total_memory
        allowed = device_bytes + torch.cuda.memory_reserved(place)
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), place)
    with mode():
        trial = evaluator.set_up(candidate)
        if trial.builts:
            say("ready")
            channel.recv(1)
            evaluator.time(trial)
    os.ftruncate(paper, 0)
    os.pwrite(paper, trial.row.to_json().encode(), 0)
    say("row")


def main() -> None:
    """Serve the process that holds the other end of the control socket."""
    control, parent = map(int, sys.argv[1:])
    nursery = _ForkingServer(socket.socket(fileno=control))

    def over(*_: object) -> None:
        nursery.end()
        os._exit(1)

    signal.signal(signal.SIGTERM, over)
    # The caller may ignore it, and with it ignored nobody can be waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _prctl(_CHILD_SUBREAPER, 1)
    try:
        when_parent_ends(signal.SIGTERM, parent)
        nursery.run()
    finally:
        nursery.end()


if __name__ == "__main__":
    main()
