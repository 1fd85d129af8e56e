"""Ranks that run one command line of finetuning.py after the other, without importing everything for each."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.runs.launch import ROOT, free_port, num_parts_of, of_part
from benchmarks.runs.peak_watch import read_peaks

LEFT_BYTES = 2**26
TORCHRUN_SECONDS = 30  # from its SIGTERM to its SIGKILL


class RankEnd(NamedTuple):
    """How a rank ended a run."""

    status: int  # 0 finished, 2 refused, 1 failed; below 0: ended by this signal
    text: str  # what it printed
    figures: dict[str, Any]  # of benchmarks/matrix/run_worker.py; empty if it did not finish
    peaks: dict[str, Any]  # of benchmarks/runs/peak_watch.py, however it ended; empty if it ended before the run began


class RunWorkers:
    """`world_size` processes on this machine, started when first needed and again after a run that did not finish."""

    def __init__(
        self, world_size: int, folder: Path, variables: Mapping[str, str] | None = None, num_gpus: int = 0
    ) -> None:
        """
        Args:
            folder: for what they print.
            variables: of their environment, besides this process's.
            num_gpus: that they see. If these are fewer than ranks, ranks share them
                (`benchmarks.runs.launch.num_parts_of`).

        Raises:
            ValueError: if they cannot be shared evenly.
        """
        self.world_size, self.folder, self.variables = world_size, folder, dict(variables or {})
        self.num_parts = num_parts_of(world_size, num_gpus)
        # On torch 2.11, FSDP2 in a process whose earlier NCCL groups have ended is ended by SIGSEGV.
        self.runs_once = num_gpus > 0 and world_size > 1
        if world_size % self.num_parts:
            raise ValueError(f"{world_size} ranks cannot share {num_gpus} GPUs evenly")
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the processes, which import what a run needs, unless they are there."""
        if not self._processes:
            self._processes = [self._start() for _ in range(self.world_size)]

    def run(
        self,
        flags: Sequence[str],
        limit_seconds: float,
        variables: Mapping[str, str] | None = None,
        *,
        by_torchrun: bool = False,
    ) -> list[RankEnd]:
        """Run a command line on all ranks. Those that have not ended after `limit_seconds` are killed.

        Args:
            variables: of this run's environment.
            by_torchrun: tell one rank, too, that it is one.
        """
        deadline = time.monotonic() + limit_seconds
        self.start()
        outputs = [self.folder / f"output-{rank}" for rank in range(self.world_size)]
        peaks = [self.folder / f"peaks-{rank}.json" for rank in range(self.world_size)]
        port = str(free_port())
        for rank, (process, output) in enumerate(zip(self._processes, outputs, strict=True)):
            output.unlink(missing_ok=True)
            peaks[rank].unlink(missing_ok=True)
            told = by_torchrun or self.world_size > 1
            of_rank = _as_torchrun(rank, self.world_size, self.num_parts, port) if told else {}
            request: dict[str, Any] = {"flags": list(flags), "variables": of_rank | dict(variables or {})}
            request |= {"output": str(output), "peaks": str(peaks[rank])}
            assert process.stdin is not None
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        replies = self._replies(deadline)
        statuses = [0 if reply else _status(process) for process, reply in zip(self._processes, replies, strict=True)]
        texts = [output.read_text(errors="replace") if output.exists() else "" for output in outputs]
        ends = [
            RankEnd(status, text, json.loads(reply or "{}"), read_peaks(file))
            for status, text, reply, file in zip(statuses, texts, replies, peaks, strict=True)
        ]
        # What a process still holds of a run would be in the peak of the next.
        holds_memory = max(end.figures.get("left_bytes", 0) for end in ends) > LEFT_BYTES
        if any(statuses) or self.runs_once or holds_memory:
            self.close()
        return ends

    def close(self) -> None:
        for process in self._processes:
            _status(process)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
        self._processes = []

    def _replies(self, deadline: float) -> list[bytes]:
        """The line that each process prints; none of those that end or whose time is up first.

        As torchrun does, this asks the others to end when one has ended.
        """
        replies, terminated = [b""] * self.world_size, False
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    break
                for key, _ in ready:
                    read = os.read(key.fd, 1 << 16)
                    replies[key.data] += read
                    if read.endswith(b"\n") or not read:
                        selector.unregister(key.fileobj)
                    if not read and not terminated:
                        terminated, deadline = True, min(deadline, time.monotonic() + TORCHRUN_SECONDS)
                        for process in self._processes:
                            process.terminate()
        return [reply if reply.endswith(b"\n") else b"" for reply in replies]

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.matrix.run_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | self.variables,
            start_new_session=True,
        )


def _as_torchrun(rank: int, world_size: int, num_parts: int, port: str) -> dict[str, str]:
    """The variables by which torchrun tells a process which rank it is, on one of so many machines."""
    part, local_rank = divmod(rank, world_size // num_parts)
    of_rank = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)} | (of_part(part) if num_parts > 1 else {})
    sizes = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size // num_parts)}
    return of_rank | sizes | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def _status(process: subprocess.Popen[bytes]) -> int:
    """How a process ended that is over, or that is killed now, with what it started."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(0.5)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()
