"""Pinned host memory: registered as it is, given back once, and from torch where CUDA registers none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from policies import pinned_memory
from policies.activations.host_pool import HostMemoryError, HostPool
from policies.pinned_memory import TensorsOnHost, num_threads, pinned_or_plain_region, pinned_region, region_maker
from utils.memory_errors import what_ran_out

SIZE = 3 * 2**20 + 4096


def with_cudart(monkeypatch: pytest.MonkeyPatch, status: int) -> list[tuple[Any, ...]]:
    """The calls of the CUDA runtime, which answers with this status."""
    calls: list[tuple[Any, ...]] = []

    def register(*given: int) -> int:
        calls.append(("register", *given))
        return status

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda at: calls.append(("unregister", at)))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return calls


def test_a_region_is_registered_in_its_exact_size_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = with_cudart(monkeypatch, 0)
    region = pinned_region(SIZE)
    address = region.memory.data_ptr()
    assert calls == [("register", address, SIZE, 1)]
    assert (region.memory.dtype, region.memory.numel(), int(region.memory.sum())) == (torch.uint8, SIZE, 0)
    region.memory.fill_(7)
    assert int(region.memory[-1]) == 7
    region.release()
    assert calls[1:] == [("unregister", address)]


def test_torch_pins_where_cuda_registers_no_memory_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, empty, asked = with_cudart(monkeypatch, 801), torch.empty, list[dict[str, Any]]()

    def note(*given: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        asked.append({"pin_memory": pin_memory, "size": given})
        return empty(*given, **more)

    monkeypatch.setattr(torch, "empty", note)
    region = pinned_region(SIZE)
    region.release()
    assert asked == [{"pin_memory": True, "size": (SIZE,)}]
    assert [call[0] for call in calls] == ["register"]


def test_memory_that_need_not_be_pinned_is_plain_and_of_its_exact_size_there(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = with_cudart(monkeypatch, 801)
    region = pinned_or_plain_region(SIZE)
    assert (region.memory.numel(), int(region.memory.sum())) == (SIZE, 0)
    region.release()
    assert [call[0] for call in calls] == ["register"]


def test_host_memory_that_cannot_be_pinned_is_not_taken_for_a_full_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any, **more: Any) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported")

    with_cudart(monkeypatch, 2)
    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(OSError, match=r"Cannot allocate memory, pinned: CUDA error: out of memory") as refused:
        pinned_region(SIZE)
    assert what_ran_out(refused.value) == "host"
    pool = HostPool(pinned_region)
    with pytest.raises(HostMemoryError, match=r"^--activation_offloading: no host memory could be pinned") as raised:
        pool.take(1)
    assert what_ran_out(raised.value) == "host"


def test_without_a_gpu_memory_is_plain_and_ranks_share_the_cores() -> None:
    assert region_maker(torch.device("cpu"))(100).memory.numel() == 100
    assert num_threads(10**6) == 1


def test_tensors_on_the_host_lie_side_by_side_and_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_memory, "REGION_BYTES", 200)
    shapes = [(3, 5), (1,), (0,), (64,), (7, 3), (33,)]
    parameters = [nn.Parameter(torch.empty(shape, dtype=torch.bfloat16)) for shape in shapes]
    found = TensorsOnHost(parameters, region_maker(torch.device("cpu")))
    for value, tensor in enumerate(found.tensors):
        tensor.fill_(value)
    for value, (tensor, parameter) in enumerate(zip(found.tensors, parameters, strict=True)):
        assert torch.equal(tensor, torch.full_like(parameter, value))
        assert tensor.data_ptr() % 2 == 0
    assert [region.memory.numel() for region in found._regions] == [256, 192]
