"""Rows that other tools have prepared: masks of what is learned by token, and where each of several texts ends.

TRL writes `completion_mask` and `assistant_masks`, and `seq_lengths` or `position_ids` of rows that are packed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from data.sequences.token_lists import whole_numbers, zeros_and_ones
from data.tokens.labels import IGNORE_INDEX
from data.tokens.spans import BadExample

LEARNED = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")
"""1 for the tokens that are learned; 0 for the others, which is what -100 says in `labels`."""

PREPARED_COLUMNS = (*LEARNED, "seq_lengths", "position_ids")

_OF_TOKENS = ("attention_mask", "special_tokens_mask")  # these do not say what is learned


def unknown_mask(columns: Iterable[str]) -> str | None:
    """A column that is called a mask, and is none of those that are read."""
    return next((name for name in columns if "mask" in name.lower() and name not in (*LEARNED, *_OF_TOKENS)), None)


def refusal_of_mask(name: str) -> str:
    return (
        f"column {name} seems to say which tokens are learned, and is not read; write labels with {IGNORE_INDEX} for "
        "the others, and leave the column out"
    )


def is_prepared(columns: Iterable[str]) -> bool:
    """Whether rows with these columns say more than `input_ids`, `labels` and `attention_mask`."""
    names = [*columns]
    return bool({*PREPARED_COLUMNS} & {*names}) or unknown_mask(names) is not None


def plain_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row with its masks in `labels`, and its lengths in `sample_lengths`.

    Raises:
        BadExample: if a mask or the lengths do not fit the tokens, or a mask is unknown.
    """
    if not is_prepared(row):
        return row
    if name := unknown_mask(row):
        raise BadExample(refusal_of_mask(name))
    labels = whole_numbers("labels", row["labels"])
    for name in LEARNED:
        if (given := row.get(name)) is not None:
            mask = zeros_and_ones(name, given)
            if mask.shape != labels.shape:
                raise BadExample(f"column {name} needs a 0 or a 1 for each of the {len(labels)} tokens")
            labels = np.where(mask, labels, np.int32(IGNORE_INDEX))
    lengths = _lengths(row, len(labels))
    more = {} if lengths is None or row.get("sample_lengths") is not None else {"sample_lengths": lengths}
    return {**row, "labels": labels, **more}


def _lengths(row: Mapping[str, Any], num_tokens: int) -> list[int] | None:
    if (given := row.get("seq_lengths")) is not None:
        lengths = _integers(given)
        if lengths is None or lengths.ndim != 1 or lengths.sum() != num_tokens or (lengths < 1).any():
            raise BadExample(f"column seq_lengths does not add up to the {num_tokens} tokens of the row")
        return lengths.tolist()
    positions = _integers(row.get("position_ids"))
    is_padded = row.get("attention_mask") is not None and not np.all(row["attention_mask"])
    if positions is None or positions.shape != (num_tokens,) or is_padded:
        return None
    starts = np.flatnonzero(positions == 0)
    steps = np.diff(positions)
    if len(starts) < 2 or starts[0] != 0 or (steps[steps != 1] >= 0).any():
        return None  # one text, or positions of another kind
    return np.diff([*starts, num_tokens]).tolist()


def _integers(values: Any) -> np.ndarray | None:
    try:
        array = np.asarray(values)
    except ValueError:
        return None
    return array if array.dtype.kind in "iub" else None
