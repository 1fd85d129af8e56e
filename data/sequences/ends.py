"""The tokens that samples begin and end with, and the assistant's turns in them."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from data.sequences.tokenized import Sequences
from data.tokens.labels import IGNORE_INDEX


def end_ids(sequences: Sequences, special: Collection[int], context_length: int) -> tuple[int, ...]:
    """The special tokens that end what is learned, sorted: of a sample, or of a turn before another turn.

    A sample that fills a row may have been cut, so its last token says nothing.

    Args:
        special: the ids of the tokenizer's special tokens.
    """
    if not sequences.labels_are_tokens:
        return ()
    labels, offsets = sequences.labels, sequences.label_offsets
    is_learned, is_special = labels != IGNORE_INDEX, np.isin(labels, list(special))
    places = np.flatnonzero(is_learned)
    if not len(places):
        return ()
    last = places[np.searchsorted(places, offsets[1:]) - 1]  # learned before the end of each sample
    is_whole = (last >= offsets[:-1]) & (np.diff(offsets) < context_length)
    found = labels[last[is_whole & is_special[last]]]
    if sequences.has_targets:
        return tuple(sorted({int(token) for token in found}))
    # Inside a sample a turn ends where a special token follows at once, or after a line break: the next turn's header.
    # After a part that is left out of a turn, text follows.
    opens = np.isin(sequences.input_ids, list(special)) & ~is_learned
    opens_next = np.append(opens[1:], False) | np.append(opens[2:], [False, False])[: len(opens)]
    stops = is_learned & ~np.append(is_learned[1:], False) & is_special & opens_next
    stops[last] = False  # what follows is the rest of the sample, or another sample
    return tuple(sorted({int(token) for token in (*found, *labels[stops])}))


def num_with_learned_padding(sequences: Sequences, padding: Collection[int]) -> int:
    """The number of samples that learn one of these tokens twice or more at their end, or right after their first.

    Rows that were padded without saying so learn it at every place that was filled; an answer ends once.
    """
    if not sequences.labels_are_tokens:
        return 0
    labels, offsets = sequences.labels, sequences.label_offsets
    starts, ends = (places[np.diff(offsets) > 2] for places in (offsets[:-1], offsets[1:]))
    is_padding = np.isin(labels, list(padding))
    twice = is_padding & (labels == np.append(labels[1:], IGNORE_INDEX))  # here and at the next place
    return int((twice[ends - 2] | twice[starts + 1]).sum())


def begins_with(sequences: Sequences, token: int) -> bool:
    """Whether most samples begin with this token; later parts of a text that was split do not."""
    firsts = sequences.input_ids[sequences.offsets[:-1][sequences.lengths > 0]]
    return bool(2 * (firsts == token).sum() > len(firsts))
