"""The counts of a step: what its loss is a mean over, and what its speed and its FLOPs are figured from."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np

Length = TypeVar("Length", int, np.ndarray)
"""Tokens of a sequence, or int64 [sequences] of many."""


LABEL_TOKENS = "label_tokens"
"""What a loss is a mean over, unless its task says otherwise (`tasks.task.Task.MEAN_OVER`)."""


class BatchCounts(NamedTuple):
    """The counts of a global batch, over all ranks and micro-batches."""

    num_label_tokens: int
    num_tokens: int  # without padding
    num_attended_pairs: int  # (query, key) pairs that attention visits; of an encoder-decoder, in the encoder
    num_decoder_tokens: int = 0  # of num_tokens, those that the decoder of an encoder-decoder reads
    num_decoder_pairs: int = 0  # (query, key) pairs of its self-attention
    num_cross_pairs: int = 0  # (query, key) pairs of its attention to the encoder
    num_image_features: int = 0  # of num_tokens, those that stand for images (`tasks.image_counts`)
    num_patches: int = 0  # that a vision encoder reads
    num_patch_pairs: int = 0  # (query, key) pairs of its attention in whole images
    num_window_pairs: int = 0  # the same in windows
    num_loss_terms: int = 0  # what the loss is a mean over: label tokens, or samples or pairs, as the task says


class ImageTokens(NamedTuple):
    """The tokens of a run's rows that stand for images, for a plan."""

    share: float  # of a row's, in the row with the most of them
    of_each: int  # of the largest image, by which memory is planned
    typical: int  # of the size that has as many pairs of patches for as many tokens as all images have: for times


def causal_pairs(length: Length) -> Length:
    """(query, key) pairs of causal attention: each token attends to itself and to all before, 1 + 2 + ... + length."""
    return length * (length + 1) // 2


class EncoderDecoderPairs(NamedTuple):
    """(query, key) pairs of an encoder-decoder."""

    encoder: int
    decoder: int
    cross: int

    @classmethod
    def of(cls, sources: np.ndarray, targets: np.ndarray) -> EncoderDecoderPairs:
        """The sums over sequences, from the int64 lengths of their sources and targets."""
        return cls(*(int(pairs.sum()) for pairs in pairs_of_each(sources, targets)))


def pairs_of_each(source: Length, target: Length) -> tuple[Length, Length, Length]:
    """Pairs in encoder, decoder and cross-attention.

    Each source token attends to all of the source, each target token to the target up to itself and to all of the
    source.
    """
    return source * source, causal_pairs(target), source * target
