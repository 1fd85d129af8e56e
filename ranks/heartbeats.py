"""Signs of life, for ranks that no launcher watches: each tells rank 0 every few seconds, over the job's store."""

from __future__ import annotations

import contextlib
import threading
import time

import torch.distributed as dist

from ranks.environment import Environment
from utils.errors import TrainingError

START_SECONDS = 600.0  # for the processes of a run to start
LOOK_SECONDS = 1.0  # between two looks for a sign
_BEAT_SECONDS = 5.0
_SILENT_SECONDS = 60.0


def start_beating(store: dist.Store, env: Environment) -> None:
    """Tell rank 0 that this process lives, from a thread, until rank 0 has gone.

    Args:
        store: a client of its own: a call of another thread that waits would hold up the beats.
    """
    threading.Thread(target=_beat, args=(store, env), daemon=True).start()


def _beat(store: dist.Store, env: Environment) -> None:
    with contextlib.suppress(dist.DistError):
        while True:
            store.add(_key(env.rank), 1)
            time.sleep(_BEAT_SECONDS * env.grace_scale)


def _key(rank: int) -> str:
    """The key of the counter that a rank raises with each beat."""
    return f"beat/{rank}"


class Silence:
    """How long a rank has given no sign of life."""

    def __init__(self) -> None:
        self.seconds, self.num_beats = 0.0, 0

    def listen(self, store: dist.Store, rank: int, env: Environment) -> None:
        """Look for a sign, `LOOK_SECONDS` after the last look.

        Raises:
            TrainingError: if there was none for too long.
        """
        before, self.num_beats = self.num_beats, store.add(_key(rank), 0)
        # Looks are counted, not time: a rank 0 that was suspended has not waited.
        self.seconds = 0.0 if self.num_beats > before else self.seconds + LOOK_SECONDS
        patience = (_SILENT_SECONDS if self.num_beats else START_SECONDS) * env.grace_scale
        if self.seconds > patience:
            what = (
                "ended before the ranks had connected; its own output says why" if self.num_beats else "did not start"
            )
            raise TrainingError(f"rank {rank} {what} (no sign of it for {self.seconds:.0f} s)")
