"""Padding: how wide a micro-batch is, what fills it, and how much of it is padding."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class PaddedWidth:
    """The longest row of a micro-batch, rounded up to a multiple, but never above `limit`.

    A model may have no positions beyond the limit (context_length), so the limit wins over the multiple.
    """

    multiple_of: int
    limit: int

    def of(self, longest: Any) -> Any:
        """Width in tokens for the longest row's length, or for an array of such lengths."""
        return np.minimum(-(-longest // self.multiple_of) * self.multiple_of, self.limit)


EXACT = PaddedWidth(multiple_of=1, limit=sys.maxsize)


def one_width(width: PaddedWidth, longest: int) -> PaddedWidth:
    """The same width for every micro-batch: that of a row of `longest` tokens."""
    limit = int(width.of(longest))
    return PaddedWidth(multiple_of=limit, limit=limit)


def padding_share(lengths: np.ndarray, rows_per_micro_batch: int, width: PaddedWidth) -> float:
    """Share of the positions in an epoch's micro-batches that hold no token.

    Args:
        lengths: tokens of each row, [rows], in the order in which they are trained on.
        rows_per_micro_batch: of one rank; the last micro-batch may hold fewer.
    """
    starts = np.arange(0, len(lengths), rows_per_micro_batch)
    widths = width.of(np.maximum.reduceat(lengths, starts))
    rows = np.diff(starts, append=len(lengths))
    return 1 - float(lengths.sum() / (widths * rows).sum())


def padding_id(tokenizer: Any, vocab_size: int) -> int:
    """The token id in the unused positions of a batch: the pad token if the model has a row for it, else the end token.

    Padding is masked from attention and loss, so any id computes the same. A tokenizer without a pad token gets none,
    and the model's config is not touched: a new `pad_token_id` there would silently stop the gradient of that token's
    embedding (`padding_idx` of torch.nn.Embedding).
    """
    has_pad = tokenizer.pad_token_id is not None and tokenizer.pad_token_id < vocab_size
    return tokenizer.pad_token_id if has_pad else tokenizer.eos_token_id
