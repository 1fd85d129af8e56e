"""Padding: how wide a micro-batch is, what fills it, and how much of it is padding."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


def batch_lengths(lengths: Sequence[int], num_rows: int = 0) -> np.ndarray:
    """The tokens of each row of a micro-batch, int64 [rows]; rows that are filled up have none.

    An empty micro-batch (fewer rows than ranks) becomes one such row.

    Args:
        num_rows: at least so many rows, as layers that are compiled for them ask.
    """
    filled = np.zeros(max(1, len(lengths), num_rows), dtype=np.int64)
    filled[: len(lengths)] = lengths
    return filled


def batch_width(lengths: np.ndarray, width: PaddedWidth) -> int:
    """The width of a micro-batch with rows of these lengths: at least 2, a token and the one that it predicts."""
    return max(2, int(width.of(max(1, lengths.max()))))


def pad_right(
    lists: list[np.ndarray], width: PaddedWidth, filling: int, num_rows: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The lists as an int64 array [batch, width], where it holds their values, and their lengths.

    Rows that are filled up count as values: without any visible token a row is all NaN in some attention kernels.
    """
    lengths = batch_lengths([len(values) for values in lists], num_rows)
    padded = np.full((len(lengths), batch_width(lengths, width)), filling, dtype=np.int64)
    is_value = np.arange(padded.shape[1]) < lengths[:, None]
    if lists:
        padded[is_value] = np.concatenate(lists)
    is_value[len(lists) :] = True
    return padded, is_value, lengths


def pad_left(lists: list[np.ndarray], filling: int) -> tuple[np.ndarray, np.ndarray]:
    """The lists as an int64 array [batch, longest], and where it holds their values.

    Prompts are padded so: generation continues each row at its right end.
    """
    lengths = np.array([len(values) for values in lists])
    width = int(lengths.max())
    padded = np.full((len(lists), width), filling, dtype=np.int64)
    is_value = np.arange(width) >= width - lengths[:, None]
    padded[is_value] = np.concatenate(lists)
    return padded, is_value


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


def padding_id(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int:
    """The token id in the unused positions of a batch: the pad token if the model has a row for it, else the end token.

    Padding is masked from attention and loss, so any id computes the same. A tokenizer without a pad token gets none,
    and the model's config is not touched: a new `pad_token_id` there would silently stop the gradient of that token's
    embedding (`padding_idx` of torch.nn.Embedding).
    """
    has_pad = tokenizer.pad_token_id is not None and tokenizer.pad_token_id < vocab_size
    return tokenizer.pad_token_id if has_pad else tokenizer.eos_token_id
