"""A line about steps that wait, since torch's allocator runs out of room in them."""

from __future__ import annotations

from utils.memory_errors import EXPANDABLE_SEGMENTS, grows_segments

WINDOW = 8  # steps; a run's first ones may retry until memory has its lasting pieces
OFTEN = 0.5  # retries per step


class AllocatorRetries:
    """Watches how often the allocator has freed its cache and tried again.

    Before it frees, it waits until the device has ended all work, and later steps ask the driver for memory again. A
    run that fits may do so in every step: memory that is kept for one stream serves no other, and pieces that fit no
    tensor serve none.
    """

    def __init__(self) -> None:
        self._since: tuple[int, int] | None = None  # a step, and the retries until its end
        self._was_told = False

    def begin_again(self, step: int, num_retries: int) -> None:
        """Count from the end of this step on, or of what followed it: an evaluation, or a checkpoint."""
        self._since = step, num_retries

    def line(self, step: int, num_retries: int) -> str | None:
        """The line to print after this step; None if there is nothing new to say.

        Args:
            num_retries: of this process so far.
        """
        if self._since is None:
            self.begin_again(step, num_retries)
            return None
        num_steps, num_times = step - self._since[0], num_retries - self._since[1]
        if num_steps < WINDOW:
            return None
        self.begin_again(step, num_retries)
        if self._was_told or num_times < OFTEN * num_steps:
            return None
        self._was_told = True
        ((name, setting),) = EXPANDABLE_SEGMENTS.items()
        grow = "" if grows_segments() else f"set {name}={setting} in the environment, or "
        return (
            f"memory: the allocator ran out of room {num_times} times in {num_steps} steps; each time the GPU waits "
            f"until its cache is freed and asked for again: {grow}keep less (--activation_checkpointing selective or "
            "full, --batch_size_training)"
        )
