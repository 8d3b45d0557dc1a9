"""Reading a CUDA graph's nodes, from a stand-in for the driver: no GPU is needed."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import graphwright as gw
from graphwright.graphs.cuda import driver, reading
from graphwright.graphs.inspection.node import arranged
from graphwright.graphs.inspection.origins import Observer, Origins

GRAPH, STREAM, EXEC = 0x7F0100000001, 0x7F0100000002, 0x7F0100000003
COPY, PACKED, PLAIN, SET = (0x7F0100000010 + n for n in range(4))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """What stands for the driver, compiled."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler for tests/support/graph_driver.c")
    made = tmp_path_factory.mktemp("driver") / "libcuda.so"
    source = Path(__file__).parents[1] / "support" / "graph_driver.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, source], check=True)
    return driver.declared(ctypes.CDLL(str(made)))


@pytest.fixture(autouse=True)
def stand_in(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    reading._function.cache_clear()
    monkeypatch.setattr(driver, "libcuda", lambda: library)
    yield library
    reading._function.cache_clear()


def test_nodes_have_what_the_driver_tells() -> None:
    nodes, handles = reading.nodes_of(GRAPH)
    assert handles == [COPY, PACKED, PLAIN, SET]
    copy, packed, plain, fill = nodes
    assert (copy.kind, copy.name, copy.bytes) == ("copy", "host to device", 300)
    assert (packed.kind, packed.name, packed.registers) == ("kernel", "gemm_tn", 168)
    assert (plain.name, plain.registers, plain.shared_bytes) == ("plain(int)", 40, 192)
    assert (plain.grid, plain.block) == ((3, 2, 1), (32, 4, 1))
    assert plain.bytes is None
    assert (fill.kind, fill.name, fill.bytes) == ("memset", "set to 0xff", 40)


def test_edges_with_data_are_read() -> None:
    nodes, _ = reading.nodes_of(GRAPH)
    assert [node.predecessors for node in nodes] == [(), (0,), (0,), (1, 2)]
    assert [node.branch for node in arranged(nodes)] == [0, 0, 1, 0]


def test_constants_are_read_one_by_one_or_packed() -> None:
    copy, packed, plain, fill = reading.constants_of([COPY, PACKED, PLAIN, SET])
    assert packed == (b"twenty-four bytes of it\0",)
    assert plain == ((7).to_bytes(4, "little"), bytes(ctypes.c_double(2.5)))
    assert fill == ((255).to_bytes(8, "little"), (8192).to_bytes(8, "little"))
    assert copy is not None
    assert copy[3] == (4096).to_bytes(8, "little")


def test_arguments_are_set_one_by_one_or_packed(stand_in: ctypes.CDLL) -> None:
    reading.set_arguments(EXEC, PLAIN, [(9).to_bytes(4, "little"), bytes(ctypes.c_double(0.5))])
    assert ctypes.c_int.in_dll(stand_in, "given_count").value == 9
    assert ctypes.c_double.in_dll(stand_in, "given_scale").value == 0.5
    reading.set_arguments(EXEC, PACKED, [b"24 other bytes are given"])
    assert bytes((ctypes.c_char * 24).in_dll(stand_in, "given_buffer")) == (
        b"24 other bytes are given"
    )


def test_the_driver_s_own_dump_is_a_file(tmp_path: Path) -> None:
    reading.dump(GRAPH, tmp_path / "graph.dot")
    assert (tmp_path / "graph.dot").read_text().startswith("digraph")
    with pytest.raises(gw.CaptureError, match="cuGraphDebugDotPrint"):
        reading.dump(GRAPH, tmp_path / "no folder" / "graph.dot")


def test_nodes_that_an_operation_adds_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph begins with one node, and grows by the others in the operation."""
    counts = iter([1, 1])
    monkeypatch.setattr(reading.driver, "node_count", lambda graph: next(counts, 4))
    by = Observer(Origins(None))
    stream: Any = types.SimpleNamespace(cuda_stream=STREAM)
    seen = reading.CaptureObserver(by, stream)
    assert seen.run(lambda x: x, (1,), {}) == 1
    assert [*by.recorded] == [PACKED, PLAIN, SET]
