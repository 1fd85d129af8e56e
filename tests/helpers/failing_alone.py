"""A rank that holds an error while the others work: how often the ranks look at each other, and which of them speak."""

from __future__ import annotations

import threading
import time
from typing import Any

from ranks.environment import read_environment
from ranks.process_group import start_process_group
from supervision.exit_status import FAILED
from supervision.failures import end_with_error
from supervision.verdict import Verdict
from supervision.watchdog import Watchdog
from utils.errors import TrainingError

HELD_SECONDS = 3.0


class CountingWatchdog(Watchdog):
    """Counts its rounds on rank 0."""

    num_rounds = 0

    def _lead(self, *args: Any) -> Verdict:
        self.num_rounds += 1
        return super()._lead(*args)


def fail_on_rank_one() -> int:
    """What `ProcessGroup.run` runs instead of the flags. Rank 0 prints how many rounds there were."""
    env = read_environment()
    start_process_group(env)
    watchdog = CountingWatchdog(env)
    watchdog.start(None)
    if env.rank == 1:
        watchdog.others_tell(HELD_SECONDS)
        watchdog.has_told()
        return 1
    with watchdog.during_run(
        before_leaving=lambda: print(watchdog.num_rounds, flush=True), was_signalled=lambda: False
    ):
        time.sleep(100)
    return 0


def fail_on_rank_zero_too() -> int:
    """As `fail_on_rank_one`, but rank 0 fails as soon as it has heard of it."""
    env = read_environment()
    start_process_group(env)
    watchdog = Watchdog(env)
    watchdog.start(None)
    if env.is_rank_zero:
        heard = threading.Event()
        with watchdog.during_run(before_leaving=heard.set, was_signalled=lambda: False):
            heard.wait(100)
    return end_with_error(env, TrainingError("it failed"), FAILED, watchdog)
