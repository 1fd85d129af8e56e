"""Which rank this process is, and how it was started.

The only module that reads the launcher's environment variables. torchrun, `accelerate launch` and
srun with torchrun's variables all set the same ones; without them the run is one process.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from tqdm import tqdm

from utils.processes import machine, started_at

if TYPE_CHECKING:
    import torch


_RESTARTS_OF_TORCHRUN, _RESTARTS_OF_SLURM = "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"


@dataclass(frozen=True)
class Environment:
    """What the launcher says about this process."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launched: bool  # by torchrun or its like; False for `python finetuning.py`
    job: str | None = None  # the launcher's name for this job; a restart keeps it
    restarted: bool = False  # by torchrun (--max-restarts) or Slurm (requeue)
    grace_scale: float = 1.0  # tests shorten by it how long ranks wait for each other (supervision/patience.py)
    # Names the torchrun process that may restart this one. None: there is none, or it is not one process: on several
    # machines, or if Slurm has requeued the job.
    launcher: str | None = None
    started_in: Path = field(default_factory=Path.cwd)  # the working directory; a user's code may change it later

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        import torch  # takes seconds; a flag that is refused should not wait for it

        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank)
        return torch.device("cpu")


def launcher_rank() -> int:
    """This process's rank, as the launcher tells it; 0 without one."""
    return int(os.environ.get("RANK", "0")) if "WORLD_SIZE" in os.environ else 0


def read_environment() -> Environment:
    """Read RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE; without them the run is one process."""
    slurm_job = os.environ.get("SLURM_JOB_ID")
    job = f"slurm-{slurm_job}" if slurm_job else os.environ.get("TORCHELASTIC_RUN_ID")
    by_torchrun, by_slurm = (int(os.environ.get(name) or 0) > 0 for name in (_RESTARTS_OF_TORCHRUN, _RESTARTS_OF_SLURM))
    restarted = by_torchrun or by_slurm
    on_one_machine = os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")
    launcher = None
    if _RESTARTS_OF_TORCHRUN in os.environ and not by_slurm and on_one_machine:  # a requeued job has a new torchrun
        launcher = _torchrun()
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    of_launcher = os.environ if launched else {}
    world_size = int(of_launcher.get("WORLD_SIZE", "1"))
    return Environment(
        rank=launcher_rank(),
        local_rank=int(of_launcher.get("LOCAL_RANK", "0")),
        world_size=world_size,
        local_world_size=int(of_launcher.get("LOCAL_WORLD_SIZE", str(world_size))),
        launched=launched,
        job=job,
        restarted=restarted,
        grace_scale=float(os.environ.get("FINETUNING_GRACE_SCALE", "1")),
        launcher=launcher,
    )


def _torchrun() -> str | None:
    """Names the process of torchrun, which may start this one through a script; None if unknown."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process().parent()
        while process is not None and _RESTARTS_OF_TORCHRUN in process.environ():
            process = process.parent()
        if process is not None:
            return f"{machine()} {process.pid} {started_at(process.pid):.0f}"
    return None


def launch_command(env: Environment, script: str, flags: Sequence[str]) -> str:
    """The command that started this run, as far as the environment tells."""
    launcher = [] if env.launched else ["python"]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        nodes = str(env.world_size // env.local_world_size)
        launcher = ["torchrun", "--nnodes", nodes, "--nproc_per_node", str(env.local_world_size)]
    return shlex.join([*launcher, script, *flags])


def print_rank_zero(env: Environment, *lines: str) -> None:
    """Print lines on rank 0 only, above its progress bar if there is one."""
    if env.is_rank_zero:
        for line in lines:
            tqdm.write(line)
        sys.stdout.flush()
