"""The copy of the state in host memory: of plain and of sharded tensors, in memory of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from checkpointing.host_copy import HostCopy
from utils.local_tensors import local_tensor


@pytest.fixture(
    params=["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
)
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    """One rank, as a group of its own."""
    backend = "cpu:gloo,cuda:nccl" if request.param == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh(request.param, (1,))
    finally:
        dist.destroy_process_group()


def test_copies_are_of_the_moment_and_lie_in_the_same_memory_from_save_to_save(mesh: DeviceMesh) -> None:
    large = torch.randn(1024, 512, device=mesh.device_type)
    tensors = {
        "plain": large,
        "turned": large.t(),
        "bf16": large.bfloat16().repeat(2, 1),
        "sharded": distribute_tensor(large.clone(), mesh, [Shard(0)]),
        "small": torch.ones(3, device=mesh.device_type),
        "step": torch.tensor(7.0),
    }
    copy = HostCopy()
    copy.prepare(tensors)
    taken = copy.take(tensors)
    places = {name: local_tensor(tensor).data_ptr() for name, tensor in taken.items()}
    # Those of one device lie side by side.
    regions = {local_tensor(taken[name]).untyped_storage().data_ptr() for name in tensors if name != "step"}
    assert len(regions) == 1
    wanted = {name: local_tensor(tensor).cpu().clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        local_tensor(tensor).add_(1)
    for name, tensor in taken.items():
        assert type(tensor) is type(tensors[name])
        assert local_tensor(tensor).device.type == "cpu"
        assert torch.equal(local_tensor(tensor), wanted[name])
    del tensors["plain"]
    tensors["new"] = large + 1
    again = copy.take(tensors)
    assert again.keys() == tensors.keys()
    for name, tensor in again.items():
        assert name == "new" or local_tensor(tensor).data_ptr() == places[name]
        assert torch.equal(local_tensor(tensor), local_tensor(tensors[name]).cpu())
    if mesh.device_type == "cuda":
        assert all(local_tensor(again[name]).is_pinned() for name in ("turned", "bf16", "sharded", "small", "new"))
    del taken, again
    copy.close()
