"""Plots of a profile: a roofline and a timeline, for its page and as pictures of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..report.markup import Html
from ..report.plots import INK, LINE, MUTED, SIZE, WIDE, color, draw, hint, series, short
from ..report.table import duration
from .roofs import Roofs
from .table import Measured
from .trace import Bar

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of a timeline: the height of a lane, and what is above and below all of them.
_LANE, _AXES = 44.0, 58.0
# Bars that are narrower than this, in units, are drawn together with their neighbours.
_NARROW = 1.0
# The width of a character of a label.
_CHARACTER = 6.5


def roofline(name: str, measured: Sequence[Measured], roofs: Roofs, *, width: float = WIDE) -> Html:
    """Operations with FLOPs over their intensity, below the roofs; a dot's area is its time.

    Raises:
        GraphwrightError: matplotlib is not installed.
    """
    points = [m for m in measured if m.operation.flops and m.operation.nbytes and m.seconds > 0]
    used = {each.operation.precision for each in points}
    ceilings = {k: v for k, v in roofs.flops.items() if k in used} or dict(roofs.flops)
    order = sorted(ceilings, key=lambda dtype: -ceilings[dtype])
    whole = sum(each.seconds for each in measured) or 1.0
    rates = [(each.operation.flops or 0) / each.seconds for each in points]
    intensities = [(each.operation.flops or 0) / each.operation.nbytes for each in points]
    top = max([*ceilings.values(), *rates]) * 2.5
    x_low = 10 ** math.floor(math.log10(min([1.0, *intensities])))
    # Right of all dots there is room for the names of the roofs.
    x_high = max([top / roofs.bandwidth, *intensities]) * (8 if width >= WIDE else 20)
    y_low = min([roofs.bandwidth * x_low, *(rate / 2 for rate in rates)])
    scale = width / WIDE

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(x_low, x_high)
        axes.set_ylim(y_low, top)
        axes.grid(visible=True)
        highest = ceilings[order[0]]
        start = max(x_low, y_low / roofs.bandwidth)
        knee = highest / roofs.bandwidth
        axes.plot([start, knee], [roofs.bandwidth * start, highest], color=INK, linewidth=1.6)
        axes.annotate(
            f"copy {_rate(roofs.bandwidth)}B/s",
            (math.sqrt(start * knee), roofs.bandwidth * math.sqrt(start * knee)),
            (-8, 6),
            textcoords="offset points",
            ha="right",
            color=INK,
        )
        last = math.inf
        for number, dtype in enumerate(order):
            flops, tone = ceilings[dtype], color(series(number))
            axes.plot([flops / roofs.bandwidth, x_high], [flops, flops], color=tone, linewidth=1.6)
            # Names of roofs that are close to each other stand one below the other.
            up = axes.transData.transform((x_high, flops))[1]
            last = min(up + 4, last - SIZE - 3)
            axes.annotate(
                f"{dtype} {_rate(flops)}FLOP/s",
                (x_high, flops),
                (-4, last - up),
                textcoords="offset points",
                ha="right",
                color=tone,
                zorder=4,
            )
        for each, rate, intensity in zip(points, rates, intensities, strict=True):
            known = each.operation.precision in order
            tone = color(series(order.index(each.operation.precision))) if known else INK
            radius = (3 + 16 * math.sqrt(each.seconds / whole)) * max(scale, 0.7)
            (drawn,) = axes.plot([intensity], [rate], "o", color=tone, markersize=2 * radius,
                                 alpha=0.6, markeredgewidth=1, zorder=3)  # fmt: skip
            text = f"{each.operation.module}: {each.operation.name}, {duration(each.seconds)}"
            hint(drawn, text)
        _named_axes(axes, "FLOPs a byte", "FLOP/s")
        if alone:
            _title(axes, title, rest)

    missing = 1 - sum(each.seconds for each in points) / whole
    title = f"Roofline of {short(name)} on {roofs.device}"
    rest = f"Not shown: operations without counted FLOPs, {missing:.0%} of the time"
    alone = width >= WIDE
    height = 460 if alone else 320
    return draw("roofline", f"{title}. {rest}", height, paint, width=width, alone=alone)


def _title(axes: Axes, title: str, rest: str = "") -> None:
    """What a picture of its own is called."""
    styles: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    up = 24 if rest else 8
    axes.annotate(title, (0, 1), (0, up), weight="bold", fontsize=SIZE + 3, color=INK, **styles)
    if rest:
        axes.annotate(rest, (0, 1), (0, 8), color=MUTED, **styles)


def _named_axes(axes: Axes, across: str, up: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _rate(value).strip()))
    axes.set_xlabel(across)
    axes.set_ylabel(up)


def drawn_timeline(name: str, bars: Sequence[Bar], *, width: float = WIDE) -> Html:
    """One call over time, a lane for each of the host's and the device's activities.

    Raises:
        GraphwrightError: matplotlib is not installed.
    """
    lanes = sorted({bar.lane for bar in bars}, key=lambda lane: (lane.startswith("device"), lane))
    end = max([bar.start_s + bar.seconds for bar in bars], default=1e-6)
    unit = end / (width - 20)

    def paint(figure: Figure) -> None:
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        axes = figure.add_subplot()
        axes.set_xlim(0, end)
        axes.set_ylim(_LANE * max(1, len(lanes)), 0)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
        if not bars:
            axes.text(end / 2, _LANE / 2, "The profiler saw no operations.", ha="center", color=INK)
        for number, lane in enumerate(lanes):
            top = _LANE * number
            axes.text(0, top + 13, lane, color=MUTED)
            axes.axhline(top + 30, color=LINE, linewidth=0.8, zorder=0)
            tone = color(series(number))
            for bar in _joined([bar for bar in bars if bar.lane == lane], _NARROW * unit):
                (drawn,) = axes.barh(top + 30, max(bar.seconds, 0.4 * unit), 22, left=bar.start_s,
                                     color=tone, linewidth=0)  # fmt: skip
                hint(drawn, f"{bar.name}, {duration(bar.seconds)}")
                label = bar.name.removeprefix("aten::")
                if bar.seconds / unit > _CHARACTER * len(label) + 8:
                    axes.text(bar.start_s + bar.seconds / 2, top + 34, short(label), ha="center",
                              color=INK, fontsize=SIZE - 1)  # fmt: skip
        axes.xaxis.set_major_locator(MaxNLocator(6 if width >= WIDE else 4))
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda value, _: duration(value) if value > 0 else "0")
        )
        axes.set_xlabel("time, under the profiler")
        if alone:
            _title(axes, title)

    alone = width >= WIDE
    title = f"One call of {short(name)}"
    height = _AXES + _LANE * max(1, len(lanes)) + 30 * alone
    return draw("timeline", f"{title} over time", height, paint, width=width, alone=alone)


def _joined(bars: Sequence[Bar], narrow_s: float) -> list[Bar]:
    """The bars of a lane in their order; short ones that follow each other closely as one."""
    found: list[Bar] = []
    members = 1
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        last = found[-1] if found else None
        if last is not None and bar.seconds < narrow_s:
            end = max(last.start_s + last.seconds, bar.start_s + bar.seconds)
            close = bar.start_s - (last.start_s + last.seconds) < narrow_s
            if close and (members > 1 or last.seconds < narrow_s):
                members += 1
                name = f"{members} operations"
                found[-1] = Bar(bar.lane, name, last.start_s, end - last.start_s)
                continue
        members = 1
        found.append(bar)
    return found


def _rate(value: float) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} "
