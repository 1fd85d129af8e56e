"""metrics.jsonl: writing its lines, reading them, and cutting it back to where a resumed run continues."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

from reporting.trackers import Trackers


class MetricsFile:
    """metrics.jsonl: one JSON object per line and one write per line; non-finite numbers are null.

    The trackers get the same events; `end` is the last and closes them. A full disk does not end the run: lines wait
    until they can be written.
    """

    def __init__(self, path: Path | None, trackers: Trackers | None = None) -> None:
        """Append to `path`. None writes nothing: every rank but 0."""
        self.path, self.trackers = path, trackers or Trackers()
        self._waiting = b""  # lines that the disk did not take

    def write(self, event: str, **values: Any) -> None:
        if self.path is None:
            return
        line = json.dumps({"event": event} | {name: json_number(value) for name, value in values.items()}) + "\n"
        could_write, self._waiting = not self._waiting, self._waiting + line.encode()
        try:
            append_whole(self.path, self._waiting)
            self._waiting = b""
        except OSError as error:
            if could_write:
                self.trackers.say(f"{self.path} cannot be written ({error.strerror}); its lines wait until it can be")
        self.trackers.write(event, values)

    def read(self) -> list[dict[str, Any]]:
        """All lines so far; none on a rank that writes none."""
        if self.path is None or not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]


def json_number(value: Any) -> Any:
    """The value as JSON can hold it: a number that is not finite becomes None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append_whole(path: Path, data: bytes) -> None:
    """Append all of the data or nothing of it.

    Raises:
        OSError: if there is no room, or the file cannot be opened.
    """
    with open(path, "ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(end)
            raise


def keep_until(source: Path, target: Path, *, step: int, epoch: int, eval_due: bool = False) -> None:
    """Copy to `target` the lines of `source` up to a step, for a resumed run to append to.

    Later lines are dropped, and with them `end` and a torn last line.

    Args:
        epoch: the first one that had not ended at that step.
        eval_due: whether the step's evaluation is still to be done. A session that was killed later may have done it.
    """
    kept = []
    for line in source.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        is_later = event.get("step", 0) > step or (event["event"] == "epoch" and event["epoch"] >= epoch)
        is_later = is_later or (eval_due and event["event"] == "eval" and event["step"] == step)
        if event["event"] != "end" and not is_later:
            kept.append(line + "\n")
    temporary = target.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(target)
