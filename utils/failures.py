"""How a run ends when it cannot go on: one line, once, and an exit status."""

from __future__ import annotations

import signal
import sys
import time
import traceback
from collections.abc import Sequence

from configs.errors import ConfigError
from configs.flags import help_text, parse_flags, wants_help
from utils.environment import Environment, print_rank_zero, read_environment

REFUSED, FAILED = 2, 1
GRACE_SECONDS = 10


class TrainingError(Exception):
    """Training cannot go on; the message is all that the user needs. Raised on every rank."""


def end_unless_flags_hold(argv: Sequence[str]) -> None:
    """End the process where these flags are refused or ask for help; for the time before torch is imported."""
    env = read_environment()
    if wants_help(argv):
        print_rank_zero(env, help_text())
        sys.exit(0)
    try:
        parse_flags(argv)
    except ConfigError as error:
        sys.exit(end_with_error(env, error, REFUSED))


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
