"""Names the examples of a step whose loss or gradient is not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from data.batches.mixing import describe_row
from ranks.collectives import gather_to_all


class NonFiniteError(Exception):
    """The loss or the gradient is not finite. Raised on every rank, before the update.

    Attributes:
        source_rows: this rank's examples in micro-batches whose loss is not finite, counted from 0
            (`data.batches.mixing.global_row`).
        rows_of_step: all of its examples in that step.
    """

    def __init__(self, source_rows: list[int], rows_of_step: list[int]) -> None:
        super().__init__(source_rows, rows_of_step)
        self.source_rows, self.rows_of_step = source_rows, rows_of_step


def describe_non_finite(
    step: int,
    error: NonFiniteError,
    datasets: Sequence[str],
    weights: Mapping[str, bool],
    *,
    is_fp16: bool = False,
) -> str:
    """The message with the examples whose loss is not finite, or with all of the step if only the gradient is not.

    Every rank must call this.

    Args:
        error: this rank's; the message counts examples from 1, as rows of their file.
        datasets: the run's.
        weights: this rank's weights that are not finite themselves, and whether each is trained. If there are any,
            they are the cause, not the data.
        is_fp16: whether the run computes in fp16, so that the gradient overflowed at the smallest loss scale.
    """
    what, suspects = "loss", gather_to_all(error.source_rows)
    # After the gather every rank has the same lists, so all enter the second one, or none.
    if not any(suspects):
        what, suspects = "gradient", gather_to_all(error.rows_of_step)
    rows = ", ".join(describe_row(row, datasets) for row in sorted({row for rows in suspects for row in rows}))
    remedy = "Look at those rows, or lower --lr, or give --gradient_clipping"
    if is_fp16:
        remedy += (
            "; fp16 holds at most 65504: bf16 (on cards that have it) or --mixed_precision False (fp32) would help"
        )
    if broken := {name: is_trained for of_rank in gather_to_all(dict(weights)) for name, is_trained in of_rank.items()}:
        remedy = _blame(broken, first_step=step == 1)
    return (
        f"step {step}: the {what} is not finite, and the update was not made; rows of the training data in it: {rows}. "
        f"{remedy}"
    )


def _blame(weights: Mapping[str, bool], *, first_step: bool) -> str:
    """The cause and the remedy if weights are not finite themselves.

    Args:
        weights: their names, and whether each is trained.
        first_step: whether no update was made yet.
    """
    # Nothing has changed these yet, so they were loaded so.
    untouched = [name for name, is_trained in weights.items() if first_step or not is_trained]
    name, more = (untouched or list(weights))[0], f" and {len(weights) - 1} more" if len(weights) > 1 else ""
    if untouched:
        return (
            f"It comes from the weights, not from the data: {name}{more} held NaN or infinity before training; get "
            "that model or adapter again, or give another"
        )
    return (
        f"It comes from the weights, not from the data: {name}{more} hold NaN or infinity, from --model_name or from "
        "an earlier update; look at that model, or go on from an earlier checkpoint with a lower --lr"
    )
