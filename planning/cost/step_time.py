"""The time of an optimizer step, from FLOPs, memory traffic, communication and the hardware's rates."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import NamedTuple

from data.batches.counts import BatchCounts
from planning.cost.kernel_rates import KernelRates, kernel_rates
from planning.cost.step_work import MicroBatchWork, OptimizerWork, optimizer_work, passes, thirds
from planning.cost.traffic import Traffic, exchange_seconds, seconds_per_step
from planning.machines.group_speeds import Speeds
from planning.machines.hardware import Hardware
from planning.model.planned_model import PlannedModel, gathered_in, layers_of
from policies.optimizers.build import steps_early
from policies.optimizers.kind import kind_of

HIDDEN_SHARE = 0.35
"""Fraction of min(compute, communication) that overlaps. Collectives take multiprocessors
and memory bandwidth from computing. On four H200 (docs/performance.md), between 0.33 and 0.45 of 8B's collectives under
FULL_SHARD were hidden, those of LoRA, too."""

HOST_BYTES_PER_SECOND = 200e9
"""Rate of a node's memory, for optimizers that step there; 13B's AdamW on the host of an H200 reached it."""

_HOST_LINK_SHARE = 0.76  # of a card's link to host memory, as of PCIe links between cards


@dataclass(frozen=True)
class StepParts:
    """Seconds of an optimizer step, by kind of work. They add up to the step."""

    matrix_products: float
    attention: float
    other_kernels: float
    host_launches: float  # the device waits for the host to start kernels
    optimizer: float
    host_transfers: float
    communication: float  # not hidden by computing

    @property
    def total(self) -> float:
        return sum(asdict(self).values())

    @property
    def largest(self) -> str:
        parts = asdict(self)
        return max(parts, key=lambda name: parts[name]).replace("_", " ")


class StepTime(NamedTuple):
    """The seconds of a step, and of what may be hidden in it."""

    parts: StepParts
    communication: float  # hidden or not
    moving: float  # waits for activations on their way to host memory and back


def time_of_step(
    planned: PlannedModel,
    hardware: Hardware,
    counts: BatchCounts,
    work: MicroBatchWork,
    rates: KernelRates,
    traffic: Traffic,
    speeds: Speeds,
    *,
    hidden_share: float = HIDDEN_SHARE,
    moved_bytes: float = 0.0,
) -> StepTime:
    """The seconds of one optimizer step of a run.

    Args: as of `planning.cost.time_plan.plan_time`.
        rates: of the dtype that products are computed in.
    """
    layout, batches, world_size = planned.resolved.policies.layout, planned.resolved.batches, planned.env.world_size
    num_micro_batches, ranks_per_node = batches.gradient_accumulation_steps, min(world_size, hardware.cards_per_node)
    optimizer = optimizer_work(planned)
    # Groups of one rank gather nothing: they only all-reduce, like DistributedDataParallel.
    strategy = "NO_SHARD" if layout.mesh_shape[1] == 1 else layout.strategy
    communication = seconds_per_step(strategy, traffic, speeds) if world_size > 1 else 0.0
    exchanges = num_micro_batches * exchange_seconds(planned, counts, speeds, ranks_per_node)
    if optimizer.num_exchanges:
        sharing = speeds.node if layout.strategy == "HYBRID_SHARD" else speeds.world
        exchanges += sharing.all_gather.seconds(optimizer.exchanged_bytes, optimizer.num_exchanges)
    own_rates = kernel_rates(hardware.card, "bf16") or rates
    host_bytes_per_second = 1e9 * _HOST_LINK_SHARE * (hardware.card.host_gb_per_second or math.inf)
    computing = sum(work.device_seconds(rates))
    hidden = _hidden_seconds(planned, computing)
    # What computing does not need for the update hides the copies of gradients and weights.
    left = max(0.0, hidden - optimizer.host_bytes * ranks_per_node / HOST_BYTES_PER_SECOND)
    transfers = max(0.0, optimizer.transfer_bytes / host_bytes_per_second - left)
    moving = num_micro_batches * _moving_seconds(planned, computing, moved_bytes / host_bytes_per_second)
    parts = step_parts(
        work,
        optimizer,
        rates,
        num_micro_batches=num_micro_batches,
        copied_bytes=_copied_bytes(planned, traffic),
        communication=communication,
        hidden_share=hidden_share,
        exchange_seconds=exchanges,
        host_transfer_seconds=transfers + _gathered_from_host(planned, traffic) / host_bytes_per_second + moving,
        update_seconds=optimizer.product_flops / own_rates.matrix_flops,
        host_bytes_per_second=HOST_BYTES_PER_SECOND / ranks_per_node,
        overlapped_seconds=hidden,
    )
    return StepTime(parts, communication + exchanges, moving)


def step_parts(
    work: MicroBatchWork,
    optimizer: OptimizerWork,
    rates: KernelRates,
    *,
    num_micro_batches: int,
    copied_bytes: float,
    communication: float,
    hidden_share: float,
    exchange_seconds: float = 0.0,
    host_transfer_seconds: float = 0.0,
    update_seconds: float = 0.0,
    host_bytes_per_second: float = HOST_BYTES_PER_SECOND,
    overlapped_seconds: float = 0.0,
) -> StepParts:
    """The seconds of one optimizer step.

    Args:
        copied_bytes: read and written around collectives, in a step.
        communication: seconds of a step's collectives.
        exchange_seconds: of collectives that computing waits for: of ranks that share rows, or update whole matrices.
        update_seconds: of the optimizer's own matrix products.
        host_transfer_seconds: of a step's copies between device and host.
        host_bytes_per_second: this rank's share of its node's.
        overlapped_seconds: of computing, beside which the optimizer may work in host memory.
    """
    matrix, attention, other = work.device_seconds(rates)
    copies = copied_bytes / rates.memory_bytes
    device = num_micro_batches * (matrix + attention + other) + copies
    # Kernels are queued ahead, so starting them costs only the time that it takes beyond the device's work.
    waits = max(0.0, num_micro_batches * work.launch_seconds - device)
    hidden = hidden_share * min(device + waits, communication)
    return StepParts(
        matrix_products=num_micro_batches * matrix,
        attention=num_micro_batches * attention,
        other_kernels=num_micro_batches * other + copies,
        host_launches=waits,
        optimizer=optimizer.device_bytes / rates.memory_bytes
        + update_seconds
        + max(0.0, optimizer.host_bytes / host_bytes_per_second - overlapped_seconds),
        host_transfers=host_transfer_seconds,
        communication=communication - hidden + exchange_seconds,
    )


def _gathered_from_host(planned: PlannedModel, traffic: Traffic) -> float:
    """Bytes between device and host of --fsdp_cpu_offload in a step: this rank's part of all weights goes up for each
    gathering, and its gradients come down."""
    layout, num_micro_batches = planned.resolved.policies.layout, planned.resolved.batches.gradient_accumulation_steps
    if not layout.cpu_offload:
        return 0.0
    of_micro_batch = 2 * traffic.units_bytes + traffic.root_bytes
    return (num_micro_batches * of_micro_batch + traffic.gradient_bytes) / layout.mesh_shape[1]


def _hidden_seconds(planned: PlannedModel, computing: float) -> float:
    """Seconds of computing in a step, beside which an optimizer on the CPU may update weights.

    That is the first forward pass, in which each layer, or unit, waits for its own weights; and the last backward pass,
    if gradients are final after it. Weights in host memory are copied before backward updates them, so a third of
    that time is lost (12 passes over memory instead of 8, for AdamW's states).

    Args:
        computing: seconds of a micro-batch, forward and backward.
    """
    train, fsdp, policies = planned.config.train_config, planned.config.fsdp_config, planned.resolved.policies
    on_host = fsdp.optimizer_cpu_offload or (fsdp.fsdp_cpu_offload and kind_of(fsdp.optimizer).steps_alone)
    if not on_host:
        return 0.0
    forward = computing / thirds(passes(planned))
    is_early = steps_early(train, scales_loss=policies.precision.scales_loss) and policies.layout.kind != "ddp"
    backward = (computing - forward) * (2 / 3 if fsdp.fsdp_cpu_offload else 1) if is_early else 0.0
    parts = gathered_in(planned) if policies.layout.kind == "fully_shard" else planned.adapted.layers
    return backward + (forward if parts else 0.0)


def _moving_seconds(planned: PlannedModel, computing: float, one_way: float) -> float:
    """Seconds that a micro-batch waits for activations on their way to host memory and back.

    They move while those layers compute whose activations move, so only copies that take longer than that are waited
    for.

    Args:
        computing: seconds of the micro-batch, forward and backward.
        one_way: seconds of the copies in one direction.
    """
    share = planned.empty.num_offloaded / max(1, len(layers_of(planned)))
    forward = computing / thirds(passes(planned))
    return max(0.0, one_way - share * forward) + max(0.0, one_way - share * (computing - forward))


def _copied_bytes(planned: PlannedModel, traffic: Traffic) -> float:
    """Bytes that `fully_shard` reads and writes in a step to copy weights and gradients to and from buffers."""
    layout = planned.resolved.policies.layout
    if layout.kind != "fully_shard":
        return 0.0
    gathered = traffic.units_bytes + traffic.root_bytes  # once, if it is kept
    if layout.reshard_after_forward:
        gathered = traffic.num_micro_batches * (2 * traffic.units_bytes + traffic.root_bytes)
    packed = traffic.gradient_bytes - traffic.unpacked_gradient_bytes
    reduced = (1 if traffic.reduces_once else traffic.num_micro_batches) * packed
    return 2 * ((gathered if traffic.packs_weights else 0) + reduced)
