"""Two ranks step on sharded parameters with given gradients, and compare with the same on whole ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from configs.flags import parse_flags
from configs.fsdp import FsdpConfig
from configs.training import TrainConfig
from policies.optimizers.build import build_optimizer, state_bytes
from reporting.memory_ledger import local_bytes, optimizer_tensors

# Rows that ranks cannot share equally, one row (LoRA of rank 1), experts, rows of whole blocks and others.
SHAPES = [(33, 256), (1, 4096), (3, 8, 256), (5, 7), (7,), (2, 2048), (4096, 2), (9, 512)]
OPTIMIZERS = {
    "AdamW": ["--optimizer", "AdamW", "--decay_norms_and_biases", "False"],
    "anyprecision": ["--optimizer", "anyprecision", "--use_kahan_summation"],
    "AdamW8bit": ["--optimizer", "AdamW8bit"],
    "Adafactor": ["--optimizer", "Adafactor"],
    "Muon": ["--optimizer", "Muon"],
}
MESHES = {"FULL_SHARD": (1, 2), "copies": (2, 1)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Parameters(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
        self.values = nn.ParameterList(nn.Parameter(value) for value in values)


def sections(name: str) -> tuple[TrainConfig, FsdpConfig]:
    config = parse_flags(["--model_name", "m", "--lr", "0.01", "--weight_decay", "0.1", *OPTIMIZERS[name]])
    return config.train_config, config.fsdp_config


def train(model: Parameters, optimizer: torch.optim.Optimizer, num_steps: int = 4) -> None:
    generator = torch.Generator().manual_seed(1)
    for step in range(num_steps):
        for index, parameter in enumerate(model.values):
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if (step, index) == (1, 3):
                continue  # took no part in this step
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def largest_difference(model: Parameters, optimizer: Any, plain: Parameters, other: Any) -> tuple[float, float]:
    """Of weights, and of states."""
    weights = states = 0.0
    for parameter, theirs in zip(model.values, plain.values, strict=True):
        weights = max(weights, (whole(parameter.detach()) - theirs).abs().max().item())
        for key, value in other.state[theirs].items():
            ours = optimizer.state[parameter][key]
            if not isinstance(value, torch.Tensor):
                assert ours == value, key
                continue
            ours = whole(ours)
            assert (ours.shape, ours.dtype) == (value.shape, value.dtype), key
            states = max(states, (ours.float() - value.float()).abs().max().item())
    return weights, states


def run(folder: Path) -> None:
    """Writes what it found, by optimizer, mesh and dtype: differences, and bytes of states held and foreseen."""
    dist.init_process_group("gloo")
    found = {}
    meshes = {
        name: init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")) for name, shape in MESHES.items()
    }
    for name in OPTIMIZERS:
        for mesh_name, mesh in meshes.items():
            for dtype_name, dtype in DTYPES.items():
                model, plain = Parameters(dtype), Parameters(dtype)
                fully_shard(model, mesh=mesh["shard"] if mesh_name == "FULL_SHARD" else mesh)
                optimizer = build_optimizer(model, *sections(name))
                other = build_optimizer(plain, *sections(name))
                train(model, optimizer)
                train(plain, other)
                weights, states = largest_difference(model, optimizer, plain, other)
                steps = 4 * len(SHAPES) if name == "AdamW" else 0  # torch's own keeps them as tensors
                foreseen = sum(
                    state_bytes(parameter.detach(), *sections(name), local=True) for parameter in model.values
                )
                found[f"{name} {mesh_name} {dtype_name}"] = {
                    "weights": weights,
                    "states": states,
                    "moved": max(
                        (whole(p.detach()) - q).abs().max().item()
                        for p, q in zip(model.values, Parameters(dtype).values, strict=True)
                    ),
                    "held": local_bytes(optimizer_tensors(optimizer))["cpu"] - steps,
                    "foreseen": foreseen,
                }
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
