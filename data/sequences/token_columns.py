"""Columns of tokenized rows besides tokens and labels: what each token's loss counts, and a teacher's probabilities.

`sample_weight` is one number of a row, `token_weights` one of each token; the loss of a token is multiplied by both.
`teacher_ids` and `teacher_logprobs` hold a list of k for each token: what a teacher held most likely at its place, and
the natural logarithms of these probabilities (`tools.teacher_logprobs`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from data.tokens.labels import IGNORE_INDEX
from data.tokens.spans import BadExample

SAMPLE_WEIGHT = "sample_weight"
WEIGHTS, TEACHER_IDS, TEACHER_LOGPROBS = "token_weights", "teacher_ids", "teacher_logprobs"
TEACHER = (TEACHER_IDS, TEACHER_LOGPROBS)
TOKEN_COLUMNS = (SAMPLE_WEIGHT, WEIGHTS, *TEACHER)

OF_TARGETS = ("target_weights", "teacher_ids", "teacher_logprobs")
"""What micro-batches call these columns at their label tokens (`tasks.micro_batch.MicroBatch`), and the loss."""

TokenArrays = Mapping[str, np.ndarray]
"""By column: fp32 [tokens], or of a teacher int32 and fp32 [tokens, k]."""

LARGEST_FP32 = float(np.finfo(np.float32).max)
_MOST_IDS = 2**24  # whole numbers below are exact in fp32
_MOST_SUM = 1.05  # of a token's probabilities: logarithms may be rounded to bf16


def weight_of(column: str, value: Any) -> float:
    """The weight of a row.

    Raises:
        BadExample: if it is no number that fp32 holds, or below 0.
    """
    try:
        weight = float("nan") if isinstance(value, bool) else float(value)  # CSV files hold texts
    except (TypeError, ValueError, OverflowError):
        weight = float("nan")
    if not 0 <= weight <= LARGEST_FP32:
        raise BadExample(f"column {column} holds {value!r}, and a weight is a number of at least 0")
    return weight


def token_arrays(row: Mapping[str, Any], num_tokens: int) -> dict[str, np.ndarray]:
    """The columns of a row that are there.

    Raises:
        BadExample: if one does not fit the tokens.
    """
    found: dict[str, np.ndarray] = {}
    if (weight := row.get(SAMPLE_WEIGHT)) is not None:
        found[WEIGHTS] = np.full(num_tokens, weight_of(SAMPLE_WEIGHT, weight), dtype=np.float32)
    if (weights := row.get(WEIGHTS)) is not None:
        values = _numbers(WEIGHTS, weights, num_tokens, 1)
        if (values < 0).any():
            raise BadExample(f"column {WEIGHTS} holds {values.min()}, and a weight is a number of at least 0")
        found[WEIGHTS] = found.get(WEIGHTS, np.float32(1)) * values
    if (row.get(TEACHER_IDS) is None) != (row.get(TEACHER_LOGPROBS) is None):
        raise BadExample(f"columns {TEACHER_IDS} and {TEACHER_LOGPROBS} belong together")
    if row.get(TEACHER_IDS) is not None:
        ids, logprobs = (_numbers(name, row[name], num_tokens, 2) for name in TEACHER)
        are_ids = bool(((ids == ids.round()) & (ids >= 0) & (ids < _MOST_IDS)).all())
        if ids.shape != logprobs.shape or not ids.shape[1] or not are_ids or (logprobs > 1e-3).any():
            raise BadExample(
                f"columns {TEACHER_IDS} and {TEACHER_LOGPROBS} need as many ids as logarithms of probabilities for "
                "each token, one at least"
            )
        found |= {TEACHER_IDS: ids.astype(np.int32), TEACHER_LOGPROBS: logprobs}
    return found


def check_probabilities(arrays: TokenArrays, labels: np.ndarray, lengths: Sequence[int]) -> None:
    """Check that a teacher's probabilities are no more than 1 in all, where they are read: at label tokens.

    Args:
        lengths: of the sequences in the row, whose first tokens have nothing that could predict them.

    Raises:
        BadExample: if they are more.
    """
    if TEACHER_LOGPROBS not in arrays:
        return
    is_read = labels != IGNORE_INDEX
    is_read[np.cumsum([0, *lengths])[:-1][np.asarray(lengths) > 0]] = False
    sums = np.exp(arrays[TEACHER_LOGPROBS][is_read]).sum(axis=1)
    if (sums > _MOST_SUM).any():
        raise BadExample(
            f"column {TEACHER_LOGPROBS} has probabilities that add up to {sums.max():.3g} at a token; give logarithms "
            "of a softmax over the whole vocabulary, not logits, and each id once"
        )


def _numbers(column: str, values: Any, num_tokens: int, num_dims: int) -> np.ndarray:
    """fp32, since token ids below 2^24 are exact in it."""
    try:
        with np.errstate(over="ignore"):  # infinite, and refused below
            array = np.asarray(values if isinstance(values, np.ndarray) else [*values], dtype=np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadExample(f"column {column} is not a list of numbers") from error
    if array.ndim != num_dims or len(array) != num_tokens or not np.isfinite(array).all():
        what = "a number" if num_dims == 1 else "a list of equally many numbers"
        raise BadExample(f"column {column} needs {what} for each of the {num_tokens} tokens")
    return array


def end_to_end(parts: Sequence[TokenArrays], lengths: Iterable[int]) -> dict[str, np.ndarray]:
    """The arrays of several parts as one. A part without weights has weights of 1.

    Raises:
        BadExample: if some parts have a teacher and others have none, or one of other k.
    """
    names = dict.fromkeys(name for part in parts for name in part)
    found: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for part, length in zip(parts, lengths, strict=True):
        for name in names:
            if name not in part and name != WEIGHTS and length:
                raise BadExample(f"column {name} is missing, and other rows have it")
            if name in part:
                found[name].append(part[name])
            elif name == WEIGHTS:
                found[name].append(np.ones(length, dtype=np.float32))
    if len({array.shape[1] for name in TEACHER for array in found.get(name, ())}) > 1:
        raise BadExample(f"column {TEACHER_IDS} holds lists of several lengths")
    return {name: np.concatenate(arrays) for name, arrays in found.items()}
