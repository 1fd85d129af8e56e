"""Checks of the ranks under their launcher, before any weight is read: devices, speeds, the time of a step."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from configs.flags import parse_flags
from configs.run import RunConfig
from planning.cost.link_speeds import network_gbps
from planning.cost.traffic import Traffic, find_traffic, seconds_per_step
from planning.machines.group_speeds import GroupSpeeds, Speeds
from planning.machines.hardware import Hardware
from planning.machines.planned_environment import own_hardware
from planning.memory.row_lengths import rows_of_run
from planning.model.planned_model import PlannedModel, build_planned_model
from planning.planned_run import time_of
from policies.sharding import Layout
from ranks.collectives import gather_to_all
from ranks.environment import Environment, read_environment
from ranks.process_group import start_process_group, stop_process_group
from resolving.data_facts import DataFacts
from resolving.resolved import resolve
from tools.network.bandwidth import measure_speeds
from tools.network.identity import describe_node, differences
from utils.atomic_write import write_in_place
from utils.errors import ConfigError
from utils.units import GIB
from utils.wording import plural

_WORTH_SAYING = 1.2  # how many times less HYBRID_SHARD has to communicate


def check_ranks(flags: Sequence[str], say: Callable[[str], None], report: Path | None = None) -> None:
    """Check the ranks, and print the findings on rank 0. Every rank must call this.

    Args:
        flags: of finetuning.py; without any, no step is predicted.
        report: rank 0 writes the speeds into this file, for --network_speeds.

    Raises:
        ConfigError, TrainingError: if a check fails; on the ranks that it fails on, or on all.
        FileWriteError: if the disk refuses the report.
    """
    env = read_environment()
    config = parse_flags(flags) if flags else None
    # Now, and not after the measurements.
    if report is not None and env.is_rank_zero and (report.is_dir() or not report.absolute().parent.is_dir()):
        raise ConfigError(f"--json: {report} cannot be written; give the path of a file in a folder that is there")
    start_process_group(env)
    tell = say if env.is_rank_zero else _say_nothing
    _check_devices(env, flags, tell)
    speeds = measure_speeds(env)
    for name, group in (("all ranks", speeds.world), ("inside a node", speeds.node), ("between nodes", speeds.between)):
        if group.size > 1:
            tell(_in_words(name, group))
    if speeds.between.size > 1:
        tell(f"plans of runs on these nodes should count with --network_gbps {network_gbps(speeds.world):.3g}")
    if report is not None and env.is_rank_zero:
        _write(report, speeds, env)
        tell(f"the speeds are in {report}, for --network_speeds")
    if config is not None:
        _predict(config, speeds, env, tell)
    stop_process_group()


def _write(report: Path, speeds: Speeds, env: Environment) -> None:
    """
    Raises:
        FileWriteError: if the disk refuses the file.
    """
    contents = {"device": _describe_device(env), "speeds": speeds.to_dict()}
    write_in_place(report, json.dumps(contents, indent=2) + "\n")


def _say_nothing(line: str) -> None:
    pass


def _check_devices(env: Environment, flags: Sequence[str], tell: Callable[[str], None]) -> None:
    """Refuse ranks whose code, versions, flags or devices differ."""
    own = {"host": socket.gethostname(), "rank": env.rank, **describe_node(flags), "device": _describe_device(env)}
    everyone: list[dict[str, Any]] = gather_to_all(own)
    nodes = {f"rank {rank['rank']} on {rank['host']}": rank for rank in everyone}
    refused = differences(nodes)
    (first, wanted), *others = nodes.items()
    for name, rank in others:
        if rank["device"] != wanted["device"]:
            refused.append(f"devices: {first} has {wanted['device']}, {name} has {rank['device']}; give all the same")
    if refused:
        raise ConfigError("the ranks differ; " + refused[0], "\n".join(refused[1:]))
    hosts = list(dict.fromkeys(rank["host"] for rank in everyone))
    ranks, machines = plural(env.world_size, "rank"), plural(len(hosts), "node")
    tell(f"{ranks} on {machines} ({', '.join(hosts)}), each with {wanted['device']}")


def _describe_device(env: Environment) -> str:
    if env.device.type != "cuda":
        return f"a CPU, {psutil.virtual_memory().total / GIB:.0f} GiB of memory"
    index, count = env.device.index, torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(env.device)
    peers = sum(torch.cuda.can_device_access_peer(index, other) for other in range(count) if other != index)
    memory = f"{properties.total_memory / GIB:.0f} GiB"
    return f"{properties.name}, {memory}, {count} on its node, of which it reaches {peers} directly"


def _in_words(name: str, group: GroupSpeeds) -> str:
    gather, reduce = group.all_gather, group.all_reduce
    return (
        f"{name} ({group.size}): all-gather {gather.gigabytes_per_second:.3g} GB/s, all-reduce "
        f"{reduce.gigabytes_per_second:.3g} GB/s of whole tensors; {1e3 * gather.latency_seconds:.2g} ms a call"
    )


def _predict(config: RunConfig, speeds: Speeds, env: Environment, tell: Callable[[str], None]) -> None:
    resolved = resolve(config, env)
    layout = resolved.policies.layout
    planned = build_planned_model(resolved, env)
    traffic = find_traffic(planned)
    weights, gradients = (traffic.units_bytes + traffic.root_bytes) / GIB, traffic.gradient_bytes / GIB
    tell(f"the model has {weights:.3g} GiB of weights as they are gathered, {gradients:.3g} GiB of gradients")
    hardware = own_hardware(config.train_config, config.planning_config, env)
    for line in (*prediction(layout, traffic, speeds), *planned_step(planned, hardware, speeds)):
        tell(line)


def planned_step(planned: PlannedModel, hardware: Hardware, speeds: Speeds) -> list[str]:
    """The time of a step with full rows, at these speeds; empty if the rates of the devices are not known."""
    time = time_of(planned, hardware, rows_of_run(planned.resolved), DataFacts(), speeds)
    if time is None:
        return []
    speed = f"{time.tokens_per_second_per_device:,.0f} tokens/s per device"
    return [f"a step should take {time.seconds_per_step:.3g} s, most of it for {time.waits_for}: {speed}"]


def prediction(layout: Layout, traffic: Traffic, speeds: Speeds) -> list[str]:
    """Seconds per step that these flags communicate, and whether sharding inside nodes would be faster."""
    strategy = "FULL_SHARD" if layout.strategy == "SINGLE" else layout.strategy
    seconds = seconds_per_step(strategy, traffic, speeds)
    lines = [f"{layout.strategy} communicates {seconds:.3g} s per step, less what computing hides"]
    if strategy not in ("FULL_SHARD", "SHARD_GRAD_OP") or speeds.between.size == 1:
        return lines
    hybrid = seconds_per_step("HYBRID_SHARD", traffic, speeds)
    if seconds > _WORTH_SAYING * hybrid:
        lines.append(
            f"warning: --hsdp, sharded inside each node, would communicate {hybrid:.3g} s, {seconds / hybrid:.1f} "
            "times less, if the devices of a node have room for the model, its gradients and optimizer states"
        )
    return lines
