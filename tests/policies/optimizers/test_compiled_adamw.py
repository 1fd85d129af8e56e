"""The compiled AdamW makes the steps of torch's fused one, with one kernel for tensors of all sizes."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import AdamW, Optimizer

from policies.optimizers.compiled_adamw import CompiledAdamW
from utils.local_tensors import local_tensor

LARGE = 2048  # elements
SHAPES = [(64, 1024), (32, 128), (100,), (3, 1024), (16, 16, 16), (7,)]  # three of them are large
OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}

pytestmark = pytest.mark.slow  # compiles


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter((0.01 * torch.randn(shape, generator=generator)).to(dtype)) for shape in SHAPES]


def make_steps(optimizer: Optimizer, steps: range) -> None:
    """Steps with another learning rate each, of which the later ones are clipped and one leaves tensors out."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
            for index, parameter in enumerate(group["params"]):
                gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                parameter.grad = None if step == 2 and index % 2 else gradient
        optimizer.grad_scale = torch.tensor(3.7) if step >= 3 else None  # type: ignore[attr-defined]
        optimizer.step()


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_its_steps_are_those_of_the_fused_one_and_it_compiles_once(dtype: torch.dtype, largest: float) -> None:
    ours, theirs = make_parameters(dtype), make_parameters(dtype)
    compiled, fused = CompiledAdamW(ours, large=LARGE, **OPTIONS), AdamW(theirs, fused=True, **OPTIONS)
    make_steps(compiled, range(6))
    make_steps(fused, range(6))
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).abs().max() <= largest * other.abs().max()
        assert compiled.state[mine].keys() == fused.state[other].keys()
        for key, state in compiled.state[mine].items():
            assert state.dtype == fused.state[other][key].dtype
            assert (state - fused.state[other][key]).abs().max() <= largest * fused.state[other][key].abs().max()
    assert counters["stats"]["unique_graphs"] == 1


def test_it_goes_on_bit_for_bit_and_its_states_serve_the_fused_one() -> None:
    straight = make_parameters(torch.float32)
    optimizer = CompiledAdamW(straight, large=LARGE, **OPTIONS)
    make_steps(optimizer, range(2))
    states = copy.deepcopy(optimizer.state_dict())
    resumed = [nn.Parameter(parameter.detach().clone()) for parameter in straight]
    other = CompiledAdamW(resumed, large=LARGE, **OPTIONS)
    other.load_state_dict(states)
    AdamW(resumed, fused=True, **OPTIONS).load_state_dict(states)
    make_steps(optimizer, range(2, 5))
    make_steps(other, range(2, 5))
    for mine, wanted in zip(resumed, straight, strict=True):
        assert torch.equal(mine, wanted)


def test_of_gradients_it_divides_none_is_written() -> None:
    parameters = make_parameters(torch.float32)[:2]
    optimizer = CompiledAdamW(parameters, large=LARGE, **OPTIONS)
    gradients = [torch.randn_like(parameter) for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.grad_scale = torch.tensor(2.0)
    optimizer.step()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_sharded_parameters_are_updated_in_place(one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    plain = make_parameters(torch.float32)
    sharded = [nn.Parameter(distribute_tensor(parameter.detach().clone(), mesh, [Shard(0)])) for parameter in plain]
    both = [CompiledAdamW(parameters, large=LARGE, **OPTIONS) for parameters in (plain, sharded)]
    for step in range(2):
        for parameter, other in zip(plain, sharded, strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
            other.grad = distribute_tensor(parameter.grad.clone(), mesh, [Shard(0)])
        for optimizer in both:
            optimizer.step()
    for parameter, other in zip(plain, sharded, strict=True):
        assert torch.equal(parameter, local_tensor(other))
        assert type(both[1].state[other]["exp_avg"]) is type(other.data)
