"""Values that go to another process by a file without a name."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from graphwright.processes import pickled_files
from graphwright.processes.child import Child
from graphwright.processes.pickled_files import read_pickled, write_pickled

READ = """
import sys, torch
from graphwright.processes.pickled_files import read_pickled
model, x, y = read_pickled(int(sys.argv[1]))
torch.testing.assert_close(model(x), y, rtol=0, atol=0)
print("right")
"""


def test_several_processes_read_one_file_at_once(tmp_path: Path) -> None:
    model, x = nn.Linear(300, 200), torch.randn(4, 300)
    program = tmp_path / "read.py"
    program.write_text(READ)
    with write_pickled((model, x, model(x).detach())) as file:
        handle = file.fileno()
        words = [str(program), str(handle)]
        children = [Child(words, handles=[handle]) for _ in range(3)]
        try:
            assert [child.status_within(60) for child in children] == [0, 0, 0]
            assert all(child.last_line() == "right" for child in children)
        finally:
            for child in children:
                child.end()


def test_it_is_read_where_handles_have_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with write_pickled({"x": torch.arange(5)}) as file:
        monkeypatch.setattr(os.path, "exists", lambda _: False)
        for _ in range(2):  # From its beginning each time.
            assert torch.equal(read_pickled(file.fileno())["x"], torch.arange(5))


def test_what_is_read_can_be_changed() -> None:
    with write_pickled(torch.zeros(5)) as file:
        read_pickled(file.fileno()).add_(1)
        assert torch.equal(read_pickled(file.fileno()), torch.zeros(5))


def test_the_caller_s_checksums_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def during(*_: object, **__: object) -> None:
        raise ValueError(torch.serialization.get_crc32_options())

    before = torch.serialization.get_crc32_options()
    monkeypatch.setattr(pickled_files.torch, "save", during)
    with pytest.raises(ValueError, match="False"):
        write_pickled(1)
    assert torch.serialization.get_crc32_options() is before


def test_what_cannot_be_pickled_leaves_no_file_open() -> None:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("open files are not listed here")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TypeError):
        write_pickled(threading.Lock())
    assert len(os.listdir("/proc/self/fd")) == before
