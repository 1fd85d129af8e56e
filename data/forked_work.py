"""Work on items in forked processes: what a function makes of each, in the order of the items."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from data.batches.workers import stop_signals_held_back, watch_parent

MAX_PROCESSES = 16

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def num_processes() -> int:
    """The processes that work at the same time: the cores that this one may use. 1 where none can be forked."""
    return min(MAX_PROCESSES, len(os.sched_getaffinity(0))) if sys.platform == "linux" else 1


def in_processes(function: Callable[[_Item], _Result], items: Sequence[_Item], number: int) -> Iterator[_Result]:
    """`function(item)` of every item, in order; some are worked on ahead.

    An item that fails is given to the function here, again, so an exception comes from this process and from the first
    such item. The same happens to items of a process that was killed.

    Args:
        function: inherited by the processes, not pickled. Its results are pickled.
        number: of processes.
    """
    context = multiprocessing.get_context("fork")
    workers, idle = [], list[Connection]()
    with stop_signals_held_back():
        for _ in range(min(number, len(items))):
            here, there = context.Pipe()
            workers.append(context.Process(target=_serve, args=(there, function), daemon=True))
            workers[-1].start()
            there.close()
            idle.append(here)
    busy: dict[Connection, int] = {}
    done: dict[int, Any] = {}
    next_item, ahead = 0, 2 * len(workers)
    try:
        for place, item in enumerate(items):
            while place not in done and (busy or idle):
                while idle and next_item < min(len(items), place + ahead):
                    busy[idle[-1]] = next_item
                    idle.pop().send(items[next_item])
                    next_item += 1
                for connection in wait(list(busy)):
                    assert isinstance(connection, Connection)
                    try:
                        done[busy[connection]] = connection.recv()
                        idle.append(connection)
                    except (EOFError, OSError):  # the process was killed
                        done[busy[connection]] = None
                    del busy[connection]
            result = done.pop(place, None)
            yield function(item) if result is None else result[0]
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def _serve(connection: Connection, function: Callable[[Any], Any]) -> None:
    """Send a list of the one result for each item that comes; None if the function fails."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads are not in this process, and others use the cores
    watch_parent(0)
    while True:
        item = connection.recv()
        try:
            result = [function(item)]
        except Exception:  # the parent meets it, too
            result = None
        connection.send(result)
