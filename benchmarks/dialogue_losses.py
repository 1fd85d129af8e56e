"""Losses on the shipped dialogues, as a run chooses to compute them and as it need not: the models of today.

    python -m benchmarks.dialogue_losses --rows qwen3-moe-lora gpt-oss-lora-packed     # rows of training_speed
    python -m benchmarks.dialogue_losses --rows tiny-lora --length 256                  # a CPU

Each row trains twenty steps by default flags, uncompiled, and by transformers' own attention; their batches are the
same, so are their losses. Packed rows and padded ones hold other dialogues in a step, so the loss of all of them is
compared before training (at a learning rate of nearly nothing).
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from benchmarks.runs.launch import launch
from benchmarks.runs.measurements import read_events
from benchmarks.runs.shapes import make_shape
from benchmarks.training_speed import ROWS, Workload

DIALOGUES = ["--dataset", "samsum_dataset", "--samsum_dataset.data_path", "datasets/samples/dialogue_summary"]
WAYS: dict[str, list[str]] = {
    "default": [],
    "uncompiled": ["--compile", "False"],
    "transformers' attention": ["--use_fast_kernels", "False", "--compile", "False"],
}
PADDED = ["--batching_strategy", "padding"]
UNTRAINED = ["--lr", "1e-12"]


def losses(row: Workload, flags: list[str], steps: int, folder: Path) -> tuple[list[float], float]:
    """The losses of the steps, and that of the validation dialogues after them.

    Raises:
        RuntimeError: the run failed.
    """
    output = Path(tempfile.mkdtemp(dir=folder))
    words = ["--model_name", str(folder / row.shape), "--random_weights", "--output_dir", str(output), "--overwrite"]
    words += [*DIALOGUES, "--context_length", str(row.length), "--batch_size_training", str(row.micro_batch)]
    words += ["--max_train_step", str(steps), "--num_epochs", "100", "--save_model", "False"]
    words += ["--save_every_steps", "0", "--save_every_minutes", "0", *_but(row.flags, flags), *flags]
    if failure := launch(words, row.nproc, by_torchrun=row.nproc > 1):
        raise RuntimeError(failure)
    events = read_events(output)
    evaluated = [event["loss"] for event in events if event["event"] == "eval"]
    return [event["loss"] for event in events if event["event"] == "train"], evaluated[-1]


def _but(words: list[str], others: list[str]) -> list[str]:
    """The flags of a row, with their values, that are not among others."""
    starts = [place for place, word in enumerate(words) if word.startswith("--")]
    parts = [words[start:end] for start, end in zip(starts, [*starts[1:], len(words)], strict=True)]
    return [word for part in parts if part[0] not in others for word in part]


def line(name: str, row: Workload, steps: int, at_once: int) -> str:
    """A row of the table; so many of its runs share the GPU."""
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(at_once) as pool:
        folder = Path(temporary)
        make_shape(folder / row.shape, row.shape)
        runs = {way: pool.submit(losses, row, flags, steps, folder) for way, flags in WAYS.items()}
        untrained = [pool.submit(losses, row, [*UNTRAINED, *flags], 1, folder) for flags in ([], PADDED)]
        found = {way: run.result()[0] for way, run in runs.items()}
        packed, padded = (run.result()[1] for run in untrained)
    default = found.pop("default")
    apart = [max(abs(a - b) / b for a, b in zip(default, other, strict=True)) for other in found.values()]
    cells = [name, f"{default[0]:.4f} -> {default[-1]:.4f}", *(f"{most:.1e}" for most in apart)]
    return f"| {' | '.join([*cells, f'{abs(packed - padded) / padded:.1e}'])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=sorted(ROWS), required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, help="tokens of a row, instead of the row's")
    parser.add_argument("--at_once", type=int, default=1, help="runs that share the GPU: losses need no quiet")
    options = parser.parse_args()
    print("| row | losses | uncompiled, at most apart | transformers' attention | padded, before training |")
    print("|---|---|---|---|---|", flush=True)
    for name in options.rows:
        row = replace(ROWS[name], length=options.length or ROWS[name].length)
        print(line(name, row, options.steps, options.at_once), flush=True)


if __name__ == "__main__":
    main()
