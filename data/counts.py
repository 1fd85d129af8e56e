"""The counts of a step that its speed and its FLOPs are figured from."""

from __future__ import annotations

from typing import NamedTuple


class BatchCounts(NamedTuple):
    """The counts of a global batch, over all ranks and micro-batches."""

    num_label_tokens: int
    num_tokens: int  # without padding
    num_attended_pairs: int  # (query, key) pairs that attention visits
