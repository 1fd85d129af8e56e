"""Plans of 64 to 1,024 GPUs, which no machine here has: the tables of docs/scaling.md.

python -m benchmarks.planned_scaling            (reads shapes only; seconds on two cores)

Llama-3.1-70B's shape, all weights, `--enable_fsdp --pure_bf16 --compile`, one row of 4,096 tokens per GPU and step,
layers computed again in backward; nodes of eight H200 with 3,200 Gb/s to the others (eight links of 400 Gb/s), or
100 Gb/s, where 16 micro-batches share a step, too.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.planned_times import causal_counts, plan_model
from benchmarks.runs.shapes import SHAPES
from planning.cost.link_speeds import expected_speeds
from planning.cost.time_plan import TimePlan, plan_time
from planning.cost.traffic import find_traffic
from planning.machines.hardware import Hardware, parse_hardware
from planning.model.planned_model import PlannedModel
from utils.units import GIB

FLAGS = "--enable_fsdp --pure_bf16 --compile --batch_size_training 1"
LENGTH, PER_NODE = 4096, 8
NUM_GPUS = (64, 256, 1024)
FAST, SLOW = 3200.0, 100.0  # Gb/s of a node
NUM_ACCUMULATED = 16
HELD_BYTES, SAVED_BYTES = 8, 6  # per parameter: weights, gradients and AdamW's two averages in bf16; without gradients
# 419 unexpected interruptions of 16,384 GPUs in 54 days ("The Llama 3 Herd of Models", 2024, section 3.3.4)
GPU_HOURS_PER_FAILURE = 16_384 * 54 * 24 / 419
STORAGE = {"10 GB/s for all nodes together": (10e9, 0.0), "2 GB/s per node": (0.0, 2e9)}


def hardware_of(num_gpus: int, network_gbps: float = FAST) -> Hardware:
    return parse_hardware(f"{PER_NODE}xH200", nodes=num_gpus // PER_NODE, network_gbps=network_gbps)


class Planned:
    """A layout on so many GPUs."""

    def __init__(self, folder: Path, num_gpus: int, more: str = "") -> None:
        self.hardware, self.slow = hardware_of(num_gpus), hardware_of(num_gpus, SLOW)
        self.model = plan_model(folder, SHAPES["llama70b"], self.hardware, f"{FLAGS} {more}".split())
        resolved = self.model.resolved
        batches = replace(resolved.batches, gradient_accumulation_steps=NUM_ACCUMULATED)
        self.accumulated = replace(self.model, resolved=replace(resolved, batches=batches))
        self.time = self._time(self.model, self.hardware)

    def _time(self, model: PlannedModel, hardware: Hardware) -> TimePlan:
        time = plan_time(model, hardware, causal_counts(1, LENGTH))
        assert time is not None
        return time

    def speeds(self) -> str:
        """Tokens/s per GPU with the fast network, the slow one, and the slow one with more micro-batches."""
        on_slow = (self._time(model, self.slow) for model in (self.model, self.accumulated))
        return " | ".join(f"{time.tokens_per_second_per_device:,.0f}" for time in (self.time, *on_slow))


def speed_table(folder: Path) -> str:
    """Layouts by number of GPUs: what a node sends, and what a step takes."""
    lines = [
        "| GPUs | layout | a node sends per step, GB | computing, s | communicating, s | of it latency, s "
        "| tokens/s per GPU | at 100 Gb/s | and 16 micro-batches |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    layouts = {"FULL_SHARD": "", "groups of 8": "--hsdp", "groups of 64": "--hsdp --sharding_group_size 64"}
    for num_gpus in NUM_GPUS:
        for name, more in layouts.items():
            if name == "groups of 64" and num_gpus == 64:
                continue  # it is FULL_SHARD
            planned = Planned(folder, num_gpus, more)
            time = planned.time
            sent = sent_by_a_node(planned.model, planned.hardware) / 1e9
            latency = latency_seconds(planned.model, planned.hardware)
            lines.append(
                f"| {num_gpus:,} | {name} | {sent:,.0f} | {time.seconds_per_step - time.step.communication:.2f} "
                f"| {time.communication_seconds:.2f} | {latency:.2f} | {planned.speeds()} |"
            )
    return "\n".join(lines)


def sent_by_a_node(planned: PlannedModel, hardware: Hardware) -> float:
    """Bytes that a node sends to others in a step. A ring over n ranks sends (n - 1) / n of a tensor over each link."""
    traffic, mesh = find_traffic(planned), planned.resolved.policies.layout.mesh_shape
    copies, sharded = mesh
    gathered = 2 * traffic.units_bytes + traffic.root_bytes + traffic.gradient_bytes
    inside = gathered * (sharded - 1) / sharded if sharded > hardware.cards_per_node else 0.0
    parts_of_node = min(sharded, hardware.cards_per_node) / sharded
    return inside + 2 * (copies - 1) / copies * traffic.gradient_bytes * parts_of_node


def latency_seconds(planned: PlannedModel, hardware: Hardware) -> float:
    """What a step's collectives take before bytes count: it grows with the ranks of a ring."""
    traffic, layout = find_traffic(planned), planned.resolved.policies.layout
    is_hybrid = layout.strategy == "HYBRID_SHARD"
    speeds = expected_speeds(hardware, layout.mesh_shape[1] if is_hybrid else None)
    assert speeds is not None
    group = speeds.node if is_hybrid else speeds.world
    num_gathers = 2 * (traffic.num_units - 1) + 1
    seconds = num_gathers * group.all_gather.latency_seconds
    seconds += traffic.num_trained_units * group.reduce_scatter.latency_seconds
    return seconds + (traffic.num_trained_units * speeds.between.all_reduce.latency_seconds if is_hybrid else 0.0)


def group_table(folder: Path) -> str:
    """Sizes of HYBRID_SHARD's groups on 1,024 GPUs: what a GPU holds, and what the network then has to do."""
    lines = [
        "| GPUs per group | a GPU holds, GiB | communicating, s | tokens/s per GPU | at 100 Gb/s "
        "| and 16 micro-batches |",
        "|---|---|---|---|---|---|",
    ]
    for size in (8, 16, 32, 64, 128, 256, 1024):
        planned = Planned(folder, 1024, f"--hsdp --sharding_group_size {size}")
        held = HELD_BYTES * num_parameters(planned.model) / size / GIB
        lines.append(f"| {size:,} | {held:.1f} | {planned.time.communication_seconds:.2f} | {planned.speeds()} |")
    return "\n".join(lines)


def checkpoint_table(folder: Path) -> str:
    """How long a checkpoint takes to write, how often GPUs fail, and how often to save then."""
    lines = [
        "| GPUs | hours between failures | storage | a checkpoint, s | best interval, minutes | time lost |",
        "|---|---|---|---|---|---|",
    ]
    num_bytes = SAVED_BYTES * num_parameters(plan_model(folder, SHAPES["llama70b"], hardware_of(64), FLAGS.split()))
    for num_gpus in NUM_GPUS:
        hours = GPU_HOURS_PER_FAILURE / num_gpus
        for name, (shared, per_node) in STORAGE.items():
            seconds = num_bytes / (shared or per_node * num_gpus / PER_NODE)
            # Young, "A first order approximation to the optimum checkpoint interval", 1974
            interval = math.sqrt(2 * seconds * 3600 * hours)
            lost = seconds / interval + interval / 2 / (3600 * hours)
            lines.append(f"| {num_gpus:,} | {hours:,.0f} | {name} | {seconds:.0f} | {interval / 60:.0f} | {lost:.1%} |")
    return "\n".join(lines)


def num_parameters(planned: PlannedModel) -> int:
    return sum(parameter.numel() for parameter in planned.adapted.model.parameters())


def main() -> None:
    with tempfile.TemporaryDirectory() as created:
        print(speed_table(Path(created)), group_table(Path(created)), checkpoint_table(Path(created)), sep="\n\n")


if __name__ == "__main__":
    main()
