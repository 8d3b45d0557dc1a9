"""Plots of a profile: a roofline and a timeline, for its page and as pictures of their own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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
# The width of a character of a label, the height of a name, and what is between it and its line.
_CHARACTER, _NAME, _GAP = 6.5, SIZE + 4.0, 3.0
# What is between the names of roofs and the dots.
_APART = 12.0
# Where the name of the slope may stand: shares of the way up, and sides of it.
_ALONG = (0.5, 0.35, 0.65, 0.2, 0.8, 0.95, 0.05)
_SIDES: tuple[tuple[int, int, Any, Any], ...] = (
    (-8, 6, "right", "bottom"),
    (8, -6, "left", "top"),
    (40, -30, "left", "top"),
)


def roofline(name: str, measured: Sequence[Measured], roofs: Roofs, *, width: float = WIDE) -> Html:
    """Operations with FLOPs over their intensity, below the roofs; a dot's area is its time.

    Raises:
        GraphwrightError: matplotlib is not installed.
    """
    whole = sum(each.seconds for each in measured) or 1.0
    dots = _dots(measured, whole, max(width / WIDE, 0.7))
    used = {dot.measured.operation.precision for dot in dots}
    ceilings = {k: v for k, v in roofs.flops.items() if k in used} or dict(roofs.flops)
    order = sorted(ceilings, key=lambda dtype: -ceilings[dtype])
    tops = sorted(ceilings.values(), reverse=True)
    knee = tops[0] / roofs.bandwidth
    x_low = 10 ** math.floor(math.log10(min([1.0, *(dot.x for dot in dots)])))
    y_low = min([roofs.bandwidth * x_low, *(dot.y / 2 for dot in dots)])
    start = max(x_low, y_low / roofs.bandwidth)

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.grid(visible=True)
        _named_axes(axes, "FLOPs a byte", "FLOP/s")
        if alone:
            _title(axes, title, rest)
        tones = {dtype: color(series(number)) for number, dtype in enumerate(order)}
        names = [f"{dtype} {_rate(top)}FLOP/s" for dtype, top in zip(order, tops, strict=True)]
        # Right of all dots, and above all roofs, there is room for the roofs' names.
        x_dots = max([knee, *(dot.x for dot in dots)])
        y_roofs = max([tops[0], *(dot.y for dot in dots)])
        axes.set_xlim(x_low, x_dots)
        axes.set_ylim(y_low, y_roofs)
        figure.draw_without_rendering()
        inside = axes.get_window_extent()
        largest = max((dot.radius for dot in dots), default=0.0)
        beside = max(map(len, names)) * _CHARACTER + largest + _APART
        above = len(names) * _NAME + _APART
        x_high = _beyond(x_low, x_dots, beside / inside.width)
        axes.set_xlim(x_low, x_high)
        axes.set_ylim(y_low, _beyond(y_low, y_roofs, above / inside.height))
        lines = [([start, knee], [roofs.bandwidth * start, tops[0]])]
        lines += [([top / roofs.bandwidth, x_high], [top, top]) for top in tops]
        for (xs, ys), tone in zip(lines, (INK, *tones.values()), strict=True):
            axes.plot(xs, ys, color=tone, linewidth=1.6)
        _draw_dots(axes, dots, tones)
        figure.draw_without_rendering()
        _name_roofs(axes, x_high, tops, names, [*tones.values()])
        _name_slope(figure, axes, f"copy {_rate(roofs.bandwidth)}B/s", lines, dots)

    missing = 1 - sum(dot.measured.seconds for dot in dots) / whole
    title = f"Roofline of {short(name)} on {roofs.device}"
    rest = f"Not shown: operations without counted FLOPs, {missing:.0%} of the time"
    alone = width >= WIDE
    height = 460 if alone else 320
    return draw("roofline", f"{title}. {rest}", height, paint, width=width, alone=alone)


def _beyond(low: float, high: float, share: float) -> float:
    """The end of a logarithmic axis of which everything beyond `high` is a share."""
    return float(high * (high / low) ** (share / (1 - share)))


class _Dot(NamedTuple):
    """An operation: its FLOPs a byte, its FLOP/s, and the radius of its dot."""

    x: float
    y: float
    radius: float
    measured: Measured


def _dots(measured: Sequence[Measured], whole_s: float, scale: float) -> list[_Dot]:
    """The operations whose FLOPs and bytes are known; a dot's area is its share of the time."""
    found = []
    for each in measured:
        flops, nbytes, seconds = each.operation.flops, each.operation.nbytes, each.seconds
        if flops and nbytes and seconds > 0:
            radius = (3 + 16 * math.sqrt(seconds / whole_s)) * scale
            found.append(_Dot(flops / nbytes, flops / seconds, radius, each))
    return found


def _draw_dots(axes: Axes, dots: Sequence[_Dot], tones: Mapping[str, str]) -> None:
    for x, y, radius, each in dots:
        tone = tones.get(each.operation.precision, INK)
        (drawn,) = axes.plot([x], [y], "o", color=tone, markersize=2 * radius, alpha=0.6,
                             markeredgewidth=1, zorder=3)  # fmt: skip
        text = f"{each.operation.module}: {each.operation.name}, {duration(each.seconds)}"
        hint(drawn, text)


def _name_roofs(
    axes: Axes, x: float, roofs: Sequence[float], names: Sequence[str], tones: Sequence[str]
) -> None:
    """The names of roofs at their right end; the roofs are from the highest down.

    Names of roofs that are close to each other stand one above the other over the highest of these.
    """
    heights = [float(axes.transData.transform((x, roof))[1]) for roof in roofs]
    waiting: list[int] = []
    for number in reversed(range(len(roofs))):
        waiting.append(number)
        above = heights[number - 1] if number else math.inf
        if above - heights[number] < len(waiting) * _NAME + _GAP:
            continue
        for step, each in enumerate(waiting):
            axes.annotate(
                names[each],
                (x, roofs[each]),
                (-4, heights[number] + _GAP + step * _NAME - heights[each]),
                textcoords="offset points",
                ha="right",
                va="bottom",
                color=tones[each],
                zorder=4,
            ).set_in_layout(False)
        waiting.clear()


def _name_slope(
    figure: Figure,
    axes: Axes,
    name: str,
    lines: Sequence[tuple[Sequence[float], Sequence[float]]],
    dots: Sequence[_Dot],
) -> None:
    """The name of the first line beside it, where no line, dot or other name is."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.path import Path
    from matplotlib.transforms import Bbox

    measuring: Any = FigureCanvasAgg(figure)  # Its methods have no annotations.
    renderer = measuring.get_renderer()
    inside = axes.get_window_extent(renderer).padded(-_GAP)
    drawn = [Path(axes.transData.transform([*zip(*line, strict=True)])) for line in lines]
    taken = [text.get_window_extent(renderer).padded(_GAP) for text in axes.texts]
    for x, y, radius, _ in dots:
        across, up = axes.transData.transform((x, y))
        taken.append(Bbox.from_bounds(across - radius, up - radius, 2 * radius, 2 * radius))
    (begin, end), (low, high) = lines[0]
    for share, (right, up, horizontal, vertical) in itertools.product(_ALONG, _SIDES):
        text = axes.annotate(
            name,
            (begin * (end / begin) ** share, low * (high / low) ** share),
            (right, up),
            textcoords="offset points",
            ha=horizontal,
            va=vertical,
            color=INK,
            zorder=4,
        )
        text.set_in_layout(False)
        # A browser's font may be a little wider.
        box = text.get_window_extent(renderer).expanded(1.08, 1.0)
        if (
            inside.x0 <= box.x0
            and box.x1 <= inside.x1
            and inside.y0 <= box.y0
            and box.y1 <= inside.y1
            and not any(path.intersects_bbox(box, filled=False) for path in drawn)
            and not any(box.overlaps(other) for other in taken)
        ):
            return
        text.remove()


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
