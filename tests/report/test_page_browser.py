"""Pages in a real browser: they render offline, sort, fold and print, on a phone, in the dark."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from sample_reports import HOSTILE, report, with_shapes
from shares import share
from torch import nn

import graphwright as gw
from graphwright.checker.finding import Finding, Place, Severity
from graphwright.checker.report import CheckReport
from graphwright.profiler.observation import ObservedOperation
from graphwright.profiler.plots import roofline
from graphwright.profiler.roofs import Roofs
from graphwright.profiler.table import Measured
from graphwright.report.benchmark_page import benchmark_to_page
from graphwright.report.plots import WIDE, WIDTH

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

RESULTS = Path(__file__).parents[2] / "bench" / "results"
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PHONE, DESK = (390, 844), (1440, 900)
KINDS = ("tune", "shapes", "hostile", "training", "tunes", "profile", "check")


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip("no Chromium or Chrome is installed")
    with playwright.sync_playwright() as tools:
        started = tools.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("pages")
    makers: dict[str, Callable[[], str]] = {
        "tune": lambda: report().to_html(),
        "shapes": lambda: with_shapes(["a shape of a rather long name", "b"]).to_html(),
        "hostile": lambda: report(HOSTILE * 3, HOSTILE).to_html(with_samples=True),
        "training": lambda: benchmark_to_page((RESULTS / "training-h200.json").read_text()),
        "tunes": lambda: benchmark_to_page((RESULTS / "tune-h200.json").read_text()),
        "profile": profile_page,
        "check": check_page,
    }

    def made(kind: str) -> Path:
        file = folder / f"{kind}.html"
        if not file.exists():
            file.write_text(makers[kind](), encoding="utf-8")
        return file

    return made


def profile_page() -> str:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    return gw.profile(model, (torch.randn(4, 64),)).to_html()


def check_page() -> str:
    place = Place(
        "folder/" * 12 + "file.py", 3, 7, "value = x.sum().item()" + " + 1" * 30, "x.sum()"
    )
    findings = [
        Finding("read", severity, "item", "It reads a value.", "Do without.", "x.sum()", place, 2)
        for severity in Severity
    ]
    return CheckReport("Model", findings).to_html()


@contextmanager
def opened(
    browser: playwright.Browser, file: Path, size: tuple[int, int] = DESK, scheme: str = "light"
) -> Iterator[playwright.Page]:
    """A page that has said nothing on its console, and asked for nothing but itself."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme
    )
    said: list[str] = []
    asked: list[str] = []
    page = context.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    yield page
    assert said == []
    assert asked == [file.as_uri()]
    context.close()


def texts(page: playwright.Page, column: int) -> list[str]:
    return page.locator(f"table >> nth=0 >> css=td:nth-child({column})").all_inner_texts()


@pytest.mark.parametrize(
    ("size", "scheme"),
    [(PHONE, "light"), (PHONE, "dark"), (DESK, "dark")],
    ids=["phone", "phone in the dark", "desk in the dark"],
)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=pytest.mark.slow) if k in ("training", "tunes") else k for k in KINDS],
)
def test_pages_render_without_network_and_without_sideways_scroll(
    kind: str,
    size: tuple[int, int],
    scheme: str,
    browser: playwright.Browser,
    files: Callable[[str], Path],
) -> None:
    file = files(kind)
    assert file.stat().st_size < 1_000_000
    with opened(browser, file, size, scheme) as page:
        assert page.locator(".verdict").is_visible()
        # All sections open, since what is folded is no wider than nothing.
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width == size[0]
        for plot in page.locator("svg").all()[:6]:
            box = plot.bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= size[0]
            assert box["height"] > 40
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = sum(map(int, ground.removeprefix("rgb(").removesuffix(")").split(",")))
        assert brightness > 600 if scheme == "light" else brightness < 150


@pytest.mark.parametrize("kind", share(KINDS, of=3))
def test_pages_load_within_a_second(
    kind: str, browser: playwright.Browser, files: Callable[[str], Path]
) -> None:
    """The best of three: other load on the machine cannot shorten it."""
    found = []
    for _ in range(3):
        with opened(browser, files(kind)) as page:
            timing = "performance.getEntriesByType('navigation')[0].loadEventEnd"
            page.wait_for_function(f"{timing} > 0")
            found.append(page.evaluate(timing))
        if found[-1] < 1000:
            break
    assert min(found) < 1000


def test_text_in_plots_is_legible_on_a_phone_and_inside_of_them(
    browser: playwright.Browser, files: Callable[[str], Path]
) -> None:
    script = """() => Array.from(document.querySelectorAll("svg text"), (text) => {
      const own = text.getBoundingClientRect();
      const plot = text.ownerSVGElement.getBoundingClientRect();
      const scale = plot.width / text.ownerSVGElement.viewBox.baseVal.width;
      return { text: text.textContent, size: parseFloat(getComputedStyle(text).fontSize) * scale,
        inside: own.left >= plot.left - 1 && own.right <= plot.right + 1 };
    })"""
    with opened(browser, files("tune"), PHONE) as page:
        found = page.evaluate(script)
    assert len(found) > 30
    assert [each for each in found if each["size"] < 8.5 or not each["inside"]] == []


@pytest.mark.parametrize("kind", ["tune", "hostile"])
def test_on_a_phone_the_latency_and_the_gain_are_seen_without_scrolling(
    kind: str, browser: playwright.Browser, files: Callable[[str], Path]
) -> None:
    script = """() => {
      const table = document.querySelector("table");
      const box = table.parentElement.getBoundingClientRect();
      return Array.from(table.rows, (row) => Array.from(row.cells).slice(0, 3).map((cell) => {
        const own = cell.getBoundingClientRect();
        return { text: cell.textContent, seen: own.width > 20 && own.left >= box.left - 1
          && own.right <= Math.min(box.right, innerWidth) + 1 };
      }));
    }"""
    with opened(browser, files(kind), PHONE) as page:
        rows = page.evaluate(script)
        assert [cell["text"] for cell in rows[0]] == ["strategy", "latency", "vs eager"]
        assert [cell for row in rows for cell in row if not cell["seen"]] == []
        # Names stay where they are while the other figures are scrolled to.
        name = page.locator("table >> nth=0 >> css=td").first
        before = name.bounding_box()
        page.evaluate("document.querySelector('.scroll').scrollLeft = 200")
        assert name.bounding_box() == before


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
@pytest.mark.parametrize("kind", ["tune", "shapes", "training"])
def test_no_line_crosses_a_label(
    kind: str,
    size: tuple[int, int],
    browser: playwright.Browser,
    files: Callable[[str], Path],
) -> None:
    script = """() => {
      document.querySelectorAll("details").forEach((each) => each.open = true);
      const found = { lines: 0, labels: 0, crossed: [] };
      for (const plot of document.querySelectorAll("svg")) {
        const labels = Array.from(plot.querySelectorAll("text"), (text) =>
          ({ text: text.textContent, box: text.getBoundingClientRect() }));
        found.labels += labels.length;
        for (const path of plot.querySelectorAll("path")) {
          const style = getComputedStyle(path);
          if (style.stroke === "none" || style.fill !== "none" || path.closest("defs")) continue;
          found.lines += 1;
          const place = path.getScreenCTM();
          // Lines of several pieces: what lies between these is not drawn.
          for (const piece of path.getAttribute("d").split(/(?=M)/)) {
            const one = document.createElementNS("http://www.w3.org/2000/svg", "path");
            one.setAttribute("d", piece);
            const length = one.getTotalLength();
            for (let at = 0; at <= length; at += 1.5) {
              const { x, y } = one.getPointAtLength(at).matrixTransform(place);
              for (const { text, box } of labels) {
                if (x > box.left + 1 && x < box.right - 1 && y > box.top + 3 && y < box.bottom - 3)
                  found.crossed.push(`${plot.getAttribute("aria-label")}: ${text}`);
              }
            }
          }
        }
      }
      return { ...found, crossed: [...new Set(found.crossed)] };
    }"""
    with opened(browser, files(kind), size) as page:
        found = page.evaluate(script)
    assert found["lines"] > 10
    assert found["labels"] > 10
    assert found["crossed"] == []


def test_points_stand_where_the_bars_end(
    browser: playwright.Browser, files: Callable[[str], Path]
) -> None:
    """A row that was screened beside a slower eager, too: by its factor it beats eager."""
    script = """() => Array.from(document.querySelectorAll("figure"), (figure) =>
      Array.from(figure.querySelectorAll("title"))
        .filter((title) => title.textContent.includes("×"))
        .map((title) => {
          const box = title.parentElement.getBoundingClientRect();
          return [title.textContent.split(": ")[0], box.right];
        }))"""
    with opened(browser, files("tune")) as page:
        bars, memory, setup, *_ = page.evaluate(script)
    order = [name for name, _ in sorted(bars, key=lambda pair: pair[1])]
    assert order[0] == "eager"
    assert order.index("torchscript") > order.index("inductor")
    for points in (memory, setup):
        ends = dict(points)
        assert len(ends) == len(order)
        assert [ends[name] for name in order] == sorted(ends.values())


def test_the_choice_and_eager_are_named_in_plots_of_points(
    browser: playwright.Browser, files: Callable[[str], Path]
) -> None:
    with opened(browser, files("tune")) as page:
        for heading in ("Speed against peak memory", "Speed against set-up"):
            plot = page.locator("figure", has_text=heading)
            named = plot.locator("text").all_text_contents()
            assert {"inductor+graph", "eager"} <= set(named)


def test_a_click_sorts_by_figures_and_a_second_one_the_other_way(
    browser: playwright.Browser, files: Callable[[str], Path]
) -> None:
    with opened(browser, files("tune")) as page:
        heading = page.get_by_role("button", name="set-up").first
        column = 1 + page.evaluate("(b) => b.parentElement.cellIndex", heading.element_handle())
        heading.click()
        order = ["100 µs", "200 ms", "5.00 s", "7.00 s", "8.00 s", "9.00 s", "20.0 s", "–"]
        assert texts(page, column) == order
        assert heading.locator("..").get_attribute("aria-sort") == "ascending"
        heading.click()
        assert texts(page, column) == [*order[-2::-1], "–"]
        strategy = page.get_by_role("button", name="strategy").first
        strategy.press("Enter")  # Without a mouse, too.
        assert texts(page, 1)[:4] == [
            "channels_last+inductor:max-autotune+graph",
            "channels_last+inductor+graph",
            "eager",
            "inductor",
        ]
        assert heading.locator("..").get_attribute("aria-sort") is None


def test_blanks_are_sorted_last_both_ways(
    browser: playwright.Browser, files: Callable[[str], Path]
) -> None:
    with opened(browser, files("tune")) as page:
        heading = page.get_by_role("button", name="break-even").first
        column = 1 + page.evaluate("(b) => b.parentElement.cellIndex", heading.element_handle())
        for _ in range(2):
            heading.click()
            assert texts(page, column)[-1] == "–"


def test_sections_fold_and_links_unfold_them(
    browser: playwright.Browser, files: Callable[[str], Path]
) -> None:
    with opened(browser, files("training")) as page:
        section = page.locator("details.section", has_text="mlp").nth(1)
        plot = section.locator("svg").first
        assert not plot.is_visible()
        page.get_by_role("link", name="mlp").click()
        assert plot.is_visible()
        section.locator("summary").click()
        assert not plot.is_visible()


def test_paper_is_light_and_shows_what_is_folded(
    browser: playwright.Browser, files: Callable[[str], Path]
) -> None:
    with opened(browser, files("tune"), scheme="dark") as page:
        folded = page.get_by_text("pip install absent").first
        assert not folded.is_visible()
        page.emulate_media(media="print", color_scheme="dark")
        assert folded.is_visible()
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == "rgb(255, 255, 255)"
        assert len(page.pdf()) > 10_000
        page.emulate_media(media="screen")
        folded.wait_for(state="hidden")


def test_nothing_that_a_name_contains_is_run(
    browser: playwright.Browser, files: Callable[[str], Path]
) -> None:
    with opened(browser, files("hostile")) as page:
        assert page.locator("h1").inner_text() == HOSTILE * 3
        assert page.evaluate("window.broken") is None
        assert page.locator("img").count() == 0


# Names of a plot that something else than the grid goes through, which is drawn behind them.
CROSSED = """() => {
    const within = (box, x, y) =>
        x > box.left + 1 && x < box.right - 1 && y > box.top + 1 && y < box.bottom - 1;
    const overlap = (a, b) =>
        a.left + 1 < b.right && b.left + 1 < a.right &&
        a.top + 1 < b.bottom && b.top + 1 < a.bottom;
    const isGrid = path => path.hasAttribute("clip-path") && path.style.strokeWidth === "0.8";
    const lines = [...document.querySelectorAll("svg path")].filter(
        path => !path.closest("defs") && path.style.stroke && !isGrid(path));
    const points = lines.flatMap(path => {
        const place = path.getScreenCTM(), found = [];
        for (let at = 0; at <= path.getTotalLength(); at += 0.5)
            found.push(path.getPointAtLength(at).matrixTransform(place));
        return found;
    });
    const dots = [...document.querySelectorAll("svg g[clip-path] use")].map(
        dot => dot.getBoundingClientRect());
    const names = [...document.querySelectorAll("svg text")].map(
        text => ({said: text.textContent, box: text.getBoundingClientRect()}));
    return {
        lines: lines.length,
        dots: dots.length,
        names: names.map(name => name.said),
        crossed: names.filter(({box}) =>
            points.some(point => within(box, point.x, point.y)) ||
            dots.some(dot => overlap(box, dot)) ||
            names.some(other => other.box !== box && overlap(box, other.box))
        ).map(name => name.said),
    };
}"""
COLORS = "--ink: #000; --muted: #555; --line: #ddd; --paper: #fff;" + "".join(
    f" --s{number}: #{number}{number}9;" for number in range(1, 8)
)
CLOSE = {"bfloat16": 7.2e14, "float16": 7e14, "tf32": 4.2e14, "float64": 6e13, "float32": 5.2e13}


def product(precision: str, intensity: float, rate: float) -> Measured:
    """A product of some FLOPs a byte at so many FLOP/s."""
    flops, nbytes = int(1e9 * intensity), int(1e9)
    plain = (False, False, "", False, False)
    found = ObservedOperation("aten::mm", "", None, nbytes, flops, precision, precision, (), *plain)
    return Measured(found, flops / rate, 0, "arithmetic")


@pytest.mark.parametrize("width", [WIDTH, WIDE])
@pytest.mark.parametrize(
    ("flops", "bandwidth", "dots"),
    [
        (CLOSE, 2e12, [(1, 1.5e12), (8, 1.7e13), (300, 4e14), (3000, 7.1e14)]),
        ({"float32": 1e11, "bfloat16": 9e10}, 1e10, []),
        ({"float32": 1e11}, 1e10, [(300, 5e9)]),  # The slope is steep, and near the edge.
        ({"float32": 1e11}, 1e10, [(1.3, 6e7), (2, 1.8e10), (15, 9e10), (70, 1e11), (70, 1.1e11)]),
    ],
)
def test_nothing_crosses_a_name_in_a_roofline(
    flops: dict[str, float],
    bandwidth: float,
    dots: list[tuple[float, float]],
    width: float,
    browser: playwright.Browser,
) -> None:
    names = itertools.cycle(flops)
    measured = [product(next(names), intensity, rate) for intensity, rate in dots]
    roofs = Roofs("a machine", 1, ((1 << 27, (1 << 27) / bandwidth),), flops, 1e-6)
    svg = roofline("Net", measured, roofs, width=width)
    page = browser.new_page()
    page.set_content(f"<style>:root {{{COLORS}}} body {{font-family: sans-serif}}</style>{svg}")
    found = page.evaluate(CROSSED)
    page.close()
    used = {each.operation.precision for each in measured} or set(flops)
    assert found["dots"] == len(dots)
    assert found["lines"] == 1 + len(used) + 2  # The slope, the roofs, and two axes.
    assert sum("FLOP/s" in name for name in found["names"]) == len(used) + 1
    assert any(name.startswith("copy ") for name in found["names"])
    assert found["crossed"] == []
