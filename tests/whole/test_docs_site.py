"""The documentation as a site: whole, offline, and with a heading where one looks for it."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from pages import ROOT
from test_package import FACES

import graphwright as gw

DOCS = ROOT / "docs"
# About two screens.
LONG = 90
DIRECTIVE = re.compile(r"^::: graphwright\.([\w.]+)$", re.MULTILINE)


def described() -> list[str]:
    """What the reference describes, as it is written there."""
    pages = sorted((DOCS / "reference" / "api").glob("*.md"))
    return [name for page in pages for name in DIRECTIVE.findall(page.read_text("utf-8"))]


def test_the_reference_covers_every_public_name_once() -> None:
    found = described()
    assert len(found) == len(set(found))
    assert {name for name in found if "." not in name} == set(gw.__all__) - {"__version__"}


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda p: str(p.relative_to(DOCS)))
def test_a_page_is_short_or_has_a_table_of_contents(page: Path) -> None:
    """The site makes one of the headings."""
    folded = r"^```.*?^```|^<details.*?^</details>"
    text = re.sub(folded, "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1
    if len(text.splitlines()) > LONG:
        assert len(re.findall(r"^##+ ", text, re.MULTILINE)) >= 2


class _Page(HTMLParser):
    """What a page loads when it is opened, the places that links can lead to, and its text."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[str] = []
        self.places: set[str] = set()
        self.text = ""
        self.feed(page.read_text("utf-8"))

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        loads = {"script": "src", "img": "src", "source": "src", "iframe": "src", "object": "data"}
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            loads["link"] = "href"
        self.places.add(given.get("id") or "")
        if given.get(loads.get(tag, "")):
            self.found.append(str(given[loads[tag]]))


@pytest.mark.slow
@pytest.mark.long
def test_the_site_is_built_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the site is built where scripts/docs has run")
    # Not quietly: that silences the warnings that --strict counts.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {path: _Page(path) for path in sorted(tmp_path.rglob("*.html"))}
    assert len(pages) > 30
    for path, page in pages.items():
        assert page.found, path
        assert not [url for url in page.found if re.match(r"(https?:)?//", url)], path
    api = [page for path, page in pages.items() if path.parts[-3] == "api"]
    for name in {*gw.__all__} - {"__version__"}:
        [page] = [page for page in api if f"graphwright.{name}" in page.places]
        words = {*re.findall(r"\w+", page.text)}
        assert {*FACES.get(name, "").split()} <= words, name
