"""The choice cache: what was stored is found again, and no damage stops tuning."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from graphwright.calls.fingerprint import Fingerprint, key_of
from graphwright.report.report import Report
from graphwright.report.result import Row, Status
from graphwright.tuning import choice_cache
from graphwright.tuning.choice_cache import folder, forget, recall, remember


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRAPHWRIGHT_CACHE_DIR", str(tmp_path))
    return tmp_path


def key(name: str = "a") -> Fingerprint:
    return key_of(nn.Identity(), [], "cpu", {}, {"name": name})


def report(note: str = "") -> Report:
    rows = [Row("eager", Status.OK, notes=[note])]
    return Report("Net", ["args[0]: 4 float32"], "latency", rows, {"torch": "2"}, chosen="eager")


def entry(name: str = "a") -> Path:
    path = remember(key(name), report())
    assert path is not None
    return path


def test_what_was_remembered_is_recalled() -> None:
    kept = report("größer ∞ \ud800")
    path = remember(key(), kept)
    assert path is not None
    assert recall(key()) == kept
    assert recall(key("b")) is None
    assert [file.name for file in folder().iterdir()] == [path.name]
    found = json.loads(path.read_text())
    assert found["key"] == key().digest
    assert found["parts"] == key().parts


def test_the_last_of_two_is_recalled() -> None:
    remember(key(), report("first"))
    remember(key(), report("second"))
    assert recall(key()) == report("second")


def test_forget_removes_one_entry() -> None:
    remember(key("a"), report())
    remember(key("b"), report())
    forget(key("a"))
    forget(key("never there"))
    assert recall(key("a")) is None
    assert recall(key("b")) == report()


def test_folder(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert folder() == cache / "choices"
    monkeypatch.setenv("GRAPHWRIGHT_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert folder().name == "choices"
    assert "graphwright" in folder().parts
    assert tmp_path / "home" in folder().parents


# ------------------------------------------------------------ damage


def edited(**changes: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = json.loads(path.read_text())
        assert all(data.get(name) != value for name, value in changes.items())
        path.write_text(json.dumps(data | changes))

    return damage


def of_the_report(**changes: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = json.loads(path.read_text())
        data["report"] |= changes
        path.write_text(json.dumps(data))

    return damage


def in_its_place(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x80"),
    "no JSON": lambda path: path.write_text("chosen: eager"),
    "no object": lambda path: path.write_text("[1, 2]"),
    "endless": lambda path: path.write_text("[" * 100_000),
    "something after it": lambda path: path.write_bytes(path.read_bytes() + b"{}"),
    "a report alone": lambda path: path.write_text(report().to_json()),
    "other schema": edited(schema="graphwright.tune"),
    "later version": edited(schema_version=2),
    "other key": edited(key="0" * 64),
    "other parts": edited(parts={}),
    "another's entry": lambda path: path.write_bytes(entry("b").read_bytes()),
    "no report": edited(report=None),
    "no rows": of_the_report(rows=None),
    "a row of text": of_the_report(rows=["eager"]),
    "a field more": of_the_report(more=1),
    "a choice without a row": of_the_report(chosen="inductor"),
    "report of another version": of_the_report(schema_version=99),
    "a directory": in_its_place(Path.mkdir),
    "a link to itself": in_its_place(lambda path: path.symlink_to(path)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entry_is_ignored_with_a_warning(damage: str) -> None:
    path = entry()
    DAMAGES[damage](path)
    with pytest.warns(RuntimeWarning, match=re.escape(str(path))) as caught:
        assert recall(key()) is None
    assert len(caught) == 1
    assert "ignored" in str(caught[0].message)
    assert caught[0].filename == __file__


def test_damaged_entry_is_replaced() -> None:
    entry().write_bytes(b"")
    remember(key(), report("anew"))
    assert recall(key()) == report("anew")


def test_any_truncation_is_noticed() -> None:
    path = entry()
    whole = path.read_bytes()

    @given(st.integers(0, len(whole) - 1))
    @settings(max_examples=50)
    def check(length: int) -> None:
        path.write_bytes(whole[:length])
        with pytest.warns(RuntimeWarning, match=path.name):
            assert recall(key()) is None

    check()


# ------------------------------------------------------------ places that cannot be written


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Without the superuser's rights, for whom no folder is read-only."""
    if os.geteuid() != 0:
        yield
        return
    try:
        os.seteuid(65534)
    except OSError:
        pytest.skip("rights cannot be dropped here")
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of choices, with an entry in it, where every user may go."""
    with tempfile.TemporaryDirectory() as place:
        monkeypatch.setenv("GRAPHWRIGHT_CACHE_DIR", place)
        Path(place).chmod(0o755)
        path = entry()
        path.chmod(0o644)
        path.parent.chmod(0o555)
        yield path.parent
        path.parent.chmod(0o755)


def test_read_only_folder_is_read_and_not_written(reachable: Path) -> None:
    with unprivileged():
        assert recall(key()) == report()
        with pytest.warns(RuntimeWarning, match=str(reachable)):
            assert remember(key("b"), report()) is None
        forget(key())
        assert recall(key()) == report()


def test_unreadable_entry_is_ignored_with_a_warning(reachable: Path) -> None:
    path = reachable / f"{key().digest}.json"
    path.chmod(0)
    with unprivileged(), pytest.warns(RuntimeWarning, match=str(path)):
        assert recall(key()) is None


def test_full_disk_leaves_the_earlier_entry() -> None:
    path = entry()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.warns(RuntimeWarning, match=str(path)):
            assert remember(key(), report("long" * 1000)) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert recall(key()) == report()
    assert list(path.parent.iterdir()) == [path]


def test_a_file_where_the_folder_should_be(cache: Path) -> None:
    (cache / "choices").write_text("")
    with pytest.warns(RuntimeWarning, match=str(cache)):
        assert remember(key(), report()) is None
    with pytest.warns(RuntimeWarning, match=str(cache)):
        assert recall(key()) is None
    forget(key())


def test_a_directory_where_the_entry_should_be() -> None:
    path = entry()
    path.unlink()
    path.mkdir()
    with pytest.warns(RuntimeWarning, match=str(path)):
        assert remember(key(), report()) is None
    assert list(path.parent.iterdir()) == [path]


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHWRIGHT_CACHE_DIR", "~no such user/cache")
    with pytest.warns(RuntimeWarning):
        assert remember(key(), report()) is None
    with pytest.warns(RuntimeWarning):
        assert recall(key()) is None
    forget(key())


# ------------------------------------------------------------ the bound


def aged(path: Path, seconds: float) -> Path:
    then = time.time() - seconds
    os.utime(path, (then, then))
    return path


def test_oldest_entries_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice_cache, "MAX_ENTRIES", 3)
    for age, name in enumerate("abc"):
        aged(entry(name), 100 + age)
    recall(key("c"))  # The oldest, but used.
    entry("d")
    assert {name for name in "abcd" if recall(key(name))} == {"a", "c", "d"}


def test_the_newest_entry_stays_though_clocks_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice_cache, "MAX_ENTRIES", 1)
    aged(entry("a"), -1000)
    entry("b")
    assert {name for name in "ab" if recall(key(name))} == {"b"}


def test_stale_temporary_files_are_removed_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice_cache, "MAX_ENTRIES", 1)
    path = entry()
    young, stale = (path.with_suffix(f".{name}.tmp") for name in ("young", "stale"))
    foreign = [path.with_name(name) for name in ("notes.json", "notes.tmp", "a.b.tmp")]
    for file in (young, stale, *foreign):
        file.write_text("")
    for file in (stale, *foreign):
        aged(file, 4000)
    entry()
    assert {*path.parent.iterdir()} == {path, young, *foreign}


# ------------------------------------------------------------ processes

SETUP = """
import os, signal, sys, warnings
from concurrent.futures import ThreadPoolExecutor
from torch import nn
from graphwright.calls.fingerprint import key_of
from graphwright.report.report import Report
from graphwright.report.result import Row, Status
from graphwright.tuning.choice_cache import folder, forget, recall, remember
warnings.simplefilter("error")
key = key_of(nn.Identity(), [], "cpu", {}, {"name": "a"})

def report(note):
    rows = [Row("eager", Status.OK)]
    return Report("Net", [], "latency", rows, {}, chosen="eager", notes=[note])
"""
SHARING = """
def work(number):
    for _ in range(4):
        assert remember(key, report(str(number) * 10_000 * (number + 1))) is not None
        note = recall(key).notes[0]
        assert len(note) == 10_000 * (int(note[0]) + 1) and {*note} == {note[0]}

processes = []
for _ in range(2):
    processes.append(os.fork())
    if processes[-1] == 0:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        sys.exit(0)
assert [os.waitpid(process, 0)[1] for process in processes] == [0, 0]
assert len(list(folder().iterdir())) == 1
"""
KILLED = """
def child(work):
    reads, writes = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            work(writes)
        finally:
            os._exit(1)
    os.close(writes)
    return process, reads

def dies(at):
    def work(_):
        setattr(os, at, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        remember(key, report("new"))
    return work

def writes_on(pipe):
    for number in range(1_000_000):
        remember(key, report(str(number) * 100_000))
        os.write(pipe, b".")

remember(key, report("old"))
for at in ("fsync", "replace"):
    process, reads = child(dies(at))
    assert os.waitpid(process, 0)[1] == signal.SIGKILL
    os.close(reads)
    assert recall(key).notes == ["old"]
assert len(list(folder().glob("*.tmp"))) == 2
for number in range(25):
    process, reads = child(writes_on)
    for _ in range(1 + number % 3):
        assert os.read(reads, 1)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    os.close(reads)
    note = recall(key).notes[0]
    assert len(note) in (100_000, 200_000)
    assert note == note[: len(note) // 100_000] * 100_000
assert {file.suffix for file in folder().iterdir()} == {".json", ".tmp"}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [pytest.param(SHARING, id="shared"), pytest.param(KILLED, id="killed")],
)
def test_entry_is_whole_whoever_writes_it(script: str) -> None:
    command = [sys.executable, "-c", SETUP + script]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
