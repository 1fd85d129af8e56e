"""How fast AdamW steps in host memory, by the number of cores; beside a copy, which only moves memory.

    python -m benchmarks.host_steps                     # 1 GiB of bf16 weights
    python -m benchmarks.host_steps --weights 4e6       # a laptop

A step reads and writes weights and both averages, and reads gradients: 14 bytes of memory for each bf16 weight, 28 for
each in fp32. It runs in a thread of its own, as in training.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.optim import AdamW

PASSES = {"AdamW": 7, "copy": 2}  # over as many bytes as the weights have
REPEATS = 3


def cores() -> list[int]:
    """Powers of two, and all cores that this process may use."""
    most = len(os.sched_getaffinity(0))
    return [*(2**n for n in range(most.bit_length()) if 2**n < most), most]


def work_of(kind: str, num_weights: int, dtype: torch.dtype) -> Callable[[], Any]:
    """The step, or the copy, on tensors whose memory has been touched."""
    weights, other = torch.full((num_weights,), 0.1, dtype=dtype), torch.full((num_weights,), 0.01, dtype=dtype)
    if kind == "copy":
        return lambda: weights.copy_(other)
    weights.grad = other
    return AdamW([weights], lr=1e-4, weight_decay=0.1, fused=True).step


def rows(num_weights: int) -> Iterator[tuple[str, str, int, float]]:
    """Kind, dtype, number of cores, and the seconds of the fastest of some repetitions."""
    with ThreadPoolExecutor(1) as executor:
        for kind in PASSES:
            for dtype in (torch.bfloat16, torch.float32):
                work = work_of(kind, num_weights, dtype)
                for num_cores in cores():
                    executor.submit(torch.set_num_threads, num_cores).result()
                    executor.submit(work).result()
                    yield kind, str(dtype).removeprefix("torch."), num_cores, executor.submit(_fastest, work).result()


def _fastest(work: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=float, default=2**29, help="weights of the tensor")
    num_weights = int(parser.parse_args(argv).weights)
    print("| work | dtype | cores | ns per weight | GB/s | seconds for 13 billion |\n|---|---|---|---|---|---|")
    for kind, dtype, num_cores, seconds in rows(num_weights):
        size = 2 if dtype == "bfloat16" else 4
        rate = PASSES[kind] * size * num_weights / seconds / 1e9
        each = seconds / num_weights
        print(f"| {kind} | {dtype} | {num_cores} | {1e9 * each:.3f} | {rate:.1f} | {13e9 * each:.2f} |", flush=True)


if __name__ == "__main__":
    main()
