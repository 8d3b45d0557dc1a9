"""Results of tuning: one row per candidate, the choice, and the evidence for both.

All of it is plain data. `to_json` and `from_json` keep every raw sample. The schema's version is
raised whenever an old reader would misread the new format.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from ..errors import GraphwrightError
from ..evaluation.accuracy import ErrorMeasure
from ..evaluation.measurement import Measurement, break_even, median_interval

SCHEMA = "graphwright.tune"
SCHEMA_VERSION = 2
COMPILE_DEFAULT = "inductor"
EAGER = "eager"
# The objectives that are times of calls.
OF_TIME = ("latency", "throughput")


class Status(enum.StrEnum):
    """What became of a candidate."""

    OK = "ok"
    SLOWER = "slower"
    WRONG = "wrong"
    FAILED = "failed"
    CRASHED = "crashed"
    TIMED_OUT = "timed out"
    MEMORY_EXCEEDED = "memory exceeded"
    UNAVAILABLE = "unavailable"
    NOT_TRIED = "not tried"


@dataclass
class Row:
    """One candidate: its status, the reason for it, and what was measured.

    Memory is in bytes, times are in seconds. With several shapes, figures are means by the shapes'
    weights.

    Attributes:
        strategy: the candidate's name.
        screening: measured in turns with eager, without the checks of a TunedModule.
        baseline: eager in the same rounds.
        final: measured in turns with all other finalists, with these checks.
        unsteady: why its figures are not to be compared, as on a busy machine; empty if they are.
        bare: of torch.compile's default as a finalist, the same without these checks.
        build_s: seconds of a build that it shares with another row, in addition to `setup_s`.
        verify_s: seconds that it took to verify it.
        repeat: the command that tries this candidate alone again.
        by_shape: with several shapes, a row for each.
        cold_start_s: the shortest of `first_answers`.
        first_answers: from the start of a process to its first right answer.
    """

    strategy: str
    status: Status
    reason: str = ""
    remedy: str = ""
    notes: list[str] = field(default_factory=list)
    complexity: int = 0
    setup_s: float | None = None
    peak_bytes: int | None = None
    error: ErrorMeasure | None = None
    screening: Measurement | None = None
    baseline: Measurement | None = None
    final: Measurement | None = None
    bare: Measurement | None = None
    unsteady: str = ""
    build_s: float = 0.0
    verify_s: float = 0.0
    repeat: str = ""
    by_shape: dict[str, Row] = field(default_factory=dict, repr=False)
    cold_start_s: float | None = None
    first_answers: list[float] = field(default_factory=list)

    def to_json(self) -> str:
        """The row as JSON, every raw sample included."""
        return json.dumps(_finite(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, text: str) -> Row:
        """Read what `to_json` wrote; raises ValueError, TypeError or KeyError for other text."""
        return _row(json.loads(text))

    @property
    def measurement(self) -> Measurement | None:
        """The measurement of the final rounds, or else of the screening."""
        return self.final or self.screening

    @property
    def setup_alone_s(self) -> float | None:
        """Seconds of its set-up if nothing else shares a build with it."""
        return None if self.setup_s is None else self.setup_s + self.build_s


@dataclass
class Shape:
    """One of several calls that were tuned for, and its share of all calls."""

    name: str
    weight: float
    inputs: list[str]


@dataclass(frozen=True)
class BestSoFar:
    """The best that was known some seconds after the start: how many times as fast as eager."""

    seconds: float
    strategy: str
    speedup: float


@dataclass(frozen=True)
class Prediction:
    """What `profile` predicted of a remedy, and what tuning measured.

    Attributes:
        remedy: its name.
        strategy: of tune(), that is this remedy and nothing else.
        beside: the strategy that the gain is over.
        low: the lower end of the predicted gain.
        high: the upper end.
        measured: the gain as tuning measured it.
    """

    remedy: str
    strategy: str
    beside: str
    low: float
    high: float
    measured: float

    @property
    def inside(self) -> bool:
        """Whether what was measured lies inside of what was predicted."""
        return self.low <= self.measured <= self.high

    def __str__(self) -> str:
        said = "inside" if self.inside else "outside"
        return (
            f"{self.strategy} over {self.beside}: {self.low:.2f}–{self.high:.2f}× predicted, "
            f"{self.measured:.2f}× measured, {said}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self) | {"inside": self.inside}


@dataclass
class Results:
    """The result of one run of `tune`, as data.

    `shapes` is empty if there was one call to tune for; `inputs` are those of the first call.
    `recalled` says when the choice was made if it comes from the choice cache. `curve` says when
    the search had found something better than all before. `host_s` is what the host needs for a
    call, if that is known, and `input_bytes` the size of its tensors: what bounds follow from.
    `predictions` are there if the model was profiled before. `left_out` names the variations of the
    inputs that no candidate was verified with, since eager does not survive them. `budget_s` is the
    limit of the run's `seconds`, a default one as it had grown; None without a limit.
    """

    model: str
    inputs: list[str]
    objective: str
    rows: list[Row]
    environment: dict[str, str]
    chosen: str | None = None
    reason: str = ""
    notes: list[str] = field(default_factory=list)
    eager_error: ErrorMeasure | None = None
    created: str = ""
    seconds: float = 0.0
    interrupted: bool = False
    shapes: list[Shape] = field(default_factory=list)
    recalled: str = ""
    curve: list[BestSoFar] = field(default_factory=list)
    host_s: float | None = None
    input_bytes: int = 0
    predictions: list[Prediction] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    budget_s: float | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Pickles of earlier versions lack the fields that were added since.
        vars(self).update(vars(Results("", [], "", [], {})) | state)

    def row(self, strategy: str) -> Row | None:
        """The row of a strategy, by name."""
        return next((row for row in self.rows if row.strategy == strategy), None)

    @property
    def chosen_row(self) -> Row | None:
        """The row of the chosen strategy."""
        return None if self.chosen is None else self.row(self.chosen)

    @property
    def figure(self) -> str:
        """The figure that ratios are of: "throughput" if that is the objective, else "latency"."""
        return "throughput" if self.objective == "throughput" else "latency"

    @property
    def own_error(self) -> ErrorMeasure | None:
        """Eager's own error: the largest over all inputs, as every other row's is.

        `eager_error` is what the limits of candidates follow from, and counts all inputs together.
        """
        row = self.row(EAGER)
        return self.eager_error if row is None or row.error is None else row.error

    def ratios(self, row: Row, other: str = EAGER) -> list[float]:
        """Time of a row relative to another's, one figure per round of the same set of rounds.

        Finalists are compared in their common rounds. Any other row is compared with eager alone,
        in the rounds of its screening. Empty without such rounds, and where one is unsteady.
        """
        peer = self.row(other)
        if peer is None or row.unsteady:
            return []
        if row.final is not None:
            if peer.final is None or peer.unsteady:
                return []
            return row.final.ratios(peer.bare or peer.final, self.figure)
        if other != EAGER or row.screening is None or row.baseline is None:
            return []
        return row.screening.ratios(row.baseline, self.figure)

    def cost(self, row: Row) -> float:
        """The figure to minimize: time relative to eager, peak bytes, or seconds to an answer.

        Where a ratio to eager is not known, as beside other work that makes times unsteady, it is
        the most that it can be. Infinite if nothing is known.
        """
        if self.objective == "cold_start":
            return math.inf if row.cold_start_s is None else row.cold_start_s
        if self.objective == "memory" and row.peak_bytes is not None:
            return float(row.peak_bytes)
        ratios = self.ratios(row)
        return statistics.median(ratios) if ratios else self._cost_at_most(row)

    def _cost_at_most(self, row: Row) -> float:
        """A row's slowest rounds relative to the fastest that eager was ever seen."""
        if row.measurement is None:
            return math.inf
        if row.strategy == EAGER:
            return 1.0
        eager = self.row(EAGER)
        seen = [] if eager is None else [eager.screening, eager.final]
        seen += [each.baseline for each in self.rows]
        fastest = min((each.fastest(self.figure) for each in seen if each), default=0.0)
        rounds = row.measurement.rounds(self.figure)
        slowest = max(rounds) if row.unsteady else median_interval(rounds)[1]
        return slowest / fastest if fastest else math.inf

    def speedup(self, row: Row, other: str = EAGER) -> tuple[float, float, float] | None:
        """How many times faster than another row: median and 95 % interval; None without data."""
        ratios = self.ratios(row, other)
        if not ratios:
            return None
        inverse = [1 / r for r in ratios]
        low, high = median_interval(inverse)
        return statistics.median(inverse), low, high

    def break_even(self, row: Row, other: str = EAGER) -> int | None:
        """Calls after which the set-up has paid off against another row's; None if never."""
        peer, ratios = self.row(other), self.ratios(row, other)
        if peer is None or peer is row or row.measurement is None or not ratios:
            return None
        mine = row.measurement.typical(self.figure).median
        # The other's time follows from the ratio, so that both belong to the same rounds.
        theirs = mine / statistics.median(ratios)
        mine_s, theirs_s = (one.setup_alone_s or 0.0 for one in (row, peer))
        return break_even(mine_s, mine, theirs_s, theirs)

    # ------------------------------------------------------------ JSON

    def to_json(self) -> str:
        """The report as JSON, every raw sample included, in seconds."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """What `to_json` writes, as dictionaries and lists."""
        data = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}
        found: dict[str, Any] = _finite(data)
        return found

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote.

        Raises:
            GraphwrightError: the text is not a report, or has a schema that cannot be read.
        """
        try:
            data = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise GraphwrightError(
                f"The report is not valid JSON: {error}.",
                remedy="Reports are written by `graphwright tune --json FILE`.",
            ) from error
        if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
            raise GraphwrightError(
                "This is not a report of graphwright tune.",
                remedy="Reports are written by `graphwright tune --json FILE`.",
            )
        version = data.pop("schema_version", None)
        if version != SCHEMA_VERSION:
            raise GraphwrightError(
                f"The report has schema version {version}, and only {SCHEMA_VERSION} can be read.",
                remedy="Use the version of graphwright that wrote it, or tune again.",
            )
        try:
            rows = [_row(row) for row in data.pop("rows")]
            shapes = [Shape(**shape) for shape in data.pop("shapes")]
            curve = [BestSoFar(**step) for step in data.pop("curve", [])]
            predictions = [Prediction(**each) for each in data.pop("predictions", [])]
            eager = _error(data.pop("eager_error"))
            report = cls(
                rows=rows,
                eager_error=eager,
                shapes=shapes,
                curve=curve,
                predictions=predictions,
                **data,
            )
            for texts in (report.notes, report.left_out):
                if type(texts) is not list or not all(type(text) is str for text in texts):
                    raise TypeError("its notes are no texts")
            report.check()
            return report
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise GraphwrightError(f"The report is damaged: {error!r}.") from error

    def check(self) -> None:
        """Raise if the data is damaged in a way that no single field shows."""


def _row(data: Mapping[str, Any]) -> Row:
    fields = dict(data)
    fields["status"] = Status(fields["status"])
    fields["error"] = _error(fields["error"])
    for name in ("screening", "baseline", "final", "bare"):
        fields[name] = _measurement(fields[name])
    fields["by_shape"] = {name: _row(one) for name, one in fields["by_shape"].items()}
    return Row(**fields)


def _error(data: Mapping[str, Any] | None) -> ErrorMeasure | None:
    return None if data is None else ErrorMeasure(float(data["rms"]), float(data["max"]))


def _measurement(data: Mapping[str, Any] | None) -> Measurement | None:
    if data is None:
        return None
    latency = tuple(tuple(map(float, block)) for block in data["latency"])
    throughput = tuple(map(float, data["throughput"]))
    return Measurement(latency, throughput, float(data.get("interrupted", 0.0)))


def _finite(value: Any) -> Any:
    """The same data with NaN and Inf as text, which JSON has no numbers for."""
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


# Its name in files that were pickled before.
Step = BestSoFar
