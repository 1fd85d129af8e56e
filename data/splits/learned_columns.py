"""Columns that say in other tools whether a row is learned, and how much: `weight`, `train`, `loss_mask`.

No format reads them, so a row that is not to be learned is refused. Text in such a column says something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from data.tokens.spans import BadExample

_LEARNS = (
    *("weight", "weights", "sample_weight", "loss_weight", "loss", "loss_mask", "loss_scale", "train", "trainable"),
    *("training", "learn", "include"),
)
_LEAVES_OUT = (
    *("mask", "masked", "ignore", "exclude", "skip", "no_loss", "no_train", "not_trained", "do_not_train"),
    "do_not_learn",
)
_YES_AND_NO = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False, "1.0": True, "0.0": False}


def learned_columns(columns: Iterable[str]) -> tuple[str, ...]:
    """The columns of this meaning, in any spelling, and the usual names, which later rows of a stream may have."""
    usual = (*_LEARNS, *_LEAVES_OUT)
    return (*(name for name in columns if _usual(name) in usual), *usual)


def refuse_unlearned(column: str, value: Any) -> None:
    """Check that a column does not say that its row is not learned, or learned in part.

    Raises:
        BadExample: if it does.
    """
    if value is None:
        return
    says, name = _YES_AND_NO.get(str(value).lower()), _usual(column)
    learns = says is None or says is (name in _LEARNS)
    is_in_part = isinstance(value, list | dict) and bool(value)
    # A loss is a measure, as of a filter, unless it is 0 or 1; any other number weighs the row.
    is_weight = says is None and name != "loss" and _is_number(value)
    is_of_assistant = name == "mask" and str(value).lower() in ("assistant", "gpt", "bot", "model")  # NeMo's
    if not learns or is_in_part or is_weight or is_of_assistant:
        raise BadExample(
            f"column {column} is {str(value)[:40]}, which seems to say whether the row is learned, and is not read; "
            "leave out the rows that are not to be learned, and the column"
        )


def _usual(column: str) -> str:
    """The name in lower case, its words joined by underscores, without `is_` or `should_`."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[\s-]+", "_", column.strip()).lower()
    return re.sub(r"^(is|should|do)_(?!not_)", "", name)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    try:
        return float(value) == float(value)  # and no NaN, pandas' empty cell
    except OverflowError:  # a whole number that is larger than any float
        return True
    except (TypeError, ValueError):
        return False
