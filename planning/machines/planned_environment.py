"""The ranks of a plan, on machines that need not be here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from configs.planning import PlanningConfig
from configs.training import TrainConfig
from planning.machines.cards import CONTEXT_GIB, Card, find_card
from planning.machines.group_speeds import Speeds, read_speeds
from planning.machines.hardware import Hardware, parse_hardware
from ranks.environment import Environment, lone_process
from utils.device import DeviceFacts
from utils.host_memory import host_bytes
from utils.units import GIB


def planned_hardware(train: TrainConfig, planning: PlanningConfig, env: Environment) -> Hardware:
    """The hardware that the flags describe; without any, this machine's own.

    Raises:
        ConfigError: if the card is not known.
    """
    if not describes_hardware(planning):
        return replace(own_hardware(train, planning, env), nodes=planning.nodes or own_nodes(env))
    return parse_hardware(
        planning.dry_run_hardware,
        device_memory_gib=planning.device_memory_gib,
        host_memory_gib=planning.host_memory_gib,
        nodes=planning.nodes or 1,
        network_gbps=planning.network_gbps,
        price_per_hour=planning.price_per_hour,
        measured=measured_speeds(planning),
    )


def measured_speeds(planning: PlanningConfig) -> Speeds | None:
    """The speeds in the file of --network_speeds; None if none is given.

    Raises:
        ConfigError: if the file has no speeds.
    """
    return None if planning.network_speeds is None else read_speeds(Path(planning.network_speeds))


def check_speeds(planning: PlanningConfig) -> None:
    """Refuse a file of --network_speeds without speeds, before any data is read.

    Raises:
        ConfigError: with the reason.
    """
    measured_speeds(planning)


def describes_hardware(planning: PlanningConfig) -> bool:
    """Whether the flags name cards; if not, a plan is one for this machine."""
    return planning.dry_run_hardware is not None or planning.device_memory_gib is not None


def own_nodes(env: Environment) -> int:
    return env.world_size // env.local_world_size


def own_hardware(train: TrainConfig, planning: PlanningConfig, env: Environment) -> Hardware:
    """This machine's devices, as many as the run takes: those of its ranks, or all of them for --enable_fsdp before a
    launcher has started any."""
    count = env.local_world_size
    host_gib = planning.host_memory_gib or host_bytes() / GIB
    if env.device.type == "cuda":
        if train.enable_fsdp and not env.launched:
            count = torch.cuda.device_count()
        properties = torch.cuda.get_device_properties(env.device)
        capability = torch.cuda.get_device_capability(env.device)
        # torch.cuda.set_per_process_memory_fraction makes a card smaller for a run, and so for its plan.
        allowed = torch.cuda.get_per_process_memory_fraction(env.device) * properties.total_memory
        # The fraction limits torch's allocator alone; the context comes on top of it.
        memory_gib = min(properties.total_memory / GIB, allowed / GIB + CONTEXT_GIB)
        known = find_card(properties.name)
        card = replace(known, memory_gib=memory_gib) if known else Card(properties.name, memory_gib)
        card = replace(card, compute_capability=capability, host_memory_gib=host_gib)
    else:
        # Ranks on CPUs share the host's memory.
        card = Card("CPU", host_gib / count, is_gpu=False, host_memory_gib=host_gib)
    speeds = measured_speeds(planning)
    return Hardware(card, count, own_nodes(env), planning.network_gbps, planning.price_per_hour, speeds)


def planned_environment(hardware: Hardware, train: TrainConfig) -> Environment:
    """Rank 0 of such hardware: one rank for each card, or one in all with --one_gpu."""
    card = hardware.card
    world_size, local_world_size = hardware.world_size, hardware.cards_per_node
    if train.one_gpu:
        world_size = local_world_size = 1
    return replace(
        lone_process(),
        world_size=world_size,
        local_world_size=local_world_size,
        launched=train.enable_fsdp or world_size > 1,
        planned_device=DeviceFacts(
            "cuda" if card.is_gpu else "cpu",
            int(card.memory_gib * GIB),
            card.has_bf16,
            card.has_float8,
            card.has_grouped_products,
        ),
    )
