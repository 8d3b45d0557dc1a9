"""The skeleton of a page: one file that opens offline, on a phone, in the dark and on paper.

What is particular to a kind of page is in a file of its own: tune_page, benchmark_page, and page in
profiler and checker.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .._version import __version__
from .markup import Html, element, join

# How a plot's series are called in the style sheet.
PLAIN, CHOSEN = "plain", "chosen"
SERIES = ("s1", "s2", "s3", "s4", "s5", "s6", "s7")


@dataclass(frozen=True)
class Section:
    """A part of a page that folds.

    Attributes:
        title: its heading.
        body: what it holds.
        aside: a few words beside the heading, which are seen when it is folded too.
        folded: whether it is so at first.
        anchor: what a link in the page calls it; empty if none does.
    """

    title: str
    body: Html
    aside: str = ""
    folded: bool = False
    anchor: str = ""

    def to_html(self) -> Html:
        """The section as an element."""
        aside = element("small", self.aside) if self.aside else ""
        # Inside of what is folded, so that a link to it unfolds it.
        place = element("span", id=self.anchor) if self.anchor else ""
        return element(
            "details",
            element("summary", element("h2", self.title), aside),
            element("div", place, self.body, class_="body"),
            class_="section",
            open=not self.folded,
        )


@dataclass(frozen=True)
class Tile:
    """A figure of the verdict: what it is, the figure, and what it compares with."""

    name: str
    figure: str
    beside: str = ""

    def to_html(self) -> Html:
        """The tile as an element."""
        beside = element("small", self.beside) if self.beside else ""
        return element("div", element("dt", self.name), element("dd", self.figure, beside))


def page(
    kind: str,
    title: str,
    lead: str,
    verdict: str,
    sections: Iterable[Section],
    *,
    more: str = "",
    tiles: Sequence[Tile] = (),
    footer: str = "",
) -> str:
    """A whole page.

    Args:
        kind: what made it, such as "graphwright tune".
        title: the heading, such as the model's name.
        lead: a line below it.
        verdict: the result in one sentence.
        sections: what it rests on.
        more: a sentence or two below the verdict.
        tiles: its figures.
        footer: the last line.
    """
    script = _read("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Nothing is fetched, and no script runs but this one, whatever a name or a reason contains.
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    head = [
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="generator", content=f"graphwright {__version__}"),
        element("title", f"{title} – {kind}"),
        element("link", rel="icon", href="data:,"),
        element("style", Html(_read("page.css"))),
    ]
    top = element(
        "header",
        element("p", kind, class_="eyebrow"),
        element("h1", title),
        element("p", lead, class_="lead") if lead else "",
    )
    card = element(
        "section",
        element("p", verdict, class_="verdict"),
        element("p", more) if more else "",
        element("dl", *(tile.to_html() for tile in tiles), class_="tiles") if tiles else "",
        class_="card",
    )
    body = element(
        "main",
        *(top, card, *(section.to_html() for section in sections)),
        element("footer", footer) if footer else "",
    )
    whole = element(
        "html",
        element("head", *head),
        element("body", body, element("script", Html(script))),
        lang="en",
    )
    return f"<!DOCTYPE html>\n{whole}\n"


def figure(title: str, svg: Html, caption: str = "", legend: Html | str = "") -> Html:
    """A plot with its heading, what its colours mean, and what to know of it."""
    below = element("figcaption", caption) if caption else ""
    return element("figure", element("h3", title), legend, svg, below)


def plots(figures: Iterable[Html]) -> Html:
    """Plots side by side where there is room."""
    return element("div", *figures, class_="plots")


def legend(items: Iterable[tuple[str, str]]) -> Html:
    """Colours, as the style sheet calls them, and what they mean."""
    return element("ul", *(element("li", what, style=f"--of: var(--{c})") for c, what in items),
                   class_="legend")  # fmt: skip


def note(text: str) -> Html:
    """A remark."""
    return element("p", text, class_="note")


def paragraphs(texts: Iterable[str]) -> Html:
    """Remarks, each by itself."""
    return join(note(text) for text in texts)


@functools.cache
def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
