"""HTML as strings that know they are HTML: all other text is escaped when it is put into them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

# Elements without an end tag.
_VOID = ("br", "hr", "img", "input", "link", "meta", "wbr")
# The factors of units in cells, for sorting: seconds, bytes, operations a second.
_UNITS = {
    "s": 1.0,
    "ms": 1e-3,
    "µs": 1e-6,
    "ns": 1e-9,
    "B": 1.0,
    "kB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "KiB": 2.0**10,
    "MiB": 2.0**20,
    "GiB": 2.0**30,
}
_FIGURE = re.compile(r"~?\s*([+-]?[\d,]*\.?\d+(?:e[+-]?\d+)?)\s*([a-zµA-Z]*)")
_TAG = re.compile(r"<[^>]*>")
# Behind which a long name may be broken.
_JOINT = re.compile(r"(?<=[+:/_.])(?=\w)")
# A cell with more characters than this has lines of a fair width.
_LONG = 40
_WORDS = {"at once": 0.0, "never": math.inf}


class Html(str):
    """Text that is HTML already, and is not escaped again."""

    __slots__ = ()


def html(text: str) -> Html:
    """Text as HTML: escaped, unless it is HTML."""
    return text if isinstance(text, Html) else Html(escape(text))


def element(tag: str, *children: str, **attributes: str | bool | None) -> Html:
    """An element with its children; those that are plain text are escaped.

    Args:
        tag: its name.
        children: HTML or text.
        attributes: True writes an attribute without a value, False and None none. An underscore
            at the end is dropped, as in `class_`; one within becomes a hyphen.
    """
    head = tag
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        head += " " + name.rstrip("_").replace("_", "-")
        if value is not True:
            head += f'="{escape(value)}"'
    if tag in _VOID:
        return Html(f"<{head}>")
    return Html(f"<{head}>{join(children)}</{tag}>")


def join(parts: Iterable[str], between: str = "") -> Html:
    """Pieces of HTML in a row."""
    return Html(html(between).join(map(html, parts)))


def sort_key(text: str) -> float | None:
    """The figure that a cell begins with, in units that can be compared; None if it has none."""
    if text in _WORDS:
        return _WORDS[text]
    found = _FIGURE.match(text)
    if found is None:
        return None
    return float(found[1].replace(",", "")) * _UNITS.get(found[2], 1.0)


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    emphasized: int | None = None,
    texts: int = 1,
    stacked: bool = False,
) -> Html:
    """A table whose columns can be sorted; on a narrow screen it scrolls inside its own box.

    Args:
        headings: one a column.
        rows: their cells, HTML or text.
        emphasized: the number of a row that stands out.
        texts: how many columns at the left hold text; the others hold figures.
        stacked: whether cells stand one below the other on a narrow screen, as long texts have to.
    """
    head = join(
        element(
            "th",
            element("button", heading, type="button"),
            class_=None if column < texts else "figure",
            scope="col",
        )
        for column, heading in enumerate(headings)
    )
    body = join(
        element(
            "tr",
            *(
                _cell(cell, figure=column >= texts, name=not column)
                for column, cell in enumerate(row)
            ),
            class_="chosen" if number == emphasized else None,
        )
        for number, row in enumerate(rows)
    )
    whole = element(
        "table",
        element("thead", element("tr", head)),
        element("tbody", body),
        class_="stacked" if stacked else None,
    )
    return element("div", whole, class_="scroll", tabindex="0", role="region", aria_label="Table")


def _cell(text: str, *, figure: bool, name: bool) -> Html:
    key = sort_key(text) if figure else None
    if name and not isinstance(text, Html):
        text = join(_JOINT.split(text), element("wbr"))
    sorted_by = None if key is None else repr(key)
    kind = "figure" if figure else "prose" if len(_TAG.sub("", text)) > _LONG else None
    return element("td", text, class_=kind, data_sort=sorted_by)


def facts(pairs: Mapping[str, str] | Iterable[tuple[str, str]]) -> Html:
    """Names with their values, such as an environment."""
    items = pairs.items() if isinstance(pairs, Mapping) else pairs
    terms = (element("div", element("dt", name), element("dd", value)) for name, value in items)
    return element("dl", *terms, class_="facts")
