"""Which candidates are set up at once, and which share a build."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...strategies.base import Candidate
from ...strategies.registry import is_ours
from .worker import Worker

# Given how many set-ups there is room for, at least one, the candidates to try next. Those that
# differ in the runner alone count as one, and should be given together, since they are then built
# once. It gives fewer or none where it would rather wait for rows that are under way; trying ends
# when it gives none and nothing is under way.
Choose = Callable[[int], Sequence[Candidate]]

# Compilers whose builds find kernels of earlier ones on disk, and whose cache that is.
_CACHES = {"inductor": "inductor", "aot_inductor": "inductor", "fused": "triton"}


@dataclass(eq=False)
class Job:
    """Candidates that share a build, as far as they are still to be tried.

    Attributes:
        candidates: the next one first.
        worker: who holds the build, once it is built.
    """

    candidates: list[Candidate]
    worker: Worker | None = None

    @property
    def cache(self) -> str | None:
        """Which compiler's cache on disk is filled by its build; None for none."""
        return _CACHES.get(self.candidates[0].compiler.name.split(":")[0])


def jobs_of(candidates: Sequence[Candidate]) -> Iterator[Job]:
    """Group candidates that share a build, those without a runner first in their group.

    What is not graphwright's own shares nothing.
    """
    groups: dict[object, list[Candidate]] = {}
    for candidate in candidates:
        key = candidate.without_runner.name if is_ours(candidate) else id(candidate)
        groups.setdefault(key, []).append(candidate)
    for group in groups.values():
        yield Job(sorted(group, key=lambda candidate: candidate.runner is not None))


class Schedule:
    """Puts jobs into groups that are set up at once.

    Args:
        choose: is asked for candidates whenever there is room.
        at_once: how many jobs a group may have.
    """

    def __init__(self, choose: Choose, at_once: int) -> None:
        self._choose = choose
        self._at_once = at_once
        self._waiting: list[Job] = []
        # The caches that were filled by earlier groups.
        self._filled: set[str | None] = {None}

    def next_group(self) -> list[Job]:
        """Take the jobs that are set up at once next; none if nothing is left.

        The first build that fills a compiler's cache goes without others that would find their
        kernels there, if there is anything else to do.
        """
        group: list[Job] = []
        self._ask(self._at_once - len(self._waiting))
        self._take(group, beside_first=False)
        if self._waiting and len(group) < self._at_once:
            self._ask(self._at_once - len(group))
            self._take(group, beside_first=False)
            self._take(group, beside_first=True)
        self._filled |= {job.cache for job in group}
        return group

    def put_back(self, jobs: Iterable[Job]) -> None:
        """Have what is left of some jobs come next: what their candidates share is there."""
        self._waiting[:0] = [job for job in jobs if job.candidates]

    def _ask(self, room: int) -> None:
        if room > 0:
            self._waiting += jobs_of(self._choose(room))

    def _take(self, group: list[Job], *, beside_first: bool) -> None:
        """Move jobs into a group; with `beside_first`, also beside the first that fills a cache."""
        for job in self._waiting.copy():
            first_builds = {each.cache for each in group} - self._filled
            if len(group) < self._at_once and (beside_first or job.cache not in first_builds):
                group.append(job)
                self._waiting.remove(job)
