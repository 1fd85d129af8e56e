"""Losses on the shipped dialogues, as a run chooses to compute them and as it need not: the models of today.

    python -m benchmarks.dialogue_losses --rows qwen3-moe-lora gpt-oss-lora-packed     # rows of training_speed
    python -m benchmarks.dialogue_losses --rows qwen3-8b-lora gemma3-lora --layers 4 --length 1024 --at_once 8
    python -m benchmarks.dialogue_losses --rows tiny-lora --length 256                  # a CPU

Each row trains twenty steps compiled, uncompiled, and by transformers' own attention; their batches are the same, so
are their losses. Where transformers' attention cannot tell packed documents apart, padded rows are beside it, compiled.
Packed rows and padded ones hold other dialogues in a step, so the loss of all of them is compared before training (at a
learning rate of nearly nothing).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.runs.launch import last_line, launch
from benchmarks.runs.measurements import read_events
from benchmarks.runs.shapes import make_shape
from benchmarks.runs.workload import Workload
from benchmarks.training_speed import ROWS

DIALOGUES = ["--dataset", "samsum_dataset", "--samsum_dataset.data_path", "datasets/samples/dialogue_summary"]
WAYS: dict[str, list[str]] = {
    "compiled": ["--compile"],  # by default a run this short would not be
    "uncompiled": ["--compile", "False"],
    "transformers' attention": ["--use_fast_kernels", "False", "--compile", "False"],
}
PADDED = ["--batching_strategy", "padding"]
UNTRAINED = ["--lr", "1e-12"]


class Losses(NamedTuple):
    """What a run measured."""

    steps: list[float]
    validation: float  # of the validation dialogues after the steps
    num_tokens: list[int]  # of each step, so of its batch


def losses(row: Workload, flags: list[str], steps: int, folder: Path) -> Losses:
    """Train for some steps.

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
    train = [event for event in events if event["event"] == "train"]
    return Losses([event["loss"] for event in train], evaluated[-1], [event["num_tokens"] for event in train])


def _but(words: list[str], others: list[str]) -> list[str]:
    """The flags of a row, with their values, that are not among others."""
    starts = [place for place, word in enumerate(words) if word.startswith("--")]
    parts = [words[start:end] for start, end in zip(starts, [*starts[1:], len(words)], strict=True)]
    return [word for part in parts if part[0] not in others for word in part]


def begin(row: Workload, steps: int, folder: Path, pool: ThreadPoolExecutor) -> dict[str, Future[Losses]]:
    """The runs of a row: three ways of twenty steps, the first padded, too, and two of none, packed and padded."""
    ways = WAYS | {"compiled, padded": [*WAYS["compiled"], *PADDED]}
    runs = {way: pool.submit(losses, row, flags, steps, folder) for way, flags in ways.items()}
    for batches, flags in {"packed": [], "padded": PADDED}.items():
        runs[batches] = pool.submit(losses, row, [*UNTRAINED, *flags], 1, folder)
    return runs


def most_apart(one: Losses, other: Losses) -> float:
    """The largest relative difference of two runs' losses of a step.

    Raises:
        ValueError: their batches are not the same.
    """
    if one.num_tokens != other.num_tokens:
        raise ValueError("batches of the two runs are not the same")
    return max(abs(a - b) / b for a, b in zip(one.steps, other.steps, strict=True))


def line(name: str, runs: dict[str, Future[Losses]]) -> str:
    """A row of the table."""
    failed = {way: last_line(str(run.exception())) for way, run in runs.items() if run.exception()}
    if failed:
        return f"| {name} | failed: {failed} |"
    found = {way: run.result() for way, run in runs.items()}
    compiled, of_transformers = found["compiled"], found["transformers' attention"]
    same_batches = compiled.num_tokens == of_transformers.num_tokens
    beside = most_apart(compiled if same_batches else found["compiled, padded"], of_transformers)
    packed, padded = found["packed"].validation, found["padded"].validation
    cells = [name, f"{compiled.steps[0]:.4f} -> {compiled.steps[-1]:.4f}"]
    cells += [f"{most_apart(compiled, found['uncompiled']):.1e}", f"{beside:.1e}{'' if same_batches else ', padded'}"]
    return f"| {' | '.join([*cells, f'{abs(packed - padded) / padded:.1e}'])} |"


def cut(folder: Path, num_layers: int) -> None:
    """Leave a model folder without weights so many of its layers."""
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    if kinds := config.get("layer_types"):
        config["layer_types"] = kinds[:num_layers]
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", metavar="ROW", choices=sorted(ROWS), required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, help="tokens of a row, instead of the row's")
    parser.add_argument("--layers", type=int, help="layers of the shape, instead of all: the table says so")
    parser.add_argument("--at_once", type=int, default=1, help="runs that share the GPU: losses need no quiet")
    options = parser.parse_args()
    print("| row | losses | uncompiled, at most apart | transformers' attention | padded, before training |")
    print("|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.at_once) as pool:
        begun = {}
        for name in options.rows:
            row = replace(ROWS[name], length=options.length or ROWS[name].length)
            if not (Path(temporary) / row.shape).exists():
                make_shape(Path(temporary) / row.shape, row.shape)
                if options.layers:
                    cut(Path(temporary) / row.shape, options.layers)
            cut_name = f"{name}, {options.layers} layers" if options.layers else name
            begun[cut_name] = begin(row, options.steps, Path(temporary), pool)
        for name, runs in begun.items():
            print(line(name, runs), flush=True)


if __name__ == "__main__":
    main()
