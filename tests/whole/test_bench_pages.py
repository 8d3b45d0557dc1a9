"""The pages of results are those that the files give, and plots show what they are given."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.common.record import RESULTS, ROOT
from bench.pages import TOPICS, _folded, measured_on, results_of, write_pages
from bench.plots import Bars, Curve

DOCS = ROOT / "docs"


def texts(svg: str) -> list[str]:
    """What is written in a picture."""
    found = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return [text.text or "" for text in found]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all pages and plots were written to."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("pages")
    write_pages(folder)
    return folder


def test_the_pages_are_those_that_the_files_give(written: Path) -> None:
    names = {path.name for path in (written / "results").iterdir()}
    assert names == {path.name for path in (DOCS / "results").iterdir()}
    for name in names:
        new, old = (folder / "results" / name for folder in (written, DOCS))
        assert new.read_text("utf-8") == old.read_text("utf-8"), f"run scripts/bench tables: {name}"


def test_the_plots_show_the_figures_that_the_files_give(written: Path) -> None:
    """Places may differ by matplotlib's version; names and figures may not."""
    for topic in TOPICS:
        name = f"results-{topic.name}.svg"
        new, old = (texts((folder / "images" / name).read_text()) for folder in (written, DOCS))
        assert new == old, f"run scripts/bench tables: {name}"
    assert {path.name for path in (DOCS / "images").glob("results-*.svg")} == {
        f"results-{topic.name}.svg" for topic in TOPICS
    }


def test_a_plot_is_the_same_picture_each_time() -> None:
    pytest.importorskip("matplotlib")
    plot = TOPICS[0].outcome(results_of(TOPICS[0])).plot
    assert plot.to_svg("one") == plot.to_svg("one")
    assert not re.search(r"<dc:date|\d{4}-\d\d-\d\dT", plot.to_svg("one"))


def test_every_topic_says_where_and_when_it_was_measured() -> None:
    for topic in TOPICS:
        results = results_of(topic)
        assert results, topic.name
        for data in results.values():
            assert measured_on(data)
            assert re.fullmatch(r"20\d\d-\d\d-\d\d", data["date"])


def test_every_result_of_a_benchmark_is_on_a_page() -> None:
    shown = {name for topic in TOPICS for name in results_of(topic)}
    # Runs of tests, and single comparisons that other pages and commits cite.
    others = (
        r"gpu-test.*|mutations.*|torch-ver.*|capture-beside.*|graph-of-fuse.*|measured-passes.*|"
        r"watching.*"
    )
    left = {file.stem for file in RESULTS.glob("*.json")} - shown
    assert not [name for name in left if not re.fullmatch(others, name)]


def test_bars_have_their_names_figures_and_series() -> None:
    pytest.importorskip("matplotlib")
    rows = [("a model", [2.0, 1.5]), ("another", [None, 3.0])]
    plot = Bars("what it shows", "s", ["ours", "theirs"], rows, "{:.1f} s".format, (1.0, "eager"))
    found = texts(svg := plot.to_svg("bars"))
    assert {"a model", "another", "ours", "theirs", "eager", "2.0 s", "1.5 s", "3.0 s"} <= {*found}
    assert 'aria-label="what it shows"' in svg
    assert "prefers-color-scheme: dark" in svg
    alone = Bars("what it shows", "s", ["ours"], [("a model", [2.0])])
    assert "ours" not in texts(alone.to_svg("alone"))


def test_a_curve_has_its_limit() -> None:
    pytest.importorskip("matplotlib")
    plot = Curve("memory", "s", "MiB", [(0.0, 1.0), (9.0, 2.0)], (3.0, 4.0), "the limit")
    assert {"s", "MiB", "the limit"} <= {*texts(plot.to_svg("curve"))}


def test_long_tables_and_lists_are_folded_once() -> None:
    table = "| a |\n| --- |\n" + "| 1 |\n" * 15
    text = f"Before.\n\n{table}\nBetween.\n\n| b |\n| --- |\n| 2 |\n"
    folded = _folded(text)
    assert folded.count("<details") == 1
    assert "<summary>All 15 rows</summary>\n\n| a |" in folded
    assert folded.endswith("Between.\n\n| b |\n| --- |\n| 2 |\n")
    inside = f"<details>\n\n{table}\n</details>\n"
    assert _folded(inside) == inside


@pytest.mark.slow
def test_matplotlib_is_imported_only_to_draw() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; import bench.__main__, bench.pages"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
