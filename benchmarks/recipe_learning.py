"""How well settings learn: loss and ROUGE on held-out data after equal steps, for the recipes of docs/recipes.md.

    python -m benchmarks.recipe_learning --models M1 M2 --data chats=chat_dataset:chats tasks=alpaca_dataset:tasks

Each model trains on each data set with each candidate, on the same rows in the same order. `--results` keeps one line
for each run, and a second call goes on where the first was ended. At its end it prints the table of what is there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.runs.launch import launch
from benchmarks.runs.measurements import read_events

LORA = ("--use_peft", "--lora_config.lora_dropout", "0")
ALL_LINEAR = (*LORA, "--lora_config.target_modules", "all-linear", "--lora_config.r", "16")
CANDIDATES: dict[str, tuple[str, ...]] = {
    "r 8 on q and v, 1e-4": ("--use_peft", "--lr", "1e-4"),  # llama-recipes' defaults, its dropout of 0.05 too
    "r 16 on all linear layers, 2e-4": (*ALL_LINEAR, "--lr", "2e-4"),
    "r 16 on all linear layers, 5e-4": (*ALL_LINEAR, "--lr", "5e-4"),
    "all weights, 2e-5": ("--lr", "2e-5"),
}
"""Flags of each candidate, by its name in the table. The schedule is the same for all of them."""


class DataSet(NamedTuple):
    """A data set with a validation split: `NAME=FORMAT:PATH` on the command line."""

    name: str
    format: str
    path: str

    @classmethod
    def parse(cls, text: str) -> DataSet:
        name, equals, rest = text.partition("=")
        form, colon, path = rest.partition(":")
        if not (equals and colon):
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FORMAT:PATH")
        return cls(name, form, path)


def measure(
    model: str, data: DataSet, candidate: str, options: argparse.Namespace, *, also_before: bool
) -> dict[str, Any]:
    """One run. Returns its held-out loss and ROUGE-L after training, and its seconds.

    Args:
        also_before: evaluate before the first step, too.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--model_name", model, "--output_dir", folder, "--overwrite", *CANDIDATES[candidate]]
        flags += ["--dataset", data.format, f"--{data.format}.data_path", data.path]
        flags += ["--context_length", str(options.length), "--batch_size_training", str(options.rows)]
        flags += ["--num_epochs", "100", "--max_train_step", str(options.steps)]
        flags += ["--scheduler", "cosine", "--warmup_ratio", "0.05", "--gradient_clipping"]
        flags += ["--max_eval_step", str(options.eval_rows), "--eval_generate"]
        flags += ["--eval_before_training"] if also_before else []
        flags += ["--max_generate_samples", str(options.answers), "--max_new_tokens", "48"]
        flags += ["--save_model", "False", "--save_every_steps", "0", "--save_every_minutes", "0"]
        flags += ["--show_sample", "False", *options.flags.split()]
        if failure := launch(flags, 1):
            raise SystemExit(f"{model}, {data.name}, {candidate} failed\n{failure}")
        events = read_events(Path(folder))
    evals = [event for event in events if event["event"] == "eval"]
    found = {"loss": evals[-1]["loss"], "rougeL": evals[-1]["rougeL"], "seconds": events[-1]["seconds"]}
    return found | ({"before": [evals[0]["loss"], evals[0]["rougeL"]]} if also_before else {})


def table(lines: list[dict[str, Any]]) -> list[str]:
    """Markdown: a row for each model and data set, for each candidate its held-out loss and ROUGE-L."""
    names = [name for name in CANDIDATES if any(line["candidate"] == name for line in lines)]
    rows = [f"| model | data | before | {' | '.join(names)} |", "|" + "---|" * (3 + len(names))]
    places = dict.fromkeys((line["model"], line["data"]) for line in lines)
    for model, data in places:
        found = {line["candidate"]: line for line in lines if (line["model"], line["data"]) == (model, data)}
        before = next(line["before"] for line in found.values() if "before" in line)
        figures = [before, *([found[name]["loss"], found[name]["rougeL"]] if name in found else None for name in names)]
        cells = ["-" if pair is None else f"{pair[0]:.3f} / {pair[1]:.1f}" for pair in figures]
        rows += [f"| {model} | {data} | {' | '.join(cells)} |"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", required=True, metavar="FOLDER_OR_NAME")
    parser.add_argument("--data", nargs="+", required=True, type=DataSet.parse, metavar="NAME=FORMAT:PATH")
    parser.add_argument("--candidates", nargs="+", choices=[*CANDIDATES], default=[*CANDIDATES])
    parser.add_argument("--results", type=Path, default=Path("recipe_learning.jsonl"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--length", type=int, default=256, help="tokens of a packed row")
    parser.add_argument("--rows", type=int, default=1, help="rows of a step")
    parser.add_argument("--eval_rows", type=int, default=8, help="packed rows of the evaluation")
    parser.add_argument("--answers", type=int, default=12, help="generated for ROUGE")
    parser.add_argument("--flags", default="", help="more flags of every run, in one string")
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    for data, model, candidate in product(options.data, options.models, options.candidates):
        place = {"model": Path(model).name, "data": data.name}
        there = [line for line in lines if line.items() >= place.items()]
        if any(line["candidate"] == candidate for line in there):
            continue
        found = measure(model, data, candidate, options, also_before=not any("before" in line for line in there))
        lines.append(place | {"candidate": candidate} | found)
        with options.results.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
        print(lines[-1], flush=True)
    print("\n".join(table(lines)))


if __name__ == "__main__":
    main()
