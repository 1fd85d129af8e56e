"""The fullest moment of a run so far, kept in a file for whoever ends the run before it has made a step."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch

from utils.units import GIB

EVERY_SECONDS = 1.0


class PeakWatch:
    """A context around a run, in which a thread writes {"seconds", "peak_gib", "reserved_gib", "host_gib"} to a file.

    `seconds` are those since the context began; the others are the most so far, 0 of a GPU that is not used. Reading
    the allocator's counters does not wait for the GPU.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._over, self._began = file, threading.Event(), time.monotonic()
        self._most: dict[str, Any] = {"seconds": 0.0, "peak_gib": 0.0, "reserved_gib": 0.0, "host_gib": 0.0}
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakWatch:
        self._note()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(EVERY_SECONDS):
            self._note()

    def _note(self) -> None:
        found = {"seconds": time.monotonic() - self._began, "host_gib": psutil.Process().memory_info().rss / GIB}
        if torch.cuda.is_initialized():
            found |= {"peak_gib": torch.cuda.max_memory_allocated() / GIB}
            found |= {"reserved_gib": torch.cuda.max_memory_reserved() / GIB}
        self._most = {name: round(max(value, found.get(name, 0.0)), 3) for name, value in self._most.items()}
        written = self._file.with_name(self._file.name + ".tmp")
        written.write_text(json.dumps(self._most))
        written.replace(self._file)  # whole, whenever this process is killed


def read_peaks(file: Path) -> dict[str, Any]:
    """What the file says; nothing if there is none."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found
