"""What accelerate() returns: a program with its parts, what answers them, and how it is undone."""

from __future__ import annotations

import json
import textwrap
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from torch import nn

from ..artifacts.tuned_module import TunedModule
from ..calls.plurals import counted
from ..errors import GraphwrightError
from ..report.markup import element
from ..report.result import EAGER
from ..report.table import duration
from .inspection import ProgramInspection
from .installation import Answer, install, uninstall
from .observed_calls import ModuleMethod
from .part_answer import TunedAnswer
from .part_calls import calls_learned
from .part_tuning import tuned_for
from .whole import WholeProgram

SCHEMA, SCHEMA_VERSION = "graphwright.accelerate", 1
_WIDTH = 80
# How far a part's results may be off, relative to eager's own error, as in tune; and that error
# where nothing, or none, was measured.
_OFF, _OWN_ERROR = 3.0, 1e-6
# Seconds for tuning all parts, unless another budget is given.
BUDGET_S = 90.0


class PartAnswerer(Protocol):
    """What answers a method's calls, and counts which way they went."""

    @property
    def calls(self) -> Counter[str]:
        """How many calls went which way."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a call."""


@dataclass
class AcceleratedPart:
    """A method of a module in an accelerated program.

    Attributes:
        target: the method.
        share: of the program's time, before.
        kept: whether something else answers its calls now.
        chosen: what was found for it: a strategy, or "graph_generate"; "" for nothing.
        reason: why it was kept, or left as it is.
        module: whose method it is.
        answer: what answers its calls; None for the module itself.
    """

    target: ModuleMethod
    share: float
    kept: bool = False
    chosen: str = ""
    reason: str = ""
    module: nn.Module | None = field(default=None, repr=False)
    answer: PartAnswerer | None = field(default=None, repr=False)

    @property
    def calls(self) -> Counter[str]:
        """How many calls went which way since it is installed."""
        return Counter() if self.answer is None else Counter(self.answer.calls)

    @property
    def tuned(self) -> TunedModule | None:
        """What tuning has made of it; None if nothing is kept, and for generate()."""
        return self.answer.tuned if isinstance(self.answer, TunedAnswer) else None

    @property
    def missed(self) -> int:
        """How many kinds of calls were seen that it was not tuned for, and could be learned.

        A new state of the module, such as another adapter, counts as one.
        """
        answer = self.answer
        return len(answer.missed) + answer.is_left if isinstance(answer, TunedAnswer) else 0

    def __str__(self) -> str:
        chosen = f" by {self.chosen}" if self.kept else ""
        return f"{self.share:4.0%}  {self.target}: {'answered' if self.kept else 'left'}{chosen}"


class InstalledParts:
    """What is installed for the parts of a program, and taken out together.

    Attributes:
        answers: by module, the last one last.
    """

    def __init__(self) -> None:
        self.answers: list[tuple[nn.Module, dict[str, Answer]]] = []

    def put_in(self, part: AcceleratedPart, module: nn.Module, answer: PartAnswerer) -> None:
        """Have a part's calls answered."""
        answers: dict[str, Answer] = {part.target.method: answer}
        self.answers.append((module, answers))  # So that an interruption takes it out.
        if isinstance(answer, TunedAnswer):
            answer.attach()
        install(module, answers)
        part.kept, part.module, part.answer = True, module, answer

    def take_out(self, part: AcceleratedPart) -> None:
        """Have the module answer the calls itself of the part that was put in last."""
        uninstall(*self.answers.pop())
        part.kept, part.answer = False, None

    def exchange(self, part: AcceleratedPart, answer: TunedAnswer) -> None:
        """Have a part's calls answered by something else, from one call to the next."""
        module, method = part.module, part.target.method
        assert module is not None
        after: dict[str, Answer] = {method: answer}
        answer.attach()
        install(module, after)
        for number, (_, before) in enumerate(self.answers):
            if before.get(method) is part.answer:
                uninstall(module, before)
                self.answers[number] = module, after
        part.answer = answer

    def take_all_out(self) -> None:
        """Have the modules answer all calls themselves."""
        for module, answers in self.answers:
            uninstall(module, answers)
        self.answers.clear()


class Accelerated:
    """A program whose modules' calls are answered by what tuning has found: `accelerate` makes it.

    Calls that nothing was tuned for go to the module itself and are counted; `learn` tunes for
    them. A context manager whose end is `undo()`. A notebook shows it as a table.

    Attributes:
        inspection: of the program, before anything was changed.
        parts: the methods that could take part, and what became of each.
        before_s: seconds of all calls before, the median of rounds.
        after_s: the same by now, in the same rounds.
    """

    def __init__(
        self, inspection: ProgramInspection, installed: InstalledParts, learner: PartLearner
    ) -> None:
        self.inspection = inspection
        self.parts: list[AcceleratedPart] = []
        self.before_s = self.after_s = sum(inspection.seconds)
        self._installed, self._learner = installed, learner
        self._lock = threading.RLock()

    @property
    def speedup(self) -> float:
        """How many times as fast the whole program is, end to end."""
        return self.before_s / self.after_s if self.after_s else 1.0

    def undo(self) -> None:
        """Put all modules back as they were; once is enough."""
        with self._lock:
            self._installed.take_all_out()
            for part in self.parts:
                part.kept, part.answer = False, None

    def learn(self) -> int:
        """Tune for the calls that were seen since and were not tuned for.

        Other threads may call the program meanwhile: what answers is exchanged between calls.

        Returns:
            for how many kinds of calls something is tuned now that was not before.
        """
        with self._lock:
            learn, installed = self._learner.learn, self._installed
            return sum(learn(part, installed) for part in self.parts if part.missed)

    def explain(self) -> str:
        """What became of each part, the time of the whole, and how calls went since."""
        lines = [self._head()]
        for part in self.parts:
            lines.append(str(part))
            for text in _notes(part):
                lines += textwrap.wrap(
                    text,
                    _WIDTH,
                    initial_indent=" " * 8,
                    subsequent_indent=" " * 10,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
        return "\n".join(lines)

    def to_json(self) -> str:
        """What became of each part, and the times of the whole, as JSON with a schema version."""
        parts = [
            {
                "method": str(part.target),
                "share": part.share,
                "kept": part.kept,
                "chosen": part.chosen,
                "reason": part.reason,
                "calls": dict(part.calls),
                "missed": part.missed,
                "tuning": None if part.tuned is None else json.loads(part.tuned.report.to_json()),
            }
            for part in self.parts
        ]
        found = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION}
        found |= {"program": self.inspection.name, "before_s": self.before_s}
        found |= {"after_s": self.after_s, "parts": parts}
        return json.dumps(found, indent=1, ensure_ascii=False) + "\n"

    def _head(self) -> str:
        head = f"{self.inspection.name}: {duration(self.before_s)} before, "
        return f"{head}{duration(self.after_s)} now ({self.speedup:.2f}×)"

    def _repr_html_(self) -> str:
        headings = ("share", "method", "answered by", "why, and how calls went since")
        head = element("tr", *(element("th", heading) for heading in headings))
        rows = []
        for part in self.parts:
            answered = part.chosen if part.kept else "itself"
            cells = (f"{part.share:.0%}", str(part.target), answered, "; ".join(_notes(part)))
            rows.append(element("tr", *(element("td", cell) for cell in cells)))
        table = element("table", element("thead", head), element("tbody", *rows))
        return element("div", element("strong", self._head()), table)

    def __enter__(self) -> Accelerated:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()

    def __str__(self) -> str:
        return self.explain()

    def __repr__(self) -> str:
        kept = sum(part.kept for part in self.parts)
        of = counted(len(self.parts), "part")
        return f"<Accelerated {self.inspection.name}, {kept} of {of} answered>"


def _notes(part: AcceleratedPart) -> Iterator[str]:
    """What is said of a part below its name."""
    if part.reason:
        yield part.reason
    ways = part.calls.most_common()
    if ways:
        yield ", ".join(f"{counted(n, 'call')} {way}" for way, n in ways)
    if part.missed:
        yield f"{counted(part.missed, 'other kind')} of call: learn() tunes"


@dataclass(frozen=True)
class PartLearner:
    """Tunes parts of an accelerated program for calls that were seen since.

    Attributes:
        options: of `tune`.
        buckets: whether what is made may answer sizes between those that were seen.
        whole: the program; None if its calls are not known, as after loading.
    """

    options: Mapping[str, Any]
    buckets: bool = True
    whole: WholeProgram | None = None

    def learn(self, part: AcceleratedPart, installed: InstalledParts) -> int:
        """Tune a part for the calls it was not tuned for; the number of their kinds, or 0."""
        answer, module = part.answer, part.module
        assert isinstance(answer, TunedAnswer)
        assert module is not None
        missed, others = list(answer.missed), answer.of_other_states()
        learned = part.missed
        calls = calls_learned(part.target, module, answer.known, missed)
        if not calls.samples:
            answer.forget()
            return 0
        try:
            tuned = tuned_for(module, calls, self.buckets, self._options_for(part))
        except GraphwrightError as error:
            part.reason = f"it could not learn: {error.what}"
            return 0
        if (tuned.report.chosen or EAGER) == EAGER:
            answer.forget()
            return 0
        following = TunedAnswer(module, part.target.method, tuned, calls, others)
        # In other states than this one the program may be another: only tuning has compared this.
        whole = None if answer.is_left or others else self.whole
        if whole is not None:  # Its results are others by now where weights are.
            whole.expect_what_it_is(module, part.target.method)
        installed.exchange(part, following)
        try:
            wrong = whole and whole.why_wrong(module, part.target.method, allowed_error(following))
        except BaseException:
            installed.exchange(part, answer)
            raise
        if wrong is not None:
            installed.exchange(part, answer)
            part.reason = f"it could not learn: {wrong}"
            return 0
        part.chosen = tuned.report.chosen or EAGER
        return learned

    def _options_for(self, part: AcceleratedPart) -> Mapping[str, Any]:
        """The options to tune a part: in another state, what has won before is tried alone."""
        assert isinstance(part.answer, TunedAnswer)
        only = part.answer.is_left and self.options.get("strategies") is None
        return {**self.options, "strategies": [part.chosen]} if only else self.options


def allowed_error(answer: PartAnswerer) -> float:
    """How far a part's results may be off, relative to their root mean square: as in `tune`."""
    error = answer.tuned.report.eager_error if isinstance(answer, TunedAnswer) else None
    return _OFF * max(0.0 if error is None else error.rms, _OWN_ERROR)
