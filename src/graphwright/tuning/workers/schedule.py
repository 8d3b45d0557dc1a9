"""Which candidates are set up at once, and which share a build."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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


def cache_of(candidate: Candidate) -> str | None:
    """Which compiler's cache on disk its build fills; None for none."""
    return _CACHES.get(candidate.compiler.name.split(":")[0])


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
        return cache_of(self.candidates[0])


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
        at_once: how many jobs may be set up at once.
        waits_for_caches: whether builds wait for the first one that fills their compiler's cache,
            if there is anything else to do.
    """

    def __init__(self, choose: Choose, at_once: int, *, waits_for_caches: bool = True) -> None:
        self._choose = choose
        self._at_once = at_once
        self._waits_for_caches = waits_for_caches
        self._waiting: list[Job] = []
        self._returned: list[Job] = []
        # The caches that were filled by earlier groups.
        self._filled: set[str | None] = {None}

    def next_group(self, room: int | None = None) -> list[Job]:
        """Take the jobs that are set up at once next; none if nothing is left.

        Args:
            room: for how many there is room now; by default for as many as may be set up at once.
        """
        room = self._at_once if room is None else room
        group: list[Job] = []
        self._waiting[:0], self._returned = self._returned, []
        self._ask(room - len(self._waiting))
        if self._waits_for_caches:
            self._take(group, room, beside_first=False)
            if self._waiting and len(group) < room:
                self._ask(room - len(group))
                self._take(group, room, beside_first=False)
        self._take(group, room, beside_first=True)
        self._filled |= {job.cache for job in group}
        return group

    def put_back(self, job: Job) -> None:
        """Have what is left of a job come next: what its candidates share is there."""
        if job.candidates:
            self._returned.append(job)

    def _ask(self, room: int) -> None:
        if room > 0:
            self._waiting += jobs_of(self._choose(room))

    def _take(self, group: list[Job], room: int, *, beside_first: bool) -> None:
        """Move jobs into a group; with `beside_first`, also beside the first that fills a cache."""
        for job in self._waiting.copy():
            first_builds = {each.cache for each in group} - self._filled
            if len(group) < room and (beside_first or job.cache not in first_builds):
                group.append(job)
                self._waiting.remove(job)
