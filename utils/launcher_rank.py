"""This process's rank before the environment is read, for progress bars and for what libraries print."""

from __future__ import annotations

import os


def launcher_rank() -> int:
    """This process's rank, as the launcher tells it; 0 without one, or if it is no number."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() and "WORLD_SIZE" in os.environ else 0
