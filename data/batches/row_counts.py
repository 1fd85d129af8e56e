"""Tokens, labels and attended pairs of each row."""

from __future__ import annotations

import numpy as np

from data.batches.rows import Rows


def row_counts(rows: Rows) -> np.ndarray:
    """The counts of each row by itself, int64 [rows, fields of BatchCounts]."""
    sequences = rows.sequences
    lengths, labels = sequences.lengths.astype(np.int64), sequences.num_label_tokens.astype(np.int64)
    if sequences.has_targets:
        targets = np.diff(sequences.label_offsets).astype(np.int64)
        of_decoder = [targets, targets * (targets + 1) // 2, lengths * targets]
        columns = [labels, lengths + targets, lengths**2, *of_decoder]
    else:
        columns = [labels, lengths, lengths * (lengths + 1) // 2, *[np.zeros_like(lengths)] * 3]
    return np.add.reduceat(np.stack(columns, axis=1)[rows.indices], rows.offsets[:-1], axis=0)
