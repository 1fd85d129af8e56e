"""Which rank this process is, and how it was started.

This module alone reads the launcher's variables, but for `utils.launcher_rank`. torchrun, `accelerate launch` and srun
with torchrun's variables all set the same ones; without them the run is one process.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from tqdm import tqdm

from ranks.accelerate_launch import not_followed
from utils.device import DeviceFacts, facts_of
from utils.errors import ConfigError
from utils.log_clock import stamped
from utils.printing import printable
from utils.processes import machine, started_at
from utils.urls import without_secrets

if TYPE_CHECKING:
    import torch


_RESTARTS_OF_TORCHRUN, _RESTARTS_OF_SLURM = "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"


@dataclass(frozen=True)
class Environment:
    """This process's place among the ranks, by the launcher's variables."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launched: bool  # by torchrun or its like; False for `python finetuning.py`
    job: str | None = None  # the launcher's name for this job; a restart keeps it
    restarted: bool = False  # by torchrun (--max-restarts) or Slurm (requeue)
    grace_scale: float = 1.0  # multiplies the time that ranks wait for each other (supervision/patience.py); for tests
    meeting_place: tuple[str, int] | None = None  # address and port of rank 0, or of the launcher's store
    launcher_has_store: bool = False  # torchrun's agent serves it; otherwise rank 0 opens one
    # Names the torchrun process that may restart this one. None without torchrun, on several machines, and if Slurm has
    # requeued the job: no single process stays over the restarts then.
    launcher: str | None = None
    started_in: Path = field(default_factory=Path.cwd)  # the working directory; user code may change it later
    refusal_file: Path | None = None  # a refused rank makes it: tools/start_node.sh then ends the launcher
    planned_device: DeviceFacts | None = None  # the device that a plan is for; None: the one of this process

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        import torch  # takes seconds; a flag that is refused should not wait for it

        if self.planned_device is not None:
            return torch.device(self.planned_device.type, self.local_rank)
        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank)
        return torch.device("cpu")

    @property
    def device_facts(self) -> DeviceFacts:
        """The facts of the device that decisions of the run depend on."""
        return self.planned_device or facts_of(self.device)


def lone_process(rank: int = 0) -> Environment:
    """The environment of a single process.

    Args:
        rank: for its messages.
    """
    return Environment(rank=rank, local_rank=0, world_size=1, local_world_size=1, launched=False)


def read_environment() -> Environment:
    """The environment by the launcher's variables; without RANK and WORLD_SIZE a single process.

    Raises:
        ConfigError: if a variable is not a number, variables contradict each other, or srun started several processes
            without RANK.
    """
    slurm_job = os.environ.get("SLURM_JOB_ID")
    job = f"slurm-{slurm_job}" if slurm_job else os.environ.get("TORCHELASTIC_RUN_ID")
    by_torchrun, by_slurm = (_number(name, 0) > 0 for name in (_RESTARTS_OF_TORCHRUN, _RESTARTS_OF_SLURM))
    restarted = by_torchrun or by_slurm
    on_one_machine = os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")
    launcher = None
    if _RESTARTS_OF_TORCHRUN in os.environ and not by_slurm and on_one_machine:  # a requeued job has a new torchrun
        launcher = _torchrun()
    refusal_file = os.environ.get("FINETUNING_REFUSAL_FILE")
    environment = replace(
        lone_process(),
        job=job,
        restarted=restarted,
        grace_scale=_grace_scale(),
        launcher=launcher,
        refusal_file=Path(refusal_file) if refusal_file else None,
    )
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return _with_ranks(environment)
    num_tasks = _number("SLURM_STEP_NUM_TASKS", 1)
    if num_tasks > 1 and not os.isatty(0):  # in a shell by `srun --pty` nobody else is started
        raise ConfigError(
            f"SLURM_STEP_NUM_TASKS={num_tasks} and RANK is not set: each of srun's tasks would train alone; let srun "
            "start one torchrun per node (slurm/multi_node.slurm), or unset this variable if each is to"
        )
    return environment


def _with_ranks(environment: Environment) -> Environment:
    """The environment of a process that a launcher started as one of several.

    Raises:
        ConfigError: if its variables are missing, are not numbers, or contradict each other.
    """
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            found = "RANK" if "RANK" in os.environ else "WORLD_SIZE"
            raise ConfigError(f"{found} is set and {name} is not; start with torchrun, which sets both, or unset it")
    world_size = _number("WORLD_SIZE", least=1)
    local_world_size = _number("LOCAL_WORLD_SIZE", world_size, least=1, most=("WORLD_SIZE", world_size))
    return replace(
        environment,
        rank=_number("RANK", most=("WORLD_SIZE - 1", world_size - 1)),
        local_rank=_number("LOCAL_RANK", 0, most=("LOCAL_WORLD_SIZE - 1", local_world_size - 1)),
        world_size=world_size,
        local_world_size=local_world_size,
        launched=True,
        meeting_place=(os.environ["MASTER_ADDR"], _number("MASTER_PORT", least=1, most=("", 65535))),
        launcher_has_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _number(name: str, default: int = 0, *, least: int = 0, most: tuple[str, int] | None = None) -> int:
    """The whole number in a variable.

    Args:
        default: if it is not set.
        most: the upper limit, in words and as a number.

    Raises:
        ConfigError: if it is not a number within the limits.
    """
    text = os.environ.get(name) or str(default)
    limits = f"from {least}" + (f" to {' = '.join(filter(None, map(str, most)))}" if most else "")
    is_number = text.isascii() and text.isdecimal() and len(text) < 10
    if not is_number or int(text) < least or (most is not None and int(text) > most[1]):
        raise ConfigError(f"{name}={text[:80]}: must be a whole number {limits}; correct or unset it")
    return int(text)


def _grace_scale() -> float:
    text = os.environ.get("FINETUNING_GRACE_SCALE", "1")
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise ConfigError(f"FINETUNING_GRACE_SCALE={text[:80]}: must be a number above 0; correct or unset it")


def _torchrun() -> str | None:
    """A name for the torchrun process, which may have started this one through a script; None if unknown."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process().parent()
        # torchrun sets the variable for its workers, so the first ancestor without it is torchrun itself.
        while process is not None and _RESTARTS_OF_TORCHRUN in process.environ():
            process = process.parent()
        if process is not None:
            return f"{machine()} {process.pid} {started_at(process.pid):.0f}"
    return None


def launch_command(env: Environment, flags: Sequence[str]) -> str:
    """The command that started this run, to be typed in `env.started_in`.

    It has the launcher's own options if its command line can be read, and the script's path as it was given.
    """
    script, launcher = sys.argv[0], ["python"]
    if env.launched:
        launcher = _words_of_launcher(flags) or _like_torchrun(env)
    return shlex.join(without_secrets(word) for word in [*launcher, script, *flags])


def _words_of_launcher(flags: Sequence[str]) -> list[str]:
    """The launcher's command line up to the script; empty if it cannot be read.

    Variables named PET_* are options of torchrun, so they stand before it.
    """
    options = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("PET_")]
    own = [Path(sys.argv[0]).name, *flags]
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().parents():
            # The launcher's command line ends with ours: the script and its flags.
            words = process.cmdline()
            words, rest = words[: -len(own)], words[-len(own) :]
            if not words or [Path(rest[0]).name, *rest[1:]] != own:
                continue
            if Path(words[0]).name.startswith("python"):
                is_script = len(words) > 1 and not words[1].startswith("-")
                words = [Path(words[1]).name, *words[2:]] if is_script else ["python", *words[1:]]
            return [*(["env", *options] if options else []), *words]
    return []


def _like_torchrun(env: Environment) -> list[str]:
    """A torchrun command with the numbers that the variables tell; empty if torchrun did not start this process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return []
    nodes = str(env.world_size // env.local_world_size)
    return ["torchrun", "--nnodes", nodes, "--nproc_per_node", str(env.local_world_size)]


def launcher_notes(env: Environment) -> list[str]:
    """Lines to print on settings of the launcher that the run does not follow."""
    return not_followed(os.environ, has_gpu=env.device.type == "cuda")


def print_rank_zero(env: Environment, *lines: str) -> None:
    """Print lines of the log on rank 0 only, above its progress bar if there is one."""
    if env.is_rank_zero:
        for line in lines:
            for part in stamped(line):
                tqdm.write(printable(part))
        sys.stdout.flush()
