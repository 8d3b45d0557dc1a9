"""The code blocks of README.md and docs/: which there are, and what stands below them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

# The first line of a block that does not run everywhere, and the mark of tests that it becomes.
MARKS = {"# needs a GPU": "gpu", "# takes a minute": "slow"}


@dataclass(frozen=True)
class Block:
    """What stands between two fences.

    Args:
        language: as the first fence names it.
        text: the lines between.
        line: of the page, on which the text begins.
        follows: whether only empty lines are between it and the block before.
    """

    language: str
    text: str
    line: int
    follows: bool

    @property
    def mark(self) -> str:
        """Why a Python block does not run everywhere: "gpu" or "slow"; empty if it does."""
        return next((mark for first, mark in MARKS.items() if self.text.startswith(first)), "")


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, whatever fences them."""
    found: list[Block] = []
    fence, language, lines, begun, between = "", "", [""], 0, True
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        mark = re.match(r"\s*(```+|~~~+)\s*(.*?)\s*$", line)
        if fence and mark and mark[1] == fence and not mark[2]:
            found.append(Block(language, "\n".join(lines) + "\n", begun, not between))
            fence, between = "", False
        elif fence:
            lines.append(line)
        elif mark:
            fence, language, lines, begun = mark[1], mark[2], [], number + 1
        elif line.strip():
            between = True
    assert not fence, f"{page}:{begun}: a block without an end"
    return found
