"""Who this process is among the others, and the few collectives the run needs.

The only module that reads the launcher's environment variables. torchrun, `accelerate launch` and
srun with torchrun's variables all set the same ones; without them the run is one process.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from configs.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Environment:
    """This process's place, as the launcher tells it."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launched: bool  # by torchrun or its like; False for `python finetuning.py`

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank)
        return torch.device("cpu")


def read_environment() -> Environment:
    """Ranks and world size from RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE; one process without them."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Environment(rank=0, local_rank=0, world_size=1, local_world_size=1, launched=False)
    world_size = int(os.environ["WORLD_SIZE"])
    return Environment(
        rank=int(os.environ["RANK"]),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=world_size,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))),
        launched=True,
    )


def launch_command(env: Environment, script: str, flags: Sequence[str]) -> str:
    """What was typed to start this run, as far as the environment tells: torchrun says that it was it."""
    launcher = [] if env.launched else ["python"]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        nodes = str(env.world_size // env.local_world_size)
        launcher = ["torchrun", "--nnodes", nodes, "--nproc_per_node", str(env.local_world_size)]
    return shlex.join([*launcher, script, *flags])


def start_process_group(env: Environment) -> None:
    """Join the default process group; a single process gets one too, so that nothing after this has two cases.

    On GPUs both backends are there: nccl for device tensors and gloo for the few host-side counts, which
    then never wait for the device.
    """
    backend, device_id = "gloo", None
    if env.device.type == "cuda":
        torch.cuda.set_device(env.device)
        backend, device_id = "cpu:gloo,cuda:nccl", env.device
    timeout = timedelta(minutes=30)
    if env.launched:
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout, device_id=device_id)


def stop_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def print_rank_zero(env: Environment, *lines: str) -> None:
    """Print lines on rank 0 only."""
    if env.is_rank_zero:
        for line in lines:
            print(line, flush=True)


def sum_on_host(*values: float) -> list[float]:
    """Sums of host numbers over all ranks, exact for integers below 2^53; never touches the device."""
    totals = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(totals)
    return totals.tolist()


def gather_to_all(value: T) -> list[T]:
    """`value` of every rank, by rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def on_rank_zero(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 only and return its result, or raise its refusal, on every rank.

    Without this a rank that fails alone would leave the others waiting in their next collective.

    Raises:
        ConfigError: where `action` refused, on all ranks.
        RuntimeError: where `action` failed otherwise; rank 0 raises the error itself.
    """
    outcome: list[Any] = [None, None]  # result, error
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except ConfigError as error:
            outcome[1] = ("refused", str(error))
        except Exception as error:
            failure = error
            outcome[1] = ("failed", f"{type(error).__name__}: {error}")
    dist.broadcast_object_list(outcome, src=0)
    if failure is not None:
        raise failure
    if outcome[1] is not None:
        kind, message = outcome[1]
        raise ConfigError(message) if kind == "refused" else RuntimeError(f"rank 0 failed: {message}")
    return outcome[0]
