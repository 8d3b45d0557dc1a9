"""The child that searches for `tune(background=True)`.

Run as `python -m graphwright.tuning.background_main SOCKET ORDER PARENT PATHS`. SOCKET is the
handle of a socket to the caller's process, ORDER that of a file with the pickled order, PARENT the
caller's process number, PATHS its `sys.path` and `sys.argv` as JSON. Each line that is sent is a
JSON message: "scratch", "doing", "better", "done" or "failed". When the other side closes the
socket or ends, so does this process, with all that it has started and written.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import warnings
from typing import Any

import torch

from ..artifacts.saving import save_choice
from ..artifacts.tuned_module import TunedModule
from ..errors import GraphwrightError, first_line, in_words
from ..processes.environment_variables import CANDIDATE
from ..processes.linux import adopt_orphans, end_with_parent, kill_children
from ..processes.pickled_files import publish_globals, read_pickled
from ..report.result import EAGER, Row, Status
from .background import SearchOrder
from .tuner import Tuning

_NICENESS = 10
# What is found before the end is loaded only if it beats the last by this.
_BETTER = 0.95


class _Caller:
    """The caller's process, and what is left to do when it goes."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self.scratch = tempfile.mkdtemp(prefix="gw-")  # Short: paths of sockets are limited.
        self._lock = threading.Lock()

    def say(self, message: str, /, **more: Any) -> None:
        """Send a message; the process ends if nobody listens."""
        try:
            with self._lock:
                self._channel.sendall(json.dumps({"say": message, **more}).encode() + b"\n")
        except OSError:
            self.leave()

    def wait(self) -> None:
        """Wait until the other side closes the socket, then end this process."""
        with contextlib.suppress(OSError):
            while self._channel.recv(1):
                pass
        self.leave()

    def leave(self, *_: object) -> None:
        """End everything that this process has started and written, and itself."""
        kill_children()
        shutil.rmtree(self.scratch, ignore_errors=True)
        os._exit(0)


class _Listener:
    """Tells the caller's process how far the search is, and hands over what is better."""

    def __init__(self, caller: _Caller, tuning: Tuning) -> None:
        self._caller, self._tuning = caller, tuning
        self._best, self._sent = 1.0, EAGER
        self._count = 0

    def start(self, total: int) -> None:
        """Nothing to do."""

    def step(self, what: str) -> None:
        """A step begins."""
        self._caller.say("doing", what=what)

    def doing(self, what: str) -> None:
        """Something within the step begins."""
        self._caller.say("doing", what=what)

    def row(self, row: Row) -> None:
        """Hand a candidate over if it is faster beyond the noise."""
        speed = self._tuning.report.speedup(row)
        if row.strategy == EAGER or row.status is not Status.OK or speed is None or speed[1] <= 1:
            return
        cost = self._tuning.report.cost(row)
        if cost > _BETTER * self._best:
            return
        name = row.strategy
        tuned = self._tuning.build(name)
        path = None if tuned is None else self._save(name, tuned)
        if path is not None:
            self._best, self._sent = cost, name
            self._tell("better", name, path)

    def done(self, tuned: TunedModule) -> None:
        """Hand the choice over, unless that has happened."""
        name = self._tuning.report.chosen or EAGER
        path = self._save(name, tuned) if name not in (EAGER, self._sent) else None
        self._tell("done", name, path)

    def _tell(self, what: str, name: str, path: str | None) -> None:
        self._caller.say(what, strategy=name, path=path, report=self._tuning.report.to_json())

    def _save(self, name: str, tuned: TunedModule) -> str | None:
        """The path of the file with a candidate; None, with a note, if there can be none."""
        self._count += 1
        path = os.path.join(self._caller.scratch, f"found{self._count}.gw")
        why = self._unloadable()
        try:
            if why is None:
                save_choice(tuned, path)
                return path
        except GraphwrightError as error:
            why = in_words(error)[0]
        note = f"{name} cannot be handed over: {why}"
        if note not in self._tuning.report.notes:
            self._tuning.report.notes.append(note)
        return None

    def _unloadable(self) -> str | None:
        """Why nothing that was found can be loaded in the caller's process."""
        samples = self._tuning.evaluator.samples
        if not all(sample.reference.pure for sample in samples):
            return "calls of the model change something, which other threads would notice"
        for sample in samples:
            before = _draws()
            call = sample.call.clone()
            self._tuning.asked.module(*call.args, **call.kwargs)
            after = _draws()
            if before != after:
                return "the model draws random numbers"
        return None


def _draws() -> list[Any]:
    """The states of the generators of random numbers."""
    states: list[Any] = [torch.random.get_rng_state().tolist(), random.getstate()]
    if torch.cuda.is_initialized():
        states += [state.tolist() for state in torch.cuda.get_rng_state_all()]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states.append([kind, keys.tolist(), *rest])
    return states


def _search(caller: _Caller, handle: int) -> None:
    order: SearchOrder = read_pickled(handle)
    publish_globals()
    os.environ.pop(CANDIDATE, None)
    cores = len(os.sched_getaffinity(0))
    threads = min(order.settings.threads, cores)
    order.settings.with_threads(threads).apply()
    tuning = Tuning(order.model, samples=order.samples, name=order.name, **order.options)
    listener = _Listener(caller, tuning)
    with order.settings.inference_mode():
        listener.done(tuning.run(listener))


def _step_back() -> None:
    """Leave a core, and the others when they are needed, to the caller's process."""
    os.nice(_NICENESS)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, cores[1:])


def main() -> None:
    """Search, and wait until the caller has loaded what was found."""
    channel, handle, parent = map(int, sys.argv[1:4])
    adopt_orphans()
    caller = _Caller(socket.socket(fileno=channel))
    signal.signal(signal.SIGTERM, caller.leave)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    end_with_parent(parent, signal.SIGTERM)
    threading.Thread(target=caller.wait, daemon=True).start()
    caller.say("scratch", path=caller.scratch)
    _step_back()
    sys.path[:], argv = json.loads(sys.argv[4])
    sys.argv[1:] = argv[1:]
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # By default Inductor's cache lies under TMPDIR; keep it where the caller has it.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    os.environ["TMPDIR"] = caller.scratch
    tempfile.tempdir = None  # Have it read TMPDIR again.
    warnings.simplefilter("ignore")  # The log's last line should say what went wrong.
    try:
        _search(caller, handle)
    except GraphwrightError as error:
        what, remedy = in_words(error)
        caller.say("failed", kind=type(error).__name__, what=what, remedy=remedy)
    except Exception as error:
        caller.say("failed", kind="", what=first_line(error, 300), remedy="")
    threading.Event().wait()


if __name__ == "__main__":
    main()
