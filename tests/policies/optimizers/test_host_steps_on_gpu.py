"""On a GPU, layers read weights that the CPU's last step has finished, while the CPU and copies are slow.

python -m pytest tests/policies/optimizers/test_host_steps_on_gpu.py    # needs one GPU
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.optim import AdamW

import policies.optimizers.host_optimizer as host_optimizer
from policies.clipping import clip_grad_norm
from policies.optimizers.host_optimizer import HostOptimizer, last_gradients, wait_for_weights
from policies.optimizers.host_weights import HostWeightsOptimizer
from policies.optimizers.offload import CPUOffloadOptimizer
from utils.local_tensors import local_tensor
from utils.torch_internals import all_parameter_groups, call_after_reduction

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
WIDTH, NUM_LAYERS, NUM_STEPS = 2048, 6, 5


class SlowAdamW(AdamW):
    """Its updates end long after the device has finished its own work."""

    def step(self, closure: Any = None) -> Any:
        time.sleep(0.02)
        return super().step()


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_model(layout: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))).to(torch.bfloat16)
    if layout != "host weights":
        model.to(DEVICE)
    if layout != "plain":
        offload = CPUOffloadPolicy(pin_memory=DEVICE.type == "cuda") if layout == "host weights" else OffloadPolicy()
        for unit in (*model[:-1], model):
            fully_shard(unit, mesh=init_device_mesh(DEVICE.type, (1,)), offload_policy=offload)
    return model


def make_optimizer(model: nn.Sequential, layout: str, *, begins_early: bool) -> HostOptimizer:
    def make(tensors: Any) -> AdamW:
        return SlowAdamW(tensors, lr=0.01, fused=True)

    groups = [{"params": list(model.parameters())}]
    if layout != "host weights":
        return CPUOffloadOptimizer(groups, make, begins_early=begins_early)
    optimizer = HostWeightsOptimizer(groups, make)
    if begins_early:
        optimizer.begin_early(model)
    return optimizer


@pytest.mark.parametrize("begins_early", [True, False])
@pytest.mark.parametrize("layout", ["plain", "sharded", "host weights"])
def test_each_layer_reads_the_weights_of_the_step_before(
    layout: str, begins_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_optimizer, "BUCKET_BYTES", 2**22)
    model, read, gradients = make_model(layout), dict[int, torch.Tensor](), dict[nn.Parameter, torch.Tensor]()

    def note_gradients(parameters: list[nn.Parameter], event: torch.cuda.Event | None) -> None:
        if event is not None:
            event.synchronize()
        with torch.no_grad():
            gradients.update({p: local_tensor(p.grad).cpu().clone() for p in parameters if p.grad is not None})

    if layout == "host weights":  # before the optimizer, which overwrites them
        for its in all_parameter_groups(model):
            call_after_reduction(its, note_gradients)
    optimizer = make_optimizer(model, layout, begins_early=begins_early)
    optimizer.return_late(model, list(model)[:-1])
    with torch.no_grad():
        wanted = [local_tensor(parameter).cpu().clone() for parameter in model.parameters()]
    reference = AdamW(wanted, lr=0.01, fused=True)
    for index, layer in enumerate(model):  # after the hooks that wait and gather
        layer.register_forward_pre_hook(lambda layer, _, i=index: read.update({i: layer.weight.detach().clone()}))
    states = torch.randn(64, WIDTH, dtype=torch.bfloat16, device=DEVICE)
    for _ in range(NUM_STEPS):
        loss = model(states).square().mean()
        for index, weight in enumerate(wanted[::2]):
            assert torch.equal(read[index].cpu(), weight), index
        with last_gradients(optimizer, is_last=True):
            loss.backward()
        parameters = list(model.parameters())
        if layout != "host weights":
            note_gradients(parameters, None)
        norm = clip_grad_norm(parameters, None, optimizer=optimizer)
        of_gradients = torch.stack([gradients[p].float().norm() for p in parameters]).norm()
        assert torch.isclose(norm.cpu(), of_gradients, rtol=1e-3)
        optimizer.step()
        optimizer.zero_grad()
        for tensor, parameter in zip(wanted, parameters, strict=True):
            tensor.grad = gradients[parameter]
        reference.step()
    wait_for_weights(optimizer)
    for parameter, weight in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(local_tensor(parameter).detach().cpu(), weight)


def test_a_host_weights_step_that_is_left_out_restores_weights() -> None:
    model = make_model("host weights")
    optimizer = make_optimizer(model, "host weights", begins_early=True)
    with torch.no_grad():
        before = [local_tensor(parameter).clone() for parameter in model.parameters()]
    with last_gradients(optimizer, is_last=True):
        model(torch.randn(64, WIDTH, dtype=torch.bfloat16, device=DEVICE)).square().mean().backward()
    clip_grad_norm(list(model.parameters()), None, optimizer=optimizer)
    optimizer.undo_step()
    with torch.no_grad():
        assert all(torch.equal(local_tensor(p), tensor) for p, tensor in zip(model.parameters(), before, strict=True))
