"""The page of a profile: the verdict, what remedies can give, plots, tables, the machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..calls.plurals import counted
from ..report.markup import Html, element, facts, html, join, table
from ..report.page import CHOSEN, Section, Tile, figure, legend, page, paragraphs, plots
from ..report.plots import WIDTH, Group, Mark, PlotRow, rows
from ..report.table import duration
from .plots import drawn_timeline, roofline
from .profile_data import ProfileData
from .remedies import Remedy
from .rendering import byte_count, span
from .table import GROUPS, Measured, OperationRow
from .trace import Bar

# Rows that a table shows.
_ROWS = 40


def to_page(profile: ProfileData, measured: Sequence[Measured], bars: Sequence[Bar]) -> str:
    """A profile as a page of its own.

    Args:
        profile: the verdict, and what it rests on.
        measured: its operations.
        bars: of a timeline of one call; may be empty.

    Raises:
        GraphwrightError: matplotlib is not installed.
    """
    what = "forward and backward" if profile.training else "forward"
    head, _, rest = profile.verdict.text.rstrip(".").partition(". ")
    return page(
        "graphwright profile",
        profile.name,
        f"{what} on {profile.roofs.device}",
        f"{head}.",
        _sections(profile, measured, bars),
        more=f"{rest}." if rest else "",
        tiles=_tiles(profile),
        footer=f"torch {profile.environment.get('torch', 'unknown')}; {profile.seconds:.0f} s.",
    )


def _tiles(profile: ProfileData) -> list[Tile]:
    times = profile.times
    on_gpu = profile.device != "cpu"
    which = f"{duration(times.low_s)} to {duration(times.high_s)}" if on_gpu else "the fastest"
    found = [Tile("a call", duration(profile.call_s), f"{which} of {times.calls} calls")]
    if on_gpu:
        found.append(Tile("the host's part", duration(times.host_s)))
    applying = [remedy for remedy in profile.remedies if remedy.applies]
    if applying:
        best = max(applying, key=lambda remedy: remedy.high)
        found.append(Tile("most promising", best.name, f"{span(best.low, best.high)} as fast"))
    return found


def _sections(
    profile: ProfileData, measured: Sequence[Measured], bars: Sequence[Bar]
) -> list[Section]:
    body = join([plots(_drawn(profile, measured, bars)), _lines(profile)])
    found = [Section("Where the time goes", body)]
    if profile.remedies:
        found.append(Section("Remedies", _remedies(profile.remedies)))
    for by in GROUPS:
        listed = profile.table(by)
        if listed:
            aside = counted(len(listed), by)
            body = _table(by, listed, gpu=profile.device != "cpu")
            found.append(Section(f"By {by}", body, aside, folded=by != "module"))
    found.append(Section("Roofs", _roofs(profile), folded=True))
    body = join([facts(profile.environment), paragraphs(profile.notes)])
    found.append(Section("Environment and notes", body, folded=True))
    return found


def _drawn(profile: ProfileData, measured: Sequence[Measured], bars: Sequence[Bar]) -> list[Html]:
    found = [*_shares(profile)]
    gains = [remedy for remedy in profile.remedies if remedy.applies]
    if gains:
        found.append(_gains(profile.name, sorted(gains, key=lambda remedy: -remedy.high)))
    found += _roofline(profile, measured)
    if bars:
        plot = drawn_timeline(profile.name, bars, width=WIDTH)
        found.append(figure("One call", plot, "Short pieces that follow each other are one."))
    return found


def _shares(profile: ProfileData) -> Iterator[Html]:
    """The shares of the time by cause, if they are known."""
    shares = {c: share for c, share in profile.verdict.shares.items() if share >= 0.005}
    if not shares:
        return
    lines = []
    for cause, share in shares.items():
        tone = CHOSEN if cause in profile.verdict.causes else "s1"
        mark = Mark(share, color=tone)
        lines.append(PlotRow(str(cause), f"{share:.0%}", [mark], tone == CHOSEN))
    plot = rows("shares", f"Bars: shares of the time of {profile.name}, by cause",
                [Group("", lines)], "share of the time", "{:.0%}".format)  # fmt: skip
    yield figure("Shares of the time", plot)


def _roofline(profile: ProfileData, measured: Sequence[Measured]) -> Iterator[Html]:
    """Operations below the roofs, if FLOPs and bytes of some are known."""
    known = [each for each in measured if each.operation.flops and each.operation.nbytes]
    if not known:
        return
    plot = roofline(profile.name, measured, profile.roofs, width=WIDTH)
    whole = sum(each.seconds for each in measured) or 1.0
    rest = 1 - sum(each.seconds for each in known) / whole
    caption = f"A dot's area is its time; point at it for its module. {rest:.0%} of the time "
    caption += "is in operations without counted FLOPs."
    yield figure("Roofline", plot, caption)


def _gains(name: str, remedies: Sequence[Remedy]) -> Html:
    lines = []
    graphs = False
    for remedy in remedies:
        marks = [_mark(remedy.low, remedy.high, CHOSEN)]
        if remedy.under_graph is not None:
            graphs = True
            marks.append(_mark(*remedy.under_graph, "s1"))
        lines.append(PlotRow(remedy.name, span(remedy.low, remedy.high), marks))
    plot = rows("gains", f"Bars: the range of the gain of each remedy for {name}",
                [Group("", lines)], "times as fast", "{:.3g}×".format,
                reference=(1.0, "now"))  # fmt: skip
    colors = [(CHOSEN, "by itself"), ("s1", "beside a graph")]
    return figure("What remedies can give", plot, "Each bar is a range; the upright line is now.",
                  legend(colors) if graphs else "")  # fmt: skip


def _mark(low: float, high: float, tone: str) -> Mark:
    width = max(high - low, 0.01 * high)
    return Mark(low + width, color=tone, hint=span(low, high), start=low)


def _lines(profile: ProfileData) -> Html:
    """The user's source that the verdict is about."""
    parts: list[Html] = []
    for line, what in profile.verdict.lines[:5]:
        parts.append(element("p", element("code", f"{line.file}:{line.number}"), f" {what}"))
        if line.source:
            parts.append(element("pre", line.source))
    return join([element("h3", "Lines that it is about"), *parts]) if parts else Html("")


def _remedies(remedies: Sequence[Remedy]) -> Html:
    ordered = sorted(remedies, key=lambda remedy: (not remedy.applies, -remedy.high))
    cells = [
        [
            remedy.name,
            span(remedy.low, remedy.high) if remedy.applies else "–",
            "–" if remedy.under_graph is None else span(*remedy.under_graph),
            remedy.why,
        ]
        for remedy in ordered
    ]
    return table(["remedy", "times as fast", "beside a graph", "why"], cells, texts=4, stacked=True)


def _table(by: str, listed: Sequence[OperationRow], *, gpu: bool) -> Html:
    count = "launches" if gpu else "operations"
    cells = [
        [
            element("code", row.key),
            row.cause,
            duration(row.seconds),
            f"{row.share:.1%}",
            str(row.launches if gpu else row.operations),
            byte_count(row.nbytes),
            f"{row.of_roof:.0%}",
        ]
        for row in listed[:_ROWS]
    ]
    body = table([by, "bound by", "time", "share", count, "bytes", "of roof"], cells, texts=2)
    left = len(listed) - _ROWS
    return join([body, paragraphs([f"{counted(left, 'other')}."] if left > 0 else [])])


def _roofs(profile: ProfileData) -> Html:
    roofs = profile.roofs
    pairs = {"copy": f"{roofs.bandwidth / 1e9:.3g} GB/s"}
    pairs |= {f"products in {name}": f"{v / 1e12:.3g} TFLOP/s" for name, v in roofs.flops.items()}
    pairs["an operation"] = duration(roofs.operation_s)
    if roofs.kernel_s:
        pairs["the shortest kernel"] = duration(roofs.kernel_s)
    pairs |= {name: f"{value / 1e9:.3g} GB/s" for name, value in roofs.transfers.items()}
    pairs["measured"] = roofs.measured if roofs.recalled else "now"
    return facts(pairs)


def to_short_html(profile: ProfileData) -> str:
    """A profile for a notebook: the verdict, shares and remedies; without colours of its own."""
    heading = f"{profile.name}: {duration(profile.call_s)} a call"
    shares = [
        f"{cause} {share:.0%}" for cause, share in profile.verdict.shares.items() if share >= 0.005
    ]
    gains = [
        element("tr", element("td", each.name), element("td", span(each.low, each.high)),
                element("td", each.why))
        for each in sorted(profile.remedies, key=lambda remedy: -remedy.high)
        if each.applies
    ]  # fmt: skip
    head = element("tr", *(element("th", h) for h in ("remedy", "times as fast", "why")))
    parts = [
        element("strong", heading),
        element("p", profile.verdict.text),
        element("p", f"Shares of the time: {', '.join(shares)}.") if shares else html(""),
        element("table", element("thead", head), element("tbody", *gains)) if gains else html(""),
    ]
    return element("div", *parts)
