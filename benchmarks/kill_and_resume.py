"""Kill a run again and again, resume it each time, and compare it with an uninterrupted run.

    python -m benchmarks.kill_and_resume --kills 20 [--ranks 2] [--seed 0] [--folder F] [flags of finetuning.py]
    python -m benchmarks.kill_and_resume --kills 20 --ranks 1 2 4    each launch on another number of ranks

Trains a tiny model with a checkpoint after every step. Every rank gets SIGKILL: in every second launch while a
checkpoint is being written, in the others at any moment, loading included. After each kill, each folder with COMPLETE
must hold the files that COMPLETE lists, and no more work may be lost than the step in progress and the one being saved.
In the end losses, gradient norms, learning rates and weights must equal those of the uninterrupted run: bit for bit on
one number of ranks, else to fp32's rounding, since ranks sum in another order. Prints a table; the exit status is 1 if
any of this fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

import numpy as np
import psutil
from safetensors.torch import load_file

from benchmarks.runs.launch import SCRIPT, free_port
from benchmarks.runs.measurements import train_events
from tools.make_tiny_model import make_tiny_model
from utils.wording import plural

LIMIT_SECONDS = 300
COMPARED = ("step", "epoch", "loss", "grad_norm", "lr", "num_label_tokens", "num_tokens")
TOLERANCE = 2e-4  # relative, over hundreds of steps whose sums were rounded in another order
DATASET_FUNCTION = """
import random
from utils.wording import plural

def get_rows(dataset_config, tokenizer, split):
    draw = random.Random(split)
    rows = [[draw.randrange(5, 500) for _ in range(draw.randrange(5, 60))] for _ in range({num_rows})]
    return [{{"input_ids": row, "labels": row}} for row in rows]
"""


class Unsound(Exception):
    """A checkpoint or a resumed run is wrong."""


@dataclass
class Kill:
    """The state of a run when it was killed."""

    where: str
    trained_step: int  # the last one in metrics.jsonl
    saved_step: int  # of the newest complete checkpoint
    num_complete: int
    writing: bool  # a checkpoint was half written


class Ranks:
    """The command on several ranks, without a launcher, which would clean up after a kill."""

    def __init__(self, flags: Sequence[str], world_size: int, log: Path) -> None:
        variables = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
        argv, self.log = [sys.executable, SCRIPT, *flags], log
        with open(log, "a") as file:
            self.started = [
                Popen(argv, env=variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=file, stderr=file)
                for rank in range(world_size)
            ]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Poll `condition` every millisecond.

        Raises:
            Unsound: if the run ends first.
        """
        deadline = time.monotonic() + LIMIT_SECONDS
        while not condition():
            if time.monotonic() > deadline or any(process.poll() is not None for process in self.started):
                self.kill()
                raise Unsound(f"a launch ended or hung before it could be killed; see {self.log}")
            time.sleep(0.001)

    def kill(self) -> None:
        """Send SIGKILL to every rank.

        Raises:
            Unsound: if a child process of a rank survives.
        """
        ranks = [psutil.Process(process.pid) for process in self.started if process.poll() is None]
        workers = [worker for rank in ranks for worker in rank.children(recursive=True)]
        for process in self.started:
            process.kill()
        for process in self.started:
            process.wait()
        _gone, alive = psutil.wait_procs(workers, timeout=30)
        if alive:
            raise Unsound(f"processes survive although their rank was killed: {alive}")

    def finish(self) -> None:
        """Wait for the end of the run.

        Raises:
            Unsound: if a rank does not exit with status 0.
        """
        statuses = [process.wait(LIMIT_SECONDS) for process in self.started]
        if any(statuses):
            raise Unsound(f"the run ended with {statuses}; see {self.log}")


def last_trained(run: Path) -> int:
    events = train_events(run)
    return int(events[-1]["step"]) if events else 0


def newest_written(run: Path) -> int:
    """The highest step whose checkpoint is being written, or 0."""
    found = (run / "checkpoints").glob("step-*.incomplete")
    return max((int(re.sub(r"\D", "", path.name)) for path in found), default=0)


def check_checkpoints(run: Path) -> list[int]:
    """Verify all checkpoints with COMPLETE, and return their steps.

    Raises:
        Unsound: if a checkpoint differs from what COMPLETE lists.
    """
    steps = []
    for complete in sorted((run / "checkpoints").glob("step-*/COMPLETE")):
        if complete.parent.suffix == ".incomplete":
            continue  # not renamed yet, so not a checkpoint
        for name, listed in json.loads(complete.read_text())["files"].items():
            data = (complete.parent / name).read_bytes()
            if {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"} != listed:
                raise Unsound(f"{complete.parent / name} is not what COMPLETE lists")
        steps.append(int(complete.parent.name.removeprefix("step-")))
    return steps


def launch_and_kill(flags: Sequence[str], run: Path, world_size: int, in_save: bool, draw: random.Random) -> Kill:
    """Launch the run, kill it, and check what it left.

    Raises:
        Unsound: if a check fails.
    """
    before = last_trained(run)
    ranks = Ranks(flags, world_size, run.parent / "killed.log")
    if in_save:
        where, target = "saving", before + draw.randint(1, 3)
        ranks.wait_until(lambda: newest_written(run) >= target)
        time.sleep(draw.choice([0.0, draw.uniform(0, 0.02)]))
    elif draw.random() < 0.25:
        where, seconds = "loading", time.monotonic() + draw.uniform(0, 5)
        ranks.wait_until(lambda: time.monotonic() > seconds)
    else:
        where = "anywhere"
        ranks.wait_until(lambda: last_trained(run) > before)
        time.sleep(draw.uniform(0, 0.4))
    ranks.kill()
    complete = check_checkpoints(run)
    kill = Kill(where, last_trained(run), max(complete, default=0), len(complete), bool(newest_written(run)))
    if kill.trained_step - kill.saved_step > 2:
        raise Unsound(f"step {kill.trained_step} was trained, and step {kill.saved_step} is the last that was saved")
    return kill


def compare(whole: Path, killed: Path, tolerance: float) -> None:
    """Compare two runs; a tolerance of 0 compares bits.

    Raises:
        Unsound: if they differ in a step's figures or in the weights.
    """
    ours, theirs = ([[event[name] for name in COMPARED] for event in train_events(run)] for run in (killed, whole))
    steps_that_differ = [a[0] for a, b in zip(theirs, ours, strict=False) if not np.allclose(a, b, tolerance, 0)]
    if len(ours) != len(theirs) or steps_that_differ:
        first = steps_that_differ[0] if steps_that_differ else min(len(ours), len(theirs)) + 1
        raise Unsound(f"the runs differ in step {first}; they have {len(theirs)} and {len(ours)} steps")
    files = sorted(path.name for path in (whole / "model").iterdir() if path.suffix == ".safetensors")
    for file in files:
        tensors, wanted = (load_file(run / "model" / file) for run in (killed, whole))
        largest = max(tensor.abs().max().item() for tensor in wanted.values())
        for name in wanted:
            if (tensors[name] - wanted[name]).abs().max() > tolerance * largest:
                raise Unsound(f"{name} in {file} differs")
    if not files:
        raise Unsound(f"{whole / 'model'} holds no weights")


def kill_and_resume(options: argparse.Namespace, given: Sequence[str], folder: Path) -> None:
    """Run the benchmark in `folder`.

    Raises:
        Unsound: if a check fails.
    """
    draw, num_steps = random.Random(options.seed), 10 * options.kills + 10
    model = make_tiny_model(folder / "tiny", vocab_size=600, hidden_size=32, intermediate_size=64)
    dataset = folder / "dataset.py"
    most = max(options.ranks)
    dataset.write_text(DATASET_FUNCTION.format(num_rows=num_steps * most // 2))  # gives two epochs
    flags = ["--model_name", str(model), "--dataset", f"{dataset}:get_rows", "--batching_strategy", "padding"]
    flags += ["--batch_size_training", "1", "--global_batch_size", str(most), "--num_epochs", "2"]
    same_ranks = len(set(options.ranks)) == 1
    # At a high rate a difference of rounding grows tenfold in some fifty steps.
    flags += ["--run_validation", "False", "--lr", "1e-2" if same_ranks else "1e-4"]
    flags += ["--save_every_steps", "1", "--resume", "auto", "--enable_fsdp", *given, "--output_dir"]
    whole, killed = folder / "whole", folder / "killed"
    Ranks([*flags, str(whole)], most, folder / "whole.log").finish()
    print("  kill  ranks  where      trained  saved  lost  complete  half written", flush=True)
    flags.append(str(killed))
    for number in range(1, options.kills + 1):
        world_size = draw.choice(options.ranks)
        kill = launch_and_kill(flags, killed, world_size, number % 2 == 1, draw)
        lost = kill.trained_step - kill.saved_step
        figures = f"{kill.trained_step:7}  {kill.saved_step:5}  {lost:4}  {kill.num_complete:8}"
        print(f"  {number:4}  {world_size:5}  {kill.where:9}  {figures}  {'yes' if kill.writing else 'no'}", flush=True)
    Ranks(flags, most, folder / "killed.log").finish()
    check_checkpoints(killed)
    compare(whole, killed, 0 if same_ranks else TOLERANCE)
    print(
        f"{num_steps} steps on {' or '.join(plural(ranks, 'rank') for ranks in options.ranks)}, {options.kills} kills: "
        f"equal to the uninterrupted run, {'bit for bit' if same_ranks else f'to {TOLERANCE:g}'}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="several: each launch draws one of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="for models and runs; unset: a temporary one")
    options, given = parser.parse_known_args(argv)
    folder = options.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    try:
        kill_and_resume(options, given, folder)
    except Unsound as error:
        print(f"error: {error}; everything is in {folder}", file=sys.stderr)
        return 1
    if options.folder is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
