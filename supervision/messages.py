"""Messages between the ranks' watchdogs: reports to rank 0 and its verdicts, over a gloo group of their own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from datetime import timedelta
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

from supervision.verdict import Report, Verdict

T = TypeVar("T")
P = ParamSpec("P")
Message = TypeVar("Message", Report, Verdict)

_RANK_BYTES = 8  # "123456, "


class LostRank(Exception):
    """The connection to another rank's watchdog has closed."""


def in_background(function: Callable[P, T], *args: P.args, **options: P.kwargs) -> Future[T]:
    """Call `function` in a thread of its own, which the end of the process does not wait for.

    A wait inside gloo that runs into a timeout would close its connections to all ranks.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **options))
        except LostRank as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def message_bytes(message: Report | Verdict | None, world_size: int) -> bytearray:
    """A message as it is sent; None: room for any. All have one length, for gloo aborts a rank that gets more bytes
    than it waits for; a verdict may name every rank."""
    text = b"" if message is None else json.dumps(asdict(message)).encode()
    return bytearray(text.ljust(1024 + _RANK_BYTES * world_size))


def send(group: dist.ProcessGroup, rank: int, message: Report | Verdict) -> None:
    data = message_bytes(message, group.size())
    _transfer(lambda: group.send([torch.frombuffer(data, dtype=torch.uint8)], rank, 0))


def receive(group: dist.ProcessGroup, rank: int, kind: type[Message]) -> Message:
    """A rank's Report, or rank 0's Verdict."""
    data = message_bytes(None, group.size())
    _transfer(lambda: group.recv([torch.frombuffer(data, dtype=torch.uint8)], rank, 0))
    return kind(**json.loads(data))


def _transfer(start: Callable[[], dist.Work]) -> None:
    try:
        start().wait(timedelta(days=7))
    except RuntimeError as error:  # gloo has no finer one
        raise LostRank from error
