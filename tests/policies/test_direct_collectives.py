"""--direct_collectives: the same bits as torch's packed collectives, in no more memory, next to computing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.planned_times import plan_model
from benchmarks.runs.shapes import SHAPES
from planning.cost.traffic import find_traffic
from planning.machines.hardware import parse_hardware
from policies.direct_transfers import direct_notes, send_directly
from policies.mixed_precision import Precision
from policies.sharding import Accumulation, Layout, end_backward, micro_batch_context, reshard, shard
from reporting.collective_timeline import DeviceClock, WatchedUnits
from tests.helpers.processes import ProcessGroup
from tests.helpers.simulated_device import SimulatedDevice, Working, simulated_ranks
from utils.errors import ConfigError
from utils.torch_internals import all_parameter_groups

CPU = torch.device("cpu")
FP32, BF16 = torch.float32, torch.bfloat16
UNEVEN = "ranks have parts of different sizes"
CAST = "gradients are cast to be summed in fp32"
PRECISIONS = {  # and of three units, one shared out unevenly, how many are reduced without packing, and why not
    "fp32": (Precision("", FP32, FP32), 2, UNEVEN),
    "bf16, reduced in bf16": (Precision("", BF16, BF16, BF16, BF16), 2, UNEVEN),
    "bf16, reduced in fp32": (Precision("", BF16, BF16, BF16, FP32), 0, CAST),
    "cast to bf16, reduced in bf16": (Precision("", FP32, BF16, FP32, BF16), 2, UNEVEN),
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_training_has_the_bits_of_packed_collectives(name: str, process_group: ProcessGroup) -> None:
    process_group.train(partial(compare_on_ranks, name), 2)


def compare_on_ranks(name: str) -> None:
    """Losses, gradients and weights of some steps: accumulated, clipped, with an evaluation between them."""
    dist.init_process_group("gloo")
    precision, num_reduced, reason = PRECISIONS[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 7), nn.Tanh(), nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 4))
    model.to(precision.storage_dtype)[2].weight.requires_grad_(False)
    for strategy, shape in (("FULL_SHARD", (1, 2)), ("SHARD_GRAD_OP", (1, 2)), ("HYBRID_SHARD", (2, 1))):
        found = []
        for is_direct in (False, True):
            sharded = copy.deepcopy(model)
            layout = Layout("fully_shard", strategy, shape, reshard_after_forward=strategy == "FULL_SHARD")
            shard(sharded, [sharded[0], sharded[2]], layout, precision, CPU)
            if is_direct:
                send_directly(sharded)
                (line,) = direct_notes(sharded)
                wanted = (3, num_reduced, reason) if shape[1] > 1 else (0, 0, "each rank has all weights")
                assert line == (
                    "direct_collectives: weights of {} of 3 units are gathered, and gradients of {} of 3 reduced, "
                    "without packing ({})"
                ).format(*wanted)
            found.append(list(trained(sharded, precision, keeps=strategy == "SHARD_GRAD_OP")))
        for one, other in zip(*found, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
    dist.destroy_process_group()


def trained(model: nn.Module, precision: Precision, *, keeps: bool) -> Iterator[torch.Tensor]:
    """What training steps come to."""
    accumulation = Accumulation(
        unsharded=precision.reduce_dtype != BF16, all_reduced=precision.reduce_dtype == BF16, keeps_weights=keeps
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    fail_in_backward(model, torch.ones(5, 16, dtype=precision.compute_dtype))
    assert not whole_bytes(model), "after an error"
    for _ in range(3):
        for index in range(2):
            with micro_batch_context(model, accumulation, is_first=index == 0, is_last=index == 1):
                loss = model(torch.randn(5, 16, dtype=precision.compute_dtype)).square().sum()
                loss.backward()
            yield loss.detach()
        assert not whole_bytes(model), "after backward"
        for parameter in model.parameters():
            if isinstance(parameter.grad, DTensor):
                yield parameter.grad.full_tensor()
        yield torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            yield model(torch.ones(2, 16, dtype=precision.compute_dtype))
        reshard(model)
        assert not whole_bytes(model), "after an evaluation"
    yield from (parameter.full_tensor() for parameter in model.parameters())


def fail_in_backward(model: nn.Module, inputs: torch.Tensor) -> None:
    """A backward pass that ends in the middle, as one that runs out of memory does."""

    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError

    hook = model[1].register_forward_hook(lambda _module, _inputs, output: output.register_hook(fail) and None)
    with pytest.raises(ArithmeticError):
        model(inputs).sum().backward()
    hook.remove()
    end_backward(model)
    reshard(model)


def whole_bytes(model: nn.Module) -> int:
    """Bytes of gathered weights that are allocated; a group of one rank has none of its own."""
    outputs = [
        output
        for group in all_parameter_groups(model)
        for its in group.fsdp_params
        for output in its.all_gather_outputs
    ]
    return sum(output.untyped_storage().nbytes() for output in outputs)


NUM_LAYERS, COMPUTING = 6, 1.0
GATHERING = {"all_gather": 0.9, "reduce_scatter": 1.5, "all_reduce": 0.0}


@contextmanager
def simulated_layers() -> Iterator[tuple[SimulatedDevice, nn.Module]]:
    with simulated_ranks(4, GATHERING) as device:
        # The last one is the root's, as a head is, and hides the gather of the last layer in backward.
        model = nn.Sequential(*(Working(device, COMPUTING) for _ in range(NUM_LAYERS + 1)))
        mesh = init_device_mesh("cpu", (4,))
        for layer in model[:-1]:
            fully_shard(layer, mesh=mesh)
        yield device, fully_shard(model, mesh=mesh, reshard_after_forward=False)


def train_step(model: nn.Module) -> None:
    model(torch.ones(2, 16, requires_grad=True)).sum().backward()


def test_layers_are_gathered_next_to_computing_as_by_torch() -> None:
    took = []
    for is_direct in (False, True):
        with simulated_layers() as (device, model):
            if is_direct:
                send_directly(model)
            WatchedUnits(model, DeviceClock(device.Event))  # its collectives take time
            train_step(model)
            began = device.computing.time
            train_step(model)
            took.append(device.computing.time - began)
    assert took[1] == pytest.approx(took[0])
    computing = 3 * (NUM_LAYERS + 1) * COMPUTING
    # The root's gather and the first layer's have nothing to run next to, nor have the last two reductions.
    assert took[1] == pytest.approx(computing + 2 * GATHERING["all_gather"] + 2 * GATHERING["reduce_scatter"])


def test_memory_is_freed_on_the_gathering_stream_after_computing_has_read_it_and_two_layers_are_whole() -> None:
    sizes: list[int] = []
    seen: list[tuple[float, float]] = []
    with simulated_layers() as (device, model):
        send_directly(model)
        WatchedUnits(model, DeviceClock(device.Event))
        train_step(model)
        of_layer = FP32.itemsize * int(next(model.parameters()).numel())
        for group in all_parameter_groups(model):
            note_frees(group, device, seen)
            group.wait_for_unshard = noting(group.wait_for_unshard, lambda: sizes.append(whole_bytes(model)))
        train_step(model)
    assert len(seen) == 2 * NUM_LAYERS + 1, "of layers after forward and after backward, and of the root"
    assert all(freed >= read for read, freed in seen)
    assert max(sizes) == 3 * of_layer, "two layers and the root"


def noting(call: Any, note: Any) -> Any:
    def both(*args: Any) -> None:
        call(*args)
        note()

    return both


def note_frees(group: Any, device: SimulatedDevice, seen: list[tuple[float, float]]) -> None:
    """Note when computing has read a group's weights, and when their memory may be written again."""
    read: list[float] = []
    gather = group.unshard.__self__
    (its,) = group.fsdp_params
    to_sharded, free = group._to_sharded, its.free_unsharded_param

    def noted_to_sharded() -> None:
        read[:] = [device.computing.time]
        to_sharded()

    def noted_free() -> None:
        seen.append((read[0], gather.stream.time))
        free()

    group._to_sharded, its.free_unsharded_param = noted_to_sharded, noted_free


def test_units_that_round_their_weights_first_stay_packed() -> None:
    with simulated_layers() as (_, model):
        (its,) = all_parameter_groups(model)[1].fsdp_params
        its._sharded_local_tensor.fsdp_pre_all_gather = None  # as a tensor of torchao's float8 has it
        send_directly(model)
        assert [vars(group).get("unshard") is None for group in all_parameter_groups(model)] == [
            False,
            True,
            *[False] * 5,
        ]
        (line,) = direct_notes(model)
    assert "weights of 6 of 7 units" in line
    assert line.endswith("(float8 rounds weights before they are gathered)")


def test_a_run_that_gathers_nothing_refuses_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--direct_collectives: this run shares no weights out .*; start several"):
        plan_model(tmp_path, LLAMA, parse_hardware("1xH200"), ["--enable_fsdp", "--direct_collectives"])


LLAMA = SHAPES["llama8b"] | {"num_hidden_layers": 2, "vocab_size": 1024}


@pytest.mark.parametrize(
    ("line", "packs_weights", "packs_gradients"),
    [
        ("--pure_bf16", True, True),
        ("--pure_bf16 --direct_collectives", False, False),
        ("--direct_collectives", False, True),
        ("--direct_collectives --reduce_dtype bf16", False, False),
        ("--pure_bf16 --direct_collectives --hsdp --sharding_group_size 2", False, True),
    ],
)
def test_a_plan_copies_what_is_packed(line: str, packs_weights: bool, packs_gradients: bool, tmp_path: Path) -> None:
    hardware = parse_hardware("4xH200" if "hsdp" in line else "2xH200")
    traffic = find_traffic(plan_model(tmp_path, LLAMA, hardware, ["--enable_fsdp", *line.split()]))
    assert traffic.packs_weights == packs_weights
    assert (traffic.gradient_bytes - traffic.unpacked_gradient_bytes > 0) == packs_gradients
