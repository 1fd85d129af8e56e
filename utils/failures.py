"""How a run ends when it cannot go on: one line, once, and an exit status."""

from __future__ import annotations

import signal
import sys
import time

from utils.distributed import Environment

REFUSED, FAILED = 2, 1
GRACE_SECONDS = 10


class TrainingError(Exception):
    """Training cannot go on; the message is all that the user needs. Raised on every rank."""


def end_with_error(env: Environment, message: str, status: int) -> int:
    """Print one `error:` line, from rank 0, and return the exit status.

    The launcher ends all ranks as soon as one has failed, so the others first give rank 0 time to speak. If it does not
    end by then, the failure was theirs alone, and they say it.
    """
    if not env.is_rank_zero:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(status))
        time.sleep(GRACE_SECONDS)
        message = f"rank {env.rank}: {message}"
    print(f"error: {message}", file=sys.stderr, flush=True)
    return status
