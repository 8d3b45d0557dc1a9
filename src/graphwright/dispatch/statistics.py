"""Statistics of a graphed callable's calls: counting them, and explaining them in words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..calls.places import carried_by
from ..calls.plurals import counted
from ..graphs.memory import MemoryPool, format_bytes
from ..report.notebook import short_table
from ..shapes.buckets import SizesSeen
from .graph_cache import CacheEntry

if TYPE_CHECKING:
    from ..graphs.captured_call import CapturedCall
    from ..shapes.verdicts import Verdicts

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class BucketStatistics:
    """What one bucket answered.

    Attributes:
        exact: calls of its own sizes.
        padded: calls that were padded to it.
        waste: share of the elements computed for all of these that were padding, from 0 to 1.
    """

    exact: int
    padded: int
    waste: float


@dataclass(frozen=True)
class CallStatistics:
    """How the calls of a graphed callable went so far.

    Attributes:
        hits: calls that a graph answered, including the first one after its capture.
        captures: graphs that were captured, including repeated captures.
        eager: eager calls, by reason.
        in_parts: calls whose submodules were answered by graphs, as there is none for the whole.
        audits: calls that were run eagerly beside the graph, and agreed.
        graphs: graphs that are ready now.
        nbytes: bytes that these added to their pool.
        padded: calls among the hits that were padded to a bucket.
        split: calls that were answered in chunks; each chunk also counts as a hit or eager.
        sizes: sizes of the calls, if there are buckets: for `Buckets.from_sizes`.
        buckets: what each bucket answered, by its sizes.
        waste: share of all computed elements that were padding, from 0 to 1.
        proof_runs: runs of the function to prove that padding is harmless.
        proof_s: seconds that these runs took.
        after_capture: calls among the hits whose graph was captured for them just before.
    """

    hits: int
    captures: int
    eager: Mapping[str, int]
    audits: int
    graphs: int
    nbytes: int
    padded: int = 0
    split: int = 0
    sizes: SizesSeen | None = None
    buckets: Mapping[Sizes, BucketStatistics] = field(default_factory=dict)
    waste: float = 0.0
    proof_runs: int = 0
    proof_s: float = 0.0
    in_parts: int = 0
    after_capture: int = 0


def summary(statistics: CallStatistics) -> str:
    """How the calls went, in a few words, for a repr."""
    graphs, eager = statistics.graphs, sum(statistics.eager.values())
    found = [
        counted(graphs, "graph"),
        format_bytes(statistics.nbytes),
        counted(statistics.hits, "hit"),
    ]
    if eager:
        found.append(f"{eager:,} eager")
    return ", ".join(found)


def to_html(kind: str, name: str, statistics: CallStatistics) -> str:
    """How the calls went, for a notebook."""
    pairs = [
        ("graphs", f"{statistics.graphs:,}"),
        ("their memory", format_bytes(statistics.nbytes)),
        ("captures", f"{statistics.captures:,}"),
        ("calls answered by graphs", f"{statistics.hits:,}"),
    ]
    if statistics.in_parts:
        pairs.append(("calls answered in parts", f"{statistics.in_parts:,}"))
    if statistics.sizes is not None:
        padding = f"{statistics.padded:,}; padding is {statistics.waste:.1%} of what was computed"
        pairs.append(("of these padded to a bucket", padding))
    if statistics.split:
        pairs.append(("calls answered in chunks", f"{statistics.split:,}"))
    pairs += [(f"eager calls: {why}", f"{n:,}") for why, n in Counter(statistics.eager).items()]
    return short_table(f"{kind} of {name}", pairs)


def both(one: CallStatistics, other: CallStatistics) -> CallStatistics:
    """What two that have no buckets counted for one callable."""
    return replace(
        one,
        hits=one.hits + other.hits,
        captures=one.captures + other.captures,
        after_capture=one.after_capture + other.after_capture,
        eager=dict(Counter(one.eager) + Counter(other.eager)),
        audits=one.audits + other.audits,
        graphs=one.graphs + other.graphs,
        nbytes=one.nbytes + other.nbytes,
    )


class Tally:
    """Counts of calls.

    Args:
        names: of the dynamic dimensions, if there are any.
    """

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        self.names = names
        self._eager: dict[str, list[int]] = {}
        self.in_parts = 0
        self.after_capture = 0
        self.audits = 0
        self.split: Counter[Sizes] = Counter()
        self.chunks: Counter[Sizes] = Counter()  # chunks of split calls, by sizes
        self.proof_runs = 0  # of proofs for discarded states
        self.proof_s = 0.0
        self.padded: Counter[tuple[Sizes, Sizes]] = Counter()  # by bucket and sizes
        self.elsewhere: Counter[Sizes] = Counter()  # calls that no bucket answered, by sizes
        self._past = 0
        self._exact: Counter[Sizes] = Counter()

    @property
    def eager(self) -> dict[str, int]:
        """Eager calls, by reason."""
        return {reason: count for reason, (count,) in self._eager.items() if count}

    def eager_for(self, reason: str) -> list[int]:
        """The number of eager calls for a reason, as a list of one that the caller counts up."""
        return self._eager.setdefault(reason, [0])

    def count_eager(self, reason: str) -> None:
        """Count an eager call."""
        self._eager.setdefault(reason, [0])[0] += 1

    def forget(self, entry: CacheEntry) -> None:
        """Keep the counts of an entry that is discarded."""
        self._past += entry.hits
        if entry.sizes is not None:
            self._exact[entry.sizes] += entry.hits
        entry.hits = 0

    def forget_proofs(self, verdicts: Iterable[Verdicts]) -> None:
        """Keep what the proofs for a discarded state of the module cost."""
        for proof in verdicts:
            self.proof_runs += proof.runs
            self.proof_s += proof.seconds

    def answered(self, ready: Iterable[CacheEntry]) -> int:
        """How many calls graphs have answered."""
        return self._past + sum(entry.hits for entry in ready) + sum(self.padded.values())

    def calls(self, ready: Iterable[CacheEntry]) -> int:
        """How many calls there were."""
        return self.answered(ready) + sum(self.eager.values()) + self.in_parts

    def statistics(
        self, ready: Iterable[CacheEntry], captures: int, verdicts: Iterable[Verdicts]
    ) -> CallStatistics:
        """Everything that was counted."""
        entries = list(ready)
        exact = self._exact.copy()
        for entry in entries:
            if entry.sizes is not None:
                exact[entry.sizes] += entry.hits
        # Calls of a bucket's own sizes were only copied into its memory layout.
        padded = sum(n for (bucket, sizes), n in self.padded.items() if bucket != sizes)
        seen: Counter[Sizes] = exact + self.elsewhere
        held: dict[Sizes, Counter[Sizes]] = {
            sizes: Counter({sizes: n}) for sizes, n in exact.items()
        }
        for (bucket, sizes), count in self.padded.items():
            seen[sizes] += count
            held.setdefault(bucket, Counter())[sizes] += count
        seen += self.split
        seen.subtract(self.chunks)
        proofs = list(verdicts)
        return CallStatistics(
            hits=self.answered(entries),
            captures=captures,
            eager=self.eager,
            audits=self.audits,
            graphs=len(entries),
            nbytes=sum(entry.graph.nbytes for entry in entries if entry.graph is not None),
            padded=padded,
            split=sum(self.split.values()),
            sizes=SizesSeen(self.names, dict(+seen)) if self.names else None,
            buckets={bucket: _of(bucket, held[bucket]) for bucket in sorted(held)},
            waste=_waste(held),
            proof_runs=self.proof_runs + sum(proof.runs for proof in proofs),
            proof_s=self.proof_s + sum(proof.seconds for proof in proofs),
            in_parts=self.in_parts,
            after_capture=self.after_capture,
        )


def _of(bucket: Sizes, calls: Counter[Sizes]) -> BucketStatistics:
    exact = calls[bucket]
    return BucketStatistics(exact, sum(calls.values()) - exact, _waste({bucket: calls}))


def _waste(held: Mapping[Sizes, Counter[Sizes]]) -> float:
    computed = sum(math.prod(bucket) * sum(calls.values()) for bucket, calls in held.items())
    true = sum(math.prod(sizes) * n for calls in held.values() for sizes, n in calls.items())
    return (computed - true) / computed if computed else 0.0


def explained(
    name: str, now: CallStatistics, ready: Iterable[CacheEntry], pool: MemoryPool
) -> list[str]:
    """Statistics in words, one line each."""
    lines = [
        f"{name}: {_count(now.graphs, 'graph')}, {format_bytes(now.nbytes)} of "
        f"{format_bytes(pool.reserved)} in their pool",
        f"{_count(now.hits, 'call')} answered by graphs, {_count(now.captures, 'capture')}"
        + (f" (in {now.after_capture} of these calls)" if now.after_capture else ""),
    ]
    if now.in_parts:
        lines.append(f"{_count(now.in_parts, 'call')} in parts, which graphs answered")
    if now.sizes is not None:
        lines.append(
            f"{now.padded} of these calls padded to a bucket; padding is {now.waste:.1%} of what "
            "was computed"
        )
        lines.append(f"padding proved in {_count(now.proof_runs, 'run')}, {now.proof_s:.2f} s")
    if now.split:
        lines.append(f"{_count(now.split, 'call')} answered in chunks")
    lines += [
        f"{_count(count, 'call')} eager: {why}" for why, count in Counter(now.eager).most_common()
    ]
    if now.buckets and now.sizes is not None:
        lines += _table(now)
    for entry in ready:
        if entry.graph is not None:
            nbytes, kind = format_bytes(entry.graph.nbytes), _does(entry.graph)
            lines.append(f"  {entry.graph.name}: {nbytes}, {kind}")
            if entry.payoff is not None and entry.payoff.ratio is not None:
                lines.append(f"    {entry.graph.divided} it takes {entry.payoff.share}")
            lines += [f"    {line}" for line in entry.graph.describe_segments()]
    return lines


def _does(graph: CapturedCall) -> str:
    """What a graph does beside its results, in words."""
    found = ["writes to tensors from outside"] if graph.mutates else []
    if carried := carried_by(graph.function):
        found.append(f"is given {', '.join(place.name for place in carried)}, and sets that")
    if graph.places:
        found.append(f"sets {', '.join(place.name for place in graph.places)}")
    elif graph.has_effects and not carried:
        found.append("changes or returns objects that it is given")
    if graph.random:
        found.append("draws random numbers")
    return ", ".join(found) or "no side effects"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _table(now: CallStatistics) -> list[str]:
    assert now.sizes is not None
    title = " × ".join(now.sizes.names)
    rows = [(title, "exact", "padded", "waste")]
    for bucket, counts in now.buckets.items():
        sizes = " × ".join(map(str, bucket))
        rows.append((sizes, str(counts.exact), str(counts.padded), f"{counts.waste:.1%}"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
