"""The counts of a step that its speed and its FLOPs are figured from."""

from __future__ import annotations

from typing import NamedTuple


class BatchCounts(NamedTuple):
    """The counts of a global batch, over all ranks and micro-batches."""

    num_label_tokens: int
    num_tokens: int  # without padding
    num_attended_pairs: int  # (query, key) pairs that attention visits; of an encoder-decoder, in the encoder
    num_decoder_tokens: int = 0  # of num_tokens, those that the decoder of an encoder-decoder reads
    num_decoder_pairs: int = 0  # (query, key) pairs of its self-attention
    num_cross_pairs: int = 0  # (query, key) pairs of its attention to the encoder
