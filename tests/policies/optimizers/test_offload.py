"""An optimizer whose states and step are on the CPU does what the one inside it would do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import policies.optimizers.host_optimizer as host_optimizer
from configs.flags import parse_flags
from policies.clipping import clip_grad_norm
from policies.optimizers.anyprecision import AnyPrecisionAdamW
from policies.optimizers.build import build_optimizer
from policies.optimizers.host_optimizer import last_gradients
from policies.optimizers.offload import CPUOffloadOptimizer
from reporting.memory_ledger import optimizer_tensors

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda tensors: AdamW(tensors, lr=0.1, weight_decay=0.1, fused=True),
    "anyprecision": lambda tensors: AnyPrecisionAdamW(tensors, lr=0.1, weight_decay=0.1, use_kahan_summation=True),
    "SGD": lambda tensors: SGD(tensors, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "SGD without momentum": lambda tensors: SGD(tensors, lr=0.1, foreach=True),
}


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 1)).to(dtype)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters())}]


def train(model: nn.Module, optimizer: Optimizer, seed: int, num_steps: int, left_out: int = 0) -> None:
    """Steps with random gradients, at a falling rate; `left_out` parameters, now these, now those, have none."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = 0.1 * 0.8**step
        for index, parameter in enumerate(model.parameters()):
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = None if (index - step) % 6 < left_out else gradient
        optimizer.step()
        optimizer.zero_grad()


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for (name, parameter), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, theirs), name


@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 10**6),
    bucket_bytes=st.sampled_from([1, 100, 2**28]),
)
@settings(max_examples=30, deadline=None)
def test_weights_and_states_are_those_of_the_optimizer_inside(
    name: str, dtype: torch.dtype, seed: int, bucket_bytes: int
) -> None:
    model, plain = make_model(dtype), make_model(dtype)
    offloaded, optimizer = (
        CPUOffloadOptimizer(groups(model), OPTIMIZERS[name]),
        OPTIMIZERS[name]([*plain.parameters()]),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_optimizer, "BUCKET_BYTES", bucket_bytes)
        train(model, offloaded, seed, num_steps=12)
    train(plain, optimizer, seed, num_steps=12)
    assert_same(model, plain)
    ours, theirs = offloaded.state_dict(), optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        found = ours["state"][index]
        assert all(torch.equal(torch.as_tensor(found[key]), torch.as_tensor(value)) for key, value in state.items())
    assert sum(map(torch.Tensor.numel, optimizer_tensors(offloaded))) == sum(
        map(torch.Tensor.numel, optimizer_tensors(optimizer))
    )


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    numbers = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))
    return model(numbers.to(next(model.parameters()).dtype)).square().mean()


@pytest.mark.parametrize("bucket_bytes", [1, 100, 2**28])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_that_begin_in_backward_are_those_of_the_plain_step(
    name: str, dtype: torch.dtype, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_optimizer, "BUCKET_BYTES", bucket_bytes)
    model, plain = make_model(dtype), make_model(dtype)
    ours = CPUOffloadOptimizer(groups(model), OPTIMIZERS[name], begins_early=True)
    theirs = OPTIMIZERS[name]([*plain.parameters()])
    for step in range(6):
        for one, optimizer in ((model, ours), (plain, theirs)):
            optimizer.param_groups[0]["lr"] = 0.1 * 0.8**step
            before = [p.detach().clone() for p in one.parameters()]
            for part in range(2):  # micro-batches, whose gradients are added
                with last_gradients(optimizer, is_last=part == 1):
                    loss_of(one, 2 * step + part).backward()
                begun = {id(p) for p in ours._begun} if optimizer is ours else set()
                is_last_of_ours = optimizer is ours and part == 1
                assert begun == ({id(p) for p in model.parameters()} if is_last_of_ours else set())
            if optimizer is ours:  # weights change in step() alone
                assert all(map(torch.equal, before, one.parameters()))
            optimizer.step()
            assert optimizer is theirs or not any(map(torch.equal, before, one.parameters()))
            optimizer.zero_grad()
    assert_same(model, plain)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        mine, others = ours.state[parameter], theirs.state[other]
        assert all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(value)) for key, value in others.items())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clipped_steps_in_fp32_are_the_plain_ones(name: str) -> None:
    """fp32 weights; some of these optimizers divide gradients in their own pass, others have them divided before."""
    model, plain = make_model(), make_model()
    ours, theirs = CPUOffloadOptimizer(groups(model), OPTIMIZERS[name]), OPTIMIZERS[name]([*plain.parameters()])
    for step in range(6):
        for one, optimizer in ((model, ours), (plain, theirs)):
            loss_of(one, step).backward()
            norm = clip_grad_norm(one.parameters(), 0.013, optimizer=optimizer)
            assert norm > 0.013
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, plain)


def test_a_step_begins_early_only_where_gradients_are_final_after_backward() -> None:
    flags = ["--model_name", "m", "--optimizer_cpu_offload"]
    for more, scales_loss, is_early in (([], False, True), (["--gradient_clipping"], False, False), ([], True, False)):
        config = parse_flags([*flags, *more])
        model = make_model()
        optimizer = build_optimizer(model, config.train_config, config.fsdp_config, scales_loss=scales_loss)
        assert isinstance(optimizer, CPUOffloadOptimizer)
        with last_gradients(optimizer, is_last=True):
            loss_of(model, 0).backward()
        assert bool(optimizer._begun) == is_early


def test_an_error_in_an_update_reaches_the_step() -> None:
    class Failing(SGD):
        def step(self, closure: Any = None) -> Any:
            raise ValueError("no step")

    model = make_model()
    optimizer = CPUOffloadOptimizer(groups(model), lambda tensors: Failing(tensors, lr=0.1), begins_early=True)
    with last_gradients(optimizer, is_last=True):
        loss_of(model, 0).backward()
    with pytest.raises(ValueError, match="no step"):
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_parameter_without_gradient_stays_as_it_is(name: str) -> None:
    model, plain = make_model(), make_model()
    train(model, CPUOffloadOptimizer(groups(model), OPTIMIZERS[name]), seed=5, num_steps=8, left_out=2)
    train(plain, OPTIMIZERS[name]([*plain.parameters()]), seed=5, num_steps=8, left_out=2)
    assert_same(model, plain)


def test_a_scheduler_sets_the_rate_of_the_steps() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = CPUOffloadOptimizer(groups(model), OPTIMIZERS["SGD without momentum"])
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    moved = []
    for _ in range(3):
        before = model.weight.item()
        model.weight.grad = torch.ones(1, 1)
        optimizer.step()
        scheduler.step()
        moved.append(before - model.weight.item())
    assert moved == pytest.approx([0.1, 0.05, 0.025], rel=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_from_a_state_dict_as_if_never_interrupted(name: str) -> None:
    model, other = make_model(), make_model()
    optimizer = CPUOffloadOptimizer(groups(model), OPTIMIZERS[name])
    train(model, optimizer, seed=1, num_steps=5)
    resumed = CPUOffloadOptimizer(groups(other), OPTIMIZERS[name])
    train(other, resumed, seed=9, num_steps=2)  # has states and weights of its own
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.load_state_dict(model.state_dict())  # after the states
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    train(model, optimizer, seed=2, num_steps=5)
    train(other, resumed, seed=2, num_steps=5)
    assert_same(model, other)


def test_weights_loaded_before_the_first_step_are_the_ones_it_starts_from() -> None:
    model, plain = make_model(), make_model()
    optimizer = CPUOffloadOptimizer(groups(model), OPTIMIZERS["AdamW"])
    for module in (model, plain):
        module.load_state_dict({name: torch.ones_like(tensor) for name, tensor in module.state_dict().items()})
    train(model, optimizer, seed=3, num_steps=2)
    train(plain, OPTIMIZERS["AdamW"]([*plain.parameters()]), seed=3, num_steps=2)
    assert_same(model, plain)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_distributed_checkpoints_hold_its_states_by_name_and_give_them_back(name: str, tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, other = make_model(), make_model()
        optimizer = CPUOffloadOptimizer(groups(model), OPTIMIZERS[name])
        train(model, optimizer, seed=1, num_steps=5)
        weights, states = get_state_dict(model, optimizer)
        key = "exp_avg" if name == "AdamW" else "momentum_buffer"
        assert states["state"]["0.weight"][key].shape == (7, 5)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path)

        resumed = CPUOffloadOptimizer(groups(other), OPTIMIZERS[name])
        fresh: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(other, resumed), strict=True))
        dcp.load(fresh, checkpoint_id=tmp_path)
        set_state_dict(other, resumed, model_state_dict=fresh["model"], optim_state_dict=fresh["optimizer"])
        train(model, optimizer, seed=2, num_steps=5)
        train(other, resumed, seed=2, num_steps=5)
        assert_same(model, other)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("flags", "inside"), [([], AdamW), (["--optimizer", "SGD"], SGD)])
def test_the_flag_wraps_the_optimizer_that_the_run_would_have_had(flags: list[str], inside: type[Optimizer]) -> None:
    plain_config = parse_flags(["--model_name", "m", "--lr", "0.1", *flags])
    config = parse_flags(["--model_name", "m", "--lr", "0.1", "--optimizer_cpu_offload", *flags])
    model, plain = make_model(), make_model()
    optimizer = build_optimizer(model, config.train_config, config.fsdp_config)
    own = build_optimizer(plain, plain_config.train_config, plain_config.fsdp_config)
    assert type(optimizer) is CPUOffloadOptimizer
    assert type(own) is inside
    train(model, optimizer, seed=4, num_steps=3)
    train(plain, own, seed=4, num_steps=3)
    assert_same(model, plain)
