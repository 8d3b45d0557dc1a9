"""What is known about filling buckets up."""

from __future__ import annotations

from dataclasses import dataclass, field

from .outputs import OutputShapes, cuts_of
from .padding import Cut, Sizes

Names = tuple[str, ...]
# Which dimensions are filled up, and which way the function takes at the true sizes.
Case = tuple[Names, tuple[bool | None, ...]]


@dataclass
class Verdicts:
    """What is known about filling one bucket up.

    Attributes:
        bucket: its sizes.
        shapes: of the outputs there.
        refused: by case: why it may not be done, or None where it may.
        cuts: for outputs that might be cut in several ways, those that were right so far.
        runs: calls that were run to find out.
        seconds: what that took.
    """

    bucket: Sizes
    shapes: OutputShapes
    refused: dict[Case, str | None] = field(default_factory=dict)
    cuts: dict[int, list[int]] = field(default_factory=dict)
    runs: int = 0
    seconds: float = 0.0

    def padded(self, sizes: Sizes) -> Names:
        """Names of the dimensions that are filled up."""
        names = self.shapes.names
        return tuple(name for name, n, m in zip(names, sizes, self.bucket, strict=True) if n != m)

    def case(self, sizes: Sizes) -> Case:
        """What decides whether calls of some sizes may be filled up."""
        return self.padded(sizes), self.shapes.way(sizes)

    def know(self, sizes: Sizes) -> bool:
        """Whether calls of some sizes need no further trial."""
        return self.case(sizes) in self.refused

    def culprits(self, sizes: Sizes) -> set[str]:
        """Dimensions that may not be filled up by themselves; if there are none, all that are."""
        names = self.padded(sizes)
        found = {name for name in names if self._alone(sizes, name) is not None}
        return found or set(names)

    def part_refused(self, sizes: Sizes) -> str | None:
        """Why one of several dimensions may not be filled up by itself."""
        names = self.padded(sizes)
        if len(names) < 2:
            return None
        reasons = (self._alone(sizes, name) for name in names)
        return next((reason for reason in reasons if reason is not None), None)

    def _alone(self, sizes: Sizes, name: str) -> str | None:
        index = self.shapes.names.index(name)
        alone = (*self.bucket[:index], sizes[index], *self.bucket[index + 1 :])
        return self.refused.get(((name,), self.shapes.way(alone)))

    def chosen(self, sizes: Sizes) -> list[Cut]:
        """How outputs are cut: the first of the ways that were right wherever it was tried."""
        ways = cuts_of(self.shapes, sizes, self.bucket)
        return [
            way[self.cuts[index][0]] if len(way) > 1 and index in self.cuts else way[0]
            for index, way in enumerate(ways)
        ]


class Impossible(str):
    """Why some calls are not filled up that eager refuses too: nobody misses them."""
