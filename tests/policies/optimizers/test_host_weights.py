"""Steps in backward on weights in host memory are the plain ones; a step that is left out changes no weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.optim import SGD, AdamW, Optimizer

import policies.optimizers.host_optimizer as host_optimizer
from configs.flags import parse_flags
from policies.clipping import clip_grad_norm
from policies.guarded_step import guarded_step
from policies.loss_scaling import LossScaler
from policies.optimizers.adafactor import Adafactor
from policies.optimizers.anyprecision import AnyPrecisionAdamW
from policies.optimizers.build import build_optimizer
from policies.optimizers.host_optimizer import last_gradients, wait_for_weights
from policies.optimizers.host_weights import HostWeightsOptimizer
from utils.local_tensors import local_tensor

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda tensors: AdamW(tensors, lr=0.1, weight_decay=0.1, fused=True),
    "anyprecision": lambda tensors: AnyPrecisionAdamW(tensors, lr=0.1, weight_decay=0.1, use_kahan_summation=True),
    "SGD": lambda tensors: SGD(tensors, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
}


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 1)).to(dtype)


def sharded(dtype: torch.dtype) -> nn.Sequential:
    """Two units, and a root with the last module."""
    model, mesh = make_model(dtype), init_device_mesh("cpu", (1,))
    options: Any = {"mesh": mesh, "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    for unit in (model[0], model[1], model):
        fully_shard(unit, mp_policy=MixedPrecisionPolicy(), **options)
    return model


def late(model: nn.Sequential, make: Callable[[Any], Optimizer], *, begins_early: bool) -> HostWeightsOptimizer:
    optimizer = HostWeightsOptimizer([{"params": list(model.parameters())}], make)
    if begins_early:
        optimizer.begin_early(model)
    optimizer.return_late(model, [model[0], model[1]])
    return optimizer


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    numbers = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))
    loss: torch.Tensor = model(numbers.to(next(model.parameters()).dtype)).square().mean()
    return loss


def backward(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for part in range(2):  # micro-batches, whose gradients are added
        with last_gradients(optimizer, is_last=part == 1):
            loss_of(model, 2 * step + part).backward()


def locals_of(model: nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        return [local_tensor(parameter).clone() for parameter in model.parameters()]


@pytest.mark.parametrize("bucket_bytes", [1, 100, 2**28])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("begins_early", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_the_plain_optimizer(
    name: str, begins_early: bool, dtype: torch.dtype, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_optimizer, "BUCKET_BYTES", bucket_bytes)
    model, plain = sharded(dtype), make_model(dtype)
    ours, theirs = late(model, OPTIMIZERS[name], begins_early=begins_early), OPTIMIZERS[name]([*plain.parameters()])
    max_norm = None if begins_early else 0.01  # which each step exceeds
    for step in range(6):
        norms = []
        for one, optimizer in ((model, ours), (plain, theirs)):
            optimizer.param_groups[0]["lr"] = 0.1 * 0.8**step
            backward(one, optimizer, step)
            assert optimizer is theirs or (len(ours._begun) == 6) == begins_early
            norms.append(clip_grad_norm([*one.parameters()], max_norm, optimizer=optimizer))
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(norms[0], norms[1])
    wait_for_weights(ours)
    assert all(map(torch.equal, locals_of(model), locals_of(plain)))
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        for key, value in theirs.state[other].items():
            found = ours.state[parameter][key]
            assert torch.equal(local_tensor(torch.as_tensor(found)), torch.as_tensor(value)), key


@pytest.mark.parametrize("bucket_bytes", [1, 2**28])
def test_weights_that_backward_has_updated_are_restored_if_the_step_is_left_out(
    bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_optimizer, "BUCKET_BYTES", bucket_bytes)
    model = sharded(torch.bfloat16)
    optimizer = late(model, OPTIMIZERS["AdamW"], begins_early=True)
    before = locals_of(model)
    backward(model, optimizer, 0)
    optimizer.gradient_norms()
    optimizer._updates._thread.submit(lambda: None).result()  # all updates were made
    assert not any(map(torch.equal, before, locals_of(model)))

    def read() -> tuple[float, float]:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        guarded_step(optimizer, LossScaler(active=False), torch.tensor([1.0, float("nan")]), read)
    wait_for_weights(optimizer)
    assert all(map(torch.equal, before, locals_of(model)))


def test_the_unit_that_gathers_weights_waits_for_them_and_not_the_layer_that_uses_them() -> None:
    model = sharded(torch.float32)
    found = host_optimizer._readers(model, list(model))
    assert [module for module, _ in found] == [model, model[0], model[1]]
    assert [read for _, read in found] == [list(part.parameters()) for part in (model[2], model[0], model[1])]
    whole = make_model(torch.float32)
    fully_shard(whole, mesh=init_device_mesh("cpu", (1,)))
    assert [(module, len(read)) for module, read in host_optimizer._readers(whole, list(whole))] == [(whole, 6)]


@pytest.mark.parametrize(
    ("flags", "scales_loss", "kind", "is_early"),
    [
        ([], False, HostWeightsOptimizer, True),
        (["--gradient_clipping"], False, HostWeightsOptimizer, False),
        ([], True, HostWeightsOptimizer, False),
        (["--optimizer", "Adafactor"], False, Adafactor, False),
    ],
)
def test_a_step_begins_in_backward_only_where_gradients_are_final_after_it(
    flags: list[str], scales_loss: bool, kind: type[Optimizer], is_early: bool
) -> None:
    config = parse_flags(["--model_name", "m", "--enable_fsdp", "--fsdp_cpu_offload", *flags])
    model = sharded(torch.float32)
    optimizer = build_optimizer(model, config.train_config, config.fsdp_config, scales_loss=scales_loss)
    assert type(optimizer) is kind
    backward(model, optimizer, 0)
    assert bool(getattr(optimizer, "_begun", ())) == is_early
