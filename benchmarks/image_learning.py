"""Does a tiny model of each family of images and text learn to see? A table, made through the command line.

    python -m benchmarks.image_learning --results learning.jsonl

Each family's tiny model (benchmarks/families/image_models.py) learns, from random weights, to answer two questions in a
row about two drawn pictures (benchmarks/families/image_questions.py): which colour the first has, and how many things
the second shows. A number is the share of 200 conversations that it has not seen whose answers it holds most likely. If
the pictures change places and the answers stay, few are right. A call measures the runs that the file lacks, so it can
be interrupted; then it prints the table. The exit status is 1 if a family is missing, or has not learned.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.families.image_models import IMAGE_FAMILIES, ImageFamily, save_family
from benchmarks.families.image_questions import CHANCE, shares_right, write_questions
from benchmarks.families.support_cells import RunFailed, in_fork
from benchmarks.model_support import LATE
from benchmarks.runs.forked_commands import run_command

NUM_TRAIN, NUM_HELD_OUT, BATCH = 4000, 200, 16
LIMIT_SECONDS = 900
WANTED = CHANCE + 0.2

Results = dict[str, dict[str, Any]]


def learning(family: ImageFamily, folder: Path, seed: int, epochs: int) -> dict[str, Any]:
    """Train the tiny model, and ask it about pictures that it has not seen; or the error line of the run."""
    in_fork(partial(_save, family, folder), folder)
    flags = ["--model_name", str(folder / "model"), "--output_dir", str(folder / "run"), "--seed", str(seed)]
    flags += ["--dataset", "chat_dataset", "--chat_dataset.data_path", str(folder / "data")]
    flags += ["--run_validation", "False", "--num_epochs", str(epochs), "--save_every_steps", "0"]
    flags += ["--batching_strategy", "padding", "--batch_size_training", str(BATCH), "--context_length", "1024"]
    flags += ["--lr", "3e-3", "--scheduler", "cosine", "--warmup_steps", "20", "--gradient_clipping"]
    flags += ["--mixed_precision", "False", "--num_workers_dataloader", "0"]
    ended = run_command(flags, 1, folder, limit_seconds=LIMIT_SECONDS)
    if any(ended.statuses):
        lines = [line for line in ended.outputs[0].splitlines() if line.startswith("error: ")]
        return {"error": (lines or [f"exit status {ended.statuses[0]}"])[0].replace(str(folder), "")}
    measured: dict[str, Any] = {"seed": seed, "steps": epochs * -(-NUM_TRAIN // BATCH), "seconds": round(ended.seconds)}
    for name in ("held_out", "swapped"):
        right = in_fork(partial(shares_right, folder / "run/model", folder / name), folder)
        measured[name] = dict(zip(("colour", "count", "both"), right, strict=True))
    return measured


def _save(family: ImageFamily, folder: Path) -> None:
    save_family(family, folder / "model")
    write_questions(folder / "data", "train", NUM_TRAIN, seed=0)
    write_questions(folder / "held_out", "validation", NUM_HELD_OUT, seed=1)
    write_questions(folder / "swapped", "validation", NUM_HELD_OUT, seed=1, swapped=True)


def read_results(file: Path) -> Results:
    lines = file.read_text().splitlines() if file.exists() else []
    return {row.pop("family"): row for row in map(json.loads, lines)}


def print_table(results: Results) -> None:
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, chance {CHANCE:.1%}\n")
    print("| family | seed | steps | seconds | colour | count | both | both, pictures swapped |")
    print("|---" * 8 + "|")
    for family, row in results.items():
        if "error" in row:
            print(f"| {family} | {row['error']} |")
            continue
        right = [row["held_out"]["colour"], row["held_out"]["count"], row["held_out"]["both"], row["swapped"]["both"]]
        shown = " | ".join(f"{100 * share:.0f} %" for share in right)
        print(f"| {family} | {row['seed']} | {row['steps']} | {row['seconds']} | {shown} |")


def has_learned(row: dict[str, Any] | None) -> bool:
    """At least 20 points over chance, and the order of the pictures matters."""
    if row is None or "error" in row:
        return False
    return bool(row["held_out"]["both"] >= WANTED > row["swapped"]["both"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="a JSON line for each family")
    names = [name for name in IMAGE_FAMILIES if name != "paligemma"]  # it learns captions alone
    parser.add_argument(
        "--families", nargs="*", metavar="FAMILY", choices=names, default=names, help="only these, in this order"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    given = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for module in LATE:
        importlib.import_module(module)
    for name in given.families:
        if name in read_results(given.results):
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                measured = learning(IMAGE_FAMILIES[name], Path(folder), given.seed, given.epochs)
            except RunFailed as error:  # its processor may need a package that is not there
                print(f"{name}: not made: {error}", file=sys.stderr, flush=True)
                continue
        with given.results.open("a") as file:
            file.write(json.dumps({"family": name} | measured) + "\n")
        print(f"{name}: {measured}", file=sys.stderr, flush=True)
    results = read_results(given.results)
    print_table(results)
    return int(not all(has_learned(results.get(name)) for name in given.families))


if __name__ == "__main__":
    sys.exit(main())
