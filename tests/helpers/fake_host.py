"""A machine whose kernel kills a rank for want of memory: the files in which Linux counts that are a test's.

    torchrun ... tests/helpers/fake_host.py ROOT RANK STEP [flags of finetuning.py]

RANK is killed in STEP of the run; -1 kills none. Under torchrun the others take a second to write their last files, in
which torchrun asks them to end.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import finetuning
import utils.host_memory
from reporting.run_reporter import RunReporter

GIB = 2**30


def make_host(root: Path, *, limit_gib: float = 2.0, version: int = 2, kills: int = 0, cached: int = 0) -> Path:
    """The files of /proc and /sys that say what memory there is."""
    files = {"proc/meminfo": f"MemTotal: {8 * 2**20} kB\nMemAvailable: {3 * 2**20} kB\n"}
    files["proc/vmstat"] = f"pgfault 12\noom_kill {kills + 40}\n"
    if version == 2:
        files["proc/self/cgroup"] = "0::/job/step\n"
        files["sys/fs/cgroup/job/memory.max"] = f"{int(limit_gib * GIB)}\n"
        files["sys/fs/cgroup/job/memory.current"] = f"{int(limit_gib * GIB) - 2**20}\n"
        files["sys/fs/cgroup/job/step/memory.max"] = "max\n"
        files["sys/fs/cgroup/job/step/memory.events"] = f"low 0\nhigh 0\nmax 9\noom 1\noom_kill {kills}\n"
        files["sys/fs/cgroup/job/memory.stat"] = f"anon 7\ninactive_file {cached}\n"
    elif version == 1:
        files["proc/self/cgroup"] = "5:cpu:/x\n4:memory:/seen/from/the/host\n"
        files["sys/fs/cgroup/memory/memory.limit_in_bytes"] = f"{int(limit_gib * GIB)}\n"
        files["sys/fs/cgroup/memory/memory.usage_in_bytes"] = f"{GIB}\n"
        files["sys/fs/cgroup/memory/memory.oom_control"] = f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n"
        files["sys/fs/cgroup/memory/memory.stat"] = f"inactive_file 0\ntotal_inactive_file {cached}\n"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def on_fake_host(argv: Sequence[str], root: Path, *, killed_rank: int = -1, step: int = 3) -> Callable[[], int]:
    """What `ProcessGroup.run` runs instead of the flags."""
    return partial(_train, tuple(argv), root, killed_rank, step)


def asking_for_too_much(argv: Sequence[str]) -> Callable[[], int]:
    """The same, on this machine: each step asks for a pebibyte of host memory."""
    return partial(_ask_for_too_much, tuple(argv))


def _ask_for_too_much(argv: Sequence[str]) -> int:
    finetuning.train_step = lambda *args, **given: torch.empty(1 << 50, dtype=torch.uint8)  # in this process alone
    return finetuning.main(argv)


def _train(argv: Sequence[str], root: Path, killed_rank: int, step: int) -> int:
    utils.host_memory.ROOT = root  # in this process alone
    if int(os.environ.get("RANK", "0")) == killed_rank:
        train_step, calls = finetuning.train_step, []

        def killed_in_step(*args: Any, **given: Any) -> Any:
            calls.append(1)
            if len(calls) == step:
                make_host(root, kills=1)
                os.kill(os.getpid(), signal.SIGKILL)
            return train_step(*args, **given)

        finetuning.train_step = killed_in_step
    status = finetuning.main(argv, ends_process=True)
    if status:
        finetuning.leave(status)
    return status


def _write_slowly(reporter: RunReporter, *, write: Callable[[RunReporter], None] = RunReporter.write_page) -> None:
    time.sleep(1)
    write(reporter)


if __name__ == "__main__":
    RunReporter.write_page = _write_slowly  # type: ignore[method-assign]
    sys.exit(_train(sys.argv[4:], Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
