"""What a person reads of a tuning and of a profile, kept as files: each change of a text shows.

After a change that is meant, `UPDATE_GOLDEN=1 python -m pytest tests/report/test_golden_pages.py`
writes them anew; look at the difference before you commit it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from sample_reports import report, with_shapes

import graphwright as gw
from graphwright.profiler.observation import Line, ObservedOperation
from graphwright.profiler.remedies import Remedy
from graphwright.profiler.roofs import Roofs
from graphwright.profiler.table import Measured
from graphwright.profiler.timing import CallTimes, ThreadTimes
from graphwright.profiler.verdict import Cause, CpuFigures, Verdict
from graphwright.report.markdown import to_markdown
from graphwright.report.terminal import to_text

GOLDEN = Path(__file__).with_name("golden")
# What is no text, or text that others draw.
_SKIPPED = ("style", "script", "svg")
_BLOCKS = ("p", "tr", "li", "h1", "h2", "h3", "div", "section", "summary", "pre", "caption")


class Words(HTMLParser):
    """The text of a page, a line for each block; without styles, scripts and plots."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.skipping = 0
        self.parts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.skipping += tag in _SKIPPED
        if tag in _BLOCKS:
            self.parts.append("\n")
        elif tag in ("td", "th"):
            self.parts.append(" | ")

    def handle_endtag(self, tag: str) -> None:
        self.skipping -= tag in _SKIPPED

    def handle_data(self, data: str) -> None:
        if not self.skipping:
            self.parts.append(data)

    def __str__(self) -> str:
        lines = (" ".join(line.split()) for line in "".join(self.parts).splitlines())
        return "\n".join(line for line in lines if line) + "\n"


def profile() -> gw.Profile:
    """A CPU's, of a model of two products and what is around them."""
    product, sum_of = Line("model.py", 12, "y = self.layer(x)"), Line("model.py", 14, "y.sum()")

    def operation(name: str, module: str, line: Line, flops: int | None) -> ObservedOperation:
        shapes = ((64, 512), (512, 512))
        named = {"dtype": "float32", "precision": "float32", "shapes": shapes, "copies": ""}
        flags = {"view": False, "reads": False, "pointwise": not flops, "backward": False}
        return ObservedOperation(name, module, line, 1 << 20, flops, **named, **flags)

    bound = [Cause.ARITHMETIC, Cause.MEMORY]
    return gw.Profile(
        name="Model",
        device="cpu",
        training=False,
        verdict=Verdict(
            tuple(bound[:1]),
            {bound[0]: 0.75, bound[1]: 0.125},
            ((product, "most of the time"), (sum_of, "reads all of it again")),
            "Three quarters of the time go into two products.",
        ),
        remedies=(
            Remedy("graph", 1.0, 1.0, "a CPU has no graphs"),
            Remedy("fusion", 1.05, 1.2, "a chain of four operations", (1.0, 1.1), 1.1),
        ),
        times=CallTimes(1e-3, 0.98e-3, 1.03e-3, 0.95e-3, 1e-3, 200),
        figures=CpuFigures(
            *(1e-3, 0.8e-3, 0.1e-3, {bound[0]: 0.7e-3}),
            ThreadTimes(1, {1: 1.5e-3, 2: 1e-3}, 2, 1.5, 1.4, 1.6, 2, 0.0),
        ),
        roofs=Roofs(
            *("cpu", 2, ((1 << 10, 1e-7), (1 << 24, 2e-3)), {"float32": 1e11}, 1e-6),
            measured="2026-01-01",
            transfers={"to": 1e9},
        ),
        environment={"processor": "a CPU", "torch": "2.13"},
        notes=("Other work ran beside it.",),
        seconds=4.0,
        _measured=(
            Measured(operation("aten::addmm", "layer", product, 1 << 25), 0.7e-3, 0, bound[0]),
            Measured(operation("aten::sum", "", sum_of, 0), 0.1e-3, 0, bound[1]),
        ),
    )


TEXTS: dict[str, Callable[[], str]] = {
    "tune-page": lambda: str(Words(report().to_html())),
    "tune-page-of-shapes": lambda: str(Words(with_shapes().to_html())),
    "tune-terminal": lambda: to_text(report(), 80),
    "tune-markdown": lambda: to_markdown(report()),
    "profile-page": lambda: str(Words(profile().to_html())),
    "profile-terminal": lambda: f"{profile()}\n",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_as_it_was(name: str) -> None:
    file, text = GOLDEN / f"{name}.txt", TEXTS[name]()
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def test_each_file_belongs_to_a_text() -> None:
    assert {file.stem for file in GOLDEN.iterdir()} == {*TEXTS}


@pytest.mark.parametrize("name", [name for name in TEXTS if name.endswith("terminal")])
def test_what_a_terminal_shows_has_80_columns(name: str) -> None:
    assert all(len(line) <= 80 for line in TEXTS[name]().splitlines())
