"""Start finetuning.py for a benchmark, in one process or with torchrun in several."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "finetuning.py")
LIMITER = "benchmarks.runs.with_less_memory"
# An all-reduce of 0.5 GiB over four processes on two GPUs: 0.050 s; with NCCL's own number of sockets 0.262 s.
BETWEEN_PARTS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NSOCKS_PERTHREAD": "2",
    "NCCL_SOCKET_NTHREADS": "8",
    "NCCL_MIN_NCHANNELS": "8",
}

UNCOMPILED = ("--compile", "False")
"""For runs whose documented figures are those of uncompiled layers; on GPUs the default compiles."""


def num_parts_of(nproc: int, num_gpus: int) -> int:
    """As how many machines so many processes run.

    With more processes than GPUs, several processes share each GPU. NCCL refuses that on one machine, so they run as if
    on several machines that all see the same GPUs, with the variables of `of_part`. Losses and memory are those of as
    many GPUs; speed is not, because data between "machines" goes through sockets.
    """
    return -(-nproc // num_gpus) if num_gpus else 1


def of_part(part: int) -> dict[str, str]:
    """The variables of the processes of one of several such machines."""
    return BETWEEN_PARTS | {"NCCL_HOSTID": f"part-{part}"}


def launch(
    flags: Sequence[str],
    nproc: int,
    environment: Mapping[str, str] | None = None,
    *,
    by_torchrun: bool = False,
    show_output: bool = False,
    before_script: Sequence[str] = (),
    limit_seconds: float | None = None,
) -> str:
    """Run finetuning.py to its end, with more processes than GPUs as `num_parts_of` says.

    Args:
        environment: additional variables.
        by_torchrun: use torchrun for one process too.
        show_output: what rank 0's part prints is seen at once, and not in what this returns.
        before_script: arguments of python before finetuning.py; for one process only.

    Returns:
        The end of its output if it failed, else an empty string.

    Raises:
        ValueError: if the processes cannot be divided evenly, or torchrun is given `before_script`.
        subprocess.TimeoutExpired: if it took longer than `limit_seconds`; it has ended then.
    """
    num_gpus = torch.cuda.device_count()
    num_parts = num_parts_of(nproc, num_gpus)
    in_one_process = nproc == 1 and not by_torchrun
    if nproc % num_parts or (before_script and not in_one_process):
        raise ValueError(f"{nproc} processes cannot be started so on {num_gpus} GPUs")
    if in_one_process:
        commands = [[sys.executable, *before_script, SCRIPT]]
    elif num_parts == 1:
        commands = [[*_torchrun(nproc), "--standalone", SCRIPT]]
    else:
        port = free_port()
        meeting = ["--nnodes", str(num_parts), "--master_addr", "127.0.0.1", "--master_port", str(port)]
        commands = [
            [*_torchrun(nproc // num_parts), *meeting, "--node_rank", str(part), SCRIPT] for part in range(num_parts)
        ]

    def run(part: int) -> str:
        variables = dict(os.environ) | dict(environment or {})
        if num_parts > 1:
            variables |= of_part(part)
        command = [*commands[part], *flags]
        captured = not (show_output and part == 0)
        done = subprocess.run(
            command, env=variables, capture_output=captured, text=True, check=False, timeout=limit_seconds
        )
        printed = [(done.stdout or "")[-2000:], _TORCHRUNS_ACCOUNT.split(done.stderr or "")[0][-3000:]]
        return "\n".join([f"exit {done.returncode}", *printed]) if done.returncode else ""

    with ThreadPoolExecutor(len(commands)) as executor:
        return "\n".join(filter(None, executor.map(run, range(len(commands)))))


_TORCHRUNS_ACCOUNT = re.compile(r"^.*(?:Sending process \d+ closing signal|failed \(exitcode)", re.MULTILINE)
"""Where torchrun begins to say what became of its processes: what they printed about it comes before."""


def last_line(printed: str) -> str:
    """The last line of what a failed run printed, for a table: most often its error."""
    return next((line[:200] for line in reversed(printed.splitlines()) if line.strip()), "")


def _torchrun(nproc: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(nproc)]


def free_port() -> int:
    """A port of this machine that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
