"""Describes a run for run.yaml and the start table: its model, its data, and the devices of all ranks."""

from __future__ import annotations

import platform
import socket
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn

from ranks.collectives import gather_to_all
from ranks.environment import Environment
from utils.host_memory import host_bytes
from utils.parameters import count_weights
from utils.units import GIB


def describe_run(
    model: nn.Module, architecture: str, data: dict[str, Any], env: Environment, *, load_seconds: float
) -> dict[str, Any]:
    """The sections `model`, `data` and `devices` of run.yaml. Every rank must call this.

    Args:
        architecture: the model's class before anything wrapped it.
        data: of `reporting.data_preview.preview_data`.
        load_seconds: the time to build, shard and fill the model.
    """
    of_model = _describe_model(model, architecture) | {"load_seconds": round(load_seconds, 2)}
    return {"model": of_model, "data": data, "devices": _describe_devices(env)}


def start_event(
    description: dict[str, Any], env: Environment, *, steps_per_epoch: int, num_steps: int
) -> dict[str, int | None]:
    """The `start` event of metrics.jsonl. Counts that are unknown for a stream are None."""
    data = description["data"]
    model, train, validation = description["model"], data["train"], data["validation"]
    return {
        "world_size": env.world_size,
        "num_parameters": model["num_parameters"],
        "num_trainable_parameters": model["num_trainable_parameters"],
        "num_train_samples": train["num_samples"],
        "num_eval_samples": validation["num_samples"] if validation else 0,
        "num_train_rows": train["num_rows"],
        "steps_per_epoch": steps_per_epoch,
        "num_steps": num_steps,
    }


def _describe_model(model: nn.Module, architecture: str) -> dict[str, Any]:
    """The section `model`. Weights are counted as whole tensors, however they are sharded."""
    counted = list(count_weights(model))
    dtypes: Counter[str] = Counter()
    for weights in counted:
        dtypes[weights.stored_as] += weights.num_weights
    return {
        "architecture": architecture,
        "num_parameters": sum(dtypes.values()),
        "num_trainable_parameters": sum(w.num_weights for w in counted if w.parameter.requires_grad),
        "num_parameters_by_dtype": dict(dtypes.most_common()),
    }


class _Device(NamedTuple):
    host: str
    device: str
    memory_gib: float  # on CPU the host's
    allocated_gib: float | None
    host_rss_gib: float


def _describe_devices(env: Environment) -> list[dict[str, Any]]:
    """One entry for each host and kind of device, with its ranks.

    Lists are by rank: memory held now on its GPU (`allocated_gib`; missing on CPU) and on the host.
    """
    groups: dict[tuple[str, str, float], dict[str, Any]] = {}
    for rank, own in enumerate(gather_to_all(_own_device(env))):
        place = {"host": own.host, "device": own.device, "memory_gib": own.memory_gib}
        group = groups.setdefault((own.host, own.device, own.memory_gib), place)
        group.setdefault("ranks", []).append(rank)
        if own.allocated_gib is not None:
            group.setdefault("allocated_gib", []).append(own.allocated_gib)
        group.setdefault("host_rss_gib", []).append(own.host_rss_gib)
    return list(groups.values())


def _own_device(env: Environment) -> _Device:
    resident = round(psutil.Process().memory_info().rss / GIB, 2)
    if env.device.type == "cuda":
        properties = torch.cuda.get_device_properties(env.device)
        allocated = round(torch.cuda.memory_allocated(env.device) / GIB, 2)
        total = round(properties.total_memory / GIB, 1)
        return _Device(socket.gethostname(), properties.name, total, allocated, resident)
    total = round(host_bytes() / GIB, 1)
    return _Device(socket.gethostname(), _cpu_name(), total, None, resident)


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "CPU"
