"""metrics.jsonl, and samples.jsonl in the same way: writing lines, reading them, and cutting them back to where a
resumed run continues."""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from io import BytesIO, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from reporting.events import Event, event_of, events_in
from reporting.trackers import Trackers
from utils.atomic_write import write_atomically
from utils.small_files import open_regular

MOST_WAITING_BYTES = 16 * 2**20  # about 40,000 steps
RETRY_SECONDS = 1.0  # a full disk is asked this often, not for every line
_PIECE_BYTES = 2**16


class MetricsFile:
    """metrics.jsonl: one JSON object per line, with its time; non-finite numbers are null.

    The trackers get the same events; `end` is the last and closes them. A full disk does not end the run: lines wait
    until they can be written, whole and in order. If too many wait, later ones are lost and counted.
    """

    def __init__(self, path: Path | None, trackers: Trackers | None = None, screen: TextIO | None = None) -> None:
        """
        Args:
            path: the file to append to. None, on every rank but 0, writes nothing.
            screen: gets each line, too (`--log_format json`).
        """
        self.path, self.trackers, self.screen = path, trackers or Trackers(), screen
        self.num_lost = 0
        self.refusal = ""  # why the last line could not be written; empty if it was
        self.unreadable = ""  # why the file could not be read the last time; empty if it could
        self._waiting: deque[bytes] = deque()  # lines that the disk has refused so far
        self._waiting_bytes = 0
        self._next_try = 0.0
        self._num_written = self._num_in_file() or 0

    def write(self, event: str, **values: Any) -> None:
        if self.path is None:
            return
        figures = {name: json_number(value) for name, value in values.items()}
        now = datetime.now().astimezone().isoformat(timespec="milliseconds")
        line = json.dumps({"event": event} | figures | {"time": now}) + "\n"
        if self.screen is not None:
            self.screen.write(line)
        # `end` is kept in any case: without it the run would look killed.
        if self._waiting_bytes + len(line) <= MOST_WAITING_BYTES or event == "end":
            self._waiting.append(line.encode())
            self._waiting_bytes += len(line)
        else:
            self.num_lost += 1
        if event == "end" or time.monotonic() >= self._next_try:
            self.write_waiting()
        self.trackers.write(event, values)

    def write_waiting(self) -> None:
        """Try to write the waiting lines."""
        if self.path is None:
            return
        could_write = not self.refusal
        try:
            while self._waiting:
                piece = self._first_lines()
                append_whole(self.path, b"".join(piece))
                self._num_written += len(piece)
                for line in piece:
                    self._waiting.popleft()
                    self._waiting_bytes -= len(line)
            self.refusal, self._next_try = "", 0.0
        except OSError as error:
            self.refusal, self._next_try = error.strerror or str(error), time.monotonic() + RETRY_SECONDS
            if could_write:
                self.trackers.say(f"{self.path} cannot be written ({self.refusal}); its lines wait until it can be")

    def num_missing(self) -> int:
        """The number of lines that are not in the file."""
        return len(self._waiting) + self.num_lost + self.num_deleted()

    def num_deleted(self) -> int:
        """The number of lines that were written and are gone, with the file or its folder; 0 if it cannot be read."""
        num_in_file = self._num_in_file()
        return 0 if num_in_file is None else max(0, self._num_written - num_in_file)

    def _num_in_file(self) -> int | None:
        """The number of lines in the file; None if it cannot be read."""
        if self.path is None:
            return 0
        try:
            with self._opened() as file:
                return sum(1 for _ in file)
        except OSError:
            return None

    def read(self) -> list[Event]:
        """All events so far, waiting ones included; of a file that cannot be read only these.

        None on a rank that writes none.
        """
        if self.path is None:
            return []
        lines: list[bytes] = []
        with suppress(OSError), self._opened() as file:
            lines = file.read().splitlines()
        return events_in([*lines, *self._waiting])

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        """The file to be read, empty if it is not there. If it cannot be read, a line says so, once."""
        assert self.path is not None
        try:
            try:
                file = open_regular(self.path)
            except FileNotFoundError:
                if os.path.lexists(self.path):  # a file server that was restarted
                    raise
                file = BytesIO()
            with file:
                yield file
        except OSError as error:
            before, self.unreadable = self.unreadable, error.strerror or str(error)
            if not before:
                self.trackers.say(
                    f"{self.path} cannot be read ({self.unreadable}); its figures are left out at the end"
                )
            raise
        self.unreadable = ""

    def _first_lines(self) -> list[bytes]:
        """The first waiting lines, at least one. Pieces are small, since a nearly full disk may take some."""
        size, lines = 0, list[bytes]()
        for line in self._waiting:
            size += len(line)
            if lines and size > _PIECE_BYTES:
                break
            lines.append(line)
        return lines


def json_number(value: Any) -> Any:
    """The value for JSON: None for a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append_whole(path: Path, data: bytes) -> None:
    """Append all of the data or none of it.

    Raises:
        OSError: if there is no room, or the file cannot be opened.
    """
    end = None
    try:
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666), "rb+", buffering=0) as file:
            end = _end_of_last_line(file)
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:  # a file server may tell of a full disk only when the file is closed
        with suppress(OSError):
            if end is not None and os.path.getsize(path) > end:
                os.truncate(path, end)
        raise


def _end_of_last_line(file: RawIOBase) -> int:
    """The file's end, after cutting off a torn last line, which a full disk or a kill has left."""
    end = size = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 4096)
        file.seek(start)
        newline = (file.read(end - start) or b"").rfind(b"\n")
        end = start + newline + 1
        if newline >= 0:
            break
    if end < size:
        file.truncate(end)
    return end


def keep_until(source: Path, target: Path, *, step: int, epoch: int, eval_due: bool = False) -> int:
    """Copy the events of `source` up to a step to `target`, for a resumed run to append to.

    Later events, `end`, a torn last line and lines without an event are dropped.

    Args:
        epoch: the first epoch that had not ended at that step.
        target: may be `source`.
        eval_due: whether the resumed run evaluates at this step, even if a session that was killed later has done so.

    Returns:
        The number of lines without an event. A torn last line does not count: every kill may leave one.

    Raises:
        OSError: if `target` cannot be written; then it is unchanged.
    """
    kept, num_others = [], 0
    for line in source.read_bytes().splitlines(keepends=True):
        event = event_of(line)
        if event is None:
            num_others += line.endswith(b"\n")
            continue
        is_later = event.get("step", 0) > step or (event["event"] == "epoch" and event["epoch"] >= epoch)
        is_later = is_later or (eval_due and event["event"] in ("eval", "sample") and event["step"] == step)
        if event["event"] != "end" and not is_later:
            kept.append(line.decode("utf-8", errors="replace").rstrip("\r\n") + "\n")
    write_atomically(target, "".join(kept))
    return num_others
