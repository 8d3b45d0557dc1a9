"""The plots of docs/results/: bars beside the names of what was measured, and a line over time.

Each is a picture of its own, as wide as a phone and legible on one; elsewhere it is shown larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# How wide it is drawn, in units of its text, and shown where there is room, in pixels.
_DRAWN, _SHOWN = 352.0, 484.0
_BAR, _BETWEEN, _AROUND, _LEGEND = 12.0, 6.0, 52.0, 17.0
_COLORS = ("chosen", "s1", "plain", "s2", "s4", "s5")
_NAME, _FIGURE = 10.0, 9.0
# Letters that a line of the legend has room for.
_LETTERS = 54


@dataclass(frozen=True)
class Bars:
    """Rows of bars, one for each series.

    Attributes:
        label: what they show, as a sentence for those who cannot see it.
        axis: what is measured, with its unit.
        series: what the bars are of; the first one is graphwright's.
        rows: a name and a figure for each series, None where there is none.
        form: a figure as text.
        marked: a figure that a dashed line marks, and what it is.
    """

    label: str
    axis: str
    series: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float | None]]]
    form: Callable[[float], str] = "{:.3g}".format
    marked: tuple[float, str] | None = None

    def to_svg(self, name: str) -> str:
        """The picture; `name` is unlike that of any other."""
        each = _BAR * len(self.series) + _BETWEEN
        rows = len(self.rows) * each
        lines = math.ceil(len(self.series) / self._columns) if len(self.series) > 1 else 0
        return _drawn(name, self.label, rows + _AROUND + _LEGEND * lines, self._paint)

    @property
    def _columns(self) -> int:
        """Of the legend: all in one line where there is room, else two."""
        letters = sum(len(what) + 4 for what in self.series)
        return len(self.series) if letters <= _LETTERS else 2

    def _paint(self, figure: Figure) -> None:
        from matplotlib.patches import Patch

        from graphwright.report.plots import INK, LINE, MUTED, color

        axes = figure.add_subplot()
        each = _BAR * len(self.series) + _BETWEEN
        shown = [v for _, values in self.rows for v in values if v is not None]
        high = max(shown + ([self.marked[0]] if self.marked else []))
        places = []
        for number, _ in enumerate(self.series):
            tone = color(_COLORS[number])
            for row, (_, values) in enumerate(self.rows):
                value = values[number]
                middle = row * each + _BAR * (number + 0.5)
                if value is None:
                    continue
                axes.barh(middle, value, _BAR - 2, color=tone, linewidth=0)
                axes.text(value + high * 0.012, middle, self.form(value), color=INK,
                          fontsize=_FIGURE, va="center_baseline")  # fmt: skip
        for row, _ in enumerate(self.rows):
            places.append(row * each + _BAR * len(self.series) / 2)
        axes.set_yticks(places, [what for what, _ in self.rows], fontsize=_NAME, color=INK)
        axes.tick_params("y", length=0)
        axes.set_ylim(len(self.rows) * each - _BETWEEN / 2, -_BETWEEN / 2)
        # Room for the figure at the end of the longest bar.
        axes.set_xlim(0, high * 1.14)
        axes.spines["left"].set_color(LINE)
        _axis(axes, self.axis, "{:g}×" if self.form(1.0).endswith("×") else "{:g}")
        if self.marked is not None:
            value, what = self.marked
            axes.axvline(value, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=2)
            axes.annotate(what, (value, 1), (0, 2), xycoords=axes.get_xaxis_transform(),
                          textcoords="offset points", ha="center", va="bottom", color=MUTED,
                          fontsize=_FIGURE)  # fmt: skip
        if len(self.series) > 1:
            keys = [
                Patch(facecolor=color(tone), label=what)
                for tone, what in zip(_COLORS, self.series, strict=False)
            ]
            figure.legend(handles=keys, loc="outside upper left", ncols=self._columns,
                          frameon=False, fontsize=_NAME, labelcolor=INK, handlelength=1,
                          handleheight=0.8, columnspacing=1.2, borderpad=0.1)  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """A figure over time, with a limit that it is to stay below.

    Attributes:
        label: what it shows, as a sentence for those who cannot see it.
        x_axis: what is measured across, with its unit.
        y_axis: what is measured upwards, with its unit.
        points: of the curve.
        limit: where the limit begins, and the limit.
        limited: what the limit is.
    """

    label: str
    x_axis: str
    y_axis: str
    points: Sequence[tuple[float, float]]
    limit: tuple[float, float]
    limited: str

    def to_svg(self, name: str) -> str:
        """The picture; `name` is unlike that of any other."""
        return _drawn(name, self.label, 240.0, self._paint)

    def _paint(self, figure: Figure) -> None:
        from graphwright.report.plots import LINE, MUTED, color

        axes = figure.add_subplot()
        xs, ys = zip(*self.points, strict=True)
        axes.plot(xs, ys, color=color("chosen"), linewidth=2)
        begin, limit = self.limit
        axes.plot([begin, xs[-1]], [limit, limit], color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(self.limited, (xs[-1], limit), (0, 3), textcoords="offset points", ha="right",
                      va="bottom", color=MUTED, fontsize=_FIGURE)  # fmt: skip
        axes.set_xlim(0, xs[-1])
        axes.set_ylim(0, limit * 1.15)
        axes.grid(axis="y")
        axes.spines["left"].set_color(LINE)
        axes.set_ylabel(self.y_axis, fontsize=_NAME)
        axes.tick_params("y", labelsize=_FIGURE)
        _axis(axes, self.x_axis, "{:g}")


def _axis(axes: Axes, what: str, form: str) -> None:
    """The horizontal one, with few round numbers."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.grid(axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: form.format(value) if value else "0")
    )
    axes.tick_params("x", labelsize=_FIGURE)
    axes.set_xlabel(what, fontsize=_NAME)


def _drawn(name: str, label: str, height: float, paint: Callable[[Figure], None]) -> str:
    from graphwright.report.plots import draw

    picture = draw(name, label, height, paint, width=_DRAWN, alone=True)
    small = f'width="{_DRAWN:g}" height="{height:g}" fill='
    large = f'width="{_SHOWN:g}" height="{height * _SHOWN / _DRAWN:g}"'
    head, end, rest = picture.partition(">")
    own = f'width="{_DRAWN:g}" height="{height:g}"'
    if own not in head or small not in rest:
        raise ValueError(f"a picture of another form: {head}")
    return head.replace(own, large) + end + rest
