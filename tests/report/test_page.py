"""Pages: what they hold, that nothing breaks out of them, and what is said where one cannot be."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import threading
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import pytest
import torch
from click.testing import CliRunner
from sample_reports import HOSTILE, report, with_shapes

import graphwright as gw
from graphwright.checker.finding import Finding, Place, Severity
from graphwright.checker.report import CheckReport
from graphwright.cli.main import main
from graphwright.errors import GraphwrightError
from graphwright.report.benchmark_page import benchmark_to_page, is_benchmark
from graphwright.report.markup import element, html, sort_key, table
from graphwright.report.plots import Group, Mark, PlotRow, draw, rows
from graphwright.report.report import Report
from graphwright.report.result import Status

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
_VOID = {"br", "hr", "img", "input", "link", "meta", "wbr"}


class Reader(HTMLParser):
    """Reads a page: its elements, whether they are closed in order, and all of its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.found)


def test_elements_escape_text_and_keep_html() -> None:
    assert element("p", "a<b", html("c&d"), element("br"), class_='"') == (
        '<p class="&quot;">a&lt;bc&amp;d<br></p>'
    )
    assert element("details", open=True, hidden=False) == "<details open></details>"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("242 µs ± 2%", 242e-6),
        ("1.50 ms", 1.5e-3),
        ("12.8×", 12.8),
        ("44.0 MiB", 44 * 2**20),
        ("3,512", 3512.0),
        ("8.3e-04", 8.3e-4),
        ("~ 3 s", 3.0),
        ("at once", 0.0),
        ("never", math.inf),
        ("–", None),
        ("ok", None),
    ],
)
def test_cells_sort_by_their_figures(text: str, key: float | None) -> None:
    assert sort_key(text) == (key if key is None else pytest.approx(key))


def test_a_page_holds_what_was_measured_and_what_was_refused() -> None:
    page = report().to_html()
    read = Reader(page)
    text = " ".join(read.text)
    assert not read.open
    assert "8.00× as fast as eager" in text
    headings = ("Speed", "Speed against peak memory", "Speed against set-up", "The search")
    for heading in (*headings, "Error against float64", "Refused, and remarks", "Environment"):
        assert heading in read.text
    assert read.count("svg") == 5
    assert "graphwright tune x --strategies off" in text
    assert "pip install absent" in text
    assert len(page) < 200_000


def test_plots_say_what_they_show_and_share_no_ids() -> None:
    read = Reader(with_shapes().to_html())
    labels = [attributes.get("aria-label") for tag, attributes in read.found if tag == "svg"]
    assert all(labels)
    assert len(set(labels)) == len(labels)
    ids = [attributes["id"] for _, attributes in read.found if "id" in attributes]
    assert len(set(ids)) == len(ids)
    used = {
        match
        for _, attributes in read.found
        for key in ("href", "clip-path")
        for match in re.findall(r"#([\w-]+)", attributes.get(key) or "")
    }
    assert used <= set(ids)


def test_colours_are_the_style_sheet_s() -> None:
    svgs = re.findall(r"<svg.*?</svg>", report().to_html(), re.DOTALL)
    assert not any("#0101" in svg for svg in svgs)
    used = set(re.findall(r"var\(--([\w-]+)\)", "".join(svgs)))
    style = (ROOT / "src/graphwright/report/page.css").read_text()
    light, dark = style.split("prefers-color-scheme: dark", 1)
    for name in used:
        assert f"--{name}:" in light
        assert f"--{name}:" in dark


def test_the_same_report_is_the_same_page() -> None:
    assert report().to_html() == report().to_html()


def test_shapes_have_plots_and_a_table() -> None:
    read = Reader(with_shapes(["short", "long", HOSTILE]).to_html())
    assert {"Latency by shape", "Gain by shape"} <= set(read.text)
    assert read.count("svg") == 7


def test_samples_are_in_a_page_only_if_asked_for() -> None:
    assert "throughput" not in "".join(Reader(report().to_html()).text)
    page = report().to_html(with_samples=True)
    (found,) = (text for text in Reader(page).text if '"schema": "graphwright.tune"' in text)
    assert Report.from_json(found) == report()


@pytest.mark.parametrize("objective", ["latency", "throughput", "memory", "cold_start"])
def test_every_objective_has_its_verdict_and_its_figure_beside_eager_s(objective: str) -> None:
    text = "".join(Reader(report(objective=objective).to_html()).text)
    gain = "8.00× as fast as eager (8.00 to 8.00)"
    equal = "two others are as fast within the noise, and it is the simplest."
    expected = {
        "latency": (f"inductor+graph was chosen, {gain}: {equal}", "latency250 µseager 2.00 ms"),
        "throughput": (f"inductor+graph was chosen, {gain}: {equal}", "calls/s8,000eager 1,000"),
        "memory": (
            "inductor+graph was chosen: it needs 40.0 MiB at its peak, eager 1.0 MiB; it is "
            f"{gain}.",
            "peak memory40.0 MiBeager 1.0 MiB",
        ),
        "cold_start": (
            "inductor was chosen: its first answer comes 2.00 s after a process starts, eager's "
            "1.00 s; once it runs, it is 2.00× as fast as eager (2.00 to 2.00).",
            "first answer2.00 seager 1.00 s",
        ),
    }
    for piece in expected[objective]:
        assert piece in text


def test_a_page_has_one_figure_of_each_thing() -> None:
    """One latency and one error of eager, and one factor of each row, wherever they stand."""
    one = report()
    read = Reader(one.to_html())
    text = " ".join(read.text)
    assert "1.1e-07" in text
    assert "9.0e-08" not in text
    assert "9.00 ms" not in text  # Eager's, beside one of the candidates.
    assert {each for each in read.text if re.match(r"eager [\d.]+ (ms|µs)$", each)} == {
        "eager 2.00 ms"
    }
    hints = [each for each in read.text if re.match(r"[\w:+-]+: [\d.]+×, ", each)]
    factors: dict[str, set[str]] = {}
    for each in hints:
        name, _, rest = each.partition(": ")
        factors.setdefault(name, set()).add(rest.partition("×")[0])
    rows = [row for row in one.rows if row.measurement is not None]
    gains = [one.speedup(row) for row in rows]
    assert factors == {
        row.strategy: {f"{gain[0]:.2f}"} for row, gain in zip(rows, gains, strict=True) if gain
    }
    assert len(hints) == 3 * len(rows)  # In the bars and in two plots of points.


def test_the_choice_is_first_in_bars_and_table() -> None:
    read = Reader(report().to_html())
    order = [
        *("inductor+graph", "channels_last+inductor+graph", "inductor:freeze+graph"),
        *("channels_last+inductor:max-autotune+graph", "torchscript", "inductor", "eager"),
    ]
    hints = [each for each in read.text if re.search("^.*: .*× to .*×$", each)]
    assert [each.rpartition(": ")[0] for each in hints] == order
    assert re.findall(r"<tr[^>]*><td[^>]*>(.*?)</td>", report().to_html())[: len(order)] == [
        re.sub(r"([+:_])", r"\1<wbr>", name) for name in order
    ]


def test_reports_without_figures_have_pages() -> None:
    empty = Report("Model", [], "latency", [], {}, interrupted=True)
    assert "Interrupted before anything could be chosen." in empty.to_html()
    alone = report()
    alone.rows, alone.chosen, alone.curve = alone.rows[:1], "eager", []
    alone.reason = "eager was chosen: nothing else could be measured here."
    assert f"<strong>eager</strong>{alone.reason.removeprefix('eager')}" in alone.to_html()
    same = report()
    same.chosen = "eager+graph"
    same.rows.append(replace(same.rows[0], strategy="eager+graph"))
    same.reason = ""
    assert "<strong>eager+graph</strong> was chosen." in same.to_html()
    unsteady = report()
    for each in unsteady.rows:
        each.unsteady = "its rounds disagree by a factor of 4"
        each.error = None
    assert "unsteady" in unsteady.to_html()
    unsteady.eager_error = None
    Reader(unsteady.to_html())


def test_exact_and_infinite_errors_are_drawn() -> None:
    one = report()
    for each, error in zip(one.rows, (0.0, math.inf, math.nan), strict=False):
        assert each.error is not None
        each.error = type(each.error)(error, error)
    assert "exact" in one.to_html()


def hostile_pages(tmp_path: Path) -> dict[str, str]:
    tuned = with_shapes([HOSTILE, "long"])
    tuned.model = tuned.reason = HOSTILE
    tuned.environment[HOSTILE] = HOSTILE
    tuned.notes, tuned.inputs = [HOSTILE], [HOSTILE]
    for each in tuned.rows:
        each.strategy += HOSTILE
        each.reason = each.remedy = each.repeat = HOSTILE
        each.notes = [HOSTILE]
    tuned.rows[0].strategy = "eager"
    tuned.chosen = tuned.rows[2].strategy
    place = Place(HOSTILE, 1, 1, f"x = {HOSTILE}", HOSTILE)
    finding = Finding(HOSTILE, Severity.BREAKS, HOSTILE, HOSTILE, HOSTILE, HOSTILE, place)
    checked = CheckReport(HOSTILE, [finding])
    ways = {
        name: {"status": "ok", "latency_samples": [[1e-3], [2e-3]], "notes": [HOSTILE]}
        for name in ("eager", HOSTILE)
    }
    benchmark = {
        "schema": "graphwright.bench",
        "benchmark": HOSTILE,
        "commit": HOSTILE,
        "environment": {"gpu": HOSTILE},
        "models": {HOSTILE: {"inputs": [HOSTILE], "ways": ways}},
        "targets": [{"target": HOSTILE, "model": HOSTILE, "met": True, "unit": HOSTILE}],
    }
    return {
        "tune": tuned.to_html(with_samples=True),
        "tune in a notebook": tuned._repr_html_(),
        "check": checked.to_html(),
        "check in a notebook": checked._repr_html_(),
        "benchmark": benchmark_to_page(json.dumps(benchmark), with_samples=True),
    }


@pytest.mark.parametrize(
    "kind", ["tune", "tune in a notebook", "check", "check in a notebook", "benchmark"]
)
def test_nothing_breaks_out_of_a_page(kind: str, tmp_path: Path) -> None:
    read = Reader(hostile_pages(tmp_path)[kind])
    assert not read.open
    assert read.count("img") == read.count("b") - read.count("b") == 0
    assert read.count("script") == (0 if "notebook" in kind else 1)
    assert not any(name.startswith("on") for _, attributes in read.found for name in attributes)
    assert any(HOSTILE in text for text in read.text)


def test_a_table_scrolls_by_itself_and_marks_the_choice() -> None:
    found = Reader(table(["a", "b"], [["x", "1 s"], ["y", "–"]], emphasized=1)).found
    assert found[0] == (
        "div",
        {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": "Table"},
    )
    cells = [attributes for tag, attributes in found if tag == "td"]
    assert [cell.get("data-sort") for cell in cells] == [None, "1.0", None, None]
    assert ("tr", {"class": "chosen"}) in found


# ------------------------------------------------------------ plots


def one_plot() -> str:
    groups = [Group("", [PlotRow("a" * 60, "1 s", [Mark(1.0, 0.5, 1.5, hint="a hint")])])]
    return rows("plot", "a plot", groups, "seconds", "{:.2g}".format)


def test_drawing_leaves_matplotlib_as_it_was() -> None:
    with matplotlib.rc_context({"font.size": 31.0, "axes.facecolor": "red"}):
        before = dict(matplotlib.rcParams)
        plot = one_plot()
        assert dict(matplotlib.rcParams) == before
    assert plot == one_plot()
    assert "<title>a hint</title>" in plot
    assert f"<title>{'a' * 60}</title>" in plot  # The name is cut, and told to who points at it.


def test_threads_draw_at_once() -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(one_plot())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [one_plot()] * 4


def test_a_picture_of_its_own_brings_its_colours() -> None:
    alone = draw("x", "a picture", 50, lambda figure: figure.add_subplot(), alone=True)
    assert alone.startswith('<svg xmlns="http://www.w3.org/2000/svg"') or "xmlns" in alone[:400]
    assert "prefers-color-scheme: dark" in alone
    assert "<title>a picture</title>" in alone


# ------------------------------------------------------------ saving


@pytest.mark.parametrize(
    ("suffix", "start"),
    [(".html", "<!DOCTYPE html>"), (".json", "{"), (".md", "### "), (".svg", "<svg")],
)
def test_the_suffix_says_what_is_saved(suffix: str, start: str, tmp_path: Path) -> None:
    file = tmp_path / f"tune{suffix.upper()}"
    report().save(file)
    assert file.read_text(encoding="utf-8").startswith(start)


def test_other_suffixes_and_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GraphwrightError, match=r"End it with \.html, \.json, \.md or \.svg\."):
        report().save(tmp_path / "tune.pdf")
    with pytest.raises(GraphwrightError, match="suffix is not one of those known"):
        report().save(tmp_path / "tune")
    with pytest.raises(GraphwrightError, match="cannot be written: No such file"):
        report().save(tmp_path / "no folder" / "tune.html")
    with pytest.raises(GraphwrightError, match=r"End it with \.html, \.json or \.txt\."):
        CheckReport("Model", []).save(tmp_path / "check.md")
    assert not [*tmp_path.iterdir()]


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )


@pytest.mark.usefixtures("no_matplotlib")
def test_without_matplotlib_it_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(GraphwrightError, match=r"pip install \"graphwright\[report\]\""):
        report().save(tmp_path / "tune.html")
    CheckReport("Model", []).save(tmp_path / "check.html")  # It has no plots.
    saved = tmp_path / "tune.json"
    report().save(saved)
    done = CliRunner().invoke(main, ["report", str(saved), "--html", str(tmp_path / "tune.html")])
    assert done.exit_code == 2
    assert "graphwright[report]" in done.output
    assert not (tmp_path / "tune.html").exists()


@pytest.mark.usefixtures("no_matplotlib")
@pytest.mark.parametrize("option", ["--html", "--roofline", "--timeline"])
def test_without_matplotlib_no_work_is_done_in_vain(option: str, tmp_path: Path) -> None:
    """It is said before the target is even looked for."""
    command = ["tune" if option == "--html" else "profile", "no_file.py:nothing", option]
    done = CliRunner().invoke(main, [*command, str(tmp_path / "file")])
    assert done.exit_code == 2
    assert "matplotlib" in done.output


# ------------------------------------------------------------ the command and benchmarks


def test_report_makes_pages_of_saved_reports(tmp_path: Path) -> None:
    saved, page = tmp_path / "tune.json", tmp_path / "tune.html"
    report().save(saved)
    done = CliRunner().invoke(main, ["report", str(saved), "--html", str(page)])
    assert done.exit_code == 0, done.output
    assert page.read_text(encoding="utf-8") == report().to_html()
    command = ["report", str(saved), "--html", str(page), "--with-samples"]
    assert CliRunner().invoke(main, command).exit_code == 0
    assert page.read_text(encoding="utf-8") == report().to_html(with_samples=True)
    done = CliRunner().invoke(main, ["report", str(saved), "--html", str(saved)])
    assert done.exit_code == 2
    assert "would overwrite" in done.output


@pytest.mark.parametrize("name", ["training-h200", "breaks-h200", "buckets-h200", "capture-h200"])
def test_benchmarks_have_pages(name: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    command = ["report", str(RESULTS / f"{name}.json"), "--html", str(page)]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    text = page.read_text(encoding="utf-8")
    assert len(text.encode()) < 1_000_000
    assert not Reader(text).open
    assert "as fast as eager" in text


def test_a_page_of_many_reports_has_one_section_for_each() -> None:
    models = {name: {"report": report(name).to_dict()} for name in ("one", "other")}
    data = {"schema": "graphwright.bench", "benchmark": "engines", "models": models}
    read = Reader(benchmark_to_page(json.dumps(data)))
    assert {"one", "other", "Strategies"} <= set(read.text)
    assert read.count("svg") == 2 * 5 + 2  # of each report, and over both: times and memory
    links = {attributes["href"] for tag, attributes in read.found if tag == "a"}
    ids = {f"#{attributes['id']}" for _, attributes in read.found if "id" in attributes}
    assert links <= ids


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("no JSON", "damaged"),
        ('{"schema": "other"}', "no result of a benchmark"),
        ('{"schema": "graphwright.bench", "benchmark": "x", "models": {}}', "has no page"),
        ('{"schema": "graphwright.bench", "models": {"a": 3}}', "damaged"),
        ('{"schema": "graphwright.bench", "models": {"a": {"ways": {"b": {"latency_samples": '
         '[["c"]]}}}}}', "damaged"),
    ],
)  # fmt: skip
def test_other_files_are_refused(data: str, said: str) -> None:
    with pytest.raises(GraphwrightError, match=said):
        benchmark_to_page(data)


def test_the_best_other_way_is_none_where_there_is_eager_alone() -> None:
    ways = {name: {"status": "ok", "latency_samples": [[seconds]] * 3}
            for name, seconds in (("eager", 2e-3), ("graphwright.graph", 1e-3))}  # fmt: skip
    models = {"net": {"ways": ways}}
    data = {"schema": "graphwright.bench", "benchmark": "x", "models": models}
    text = "".join(Reader(benchmark_to_page(json.dumps(data))).text)
    assert "graphwright is 2.00× as fast as eager for net." in text
    ways["torch.compile"] = {"latency_samples": [[1.5e-3]] * 3}
    text = "".join(Reader(benchmark_to_page(json.dumps(data))).text)
    assert "2.00× as fast as eager and 1.50× as fast as the best other way for net." in text


def test_a_benchmark_is_shown_as_a_page_only() -> None:
    done = CliRunner().invoke(main, ["report", str(RESULTS / "breaks-h200.json")])
    assert done.exit_code == 2
    assert "it is the result of a benchmark" in done.output
    assert "Give --html PAGE" in done.output


def test_only_benchmarks_are_taken_for_one() -> None:
    assert is_benchmark((RESULTS / "training-h200.json").read_text())
    assert not is_benchmark(report().to_json())


# ------------------------------------------------------------ check, and notebooks


def test_check_makes_a_page_of_its_findings(tmp_path: Path) -> None:
    source = tmp_path / "model.py"
    source.write_text(
        "import torch\n\n\ndef f(x):\n    if x.sum() > 0:\n        x = x + 1\n    return x\n\n\n"
        "def made():\n    return f, (torch.ones(3),)\n"
    )
    page = tmp_path / "check.html"
    done = CliRunner().invoke(main, ["check", f"{source}:made", "--html", str(page)])
    assert done.exit_code == 1, done.output
    read = Reader(page.read_text(encoding="utf-8"))
    assert "breaks" in read.text
    assert read.count("mark") == 1
    assert read.count("article") == 1


def test_check_returns_a_list_that_shows_itself(tmp_path: Path) -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    found = gw.check(doubled, (torch.ones(2),))
    assert [finding.kind for finding in found] == ["small"]
    assert isinstance(found, list)
    assert "doubled: 1 slow" in found._repr_html_()
    found.save(tmp_path / "check.json")
    assert len(json.loads((tmp_path / "check.json").read_text())["findings"]) == 1


def test_statuses_of_rows_keep_their_tone() -> None:
    one = report()
    off = one.row("off")
    assert off is not None
    off.status = Status.CRASHED
    assert '<span class="bad">crashed</span>' in one.to_html()
