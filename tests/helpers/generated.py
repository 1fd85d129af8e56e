"""What runs with --eval_generate leave, and data for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers.processes import read_metrics
from tests.helpers.refusals import dialogues, write_lines

NUM_ROWS, MAX_NEW_TOKENS = 11, 12
ROUGES = ("rouge1", "rouge2", "rougeL")
GENERATE = ["--eval_generate", "--max_new_tokens", str(MAX_NEW_TOKENS), "--eval_before_training"]


def rows_of_many_lengths(count: int) -> list[dict[str, str]]:
    """Prompts of several lengths, so that batches have padding."""
    return [row | {"dialogue": "Ann: Hm.\n" * (7 * i % 5) + row["dialogue"]} for i, row in enumerate(dialogues(count))]


def write_rows(folder: Path) -> Path:
    write_lines(folder / "train.jsonl", rows_of_many_lengths(30))
    write_lines(folder / "validation.jsonl", rows_of_many_lengths(NUM_ROWS))
    return folder


def flags(model: Path, data: Path, output: Path, *given: str) -> list[str]:
    argv = ["--model_name", str(model), "--samsum_dataset.data_path", str(data), "--output_dir", str(output)]
    return [*argv, "--num_workers_dataloader", "0", *given]


def evaluation(run: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The ROUGE before training, and the lines of samples.jsonl that belong to it, without their time."""
    (event,) = (e for e in read_metrics(run) if e["event"] == "eval" and e["step"] == 0)
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    without_time = [{name: value for name, value in line.items() if name != "time"} for line in lines]
    return {name: event[name] for name in ROUGES}, [line for line in without_time if line["step"] == 0]
