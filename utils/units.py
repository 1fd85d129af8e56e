"""Sizes in bytes: GiB, and text for people."""

from __future__ import annotations

GIB = 2**30


def readable(num_bytes: float) -> str:
    """A size for people: "14.96 GiB", "0.68 MiB"."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.2f} MiB"
