"""Of several processes, one at a time has a GPU to itself."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from graphwright.evaluation import gpu_turns
from graphwright.evaluation.gpu_turns import alone_on, turn_of
from graphwright.fusion import pass_timing

_FORK = multiprocessing.get_context("fork")


def _turns(path: Path, log: Path, count: int) -> None:
    for _ in range(count):
        with turn_of(str(path)), log.open("a") as file:
            file.write(f"{os.getpid()} ")
            file.flush()
            time.sleep(0.005)
            file.write(f"{os.getpid()}\n")


def test_turns_of_processes_do_not_overlap(tmp_path: Path) -> None:
    log = tmp_path / "log"
    each = [_FORK.Process(target=_turns, args=(tmp_path / "lock", log, 10)) for _ in range(3)]
    for process in each:
        process.start()
    for process in each:
        process.join()
    lines = [line.split() for line in log.read_text().splitlines()]
    assert len(lines) == 30
    assert all(len(pair) == 2 and pair[0] == pair[1] for pair in lines)


def _holds(path: Path, ready: Any) -> None:
    with turn_of(str(path)):
        ready.set()
        time.sleep(60)


def test_a_process_that_is_killed_hands_its_turn_on(tmp_path: Path) -> None:
    ready = _FORK.Event()
    process = _FORK.Process(target=_holds, args=(tmp_path / "lock", ready))
    process.start()
    ready.wait()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    began = time.monotonic()
    with turn_of(str(tmp_path / "lock")):
        assert time.monotonic() - began < 1


def test_a_turn_ends_although_a_child_was_forked_meanwhile(tmp_path: Path) -> None:
    process = _FORK.Process(target=time.sleep, args=(60,))
    with turn_of(str(tmp_path / "lock")):
        process.start()
    began = time.monotonic()
    with turn_of(str(tmp_path / "lock")):
        assert time.monotonic() - began < 1
    process.kill()
    process.join()


def test_where_there_is_no_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", missing)
    with turn_of("lock"):
        pass


def test_nobody_waits_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_turns, "PATIENCE_S", 0.2)
    with turn_of(str(tmp_path / "lock")), turn_of(str(tmp_path / "lock")):
        pass


@pytest.mark.parametrize("name", ["no/such/folder", "a/link"])
def test_a_file_that_cannot_be_locked_is_done_without(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "link").symlink_to(tmp_path / "elsewhere")
    with turn_of(str(tmp_path / name)):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_the_cpu_has_no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_turns, "turn_of", None)
    with alone_on(torch.device("cpu")):
        pass


@pytest.mark.gpu
def test_a_turn_in_a_turn_is_the_same() -> None:
    began = time.monotonic()
    with alone_on(torch.device("cuda", 0)), alone_on(torch.device("cuda", 0)):
        pass
    assert time.monotonic() - began < 1


def test_passes_are_compared_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    @contextlib.contextmanager
    def noted(device: torch.device) -> Any:
        seen.append("begins")
        yield
        seen.append("ends")

    monkeypatch.setattr(pass_timing, "alone_on", noted)
    calls = [lambda x: seen.append("runs"), lambda x: None]
    pass_timing.compared(calls, (torch.ones(1),), {}, torch.device("cpu"))
    begins, ends = seen.index("begins"), seen.index("ends")
    assert "runs" in seen[begins:ends]
    assert "runs" not in seen[ends:]
