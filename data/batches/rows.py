"""Rows of a batch: which sequences each of them holds."""

from __future__ import annotations

import numpy as np
from torch.utils.data import Dataset

from data.batches.packing import pack_best_fit
from data.sequences.tokenized import Row, Sequences


class Rows(Dataset[Row]):
    """Rows of a batch: one sequence each under padding, several under packing.

    Row i holds the sequences `indices[offsets[i]:offsets[i + 1]]`. These are flat arrays because forked workers share
    them; a list would be copied to each worker when its reference counts change.
    """

    def __init__(self, sequences: Sequences, indices: np.ndarray, offsets: np.ndarray, *, packed: bool) -> None:
        self.sequences, self.indices, self.offsets, self.packed = sequences, indices, offsets, packed

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64 [rows]."""
        before = np.concatenate([[0], np.cumsum(self.sequences.lengths[self.indices])])
        return np.diff(before[self.offsets])

    @property
    def num_sequences(self) -> np.ndarray:
        """Sequences of each row, int64 [rows]."""
        return np.diff(self.offsets)

    def first(self, num_rows: int) -> Rows:
        """The first rows alone."""
        return Rows(self.sequences, self.indices, self.offsets[: num_rows + 1], packed=self.packed)

    def __getitem__(self, index: int) -> Row:
        indices = self.indices[self.offsets[index] : self.offsets[index + 1]].tolist()
        return [self.sequences[number] for number in indices]


def make_rows(
    sequences: Sequences, *, batching_strategy: str, context_length: int, indices: np.ndarray | None = None
) -> Rows:
    """Pack sequences into rows, or give each a row of its own.

    Packing happens once, so every epoch has the same number of rows; epochs shuffle the rows.

    Args:
        context_length: tokens to fill a packed row with; a longer sequence has a row to itself.
        indices: the sequences of an epoch, int64 [n], with repeats if any; unset: each once.
    """
    if indices is None:
        indices = np.arange(len(sequences))
    if batching_strategy == "padding":
        return Rows(sequences, indices, np.arange(len(indices) + 1), packed=False)
    # A sequence as long as a row leaves no room for another.
    rows = pack_best_fit(np.minimum(sequences.lengths[indices], context_length), context_length)
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return Rows(sequences, indices[np.concatenate(rows)], offsets, packed=True)
