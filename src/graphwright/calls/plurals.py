"""Numbers in sentences."""

from __future__ import annotations


def counted(count: int, noun: str, several: str = "") -> str:
    """A number and its noun: "1 graph", "2 graphs", "1,000 calls".

    Args:
        count: the number.
        noun: for one; more words may follow in the text.
        several: for more than one, where that is not the noun with an s.
    """
    return f"{count:,} {noun if count == 1 else several or f'{noun}s'}"
