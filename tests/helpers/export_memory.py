"""Peak memory of an export in a process of its own, beyond that of an export of next to nothing."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psutil
import torch

from tools.export import main


class Peak:
    """The largest resident memory between entry and exit, in bytes, pages of mapped files included."""

    def __enter__(self) -> Peak:
        self._process, self._ends, self.num_bytes = psutil.Process(), threading.Event(), 0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ends.is_set():
            self.num_bytes = max(self.num_bytes, self._process.memory_info().rss)
            time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()


def measure(small: Path, checkpoint: Path, to: Path, *flags: str) -> None:
    """Print the bytes, as the last line of stdout."""
    torch.set_num_threads(1)
    with Peak() as baseline:
        assert main([str(small), "--to", f"{to}-small", *flags]) == 0
    with Peak() as peak:
        assert main([str(checkpoint), "--to", str(to), *flags]) == 0
    print(peak.num_bytes - baseline.num_bytes)
