"""--reduce_dtype: what gradients are after they were summed over ranks and micro-batches, and what a plan counts."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.planned_times import plan_model
from benchmarks.runs.shapes import SHAPES
from configs.flags import parse_flags
from planning.cost.traffic import find_traffic, seconds_per_step
from planning.machines.group_speeds import GroupSpeeds, Speed, Speeds
from planning.machines.hardware import parse_hardware
from planning.memory.row_lengths import RowLengths
from planning.memory.run_memory import plan_memory
from policies.mixed_precision import Precision, resolve_precision, two_in_bf16
from policies.sharding import (
    Accumulation,
    Layout,
    choose_accumulation,
    choose_layout,
    micro_batch_context,
    reduction_notes,
    shard,
)
from ranks.environment import Environment
from tests.helpers.processes import ProcessGroup
from utils.device import facts_of
from utils.errors import ConfigError

CPU = torch.device("cpu")
FP32, BF16 = torch.float32, torch.bfloat16
NUM_MICRO_BATCHES = 3


def chosen(line: str, world_size: int) -> tuple[Precision, Layout, Accumulation]:
    """What the flags come to on so many ranks without a GPU."""
    config = parse_flags(["--model_name", "m", *line.split()])
    train, fsdp = config.train_config, config.fsdp_config
    env = Environment(rank=0, local_rank=0, world_size=world_size, local_world_size=world_size, launched=True)
    precision, _ = resolve_precision(train, fsdp, facts_of(CPU))
    layout = choose_layout(train, fsdp, precision, env)
    asked = fsdp.accumulate_unsharded
    return precision, layout, choose_accumulation(asked, layout, precision, nn.Linear(2, 2), facts_of(CPU))


@pytest.mark.parametrize(
    ("line", "world_size", "reason", "remedy"),
    [
        ("--enable_fsdp --mixed_precision True", 1, "this run has one process", "start several"),
        ("--enable_fsdp", 2, "gradients that are computed in bf16, and this run is fp32", "--mixed_precision True"),
        ("--enable_fsdp --use_fp16", 2, "computed in bf16, and this run is fp16-mixed", "--pure_bf16"),
        ("--enable_fsdp --use_peft --pure_bf16", 2, "adapters have theirs in fp32", "--peft_dtype bf16"),
    ],
)
def test_what_cannot_be_reduced_in_bf16_is_refused(line: str, world_size: int, reason: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        chosen(f"{line} --reduce_dtype bf16", world_size)
    message = str(caught.value)
    assert message.startswith("--reduce_dtype: ")
    assert len(message.splitlines()) == 1
    assert reason in message
    assert remedy in message.rpartition("; ")[2]


def test_copies_that_sum_in_bf16_cannot_promise_fp32() -> None:
    with pytest.raises(ConfigError, match=r"--reduce_dtype: DistributedDataParallel.* in bf16; give"):
        chosen("--pure_bf16 --reduce_dtype fp32", 2)
    assert chosen("--pure_bf16 --reduce_dtype bf16", 2)[1].kind == "ddp"  # it holds


@pytest.mark.parametrize("line", ["", "--reduce_dtype fp32"])
@pytest.mark.parametrize("accumulate", ["True", "False"])
def test_without_it_gradients_are_reduced_in_fp32(line: str, accumulate: str) -> None:
    flags = f"--enable_fsdp --mixed_precision True --accumulate_unsharded {accumulate} {line}"
    precision, _, accumulation = chosen(flags, 2)
    assert precision.policy.reduce_dtype == FP32
    assert accumulation == Accumulation(unsharded=accumulate == "True", all_reduced=False)


@pytest.mark.parametrize(
    ("line", "num_micro_batches", "said"),
    [
        ("--reduce_dtype bf16", 3, "over ranks after each of 3 micro-batches, in all 1.5 times the bytes of fp32"),
        ("--reduce_dtype bf16", 2, ""),
        ("--reduce_dtype bf16 --accumulate_unsharded False", 3, ""),
        (
            "--reduce_dtype bf16 --accumulate_unsharded False --hsdp --sharding_group_size 2",
            4,
            "over copies after each",
        ),
        ("--accumulate_unsharded False --hsdp --sharding_group_size 1", 4, "False has no effect here: one rank holds"),
        ("", 3, ""),
    ],
)
def test_what_sends_more_than_fp32_is_said(line: str, num_micro_batches: int, said: str) -> None:
    precision, layout, _ = chosen(f"--enable_fsdp --mixed_precision True {line}", 4)
    asked = False if "unsharded" in line else None
    notes = reduction_notes(asked, layout, precision, nn.Linear(2, 2), facts_of(CPU), num_micro_batches)
    assert len(notes) == bool(said)
    assert said in "".join(notes)


LAYOUTS = {
    "FULL_SHARD": ((1, 2), "--enable_fsdp"),
    "NO_SHARD": ((2, 1), ""),
    "HYBRID_SHARD": ((2, 2), "--enable_fsdp --hsdp --sharding_group_size 2"),
}


@pytest.mark.parametrize("strategy", LAYOUTS)
def test_ranks_are_summed_in_bf16_and_micro_batches_in_fp32(strategy: str, process_group: ProcessGroup) -> None:
    mesh_shape, flags = LAYOUTS[strategy]
    process_group.train(partial(compare_on_ranks, mesh_shape, flags), mesh_shape[0] * mesh_shape[1])


def compare_on_ranks(mesh_shape: tuple[int, int], flags: str) -> None:
    """Gradients of several micro-batches, reduced in each dtype; those of bf16 are as added by hand, to the bit."""
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4, bias=False))
    inputs = torch.randn(world_size, NUM_MICRO_BATCHES, 32, 16, dtype=BF16)
    computed = [[gradients(model, rows) for rows in of_rank] for of_rank in inputs]
    found = {}
    for name in ("fp32", "bf16"):
        precision, layout, accumulation = chosen(f"--mixed_precision True {flags} --reduce_dtype {name}", world_size)
        assert (layout.kind, layout.mesh_shape) == ("fully_shard", mesh_shape)
        sharded = copy.deepcopy(model)
        shard(sharded, [sharded[0]], layout, precision, CPU)
        for index, rows in enumerate(inputs[dist.get_rank()]):
            with micro_batch_context(
                sharded, accumulation, is_first=index == 0, is_last=index == NUM_MICRO_BATCHES - 1
            ):
                sharded(rows).square().sum().backward()
        grads = [parameter.grad for parameter in sharded.parameters()]
        found[name] = [grad.full_tensor() for grad in grads]
        assert {grad.dtype for grad in grads} == {FP32}

    for place, (in_bf16, in_fp32) in enumerate(zip(found["bf16"], found["fp32"], strict=True)):
        of_ranks = [[of_micro_batch[place] for of_micro_batch in of_rank] for of_rank in computed]
        mean = sum(sum(grad.float() for grad in of_rank) for of_rank in of_ranks) / world_size
        torch.testing.assert_close(in_fp32, mean, rtol=1e-5, atol=1e-4)
        by_hand = torch.zeros_like(mean)
        for micro_batch in zip(*of_ranks, strict=True):
            by_hand += (summed_in_groups(micro_batch, mesh_shape[1]) / world_size).float()
        assert torch.equal(in_bf16, by_hand)
        assert not torch.equal(in_bf16, mean), "nothing was rounded"
        assert not torch.equal(in_bf16, in_bf16.to(BF16).float()), "micro-batches were added in bf16"
    dist.destroy_process_group()


def gradients(model: nn.Module, rows: torch.Tensor) -> list[torch.Tensor]:
    """Of one micro-batch on one rank, in bf16."""
    computing = copy.deepcopy(model).to(BF16)
    computing(rows).square().sum().backward()
    return [parameter.grad for parameter in computing.parameters() if parameter.grad is not None]


def summed_in_groups(grads: tuple[torch.Tensor, ...], group_size: int) -> torch.Tensor:
    """In bf16: within each group first, as a reduce-scatter does, and then over the groups."""
    groups = [sum(grads[at + 1 : at + group_size], grads[at]) for at in range(0, len(grads), group_size)]
    return sum(groups[1:], groups[0])


@pytest.mark.parametrize(
    ("flags", "mesh_shape", "num_micro_batches", "dtype"),
    [
        ("--pure_bf16", (1, 2), 1, BF16),
        ("--pure_bf16 --use_peft --peft_dtype bf16", (1, 2), 1, BF16),
        ("--pure_bf16 --use_peft", (1, 2), 1, FP32),  # adapters are in fp32
        ("--mixed_precision True", (1, 2), 1, FP32),  # weights are
        ("--pure_bf16", (1, 2), 2, FP32),
        ("--pure_bf16", (1, 4), 1, FP32),
        ("--pure_bf16", (2, 2), 1, FP32),
        ("--pure_bf16 --reduce_dtype fp32", (1, 2), 1, FP32),
        ("--pure_bf16 --accumulate_unsharded True", (1, 2), 1, FP32),
    ],
)
def test_two_ranks_reduce_in_bf16_if_that_is_the_same(
    flags: str, mesh_shape: tuple[int, int], num_micro_batches: int, dtype: torch.dtype
) -> None:
    config = parse_flags(["--model_name", "m", "--enable_fsdp", *flags.split()])
    precision, _ = resolve_precision(config.train_config, config.fsdp_config, facts_of(CPU))
    found = two_in_bf16(precision, config.train_config, config.fsdp_config, mesh_shape, num_micro_batches)
    assert found == replace(precision, reduce_dtype=dtype)


def test_between_two_ranks_bf16_and_fp32_give_the_same_bits(process_group: ProcessGroup) -> None:
    process_group.train(compare_bits, 2)


def compare_bits() -> None:
    """Gradients of many sizes, reduced in each dtype."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(64, 8, bias=False).to(BF16)
    torch.manual_seed(1 + dist.get_rank())
    inputs = (torch.randn(256, 64) * 2.0 ** torch.randint(-20, 20, (64,))).to(BF16)
    found = []
    for dtype in (FP32, BF16):
        sharded = copy.deepcopy(model)
        shard(
            sharded, [], Layout("fully_shard", "FULL_SHARD", (1, 2), True), Precision("", BF16, BF16, BF16, dtype), CPU
        )
        (sharded(inputs) * 1.5).sum().backward()
        grad = sharded.weight.grad
        assert isinstance(grad, DTensor)
        found.append(grad.full_tensor())
    assert found[0].dtype == BF16
    assert found[0].abs().max() > 0
    assert torch.equal(*found)
    dist.destroy_process_group()


LLAMA = SHAPES["llama8b"] | {"num_hidden_layers": 2, "vocab_size": 1024}
ONE = Speed(0.0, 1.0)
SPEEDS = Speeds(*(GroupSpeeds(2, ONE, ONE, ONE) for _ in range(3)))  # a byte a second


def test_a_plan_sends_half_of_the_bytes(tmp_path: Path) -> None:
    flags = "--enable_fsdp --hsdp --sharding_group_size 2 --gradient_accumulation_steps 2 --accumulate_unsharded False"
    hardware = parse_hardware("4xH200")
    traffic = {
        dtype: find_traffic(plan_model(tmp_path, LLAMA, hardware, [*flags.split(), "--reduce_dtype", dtype]))
        for dtype in ("fp32", "bf16")
    }
    assert traffic["fp32"].gradient_bytes == 2 * traffic["bf16"].gradient_bytes
    # Both reduce two micro-batches; fp32 is all-reduced over the copies after the second alone.
    whole = traffic["bf16"].gradient_bytes
    seconds = {dtype: seconds_per_step("HYBRID_SHARD", found, SPEEDS) for dtype, found in traffic.items()}
    assert seconds["fp32"] - seconds["bf16"] == pytest.approx((2 * 2 * whole + whole) - (2 * whole + whole))


def test_a_plan_holds_buffers_of_half_the_size(tmp_path: Path) -> None:
    hardware = parse_hardware("2xH200")
    buffers = []
    for dtype in ("fp32", "bf16"):
        flags = ["--enable_fsdp", "--sharding_strategy", "SHARD_GRAD_OP", "--reduce_dtype", dtype]
        planned = plan_model(tmp_path, LLAMA, hardware, flags)
        memory = plan_memory(planned, hardware.card, RowLengths(1, (64,), (64,)))
        buffers.append(memory.phases["backward"].communication)
    assert buffers[0] == pytest.approx(2 * buffers[1])
