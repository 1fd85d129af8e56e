"""What works with models of images and text, measured through the command line, as a table.

    python -m benchmarks.image_support --results images.jsonl

Each family has a tiny model and a processor of its own kind (benchmarks/families/image_models.py), and learns generated
conversations with none to several pictures of different sizes, in fp32 on the CPU. The columns are those of
`python -m benchmarks.model_support`; LoRA is on the language model, on the vision encoder, and on what lies between
them. A call measures the cells that the file lacks, so it can be interrupted; then it prints the table. The exit status
is 1 if a cell is wrong or missing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from benchmarks.families.image_chats import CONTEXT_LENGTH, own_loss, write_chats
from benchmarks.families.image_models import IMAGE_FAMILIES, ImageFamily, save_family
from benchmarks.families.published import PublishedModel
from benchmarks.families.support_cells import (
    COLUMNS,
    LEARNING_LORA,
    FamilyRuns,
    RunFailed,
    SupportCell,
    apart,
    best_loss,
    in_fork,
    measure_column,
)
from benchmarks.model_support import LATE, count_wrong, print_table, read_cells, shown_cell
from utils.model_parts import language_part, vision_part


class ImageRuns(FamilyRuns):
    """The tiny model of a family of images, and runs on it."""

    def __init__(self, name: str, family: ImageFamily, folder: Path) -> None:
        self.family = family
        super().__init__(PublishedModel(name, family.model, "", {}, {}), folder)

    def save(self) -> None:
        save_family(self.family, self.model)
        write_chats(self.folder / "chats")

    def loss_of(self, model: Path, adapter: Path | None = None) -> float:
        return float(in_fork(partial(own_loss, model, self.folder / "chats", adapter), self.folder))

    def usual_flags(self) -> list[str]:
        usual = ["--dataset", "chat_dataset", "--chat_dataset.data_path", str(self.folder / "chats")]
        return [*usual, "--num_workers_dataloader", "0", "--context_length", str(CONTEXT_LENGTH)]


def lora_on(part: Callable[[Any], Sequence[str]], runs: FamilyRuns) -> SupportCell:
    """The last evaluation of a run with adapters on these layers, beside the loss of what plain peft loads."""
    names = in_fork(lambda: part(_empty(runs.model)), runs.folder)
    if not names:
        return SupportCell(said="no linear layer")
    flags = [*LEARNING_LORA, "--lora_config.target_modules", ",".join(names)]
    run = runs.run(f"lora-{part.__name__}", "--batching_strategy", "padding", *flags)
    return SupportCell(apart([best_loss(run)], [runs.loss_of(runs.model, run / "adapter")]))


def _empty(folder: Path) -> Any:
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))


def vision_layers(model: Any) -> list[str]:
    """The names of the linear layers of the vision encoder, without what merges its patches."""
    inside = {module for part in vision_part(model) for module in part.modules()}
    return [name for name, module in _linear(model) if module in inside and "merger" not in name]


def projector_layers(model: Any) -> list[str]:
    """The names of the linear layers between vision encoder and language model."""
    elsewhere = {module for part in (*vision_part(model), *language_part(model)) for module in part.modules()}
    return [name for name, module in _linear(model) if module not in elsewhere or "merger" in name]


def _linear(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]


IMAGE_COLUMNS: dict[str, Callable[[FamilyRuns], SupportCell]] = {
    **{name: COLUMNS[name] for name in ("padded", "packed", "compiled", "LoRA", "merged")},
    "LoRA, vision": partial(lora_on, vision_layers),
    "LoRA, projector": partial(lora_on, projector_layers),
    **{name: COLUMNS[name] for name in ("4-bit", "FSDP2", "plan", "saved", "resumed")},
}


def measure_missing(results: Path, families: Sequence[str], columns: Sequence[str]) -> None:
    """Append a line for each cell that the file lacks."""
    there = read_cells(results)
    for name in families:
        missing = [column for column in columns if (name, column) not in there]
        if not missing:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                runs = ImageRuns(name, IMAGE_FAMILIES[name], Path(folder))
            except RunFailed as error:
                print(f"{name}: not made: {error}", file=sys.stderr, flush=True)
                continue
            for column in missing:
                cell = measure_column(runs, IMAGE_COLUMNS[column])
                with results.open("a") as file:
                    file.write(json.dumps({"family": name, "column": column} | asdict(cell)) + "\n")
                print(f"{name} {column}: {shown_cell(cell, [])} {cell.refused}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="a JSON line for each cell")
    parser.add_argument(
        "--families", nargs="*", metavar="FAMILY", choices=list(IMAGE_FAMILIES), help="only these, in this order"
    )
    parser.add_argument(
        "--columns", nargs="*", default=list(IMAGE_COLUMNS), choices=list(IMAGE_COLUMNS), help="only these"
    )
    given = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for module in LATE:
        importlib.import_module(module)
    families = given.families or list(IMAGE_FAMILIES)
    measure_missing(given.results, families, given.columns)
    cells = read_cells(given.results)
    print_table(cells, {name: IMAGE_FAMILIES[name].model for name in families}, IMAGE_COLUMNS)
    return count_wrong(cells, [(name, column) for name in families for column in given.columns])


if __name__ == "__main__":
    sys.exit(main())
