"""Let runs run out of memory in forward, in backward, in the optimizer step and in an evaluation, and do what they say.

    python -m benchmarks.out_of_memory [--shape tinyllama] [--nproc 4] [--flags "--enable_fsdp"]

Four runs are measured without a limit first: one with many rows, whose activations and logits need most; the same with
layers recomputed and few logits at a time, whose backward needs most; one with few rows, whose optimizer step needs
most; and one with few whose evaluation needs most. Then each of the four phases
gets less memory than it needs, and enough for what comes before it. The run has to end with status 1 and one account
that names the phase, and the first command of that account has to be predicted to fit, and to finish, in as little
memory. Prints a table; the exit status is 1 if any of this fails.

On one H200 all four phases were right (docs/out-of-memory.md). Tests run it on a CPU, whose memory
tests/helpers/small_device.py limits. Over several GPUs it has not run yet.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.runs.launch import LIMITER, ROOT, SCRIPT, UNCOMPILED
from benchmarks.runs.measurements import read_events
from benchmarks.runs.shapes import SHAPES, make_shape

KINDS = ("many rows", "many rows recomputed", "few rows", "evaluation")
LEAST_STEP = 1.01  # a phase needs so much more than what comes before it, or no limit lies between them
_AFTER = ("after_forward", "after_backward", "after_optimizer_step")


class NotProvokedError(Exception):
    """The run cannot be made to run out of memory phase by phase, or did not end as it should."""


Run = Callable[[Sequence[str], float], "subprocess.CompletedProcess[str]"]
"""Runs finetuning.py with these flags in so many GiB of each GPU; 0: in all of it."""


def runner(options: argparse.Namespace) -> Run:
    """Runs the command line, by torchrun if there are several processes."""
    launcher = [sys.executable]
    if options.nproc > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(options.nproc)]
    sizes = {
        "ROW_LENGTH": str(options.length),
        "NUM_ROWS": str(max(options.batch * 2, options.val_batch) * options.nproc),
    }

    def run(flags: Sequence[str], limit_gib: float) -> subprocess.CompletedProcess[str]:
        command = [*launcher, "-m", options.limiter, f"{limit_gib:.9f}", SCRIPT, *flags]
        return subprocess.run(command, env=os.environ | sizes, cwd=ROOT, capture_output=True, text=True, check=False)

    return run


def flags_of(kind: str, model: Path, output: Path, options: argparse.Namespace) -> list[str]:
    """A run of one of KINDS."""
    flags = ["--model_name", str(model), "--random_weights", "--output_dir", str(output), "--save_model", "False"]
    flags += ["--dataset", f"{ROOT}/benchmarks/runs/random_rows.py:get_rows", "--context_length", str(options.length)]
    flags += ["--batch_size_training", str(options.batch if kind.startswith("many rows") else 1)]
    if kind == "evaluation":
        flags += ["--val_batch_size", str(options.val_batch), "--max_eval_step", "1", "--eval_every_steps", "1"]
    else:
        flags += ["--run_validation", "False"]
    if kind == "many rows recomputed":
        flags += ["--activation_checkpointing", "full", "--loss_chunk_size", str(options.chunk)]
    else:
        flags += ["--activation_checkpointing", "off"]
    flags += ["--max_train_step", "2", "--num_epochs", "2", *UNCOMPILED]
    flags += ["--save_every_steps", "0", "--save_every_minutes", "0", "--num_workers_dataloader", "0"]
    return [*flags, *shlex.split(options.flags)]


def limits_of(kind: str, run: Path) -> dict[str, float]:
    """For each phase of this kind of run, GiB that are too few for it and enough for what comes before it.

    Args:
        run: one that was measured without a limit.

    Raises:
        NotProvokedError: if a phase does not need more than what comes before it.
    """
    highest: dict[tuple[int, str], float] = {}
    for event in read_events(run):
        if event["event"] == "memory":
            at = event["step"], event["phase"]
            highest[at] = max(highest.get(at, 0.0), event["peak_allocated_gib"])
    before_forward, forward, backward = (highest[1, f"{name}"] for name in ("before_forward", *_AFTER[:2]))
    step, evaluation = highest[1, _AFTER[2]], highest[2, "before_forward"]
    needs = {
        "many rows": {"forward": (before_forward, forward)},
        "many rows recomputed": {"backward": (forward, backward)},
        "few rows": {"optimizer_step": (backward, step)},
        "evaluation": {"evaluation": (step, evaluation)},
    }[kind]
    for phase, (before, needed) in needs.items():
        if needed < LEAST_STEP * before:
            raise NotProvokedError(
                f"{phase} needs {needed:.4g} GiB, and what comes before it {before:.4g}; another --batch, --val_batch, "
                "--length or --shape would set them apart"
            )
    return {phase: max((before + needed) / 2, 0.9 * needed) for phase, (before, needed) in needs.items()}


def provoke_all(run: Run, model: Path, folder: Path, options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """The rows of the table.

    Raises:
        NotProvokedError: for the first phase where something is wrong.
    """
    for kind in KINDS:
        output = folder / kind.replace(" ", "-")
        flags = flags_of(kind, model, output, options)
        print("$ finetuning.py", shlex.join(flags), flush=True)
        if (whole := run(flags, 0.0)).returncode:
            raise NotProvokedError(f"without a limit: exit {whole.returncode}\n{whole.stderr[-3000:]}")
        for phase, limit_gib in limits_of(kind, output).items():
            yield provoke(run, flags, phase, limit_gib)


def provoke(run: Run, flags: list[str], phase: str, limit_gib: float) -> dict[str, str]:
    """Let the run run out of memory in a phase, and run what it then says; a row of the table.

    Raises:
        NotProvokedError: if it ends otherwise, or its account or its command is wrong.
    """
    output = Path(flags[flags.index("--output_dir") + 1])
    done = run([*flags, "--overwrite"], limit_gib)
    if done.returncode != 1 or not (output / "oom.json").exists():
        raise NotProvokedError(f"{phase}: exit {done.returncode} and no account\n{done.stderr[-3000:]}")
    num_accounts = done.stderr.count("error: ")
    account = json.loads((output / "oom.json").read_text())
    if account["phase"] != phase or num_accounts != 1:
        raise NotProvokedError(f"{phase}: {num_accounts} accounts, of {account['phase']}\n{done.stderr[-3000:]}")
    if not account["changes"]:
        raise NotProvokedError(f"{phase}: no change is suggested")
    change = account["changes"][0]
    if change["fits"] is False or (change["peak_gib"] or 0.0) > limit_gib:
        raise NotProvokedError(f"{phase}: the first change is not expected to fit\n{done.stderr[-3000:]}")
    planned = next((line for line in done.stderr.splitlines() if line.startswith("  planned ")), "")
    if account["plan"] and account["plan"]["peak_gib"] > limit_gib and ": does not fit" not in planned:
        raise NotProvokedError(f"{phase}: planned for more memory than there is\n{done.stderr[-3000:]}")
    words = shlex.split(change["command"])
    while not words.pop(0).endswith("finetuning.py"):
        pass
    again = run(words, limit_gib)
    if again.returncode:
        raise NotProvokedError(f"{phase}: {change['command']}\nexit {again.returncode}\n{again.stderr[-3000:]}")
    predicted = change["peak_gib"]
    folder = Path(words[words.index("--output_dir") + 1])
    return {
        "phase": phase,
        "limit GiB": f"{limit_gib:.4g}",
        "allocated GiB": f"{account['allocated_gib']:.4g}",
        "in": account["module"] or "",
        "first suggestion": shlex.join(change["flags"]),
        "predicted peak GiB": "" if predicted is None else f"{predicted:.4g}",
        "measured peak GiB": f"{read_events(folder)[-1]['peak_allocated_gib']:.4g}",
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tinyllama")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=16, help="rows of the run with many")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens whose logits backward's run holds")
    parser.add_argument("--val_batch", type=int, default=256)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--flags", default="", help="flags of finetuning.py to add, in one string")
    parser.add_argument("--limiter", default=LIMITER, help="runs a script with less memory")
    options = parser.parse_args(argv)
    table: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / options.shape
        make_shape(model, options.shape)
        try:
            table.extend(provoke_all(runner(options), model, Path(temporary), options))
        except NotProvokedError as error:
            print(f"error: {error}", file=sys.stderr)
    if table:
        print("| " + " | ".join(table[0]) + " |\n|" + "---|" * len(table[0]))
    for row in table:
        print("| " + " | ".join(row.values()) + " |")
    return 0 if len(table) == 4 else 1


if __name__ == "__main__":
    sys.exit(main())
