"""What experts cost over GPUs: gathering them (FSDP) beside sending tokens to them (expert parallelism).

    torchrun --nproc_per_node 2 -m benchmarks.expert_exchange                                 # Qwen3-30B-A3B's layer
    torchrun --nproc_per_node 2 -m benchmarks.expert_exchange --tokens 64 --hidden 32 --inner 16 --experts 8   # a CPU

Prints milliseconds and rates of one layer, for the tokens of one rank: the all-gather of its experts, the all-to-all of
its rows there and back, and the grouped products over all experts and over a rank's share of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import fire
import torch
import torch.distributed as dist

from policies.experts.forward import grouped_product

REPEATS, WARMUP = 10, 3


def milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """The median of some runs."""
    times = []
    for _ in range(WARMUP + REPEATS):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[WARMUP:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(tokens: int = 8192, hidden: int = 2048, inner: int = 768, experts: int = 128, chosen: int = 8) -> None:
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    values = partial(torch.randn, device=device, dtype=torch.bfloat16)
    num_rows = tokens * chosen
    rows, received = (values(num_rows, hidden) for _ in range(2))
    weights = values(experts, hidden, 2 * inner)
    share = values(experts // world_size, 3 * hidden * inner)
    whole = values(experts, 3 * hidden * inner)

    def say(what: str, taken: float, amount: float, unit: str) -> None:
        if rank == 0:
            print(f"{what:60s} {taken:8.3f} ms {amount / taken:8.1f} {unit}", flush=True)

    gathered = whole.numel() * whole.element_size() * (world_size - 1) / world_size
    taken = milliseconds(lambda: dist.all_gather_into_tensor(whole, share), device)
    say(f"all-gather of {whole.nbytes / 2**20:,.0f} MiB of experts", taken, gathered / 1e6, "GB/s received")
    taken = milliseconds(lambda: dist.all_to_all_single(received, rows), device)
    sent = rows.nbytes * (world_size - 1) / world_size
    say(f"all-to-all of {rows.nbytes / 2**20:,.0f} MiB of rows, one way", taken, sent / 1e6, "GB/s sent")
    work = 2 * num_rows * hidden * 2 * inner
    for number in (experts, experts // world_size):
        ends = torch.arange(1, number + 1, device=device, dtype=torch.int32) * (num_rows // number)
        taken = milliseconds(partial(grouped_product, rows, weights[:number], ends), device)
        say(f"grouped product of {num_rows:,} rows with {number} experts", taken, work / 1e9, "TFLOP/s")
    dist.destroy_process_group()


if __name__ == "__main__":
    fire.Fire(main)
