"""What the doctor looks at on a machine that meets no other: packages, GPUs, shared memory."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from tools.network.names import check_nccl_interfaces
from utils.bytecode import compiles_at_each_start, keep_bytecode
from utils.errors import ConfigError, in_one_line
from utils.units import GIB, readable
from utils.wording import plural

_SHARED = Path("/dev/shm")
_LEAST_SHARED_BYTES = GIB  # containers have 64 MiB unless they are given more


def check_machine(versions: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Check this machine alone, and say what was found.

    Args:
        versions: of packages, by name.

    Raises:
        ConfigError: if a package that every run needs is missing, or the interface that NCCL is told to use.
    """
    if missing := [name for name in ("torch", "transformers", "peft") if name not in versions]:
        raise ConfigError(f"{', '.join(missing)}: not installed here; pip install --requirement requirements.txt")
    check_nccl_interfaces()
    shown = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "peft", "this repository"))
    say(f"checked this machine alone, {socket.gethostname()}: {_devices()}; {shown}")
    keep_bytecode()  # as a run does
    if uncompiled := [name for name in ("torch", "transformers") if compiles_at_each_start(name)]:
        say(
            f"warning: Python compiles {' and '.join(uncompiled)} anew at each start, ten seconds of it, since it may "
            "not keep the bytecode; run python -m compileall -q on their folder once, as its owner, or name a folder "
            "for it that can be written: XDG_CACHE_HOME"
        )
    shared = shared_memory_bytes()
    if shared is not None and shared < _LEAST_SHARED_BYTES:
        say(
            f"warning: /dev/shm has {readable(shared)}: NCCL may end with a bus error, and pictures reach their ranks "
            "more slowly; give the container more (docker run --shm-size 16g)"
        )
    say("to check several machines, give --rdzv_endpoint HOST:PORT of the first on each")


def shared_memory_bytes() -> int | None:
    """The size of /dev/shm; None if there is none."""
    return shutil.disk_usage(_SHARED).total if _SHARED.is_dir() else None


def _devices() -> str:
    """The GPUs in words, by nvidia-smi: to ask torch takes seconds."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return f"no GPU (no nvidia-smi), {plural(os.cpu_count() or 1, 'core')}"
    names = done.stdout.split("\n")[:-1]
    if done.returncode or not names:
        return f"no GPU (nvidia-smi: {in_one_line(done.stdout + done.stderr)})"
    kinds = ", ".join(dict.fromkeys(names))
    return f"{plural(len(names), 'GPU')} ({kinds})"
