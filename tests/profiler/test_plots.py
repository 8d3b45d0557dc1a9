"""Plots of a profile: what is drawn, and that it stays small."""

from __future__ import annotations

import re

from test_verdict import operation

from graphwright.profiler.plots import drawn_timeline, roofline
from graphwright.profiler.roofs import Roofs
from graphwright.profiler.table import Measured
from graphwright.profiler.trace import Bar

ROOFS = Roofs("a CPU", 1, ((1 << 27, 1e-2),), {"float32": 1e11, "bfloat16": 9e10}, 1e-6)


def hints(svg: str) -> list[str]:
    return re.findall(r"<title>([^<]*)</title>", svg)


def test_a_roofline_has_a_dot_for_each_operation_with_flops() -> None:
    known = operation(name="aten::mm", module="head <b>", flops=1 << 30, nbytes=1 << 24)
    measured = [Measured(known, 2e-2, 0, "arithmetic"), Measured(operation(), 1e-2, 0, "x")]
    svg = roofline("$Net$", measured, ROOFS)
    assert "Roofline of $Net$ on a CPU" in svg
    assert "33% of the time" in svg
    assert "head &lt;b&gt;: aten::mm, 20.0 ms" in hints(svg)


def test_a_roofline_of_nothing_shows_the_roofs() -> None:
    svg = roofline("Net", [], ROOFS)
    assert "float32 100 GFLOP/s" in svg
    assert "bfloat16 90 GFLOP/s" in svg


def test_a_timeline_names_its_lanes_and_pieces() -> None:
    bars = [
        Bar("host: operations", "aten::mm", 0.0, 5e-3),
        Bar("device: kernels", "gemm", 1e-3, 4e-3),
    ]
    svg = drawn_timeline("Net", bars)
    assert "host: operations" in svg
    assert "device: kernels" in svg
    assert {"aten::mm, 5.00 ms", "gemm, 4.00 ms"} <= set(hints(svg))
    assert "The profiler saw no operations." in drawn_timeline("Net", [])


def test_short_pieces_are_drawn_as_one() -> None:
    bars = [Bar("host: operations", "aten::add", n * 1e-6, 0.8e-6) for n in range(20_000)]
    bars.append(Bar("host: operations", "aten::mm", 21e-3, 5e-3))
    svg = drawn_timeline("Net", bars)
    assert {"20000 operations, 20.0 ms", "aten::mm, 5.00 ms"} <= set(hints(svg))
    assert len(svg) < 20_000
