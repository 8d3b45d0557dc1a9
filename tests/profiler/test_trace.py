"""What is read from a Chrome trace: planted events, with kernels as CUPTI writes them."""

from __future__ import annotations

from typing import Any

import pytest
from test_verdict import operation

from graphwright.profiler.trace import CALL, MARK, MARKED, TracedCall, named, parse, timeline

US = 1e-6


def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    device = cat in ("kernel", "gpu_memcpy", "gpu_memset")
    tid = 7 if device else args.pop("tid", 1)
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": ts, "dur": dur,
        "args": args,
    }  # fmt: skip


def launch(number: int, ts: float, name: str = "cudaLaunchKernel", dur: float = 3) -> Any:
    return event("cuda_runtime", name, ts, dur, correlation=number)


def planted() -> list[dict[str, Any]]:
    """Two calls as they are, the first to be left out; and a marked one."""
    found = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}}]
    for number, start in ((0, 0.0), (1, 1000.0)):
        found += [
            event("user_annotation", f"{CALL}{number}", start, 100),
            event("cpu_op", "aten::mm", start + 10, 20),
            launch(10 * number + 1, start + 20),
            event("kernel", "gemm", start + 25, 40, correlation=10 * number + 1, stream=7),
            event("cpu_op", "aten::item", start + 40, 40),
            launch(10 * number + 2, start + 45, "cudaMemcpyAsync", 5),
            event(
                "gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", start + 66, 2,
                correlation=10 * number + 2, stream=7,
            ),
            event("cuda_runtime", "cudaStreamSynchronize", start + 50, 25, correlation=99),
        ]  # fmt: skip
    found += [
        event("user_annotation", f"{MARKED}0", 2000, 100),
        event("user_annotation", f"{MARK}0", 2010, 20),
        launch(31, 2020),
        event("kernel", "gemm", 2030, 40, correlation=31, stream=7),
        event("user_annotation", f"{MARK}1", 2050, 20),
        launch(32, 2055, "cudaMemcpyAsync"),
        event("gpu_memcpy", "Memcpy DtoH", 2075, 2, correlation=32, stream=7),
        launch(33, 2080, "cudaGraphLaunch"),
        *(event("kernel", "small", 2090 + 3 * n, 1.5, correlation=33, stream=7) for n in range(5)),
    ]
    return found


@pytest.fixture(name="parsed")
def _parsed() -> TracedCall:
    return parse(planted())


def test_the_host_s_time_is_divided(parsed: TracedCall) -> None:
    assert parsed.window_s == pytest.approx(100 * US)
    assert parsed.waiting_s == pytest.approx(25 * US)
    assert parsed.python_s == pytest.approx(40 * US)  # 0-10, 30-40 and 80-100
    assert parsed.copying_s == 0  # A value that is read is no transfer.
    assert parsed.launches == 2


def test_the_device_s_time_is_a_union(parsed: TracedCall) -> None:
    assert parsed.busy_s == pytest.approx(42 * US)


def test_kernels_belong_to_operations(parsed: TracedCall) -> None:
    assert parsed.operation_s == {0: pytest.approx(40 * US), 1: pytest.approx(2 * US)}
    assert [kernel.kind for kernel in parsed.kernels[:2]] == ["kernel", "to host"]
    outside = [kernel for kernel in parsed.kernels if kernel.operation is None]
    assert len(outside) == 5


def test_gaps_inside_one_launch_count_as_work() -> None:
    events = [
        event("user_annotation", f"{CALL}0", 0, 100),
        launch(1, 5, "cudaGraphLaunch"),
        *(event("kernel", "small", 10 + 4 * n, 2, correlation=1) for n in range(10)),
    ]
    assert parse(events).busy_s == pytest.approx(38 * US)


def test_other_threads_operations_are_no_python() -> None:
    """A backward pass runs on a thread of its own while Python waits for it."""
    events = [
        event("user_annotation", f"{CALL}0", 0, 100),
        event("cpu_op", "aten::mm", 10, 80, tid=2),
    ]
    assert parse(events).python_s == pytest.approx(20 * US)


def test_nothing_is_made_of_nothing() -> None:
    assert parse([]) == TracedCall()
    assert timeline([]) == []


def test_a_timeline_has_lanes_for_host_and_device(parsed: TracedCall) -> None:
    bars = timeline(parsed.events)
    lanes = {bar.lane for bar in bars}
    assert lanes == {"host: operations", "host: waiting", "device: kernels", "device: copies"}
    assert [bar.name for bar in bars if bar.lane == "device: kernels"] == ["gemm"]


def test_marks_bear_the_names_of_modules(parsed: TracedCall) -> None:
    operations = [operation(name="aten::mm", module="head"), operation(name="aten::item")]
    titles = [each["name"] for each in named(parsed.events, operations)]
    assert "head: aten::mm" in titles
    assert "aten::item" in titles
    assert not any(title.startswith(MARK) for title in titles)


def test_large_copies_keep_the_host_busy() -> None:
    events = [
        event("user_annotation", f"{CALL}0", 0, 1000),
        event("cpu_op", "aten::copy_", 10, 900),
        launch(1, 20, "cudaMemcpyAsync", 700),
        event("gpu_memcpy", "Memcpy HtoD", 30, 600, correlation=1, bytes=1 << 24),
    ]
    parsed = parse(events)
    assert parsed.copying_s == pytest.approx(700 * US)
    assert parsed.busy_s == pytest.approx(600 * US)
