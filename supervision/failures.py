"""Ends a run that cannot go on: one line, once, and an exit status."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from configs.flags import parse_flags
from configs.help import help_text, wants_help
from ranks.environment import Environment, lone_process, print_rank_zero, read_environment
from supervision.exit_status import FAILED, REFUSED, hand_refusal_over, leave
from supervision.patience import patience_of
from utils.compiled_code import keep_compiled_code
from utils.errors import ConfigError, RunError, TrainingError
from utils.launcher_rank import launcher_rank
from utils.printing import print_line

if TYPE_CHECKING:
    from supervision.watchdog import Watchdog

_LOST_WORDS = (  # in errors of gloo, NCCL and the store if another rank is gone
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection was likely closed",
    "Broken pipe",
    "remote process",
    "Application timeout caused pair closure",
)


def end_unless_flags_hold(argv: Sequence[str]) -> None:
    """End the process if these flags or variables are refused, or if it is asked for help.

    Before torch is imported: it learns here where compiled code is kept.
    """
    env = lone_process(launcher_rank())
    try:
        env = read_environment()
        if wants_help(argv):
            print_rank_zero(env, help_text(argv))
            sys.exit(0)
        parse_flags(argv)
        keep_compiled_code()  # the run says later if it cannot be kept
    except ConfigError as error:
        status = end_with_error(env, error, REFUSED)
        hand_refusal_over(env.refusal_file)
        sys.exit(status)


def end_at_once(message: str) -> NoReturn:
    """Print one `error:` line and end the process from any thread, so that it writes nothing more."""
    print_line(f"\nerror: {message}", to_stderr=True)  # below a progress bar
    leave(FAILED)


def end_with_error(env: Environment, error: BaseException, status: int, watchdog: Watchdog | None = None) -> int:
    """Print one `error:` line, from one rank, and return the exit status. An unforeseen error's traceback follows.

    The launcher ends all ranks as soon as one has failed, so the others first give rank 0 time to speak. If neither it
    nor the watchdogs have said by then what happened, the failure was this rank's alone, and it says so. A rank 0 that
    fails after that stays silent.
    """
    # docs/decisions.md, "Refuse early, in one line".
    patience, who = patience_of(env), ""
    is_of_another_rank = not isinstance(error, RunError) and any(words in str(error) for words in _LOST_WORDS)
    if not env.is_rank_zero or is_of_another_rank:
        # If a rank was killed for memory, the watchdog says so next; a launcher would end this one before.
        was_killed = is_of_another_rank and watchdog is not None and watchdog.killed()
        signal.signal(signal.SIGTERM, signal.SIG_IGN if was_killed else partial(_leave, env, status))
        if watchdog is None:
            time.sleep(patience.grace_seconds)
        elif watchdog.others_tell(patience.lost_seconds if is_of_another_rank else patience.grace_seconds):
            return status
        who = f"rank {env.rank}: "
    elif watchdog is not None and watchdog.others_have_told():
        return status  # one that had waited for this rank in vain
    start = "" if isinstance(error, ConfigError | TrainingError) else "\n"  # below a progress bar
    parts = error.parts() if isinstance(error, RunError) else iter([_with_traceback(error)])
    print_line(f"{start}error: {who}{next(parts)}", to_stderr=True)
    with _sigterm_ignored():  # the others end once this rank has told, and a launcher then wants to end this one, too
        if watchdog is not None:
            watchdog.has_told(refused=status == REFUSED)
        for part in parts:
            print_line(part, to_stderr=True)
    return status


def _leave(env: Environment, status: int, *_: object) -> NoReturn:
    if status == REFUSED:
        hand_refusal_over(env.refusal_file, wait=False)
    leave(status)


@contextlib.contextmanager
def _sigterm_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # Python allows no handlers there
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _with_traceback(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}\n{''.join(traceback.format_exception(error))}"
