"""Plots as SVG, drawn by matplotlib and coloured by style sheets, so that dark mode is theirs too.

Figures are made by matplotlib's object interface: no backend is chosen and no figure is kept. Its
settings are a global of its own; while a plot is drawn they are its defaults, one thread at a time,
and then the caller's again.

Lengths are in units of the picture, of which a phone shows one a pixel.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import math
import re
import threading
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import GraphwrightError
from .install_commands import install_extra
from .markup import Html
from .page import CHOSEN, PLAIN, SERIES

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A plot's width: what a phone has room for, and a picture of its own.
WIDTH, WIDE = 380, 720
# Of text; of names that are cut short.
SIZE, LONGEST = 11.0, 46
# Colours that stand for those of style sheets while matplotlib draws, and what these are where a
# picture stands alone: on paper, and in the dark.
_COLORS = {
    "ink": ("#010101", "#1b2026", "#e7ebf0"),
    "muted": ("#010102", "#5a6470", "#a3adb9"),
    "line": ("#010103", "#dce1e7", "#303843"),
    "paper": ("#010104", "#ffffff", "#171b21"),
    PLAIN: ("#010105", "#9aa5b1", "#6f7b88"),
    CHOSEN: ("#010106", "#0a7a4d", "#4cd195"),
    "s1": ("#010111", "#2f6fd0", "#74a9ff"),
    "s2": ("#010112", "#c2570c", "#ff9d5c"),
    "s3": ("#010113", "#0a7a4d", "#4cd195"),
    "s4": ("#010114", "#8a4fbf", "#c79bf2"),
    "s5": ("#010115", "#7a6a00", "#d6c34a"),
    "s6": ("#010116", "#b3306b", "#f58ab8"),
    "s7": ("#010117", "#3b7f8c", "#7cc4d1"),
}
INK, MUTED, LINE, PAPER = (_COLORS[name][0] for name in ("ink", "muted", "line", "paper"))
_NAME_OF = {sentinel: name for name, (sentinel, _, _) in _COLORS.items()}
_SENTINEL = re.compile("|".join(_NAME_OF))
# What keeps text legible over lines, as style.
HALO = "paint-order: stroke; stroke: var(--paper); stroke-width: 3px; stroke-linejoin: round"
# What an artist's group id begins with if the rest is a hint for whoever points at it.
_HINT = "hint:"
_NUMBERS = re.compile(r"-?\d+\.\d{3,}")
# What matplotlib writes of each text and need not: the page has a font of its own.
_FONT = re.compile(r"font-family: [^;]*;? ?")
_DRAWING = threading.Lock()
# Bytes of the unit that memory is shown in; and how far apart figures are on a logarithmic axis.
_MIB, _FAR_APART = 2.0**20, 8.0
# Settings that choose how matplotlib shows figures; they are left alone.
_OF_BACKENDS = ("backend", "interactive", "toolbar", "webagg", "tk.", "macosx", "figure.max_open")


def need_matplotlib() -> None:
    """Raise unless plots can be drawn.

    Raises:
        GraphwrightError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise GraphwrightError(
            "Plots are drawn by matplotlib, which is not installed.",
            remedy=install_extra("report"),
        )


def color(name: str) -> str:
    """A colour for matplotlib that becomes the style sheet's."""
    return _COLORS[name][0]


def series(number: int) -> str:
    """The name of the colour of a plot's series, by its number."""
    return SERIES[number % len(SERIES)]


def hint(artist: Artist, text: str) -> None:
    """Show a text to whoever points at something drawn."""
    artist.set_gid(_HINT + text)


def short(text: str, longest: int = LONGEST) -> str:
    """A name that fits: what is cut is its middle."""
    if len(text) <= longest:
        return text
    half = (longest - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def draw(
    name: str,
    label: str,
    height: float,
    paint: Callable[[Figure], None],
    *,
    width: float = WIDTH,
    alone: bool = False,
) -> Html:
    """A plot as SVG; the same one is the same text.

    Args:
        name: unlike that of any other plot in the page.
        label: what it shows, for those who cannot see it.
        height: in units.
        paint: draws into an empty figure.
        width: in units.
        alone: whether it is a picture of its own, which brings its colours.

    Raises:
        GraphwrightError: matplotlib is not installed.
    """
    need_matplotlib()
    with _settings(name):
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        figure = Figure((width / 72, height / 72), dpi=72, layout="constrained")
        canvas: Any = FigureCanvasSVG(figure)  # Its methods have no annotations.
        figure.patch.set_visible(False)
        paint(figure)
        text = io.StringIO()
        unsaid = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        canvas.print_svg(text, metadata=unsaid)
    return _picture(text.getvalue(), name, label, width, height, alone=alone)


@contextlib.contextmanager
def _settings(salt: str) -> Iterator[None]:
    """Matplotlib's default settings, with ours, for a while."""
    import matplotlib

    with warnings.catch_warnings():
        # The browser has glyphs that matplotlib has not: it only measures here.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        with _DRAWING, matplotlib.rc_context():
            defaults = {
                key: value
                for key, value in matplotlib.rcParamsDefault.items()
                if not key.startswith(_OF_BACKENDS)
            }
            dict.update(matplotlib.rcParams, defaults)
            matplotlib.rcParams.update(
                {
                    "svg.fonttype": "none",
                    "svg.hashsalt": salt,
                    "font.size": SIZE,
                    "text.parse_math": False,
                    "text.color": INK,
                    "axes.edgecolor": LINE,
                    "axes.labelcolor": MUTED,
                    "axes.labelsize": SIZE,
                    "axes.facecolor": "none",
                    "axes.spines.top": False,
                    "axes.spines.right": False,
                    "axes.axisbelow": True,
                    "grid.color": LINE,
                    "grid.linewidth": 0.8,
                    "xtick.color": LINE,
                    "xtick.labelcolor": MUTED,
                    "ytick.color": LINE,
                    "ytick.labelcolor": MUTED,
                    "xtick.minor.visible": False,
                    "ytick.minor.visible": False,
                }
            )
            yield


def _picture(text: str, name: str, label: str, width: float, height: float, *, alone: bool) -> Html:
    """What matplotlib has drawn as a picture of ours."""
    root = ET.fromstring(text)
    _clean(root, re.sub(r"\W", "-", name))
    root.attrib.clear()
    for node in root.findall("defs"):
        if node.find("style") is not None:  # It would be the whole page's.
            root.remove(node)
    root.set("viewBox", f"0 0 {width:g} {height:g}")
    root.set("role", "img")
    root.set("aria-label", label)
    if alone:
        root.set("xmlns", "http://www.w3.org/2000/svg")
        root.set("width", f"{width:g}")
        root.set("height", f"{height:g}")
        for node in _ground(label, width, height):
            root.insert(0, node)
    return Html(ET.tostring(root, encoding="unicode"))


def _clean(root: ET.Element, prefix: str) -> None:
    """Give a picture the colours of a style sheet, and ids that no other picture has."""
    used = set(re.findall(r"#([\w-]+)", " ".join(_references(root))))
    for node in root.iter():
        node.tag = node.tag.rpartition("}")[2]
        node.tail = None
        if node.tag not in ("text", "title"):
            node.text = None
        names = {key.rpartition("}")[2]: value for key, value in node.attrib.items()}
        attributes = {key: _attribute(key, value, prefix) for key, value in names.items()}
        own = attributes.pop("id", "")
        if own.startswith(_HINT):
            title = ET.Element("title")
            title.text = own.removeprefix(_HINT)
            node.insert(0, title)
        elif own in used:
            attributes["id"] = f"{prefix}-{own}"
        if attributes.get("transform", "").startswith("rotate(-0 "):
            del attributes["transform"]
        node.attrib.clear()
        node.attrib.update(attributes)


def _attribute(name: str, value: str, prefix: str) -> str:
    """The value of an attribute, with numbers no longer than they show, and our colours and ids."""
    if name == "d":
        return " ".join(_rounded(value).split())
    if name in ("x", "y", "transform", "width", "height"):
        return _rounded(value)
    if name == "style":
        return _coloured(_FONT.sub("", value))
    if name in ("fill", "stroke"):
        return _coloured(value)
    if name in ("href", "clip-path"):
        return value.replace("#", f"#{prefix}-")
    return value


def _rounded(value: str) -> str:
    return _NUMBERS.sub(lambda number: f"{float(number[0]):.2f}", value)


def _coloured(value: str) -> str:
    return _SENTINEL.sub(lambda color: f"var(--{_NAME_OF[color[0]]})", value)


def _references(root: ET.Element) -> Iterator[str]:
    for node in root.iter():
        for key, value in node.attrib.items():
            if key.endswith(("href", "clip-path")):
                yield value


def _ground(label: str, width: float, height: float) -> Iterator[ET.Element]:
    """What a picture of its own has beneath it, the last first."""
    rect = ET.Element("rect", width=f"{width:g}", height=f"{height:g}", fill="var(--paper)")
    yield rect
    light, dark = (
        " ".join(f"--{name}: {colors[which]};" for name, colors in _COLORS.items())
        for which in (1, 2)
    )
    style = ET.Element("style")
    style.text = (
        f":root {{ {light} }} @media screen and (prefers-color-scheme: dark) "
        f"{{ :root {{ {dark} }} }} text {{ font-family: sans-serif !important; "
        f"{HALO} }}"
    )
    yield style
    title = ET.Element("title")
    title.text = label
    yield title


# ------------------------------------------------------------ rows of bars


@dataclass(frozen=True)
class Mark:
    """A bar or a dot: its figure, where its whisker begins and ends, its colour, and a hint.

    `start` is where a bar begins; None at the axis.
    """

    value: float
    low: float | None = None
    high: float | None = None
    color: str = PLAIN
    hint: str = ""
    start: float | None = None


@dataclass(frozen=True)
class PlotRow:
    """A row: its name, a text at the right, and its marks one below the other."""

    name: str
    text: str
    marks: Sequence[Mark]
    strong: bool = False


@dataclass(frozen=True)
class Group:
    """Rows under a heading; the heading may be empty."""

    heading: str
    lines: Sequence[PlotRow]


_TEXT_HEIGHT, _MARK_HEIGHT, _GAP, _HEADING, _FOOT = 17.0, 11.0, 8.0, 24.0, 46.0


def rows(
    name: str,
    label: str,
    groups: Sequence[Group],
    axis: str,
    form: Callable[[float], str],
    *,
    dots: bool = False,
    logarithmic: bool = False,
    binary: bool = False,
    reference: tuple[float, str] | None = None,
    alone: bool = False,
) -> Html:
    """Rows of horizontal bars, or of dots, with whiskers; each below its own name.

    Args:
        name: of the plot.
        label: what it shows.
        groups: of rows, from top to bottom.
        axis: what is measured.
        form: a figure of the axis as text.
        dots: draw dots in place of bars.
        logarithmic: whether the axis is, if figures are far apart.
        binary: whether the figures are bytes, whose round numbers are powers of two.
        reference: a figure to mark by a line, and what it is.
        alone: whether it is a picture of its own, which brings its colours.
    """
    height = _FOOT
    for group in groups:
        height += _HEADING * bool(group.heading)
        height += sum(_TEXT_HEIGHT + _MARK_HEIGHT * len(r.marks) + _GAP for r in group.lines)

    ends = _ends(groups, reference)
    positive = [value for value in ends if value > 0] or [1.0]
    log_axis = logarithmic and max(positive) > _FAR_APART * min(positive)

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        if log_axis:
            axes.set_xscale("log")
            axes.set_xlim(min(positive) / 1.8, max(positive) * 1.8)
        else:
            axes.set_xlim(*_span(groups, ends))
        at, bands = 0.0, []
        for group in groups:
            if group.heading:
                axes.text(0, at + 15, group.heading, color=MUTED, style="italic",
                          transform=axes.get_yaxis_transform())  # fmt: skip
                at += _HEADING
            for line in group.lines:
                _row(axes, line, at, dots=dots)
                high = _MARK_HEIGHT * len(line.marks)
                if high:
                    bands.append((at + _TEXT_HEIGHT, at + _TEXT_HEIGHT + high + _GAP / 2))
                at += _TEXT_HEIGHT + high + _GAP
        axes.set_ylim(at, 0)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        _ticks(axes, form, logarithmic=log_axis, binary=binary)
        axes.set_xlabel(axis)
        left, right = axes.get_xlim()
        ticks = [float(tick) for tick in axes.get_xticks() if left <= tick <= right]
        _upright(axes, ticks, bands, color=LINE, linewidth=0.8, zorder=0)
        if reference is not None:
            _upright(axes, reference[:1], bands, color=MUTED, linewidth=1.2, zorder=1)

    return draw(name, label, height, paint, alone=alone)


def _upright(
    axes: Axes, xs: Sequence[float], bands: Sequence[tuple[float, float]], **style: Any
) -> None:
    """Upright lines that are interrupted between some bands, where there is text."""
    ends = [(x, y) for x in xs for band in bands for y in (*band, math.nan)]
    axes.plot([x for x, _ in ends], [y for _, y in ends], scalex=False, scaley=False, **style)


def _ends(groups: Sequence[Group], reference: tuple[float, str] | None) -> list[float]:
    """All figures that an axis has to show."""
    marks = [mark for group in groups for line in group.lines for mark in line.marks]
    ends = [v for m in marks for v in (m.value, m.low, m.high, m.start) if v is not None]
    ends += [] if reference is None else [reference[0]]
    return [value for value in ends if math.isfinite(value)]


def _span(groups: Sequence[Group], ends: Sequence[float]) -> tuple[float, float]:
    """Where an axis begins and ends: at zero, unless all it shows are ranges."""
    marks = [mark for group in groups for line in group.lines for mark in line.marks]
    if marks and all(mark.start is not None for mark in marks):
        room = 0.06 * (max(ends) - min(ends))
        return max(0.0, min(ends) - room), max(ends) + room
    return 0.0, max([*ends, 0.0]) * 1.03 or 1.0


def _row(axes: Axes, line: PlotRow, at: float, *, dots: bool) -> None:
    across = axes.get_yaxis_transform()
    weight = "bold" if line.strong else "normal"
    ink = color(CHOSEN) if line.strong else INK
    room = LONGEST - len(line.text)
    found = axes.text(0, at + 13, short(line.name, max(room, 12)), color=ink, weight=weight,
                      transform=across)  # fmt: skip
    if found.get_text() != line.name:
        hint(found, line.name)
    axes.text(1, at + 13, line.text, color=ink, weight=weight, ha="right", transform=across)
    for number, mark in enumerate(line.marks):
        middle = at + _TEXT_HEIGHT + _MARK_HEIGHT * (number + 0.5)
        if not math.isfinite(mark.value):
            continue
        if dots:
            (drawn,) = axes.plot([mark.value], [middle], "o", color=color(mark.color), markersize=8)
            axes.axhline(middle, color=LINE, linewidth=0.8, zorder=0)
        else:
            start = 0.0 if mark.start is None else mark.start
            bars = axes.barh(middle, mark.value - start, _MARK_HEIGHT - 2, left=start,
                             color=color(mark.color), linewidth=0)  # fmt: skip
            drawn = bars[0]
        if mark.hint:
            hint(drawn, mark.hint)
        if mark.low is not None and mark.high is not None:
            axes.plot([mark.low, mark.high], [middle, middle], color=INK, linewidth=1.4,
                      marker="|", markersize=6, markeredgewidth=1.4)  # fmt: skip


def _ticks(
    axes: Axes,
    form: Callable[[float], str],
    *,
    logarithmic: bool = False,
    which: str = "x",
    binary: bool = False,
) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    axis.set_major_formatter(FuncFormatter(lambda value, _: form(value) if value else "0"))
    whole = MaxNLocator(4 if which == "x" else 5, steps=[1, 2, 2.5, 5, 10])
    if logarithmic and binary:
        axis.set_major_locator(LogLocator(base=2, numticks=6))
        axis.set_minor_locator(NullLocator())
    elif logarithmic:
        decades = math.log10(high / low)
        steps = (1.0, 2.0, 5.0) if decades < 1.3 else (1.0, 3.0) if decades < 2 else (1.0,)
        axis.set_major_locator(LogLocator(subs=steps, numticks=5 if len(steps) == 1 else 20))
        axis.set_minor_locator(NullLocator())
    elif binary:
        ticks = [_MIB * each for each in whole.tick_values(low / _MIB, high / _MIB)]
        axis.set_major_locator(FixedLocator([each for each in ticks if low <= each <= high]))
    else:
        axis.set_major_locator(whole)


# ------------------------------------------------------------ points with names


@dataclass(frozen=True)
class Point:
    """A point with its name; `strong` ones are labelled first."""

    name: str
    x: float
    y: float
    color: str = "s1"
    strong: bool = False


def tradeoff(
    name: str,
    label: str,
    points: Sequence[Point],
    x_axis: str,
    y_axis: str,
    x_form: Callable[[float], str],
    y_form: Callable[[float], str],
    *,
    binary: bool = False,
    gain: bool = False,
) -> Html:
    """Points of which less is better both ways, with the line of those that none beats in both.

    Args:
        name: of the plot.
        label: what it shows.
        points: with their names.
        x_axis: what is measured across.
        y_axis: what is measured upwards.
        x_form: a figure as text.
        y_form: likewise.
        binary: whether the vertical figures are bytes, whose round numbers are powers of two.
        gain: whether more is better across.
    """

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        _scale(axes, "x", [p.x for p in points])
        _scale(axes, "y", [p.y for p in points])
        front = _front(points, gain=gain)
        line = _stairs([(p.x, p.y) for p in front])
        axes.plot([x for x, _ in line], [y for _, y in line], color=MUTED, linewidth=1,
                  linestyle=(0, (4, 3)), zorder=1)  # fmt: skip
        ordered = sorted(points, key=lambda p: (not p.strong, p not in front))
        for point in reversed(ordered):
            (drawn,) = axes.plot([point.x], [point.y], "o", color=color(point.color), markersize=8)
            hint(drawn, f"{point.name}: {x_form(point.x)}, {y_form(point.y)}")
        _ticks(axes, x_form, logarithmic=axes.get_xscale() == "log")
        _ticks(axes, y_form, logarithmic=axes.get_yscale() == "log", which="y", binary=binary)
        axes.set_xlabel(x_axis)
        axes.set_ylabel(y_axis)
        _labels(figure, axes, [(p.name, p.x, p.y, p.color) for p in ordered], [line])

    return draw(name, label, 290, paint)


# The shares of a scale that are left free at its ends: a name needs more room at the right.
_ROOM = {"x": (0.08, 0.36), "y": (0.16, 0.2)}


def _scale(axes: Axes, which: str, values: Sequence[float]) -> None:
    """A scale on which all figures can be told apart, with room for names."""
    low, high = min(values), max(values)
    limits = axes.set_xlim if which == "x" else axes.set_ylim
    below, above = _ROOM[which]
    if low > 0 and high / low > _FAR_APART:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        span = high / low
        limits(low / (span**below * 1.1), high * span**above * 1.1)
    else:
        span = high - low or abs(high) or 1.0
        limits(
            max(0.0, low - below * span) if low >= 0 else low - below * span, high + above * span
        )


def _front(points: Sequence[Point], *, gain: bool) -> list[Point]:
    """Those that no other point beats in one and equals in the other, the best across first."""
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.x if gain else p.x, p.y)):
        if not found or point.y < found[-1].y:
            found.append(point)
    return found


def _stairs(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of a line that stays at a place's height until it is at the next place."""
    found = list(places[:1])
    for (_, before), (x, y) in itertools.pairwise(places):
        found += [(x, before), (x, y)]
    return found


# Where a name may stand: how far from its point, and which of its corners is there. What is far has
# a line that leads to it.
_PLACES = (
    *((8, 0, "left", "center"), (-8, 0, "right", "center")),
    *((0, 8, "center", "bottom"), (0, -8, "center", "top")),
    *((-20, 8, "left", "bottom"), (-20, -8, "left", "top")),
    *((20, 8, "right", "bottom"), (20, -8, "right", "top")),
    *(
        (right, up, "left" if right > 0 else "right", "bottom" if up > 0 else "top")
        for across, high in ((6, 8), (8, 18), (8, 32), (16, 46), (30, 18), (30, 32), (46, 60))
        for right in (across, -across)
        for up in (high, -high)
    ),
)
_FAR = 10


def _labels(
    figure: Figure,
    axes: Axes,
    items: Sequence[tuple[str, float, float, str]],
    lines: Sequence[Sequence[tuple[float, float]]],
) -> None:
    """Names beside their points, none over a name, a point or a line; the rest are left out.

    Args:
        figure: what is drawn.
        axes: in it.
        items: a name, its place and its colour, the most important first.
        lines: through these places.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.path import Path
    from matplotlib.transforms import Bbox

    measuring: Any = FigureCanvasAgg(figure)  # Its methods have no annotations.
    renderer = measuring.get_renderer()
    figure.draw_without_rendering()
    inside = axes.get_window_extent(renderer)
    drawn = [Path(axes.transData.transform(line)) for line in lines if len(line) > 1]
    dots: list[Bbox] = []
    for _, x, y, _ in items:
        across, above = axes.transData.transform((x, y))
        dots.append(Bbox.from_bounds(across - 5, above - 5, 10, 10))
    names: list[Bbox] = []

    def fits(box: Bbox, lead: Path | None, own: Bbox) -> bool:
        if not (inside.x0 <= box.x0 and box.x1 <= inside.x1):
            return False
        if not (inside.y0 <= box.y0 and box.y1 <= inside.y1):
            return False
        if any(box.overlaps(dot) for dot in dots):
            return False
        if any(box.padded(5, 0).overlaps(other) for other in names):
            return False
        if any(path.intersects_bbox(box, filled=False) for path in drawn):
            return False
        others = (*names, *(dot for dot in dots if dot is not own))
        return lead is None or not any(lead.intersects_bbox(each, filled=False) for each in others)

    for (name, x, y, tone), own in zip(items, dots, strict=True):
        chosen = tone == CHOSEN
        for right, up, horizontal, vertical in _PLACES:
            far = abs(up) > _FAR
            text = axes.annotate(
                short(name, 30),
                (x, y),
                (right, up),
                textcoords="offset points",
                ha=horizontal,
                va=vertical,
                fontsize=SIZE - 1,
                color=color(CHOSEN) if chosen else INK,
                weight="bold" if chosen else "normal",
            )
            text.set_in_layout(False)
            # A browser's font may be a little wider.
            box = text.get_window_extent(renderer).expanded(1.08, 1.0)
            across, above = axes.transData.transform((x, y))
            lead = Path([(across, above), (across + right, above + up)]) if far else None
            if fits(box, lead, own):
                names.append(box)
                if lead is not None:
                    _lead(axes, (x, y), (right, up))
                    drawn.append(lead)
                break
            text.remove()


def _lead(axes: Axes, place: tuple[float, float], offset: tuple[int, int]) -> None:
    """A line that leads from a point to its name."""
    style = {"arrowstyle": "-", "color": LINE, "shrinkA": 0, "shrinkB": 4}
    line = axes.annotate("", place, offset, textcoords="offset points", arrowprops=style)
    line.set_in_layout(False)


# ------------------------------------------------------------ curves


@dataclass(frozen=True)
class Curve:
    """A line through points, or steps from one to the next."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: str


def curves(
    name: str,
    label: str,
    found: Sequence[Curve],
    x_axis: str,
    y_axis: str,
    x_form: Callable[[float], str],
    y_form: Callable[[float], str],
    *,
    steps: bool = False,
    names: Sequence[tuple[str, float, float]] = (),
    floating: bool = False,
) -> Html:
    """Curves over a common axis, with names at some places.

    Args:
        name: of the plot.
        label: what it shows.
        found: the curves.
        x_axis: what is measured across.
        y_axis: what is measured upwards.
        x_form: a figure as text.
        y_form: likewise.
        steps: whether a curve stays where it is until its next point.
        names: texts beside some points.
        floating: whether the vertical axis need not begin at zero.
    """
    lines = [[*zip(curve.xs, curve.ys, strict=True)] for curve in found]
    lines = [_stairs(line) for line in lines] if steps else lines

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.grid(visible=not names)
        for curve, line in zip(found, lines, strict=True):
            (drawn,) = axes.plot([x for x, _ in line], [y for _, y in line],
                                 color=color(curve.color), linewidth=2)  # fmt: skip
            hint(drawn, curve.name)
        for what, x, y in names:
            (drawn,) = axes.plot([x], [y], "o", color=color(found[0].color), markersize=7)
            hint(drawn, f"{what}: {y_form(y)} after {x_form(x)}")
        if not floating:
            high = max(max(curve.ys) for curve in found)
            axes.set_ylim(0, high * 1.15 or 1.0)
        axes.set_xlim(left=0)
        _ticks(axes, x_form)
        _ticks(axes, y_form, which="y")
        axes.set_xlabel(x_axis)
        axes.set_ylabel(y_axis)
        _labels(figure, axes, [(what, x, y, PLAIN) for what, x, y in names], lines)

    return draw(name, label, 260, paint)
