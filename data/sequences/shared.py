"""Validation samples that are trained on: their loss tells what the model remembers, not what it has learned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from data.sequences.tokenized import Sequences

_NUM_SAMPLED = 16  # tokens of a sequence that a fingerprint is made of, besides its length
_AT_A_TIME = 100_000  # sequences: bounds host memory


def num_shared(train: Sequences, evaluation: Sequences) -> int:
    """The number of validation sequences whose tokens and labels are those of a training sequence."""
    wanted = _fingerprints(evaluation)
    candidates = np.flatnonzero(np.isin(_fingerprints(train), wanted))
    if not len(candidates):
        return 0
    trained_on = {_content(train, index) for index in candidates.tolist()}
    return sum(_content(evaluation, index) in trained_on for index in range(len(evaluation)))


def note_on_shared(train: Sequences, evaluation: Sequences) -> list[str]:
    """A line on validation samples that are trained on, if there are any."""
    if not (shared := num_shared(train, evaluation)):
        return []
    number = f"{shared:,} of {len(evaluation):,} samples are" if shared < len(evaluation) else "all samples are"
    return [f"validation: {number} training samples, too; their loss does not tell how the model does on new data"]


def _fingerprints(sequences: Sequences) -> np.ndarray:
    """A number of each sequence, uint64 [sequences], from its length and tokens that are evenly spaced over it.

    Reading a few tokens of each takes a fraction of the time of reading all; those that agree are compared in full.
    """
    found = np.empty(len(sequences), dtype=np.uint64)
    spaced = np.arange(_NUM_SAMPLED)
    for first in range(0, len(sequences), _AT_A_TIME):
        starts = sequences.offsets[:-1][first : first + _AT_A_TIME, None]
        lengths = sequences.lengths[first : first + _AT_A_TIME, None]
        columns = sequences.input_ids[starts + spaced * (lengths - 1) // (_NUM_SAMPLED - 1)]
        value = lengths[:, 0].astype(np.uint64)
        for column in columns.T:
            value = value * np.uint64(6364136223846793005) + column.astype(np.uint64) + np.uint64(1)
        found[first : first + _AT_A_TIME] = value
    return found


def _content(sequences: Sequences, index: int) -> tuple[bytes, bytes]:
    sequence = sequences[index]
    return sequence.input_ids.tobytes(), sequence.labels.tobytes()
