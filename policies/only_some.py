"""What runs in many like pieces, tiles or chunks, computes only some of them in a plan of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol


class InPieces(Protocol):
    """How something is cut, and whether only some of the pieces are computed; which ones, it says itself."""

    only_some: bool


@contextmanager
def only_some(cuts: Sequence[InPieces]) -> Iterator[None]:
    """Inside this context only some pieces are computed, and room is made for all that the others would leave.

    A plan of memory needs no others: a piece takes what the one before it took. Half a million tokens are hundreds.
    """
    for cut in cuts:
        cut.only_some = True
    try:
        yield
    finally:
        for cut in cuts:
            cut.only_some = False
