"""How wide a micro-batch is, and how much of it is padding."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class PaddedWidth:
    """The longest row of a micro-batch, rounded up to a multiple, but never above the longest row that there may be.

    A model may have no positions beyond `limit` (context_length), so the limit goes before the multiple.
    """

    multiple_of: int
    limit: int

    def of(self, longest: Any) -> Any:
        """Width in tokens, of one length or of an array of them."""
        return np.minimum(-(-longest // self.multiple_of) * self.multiple_of, self.limit)


EXACT = PaddedWidth(multiple_of=1, limit=sys.maxsize)


def padding_share(lengths: np.ndarray, rows_per_micro_batch: int, width: PaddedWidth) -> float:
    """Share of the places of an epoch's micro-batches that hold no token.

    Args:
        lengths: tokens of each row, [rows], in the order in which they are trained on.
        rows_per_micro_batch: of one rank; every micro-batch but the last holds so many.
    """
    starts = np.arange(0, len(lengths), rows_per_micro_batch)
    widths = width.of(np.maximum.reduceat(lengths, starts))
    rows = np.diff(starts, append=len(lengths))
    return 1 - float(lengths.sum() / (widths * rows).sum())
