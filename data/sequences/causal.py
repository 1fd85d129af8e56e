"""Sequences for a causal model: every label stands where its token does, and both are cut to the context length.

All that relies on labels being as long as their inputs is here and in `data.sequences.flattening`. A task with other
labels has a `build_sequences` of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np

from data.sequences.flattening import flatten
from data.sequences.tokenized import COUNT_COLUMNS, Sequences
from data.tokens.labels import IGNORE_INDEX
from utils.errors import ConfigError

Truncation = Literal["right", "left", "drop", "error", "split"]


def build_sequences(
    rows: Iterable[Mapping[str, Any]],
    *,
    name: str,
    context_length: int,
    truncation: Truncation = "right",
    first_row: int = 0,
    is_part: bool = False,
) -> Sequences:
    """Check rows of `input_ids`, `labels` and optional `attention_mask`; cut them and leave out those without a label.

    Args:
        truncation: for a row longer than `context_length`: keep its first tokens (right) or its last (left), leave it
            out (drop), refuse the data (error), or make several sequences of it (split).
        first_row: the first row's place in the data, from 0.
        is_part: more rows may follow, so it is no error if none of these is kept.

    Raises:
        ConfigError: missing columns, columns of unequal length, values that are not integers, a row that is too long
            under `error`, or no row left.
    """
    flat = flatten(rows, name, first_row)
    if len(flat) == 0 and not is_part:
        raise ConfigError(f"dataset ({name}): it is empty; check the path and the split")
    sequences = cut_sequences(flat, name=name, context_length=context_length, truncation=truncation)
    if len(sequences) == 0 and not is_part:
        raise ConfigError(
            f"dataset ({name}): none of its {len(flat)} rows has a label token within context_length "
            f"{context_length}: answers are empty, or begin after it; check the data, or raise --context_length"
        )
    return sequences


def cut_sequences(flat: Sequences, *, name: str, context_length: int, truncation: Truncation) -> Sequences:
    """The sequences with a label, none longer than `context_length`; what was cut or left out is counted.

    Raises:
        ConfigError: under `error`, for the first sequence that is too long.
    """
    return cut_and_kept(flat, name=name, context_length=context_length, truncation=truncation)[0]


def cut_and_kept(
    flat: Sequences, *, name: str, context_length: int, truncation: Truncation
) -> tuple[Sequences, np.ndarray]:
    """The same, and for each the index of the sequence that it is, or is a part of."""
    num_split = num_parts = 0
    whole = np.arange(len(flat))  # the sequence that each one is a part of
    if truncation == "split":
        num_split, num_whole = int((flat.lengths > context_length).sum()), len(flat)
        flat, whole = split_sequences(flat, context_length)
        num_parts = len(flat) - num_whole + num_split
    starts, ends = flat.offsets[:-1], flat.offsets[1:]
    lengths = ends - starts
    too_long = lengths > context_length
    if truncation == "error" and too_long.any():
        index = int(np.argmax(too_long))
        raise ConfigError(
            f"dataset ({name}), row {flat.source_rows[index] + 1}: {lengths[index]} tokens are more than "
            f"--context_length {context_length}; raise it, or give --truncation right, left, drop or split"
        )
    if truncation == "left":
        starts = np.maximum(starts, ends - context_length)
    else:
        ends = np.minimum(ends, starts + context_length)
    is_empty, is_dropped = lengths == 0, too_long & (truncation == "drop")
    kept = ~is_empty & ~is_dropped
    has_label = _has_label(flat.labels, starts, ends)
    lacking = whole[kept & ~has_label]
    kept &= has_label
    is_part = np.isin(lacking, whole[kept])  # of a sequence of which other parts are kept
    lengths_kept = (ends - starts)[kept]
    num_tokens_cut = int((lengths[kept] - lengths_kept).sum())
    input_ids, labels, of_tokens = flat.input_ids, flat.labels.copy(), dict(flat.of_tokens)
    if len(labels) != lengths_kept.sum():
        is_token_kept = _covered(starts[kept], ends[kept], len(labels))
        input_ids, labels = input_ids[is_token_kept], labels[is_token_kept]
        of_tokens = {name: values[is_token_kept] for name, values in of_tokens.items()}
    offsets = np.concatenate([[0], np.cumsum(lengths_kept)]).astype(np.int64)
    labels[offsets[:-1]] = IGNORE_INDEX  # nothing precedes a first token
    cut = Sequences(
        input_ids=input_ids,
        labels=labels,
        offsets=offsets,
        label_offsets=offsets,
        source_rows=flat.source_rows[kept],
        num_truncated=int(too_long[kept].sum()),
        num_tokens_cut=num_tokens_cut,
        num_too_long=int(is_dropped.sum()),
        num_without_label=len(np.unique(lacking[~is_part])),
        num_split=num_split,
        num_parts=num_parts,
        num_parts_without_label=int(is_part.sum()),
        num_empty=int(is_empty.sum()),
        of_tokens=of_tokens,
        **{name: getattr(flat, name) for name in COUNT_COLUMNS},
        num_misplaced_labels=int(((labels != IGNORE_INDEX) & (labels != input_ids)).sum()),
    )
    return cut, whole[kept]


def split_sequences(flat: Sequences, context_length: int) -> tuple[Sequences, np.ndarray]:
    """Sequences longer than `context_length` as several, all but the last of them that long.

    Each part begins with the last token of the part before, as in Megatron's and nanoGPT's data: nothing precedes a
    first token, so it has no label, and every label counts exactly once. No start or end token is added inside a text.

    Returns:
        The parts, and for each the index of its sequence.
    """
    starts, lengths = flat.offsets[:-1], flat.lengths
    step = context_length - 1
    num_parts = np.maximum(1, -(-(lengths - 1) // step))
    whole = np.repeat(np.arange(len(flat)), num_parts)
    if len(whole) == len(flat):
        return flat, whole
    ordinals = np.arange(num_parts.sum()) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    part_starts = np.repeat(starts, num_parts) + ordinals * step
    seams = part_starts[ordinals > 0]  # tokens that end one part and begin the next
    offsets = np.append(part_starts + np.cumsum(ordinals > 0), flat.offsets[-1] + len(seams))
    # A part before a seam ends after the seam's token; the next begins with its copy, one place later.
    parts = dataclasses.replace(
        flat,
        input_ids=np.insert(flat.input_ids, seams + 1, flat.input_ids[seams]),
        labels=np.insert(flat.labels, seams + 1, flat.labels[seams]),
        offsets=offsets,
        label_offsets=offsets,
        source_rows=flat.source_rows[whole],
        of_tokens={
            name: np.insert(values, seams + 1, values[seams], axis=0) for name, values in flat.of_tokens.items()
        },
    )
    return parts, whole


def _has_label(labels: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Whether a sequence has a label after its first token, bool [sequences]; the slices do not overlap."""
    has_second = ends - starts > 1
    found = np.zeros(len(starts), dtype=bool)
    if has_second.any():
        bounds = np.stack([starts[has_second] + 1, ends[has_second]], axis=1).reshape(-1)
        has_loss = np.append(labels != IGNORE_INDEX, False)  # the last sequence's end must be an index
        found[has_second] = np.logical_or.reduceat(has_loss, bounds)[::2]
    return found


def _covered(starts: np.ndarray, ends: np.ndarray, num_tokens: int) -> np.ndarray:
    """Which tokens are in one of the slices, bool [num_tokens]; slices are not empty and do not overlap."""
    steps = np.zeros(num_tokens + 1, dtype=np.int8)
    steps[starts] += 1
    steps[ends] -= 1
    return np.cumsum(steps[:-1], dtype=np.int8).view(bool)
