"""How a run ends when it cannot go on: one line, once, and an exit status."""

from __future__ import annotations

import signal
import sys
import time
import traceback
from collections.abc import Sequence

from configs.errors import ConfigError
from utils.distributed import Environment, gather_to_all

REFUSED, FAILED = 2, 1
GRACE_SECONDS = 10


class TrainingError(Exception):
    """Training cannot go on; the message is all that the user needs. Raised on every rank."""


class NonFiniteError(Exception):
    """The loss or the gradient is not finite; raised on every rank, before the update. Holds this rank's suspects."""

    def __init__(self, source_rows: list[int]) -> None:
        super().__init__(source_rows)
        self.source_rows = source_rows


def describe_non_finite(step: int, error: NonFiniteError, rows_of_step: Sequence[int]) -> str:
    """Name the rows whose loss is not finite, or all of the step's where only the gradient is not.

    Every rank must call this.

    Args:
        rows_of_step: this rank's rows of the training data in that step, counted from 0; the message counts from 1.
    """
    what, suspects = "loss", gather_to_all(error.source_rows)
    if not any(suspects):
        what, suspects = "gradient", gather_to_all(list(rows_of_step))
    rows = ", ".join(str(row + 1) for row in sorted(row for rows in suspects for row in rows))
    return (
        f"step {step}: the {what} is not finite, and the update was not made; rows of the training data in it: {rows}. "
        "Look at those rows, or lower --lr, or give --gradient_clipping"
    )


def end_with_error(env: Environment, error: Exception, status: int) -> int:
    """Print one `error:` line, from one rank, and return the exit status; under it, where from, if it was unforeseen.

    The launcher ends all ranks as soon as one has failed, so the others first give rank 0 time to speak. If it does not
    end by then, the failure was theirs alone, and they say it.
    """
    message, start = str(error), ""
    if not isinstance(error, ConfigError | TrainingError):
        start = "\n"  # below a progress bar
        message = f"{type(error).__name__}: {error}\n{''.join(traceback.format_exception(error))}"
    if not env.is_rank_zero or _is_of_another_rank(error):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(status))
        time.sleep(GRACE_SECONDS)
        message = f"rank {env.rank}: {message}"
    print(f"{start}error: {message}", file=sys.stderr, flush=True)
    return status


def _is_of_another_rank(error: Exception) -> bool:
    """Whether this rank only lost its connection to one that had ended, which gloo and nccl say in these words."""
    return any(
        words in str(error) for words in ("Connection closed by peer", "Connection reset by peer", "remote process")
    )
