"""The lists of a tokenized row, as arrays: token ids and masks."""

from __future__ import annotations

from typing import Any

import numpy as np

from data.tokens.spans import BadExample

LIMITS = np.iinfo(np.int32)
_KINDS = {
    "f": "numbers with a fraction",
    "b": "True and False",
    "U": "texts",
    "S": "bytes",
    "O": "values of other kinds",
}


def whole_numbers(column: str, values: Any) -> np.ndarray:
    """A list of whole numbers, int32.

    Raises:
        BadExample: if it is none, or a number is no int32.
    """
    if isinstance(values, np.ndarray) and values.dtype == np.int32 and values.ndim == 1:  # as our own tokenizing's
        return values
    array = _array(values)
    kind = "b" if isinstance(values, list) and bool in set(map(type, values)) else array.dtype.kind
    if array.size and kind not in "iu":
        raise BadExample(f"column {column} is not a list of whole numbers, but holds {_KINDS.get(kind, array.dtype)}")
    if array.ndim != 1:
        raise BadExample(f"column {column} is not one list of whole numbers; its shape is {array.shape}")
    for number in (array.min(), array.max()) if array.size else ():
        if not LIMITS.min <= number <= LIMITS.max:
            raise BadExample(f"{number} in column {column} is no token id; is it another tokenizer's?")
    return array.astype(np.int32)


def zeros_and_ones(column: str, values: Any) -> np.ndarray:
    """A mask by token, bool.

    Raises:
        BadExample: if it holds anything but 0 and 1.
    """
    array = _array(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iubf"):
        raise BadExample(f"column {column} needs a 0 or a 1 for each token")
    is_other = ~np.isin(array, (0, 1))
    if is_other.any():
        raise BadExample(f"column {column} needs a 0 or a 1 for each token, and holds {array[is_other][0]}")
    return array.astype(bool)


def _array(values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except ValueError:  # lists of unequal lengths
        return np.empty(1, dtype=object)
