"""How much the batches that a worker sends slow the thread that queues kernels.

    python -m benchmarks.worker_batches --mib 160

A worker sends a batch of one tensor every half second: through the pipe, as an array, then as `tasks.sent_tensors`
does. A second thread receives and pins them, as DataLoader's does. The main thread makes small calls to torch all the
time, as for the kernels of a step, on the GPU if there is one.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from tasks.micro_batch import TensorBatch

CALLS = 1000  # between two looks at the clock


@dataclass(frozen=True)
class PixelsAlone(TensorBatch):
    pixels: torch.Tensor
    num_label_tokens: int = 0


@dataclass(frozen=True)
class TimedBatches(IterableDataset[Any]):
    """One every half second, for so many seconds."""

    num_bytes: int
    by_value: bool
    seconds: float

    def __iter__(self) -> Iterator[Any]:
        torch.set_num_threads(1)
        pixels = np.ones(self.num_bytes // 4, dtype=np.float32)
        for _ in range(int(2 * self.seconds)):
            time.sleep(0.5)
            yield pixels if self.by_value else PixelsAlone(torch.from_numpy(pixels.copy()))


def receive(batches: TimedBatches, on_gpu: bool) -> None:
    for batch in DataLoader(batches, batch_size=None, collate_fn=_as_it_is, num_workers=1):
        received = PixelsAlone(torch.from_numpy(batch)) if batches.by_value else batch
        if on_gpu:
            received.pin_memory()


def calls_beside(work: threading.Thread | None, seconds: float, device: torch.device) -> list[float]:
    """Seconds of each 1,000 calls while the thread lives, or for so long."""
    tensor = torch.ones(16, device=device)
    taken = []
    ends = time.perf_counter() + seconds
    while work.is_alive() if work else time.perf_counter() < ends:
        began = time.perf_counter()
        for _ in range(CALLS):
            tensor.add_(1.0)
        taken.append(time.perf_counter() - began)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=160, help="of a batch")
    parser.add_argument("--seconds", type=float, default=15.0, help="for each way")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    print("| batches | microseconds per call | longest 1,000 calls, ms |\n|---|---|---|")
    for name, by_value in (("none", None), ("through the pipe", True), ("in shared memory", False)):
        work = None
        if by_value is not None:
            batches = TimedBatches(options.mib * 2**20, by_value, options.seconds)
            work = threading.Thread(target=receive, args=(batches, on_gpu))
            work.start()
        taken = calls_beside(work, options.seconds, torch.device("cuda" if on_gpu else "cpu"))
        print(f"| {name} | {1e6 * sum(taken) / len(taken) / CALLS:.2f} | {1e3 * max(taken):.0f} |", flush=True)


def _as_it_is(batch: Any) -> Any:
    return batch


if __name__ == "__main__":
    main()
