"""On two GPUs: gradients lie in memory of the stream that computes, and have the same bits as in torch's own."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from policies.gradient_memory import ReduceScatterIntoComputing
from policies.mixed_precision import Precision
from policies.sharding import Layout, shard
from tests.helpers.processes import ROOT

DEVICE = torch.device("cuda", 0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gradients_lie_in_memory_of_the_stream_that_computes() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*launcher, "-m", __name__], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_is_not_filled_with_nan_after_it_was_written() -> None:
    computing, reducing = torch.cuda.current_stream(), torch.cuda.Stream()
    torch.use_deterministic_algorithms(True)
    try:
        reducing.wait_stream(computing)
        torch.cuda._sleep(10**8)  # of the stream that computes, about 50 ms
        with torch.cuda.stream(reducing):
            memory = ReduceScatterIntoComputing(computing).allocate([1024], dtype=torch.float32, device=DEVICE)
            memory.fill_(1.0)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.cuda.synchronize()
    assert memory.eq(1.0).all()


def train_on_ranks() -> None:
    dist.init_process_group("nccl")
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    ours, torchs = (small_model(device) for _ in range(2))
    layout = Layout("fully_shard", "FULL_SHARD", (1, 2), reshard_after_forward=True)
    shard(ours, list(ours), layout, Precision("fp32", torch.float32, torch.float32), device)
    mesh = init_device_mesh("cuda", (2,))
    for unit in (*torchs, torchs):
        fully_shard(unit, mesh=mesh)
    for step in range(5):
        for model in (ours, torchs):
            model.zero_grad()
            torch.manual_seed(2 * step + dist.get_rank())
            model(torch.randn(64, 1024, device=device)).square().sum().backward()
        for found, wanted in zip(gradients(ours), gradients(torchs), strict=True):
            assert torch.equal(found, wanted)
    computing = torch.cuda.current_stream().cuda_stream
    assert {stream_of(gradient) for gradient in gradients(ours)} == {computing}
    assert computing not in {stream_of(gradient) for gradient in gradients(torchs)}
    dist.destroy_process_group()


def small_model(device: torch.device) -> nn.Sequential:
    """Its weights are pieces of memory that the allocator does not share out to small tensors."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))).to(device)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.to_local() for parameter in model.parameters()]  # type: ignore[union-attr]


def stream_of(tensor: torch.Tensor) -> int:
    """The stream whose memory a tensor lies in."""
    segments = torch.cuda.memory_snapshot()
    return next(s["stream"] for s in segments if 0 <= tensor.data_ptr() - s["address"] < s["total_size"])


if __name__ == "__main__":
    train_on_ranks()
