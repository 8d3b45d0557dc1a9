"""Verdicts: what is known about padding calls to a bucket."""

from __future__ import annotations

from dataclasses import dataclass, field

from .output_shapes import OutputShapes, cuts_of
from .padding import Cut, Sizes

Names = tuple[str, ...]
# Which dimensions are padded, and which branches the function takes at the true sizes.
Case = tuple[Names, tuple[bool | None, ...]]


@dataclass
class Verdicts:
    """What is known about padding calls to one bucket.

    Attributes:
        bucket: its sizes.
        shapes: of the outputs there.
        refused: by case, why padding is refused; None if it is allowed.
        by_size: where branches on sizes are unknown, why padding is refused for each size that was
            tried, if its case is not.
        cuts: for outputs that can be sliced in several ways, the ways that were right so far.
        runs: calls that were run to find out.
        seconds: what that took.
    """

    bucket: Sizes
    shapes: OutputShapes
    refused: dict[Case, str | None] = field(default_factory=dict)
    by_size: dict[Sizes, str | None] = field(default_factory=dict)
    cuts: dict[int, list[int]] = field(default_factory=dict)
    runs: int = 0
    seconds: float = 0.0

    def padded(self, sizes: Sizes) -> Names:
        """Names of the dimensions that are padded for calls of some sizes."""
        names = self.shapes.names
        return tuple(name for name, n, m in zip(names, sizes, self.bucket, strict=True) if n != m)

    def in_words(self, sizes: Sizes) -> str:
        """The padding of calls of some sizes."""
        every = zip(self.shapes.names, sizes, self.bucket, strict=True)
        return ", ".join(f"{name} padded from {n} to {m}" for name, n, m in every if n != m)

    def case(self, sizes: Sizes) -> Case:
        """The case that calls of some sizes belong to.

        All calls of a case share one verdict, unless branches on sizes are unknown: then sizes of a
        case that is allowed have a verdict of their own.
        """
        return self.padded(sizes), self.shapes.way(sizes)

    def know(self, sizes: Sizes) -> bool:
        """Whether there is a verdict for calls of some sizes."""
        case = self.case(sizes)
        if self.refused.get(case) is None and self.shapes.blind:
            return sizes in self.by_size
        return case in self.refused

    def reason(self, sizes: Sizes) -> str | None:
        """Why calls of some sizes are refused; None if they are not, or if that is unknown."""
        return self.refused.get(self.case(sizes)) or self.by_size.get(sizes)

    def note(self, sizes: Sizes, reason: str | None, *, alone: bool = False) -> None:
        """Keep a verdict on calls of some sizes.

        Args:
            sizes: the named sizes.
            reason: why they are refused, or None.
            alone: whether it is for no other sizes of their case, where branches are unknown.
        """
        if self.shapes.blind:
            self.by_size[sizes] = reason
        if not (alone and self.shapes.blind):
            self.refused[self.case(sizes)] = reason

    def culprits(self, sizes: Sizes) -> set[str]:
        """Dimensions that may not be padded even alone; if there are none, all padded ones."""
        names = self.padded(sizes)
        found = {name for name in names if self._alone(sizes, name) is not None}
        return found or set(names)

    def part_refused(self, sizes: Sizes) -> str | None:
        """Why one of several padded dimensions may not be padded even alone, or None."""
        names = self.padded(sizes)
        if len(names) < 2:
            return None
        reasons = (self._alone(sizes, name) for name in names)
        return next((reason for reason in reasons if reason is not None), None)

    def _alone(self, sizes: Sizes, name: str) -> str | None:
        index = self.shapes.names.index(name)
        alone = (*self.bucket[:index], sizes[index], *self.bucket[index + 1 :])
        return self.reason(alone)

    def chosen(self, sizes: Sizes) -> list[Cut]:
        """How outputs are sliced: for each the first way that was right in all trials."""
        options = cuts_of(self.shapes, sizes, self.bucket)
        return [
            cuts[self.cuts[index][0]] if len(cuts) > 1 and index in self.cuts else cuts[0]
            for index, cuts in enumerate(options)
        ]


class Impossible(str):
    """Why calls are not padded that eager refuses too, so that nothing is lost."""
