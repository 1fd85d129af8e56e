"""This process's rank, known before anything is imported: for progress bars, and for lines that libraries print."""

from __future__ import annotations

import os


def launcher_rank() -> int:
    """This process's rank by the launcher's variables; 0 without a launcher, or if RANK is not a number."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() and "WORLD_SIZE" in os.environ else 0
