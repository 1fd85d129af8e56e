"""Finds the rows of the data that a loss or a gradient that is not finite came from."""

from __future__ import annotations

from collections.abc import Sequence

from data.mixing import describe_row
from utils.distributed import gather_to_all


class NonFiniteError(Exception):
    """The loss or the gradient is not finite. Raised on every rank, before the update; holds this rank's suspects."""

    def __init__(self, source_rows: list[int]) -> None:
        super().__init__(source_rows)
        self.source_rows = source_rows


def describe_non_finite(
    step: int, error: NonFiniteError, rows_of_step: Sequence[int], datasets: Sequence[str], *, is_fp16: bool = False
) -> str:
    """The message that names the rows whose loss is not finite, or all rows of the step if only the gradient is not.

    Every rank must call this.

    Args:
        rows_of_step: this rank's rows of the training data in that step, counted from 0 (`data.mixing.global_row`);
            the message counts from 1.
        datasets: the run's.
        is_fp16: whether the run computes in fp16. Then its gradient overflowed at the smallest loss scale.
    """
    what, suspects = "loss", gather_to_all(error.source_rows)
    if not any(suspects):
        what, suspects = "gradient", gather_to_all(list(rows_of_step))
    rows = ", ".join(describe_row(row, datasets) for row in sorted(row for rows in suspects for row in rows))
    remedy = "Look at those rows, or lower --lr, or give --gradient_clipping"
    if is_fp16:
        remedy += (
            "; fp16 holds at most 65504: bf16 (on cards that have it) or --mixed_precision False (fp32) would help"
        )
    return (
        f"step {step}: the {what} is not finite, and the update was not made; rows of the training data in it: {rows}. "
        f"{remedy}"
    )
