"""Words of messages for people."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """A count with its noun: "1 rank", "2 ranks", "1,000 rows". For nouns whose plural is formed with an s."""
    return f"{count:,} {noun if count == 1 else noun + 's'}"
