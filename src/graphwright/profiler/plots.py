"""Plots of a profile as SVG, written by hand: a roofline and a timeline."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence

from ..report.table import duration
from .roofs import Roofs
from .table import Measured
from .trace import Bar

_WIDTH, _HEIGHT = 760, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 150, 50, 60
_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d", "#e45756")
_GREY, _INK = "#d5d9de", "#333333"


class _Drawing:
    """An SVG under construction; coordinates are in pixels from the upper left."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
            f"<title>{html.escape(title)}</title>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]
        self.text(16, 26, title, size=15, bold=True)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 12,
        bold: bool = False,
        anchor: str = "start",
        color: str = _INK,
        turned: bool = False,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{color}"{weight}{turn}>{html.escape(text)}</text>'
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, color: str, width: float = 1.0
    ) -> None:
        self._parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            f'stroke="{color}" stroke-width="{width}"/>'
        )

    def box(self, x: float, y: float, width: float, height: float, color: str, hint: str) -> None:
        self._parts.append(
            f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.4):.2f}" height="{height:.1f}" '
            f'fill="{color}"><title>{html.escape(hint)}</title></rect>'
        )

    def dot(self, x: float, y: float, radius: float, color: str, hint: str) -> None:
        self._parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{color}" '
            f'fill-opacity="0.65" stroke="{color}"><title>{html.escape(hint)}</title></circle>'
        )

    def done(self) -> str:
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def roofline(name: str, measured: Sequence[Measured], roofs: Roofs) -> str:
    """Operations with FLOPs over their intensity, below the roofs; a dot's area is its time."""
    points = [
        (
            m.operation.flops / m.operation.nbytes,
            m.operation.flops / m.seconds,
            m.seconds,
            m.operation,
        )
        for m in measured
        if m.operation.flops and m.operation.nbytes and m.seconds > 0
    ]
    used = {operation.precision for *_, operation in points}
    ceilings = {k: v for k, v in roofs.flops.items() if k in used} or dict(roofs.flops)
    top = max([*ceilings.values(), *(p[1] for p in points)]) * 2
    ridge = top / roofs.bandwidth
    x_low = 10 ** math.floor(math.log10(min([1.0, *(p[0] for p in points)])))
    x_high = 10 ** math.ceil(math.log10(max([ridge, *(p[0] for p in points)])))
    y_low = min([roofs.bandwidth * x_low, *(p[1] / 2 for p in points)])
    drawing = _Drawing(_WIDTH, _HEIGHT, f"Roofline of {name} on {roofs.device}")
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def across(value: float) -> float:
        return _LEFT + (right - _LEFT) * math.log(value / x_low) / math.log(x_high / x_low)

    def up(value: float) -> float:
        return bottom - (bottom - _TOP) * math.log(value / y_low) / math.log(top / y_low)

    for value in _decades(x_low, x_high):
        drawing.line(across(value), _TOP, across(value), bottom, _GREY)
        drawing.text(across(value), bottom + 18, f"{value:g}", anchor="middle")
    for value in _decades(y_low, top):
        drawing.line(_LEFT, up(value), right, up(value), _GREY)
        drawing.text(_LEFT - 6, up(value) + 4, _rate(value), anchor="end")
    drawing.text((_LEFT + right) / 2, _HEIGHT - 16, "FLOPs a byte", anchor="middle")
    drawing.text(20, (_TOP + bottom) / 2, "FLOP/s", anchor="middle", turned=True)
    highest = max(ceilings.values())
    knee = highest / roofs.bandwidth
    start = max(x_low, y_low / roofs.bandwidth)
    drawing.line(across(start), up(roofs.bandwidth * start), across(knee), up(highest), _INK, 1.6)
    half = math.sqrt(start * knee)
    label = f"copy {_rate(roofs.bandwidth)}B/s"
    drawing.text(across(half) - 10, up(roofs.bandwidth * half), label, anchor="end")
    last = -math.inf
    for number, (dtype, flops) in enumerate(sorted(ceilings.items(), key=lambda p: -p[1])):
        color = _COLORS[number % len(_COLORS)]
        drawing.line(across(flops / roofs.bandwidth), up(flops), right, up(flops), color, 1.6)
        last = max(up(flops) + 4, last + 14)
        drawing.text(right + 8, last, f"{dtype} {_rate(flops)}", color=color)
    order = [dtype for dtype, _ in sorted(ceilings.items(), key=lambda p: -p[1])]
    whole = sum(m.seconds for m in measured) or 1.0
    for intensity, rate, seconds, operation in points:
        known = operation.precision in order
        color = _COLORS[order.index(operation.precision) % len(_COLORS)] if known else _INK
        hint = f"{operation.module}: {operation.name}, {duration(seconds)}"
        radius = 3 + 16 * math.sqrt(seconds / whole)
        drawing.dot(across(intensity), up(rate), radius, color, hint)
    rest = 1 - sum(p[2] for p in points) / whole
    drawing.text(
        _LEFT, 44, f"Not shown: operations without counted FLOPs, {rest:.0%} of the time", size=11
    )
    return drawing.done()


def drawn_timeline(name: str, bars: Sequence[Bar]) -> str:
    """One call over time, a lane for each of the host's and the device's activities."""
    lanes = sorted({bar.lane for bar in bars}, key=lambda lane: (lane.startswith("device"), lane))
    height = _TOP + 46 * max(1, len(lanes)) + _BOTTOM
    drawing = _Drawing(_WIDTH, height, f"One call of {name}")
    end = max([bar.start_s + bar.seconds for bar in bars], default=1e-6)
    left, right, bottom = 130, _WIDTH - 20, height - _BOTTOM
    if not bars:
        drawing.text(left, _TOP + 20, "The profiler saw no operations.")
    for value in _ticks(end):
        x = left + (right - left) * value / end
        drawing.line(x, _TOP, x, bottom, _GREY)
        drawing.text(x, bottom + 18, duration(value) if value else "0", anchor="middle")
    for number, lane in enumerate(lanes):
        top = _TOP + 46 * number + 8
        drawing.text(left - 8, top + 19, lane, anchor="end")
        color = _COLORS[number % len(_COLORS)]
        for bar in bars:
            if bar.lane == lane:
                x = left + (right - left) * bar.start_s / end
                width = (right - left) * bar.seconds / end
                drawing.box(x, top, width, 30, color, f"{bar.name}, {duration(bar.seconds)}")
                label = bar.name.removeprefix("aten::")
                if width > 7 * len(label) + 6:
                    middle = x + width / 2
                    drawing.text(middle, top + 19, label, size=11, anchor="middle", color="white")
    drawing.text((left + right) / 2, height - 16, "time, under the profiler", anchor="middle")
    return drawing.done()


def _decades(low: float, high: float) -> Iterator[float]:
    for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1):
        yield 10.0**power


def _ticks(end: float) -> list[float]:
    step = 10 ** math.floor(math.log10(end))
    while end / step > 6:
        step *= 2
    while end / step < 3:
        step /= 2
    return [step * n for n in range(math.floor(end / step) + 1)]


def _rate(value: float) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} "
