"""Tokens, labels and attended pairs of each row."""

from __future__ import annotations

import numpy as np

from data.batches.counts import causal_pairs, pairs_of_each
from data.batches.rows import Rows
from data.sequences.tokenized import Sequences


def row_counts(rows: Rows) -> np.ndarray:
    """The counts of each row by itself, int64 [rows, fields of BatchCounts]."""
    sequences = rows.sequences
    lengths, labels = sequences.lengths.astype(np.int64), sequences.num_label_tokens.astype(np.int64)
    if sequences.has_targets:
        targets = np.diff(sequences.label_offsets).astype(np.int64)
        encoder, decoder, cross = pairs_of_each(lengths, targets)
        columns = [labels, lengths + targets, encoder, targets, decoder, cross]
    else:
        columns = [labels, lengths, _attended_pairs(sequences), *[np.zeros_like(lengths)] * 3]
    return np.add.reduceat(np.stack(columns, axis=1)[rows.indices], rows.offsets[:-1], axis=0)


def _attended_pairs(sequences: Sequences) -> np.ndarray:
    """(query, key) pairs of causal attention in each sequence, int64 [sequences]."""
    texts = [lengths.astype(np.int64) for lengths in sequences.text_lengths]
    pairs: np.ndarray = (
        np.sum([causal_pairs(lengths) for lengths in texts], axis=0) + sequences.shared_lengths * texts[-1]
    )
    return pairs
