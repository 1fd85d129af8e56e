"""Shows progress of long work: bars in a terminal; in a log file a line when it starts and one when it ends.

In a terminal (stderr is one) bars make the lines superfluous, so none are printed. Both come from rank 0 alone. The
rank is read from the environment, not passed in: dataset functions of users tokenize, too, and have no argument for it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from utils.launcher_rank import launcher_rank
from utils.printing import print_line, printable


def shows_progress() -> bool:
    """Whether this is the rank that shows progress."""
    return launcher_rank() == 0


def shows_bars() -> bool:
    """Whether this process draws progress bars: on the rank that shows progress, in a terminal."""
    return shows_progress() and sys.stderr.isatty()


def progress_bar(
    description: str, items: Iterable[Any] | None = None, *, is_hidden: bool = False, **options: Any
) -> tqdm[Any]:
    """A tqdm bar over `items`, or one that is moved by `update`. Draws nothing outside a terminal.

    Args:
        options: of tqdm, such as `total`.
    """
    return tqdm(items, desc=printable(description), disable=is_hidden or not shows_bars(), **options)


def phase_begins(name: str) -> None:
    """Print to a log file that long work begins. For work that prints its own last line; otherwise use `phase`."""
    if shows_progress() and not shows_bars():
        print_line(f"{name} ...")


def say_if_it_lasts(name: str, seconds: float = 3.0) -> Callable[[], None]:
    """Print what is being waited for, if it takes longer than `seconds`.

    Args:
        name: of the work, as a participle.

    Returns:
        A function to call when it has ended.
    """
    if not shows_progress():
        return lambda: None
    timer = threading.Timer(seconds, print_line, [f"{name} ..."], {"to_stderr": True})
    timer.daemon = True
    timer.start()

    def ended() -> None:
        timer.cancel()
        timer.join()

    return ended


@contextmanager
def phase(name: str) -> Iterator[None]:
    """A context that prints to a log file that long work begins, and how long it took: "loading weights: 12.3 s".

    Args:
        name: of the work, as a participle.
    """
    phase_begins(name)
    started = time.perf_counter()
    yield
    if shows_progress() and not shows_bars():
        print_line(f"{name}: {time.perf_counter() - started:.1f} s")
