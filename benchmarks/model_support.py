"""What works with the models that people fine-tune today, measured through the command line, as a table.

    python -m benchmarks.model_support --results support.jsonl

Each family has a tiny model, whose config is its authors' published one with smaller sizes
(benchmarks/families/published.yaml). All is in fp32 on the CPU, with random weights and documents. The columns:

    padded, packed   the run's loss beside transformers' own of one document at a time
    compiled         the losses of a compiled run beside those of the plain one (aot_eager)
    LoRA             all-linear: the run's last evaluation beside that of the adapter in plain peft
    merged           the same evaluation beside that of the adapter merged into its base (tools.export --merge)
    4-bit            LoRA on a base in 4 bits finishes
    FSDP2            the losses of two ranks beside those of one
    plan             --dry_run gives its verdict
    saved            the run's last evaluation beside that of the saved model in transformers
    resumed          losses and weights are, bit by bit, those of a run that was not interrupted

A number is the largest difference of a loss, as a share of it; 1e-5 is the limit. A call measures the cells that the
file lacks, so it can be interrupted; then it prints the table. The exit status is 1 if a cell is wrong or missing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from benchmarks.families.published import PublishedModel, read_published
from benchmarks.families.support_cells import COLUMNS, FamilyRuns, SupportCell, measure_column

# Imported late by runs: once, for all forks.
LATE = (
    "finetuning",
    "bitsandbytes",
    "peft.tuners.lora.bnb",
    "torch.distributed.checkpoint",
    "torch._inductor.compile_fx",
)

Cells = dict[tuple[str, str], SupportCell]


def measure_missing(results: Path, families: Sequence[PublishedModel], columns: Sequence[str]) -> None:
    """Append a line for each cell that the file lacks."""
    there = read_cells(results)
    for family in families:
        missing = [column for column in columns if (family.name, column) not in there]
        if not missing:
            continue
        with tempfile.TemporaryDirectory() as folder:
            runs = FamilyRuns(family, Path(folder))
            for column in missing:
                cell = measure_column(runs, COLUMNS[column])
                with results.open("a") as file:
                    file.write(json.dumps({"family": family.name, "column": column} | asdict(cell)) + "\n")
                print(f"{family.name} {column}: {shown_cell(cell, [])} {cell.refused}", file=sys.stderr, flush=True)


def read_cells(results: Path) -> Cells:
    cells: Cells = {}
    for line in results.read_text().splitlines() if results.exists() else []:
        row = json.loads(line)
        key = row.pop("family"), row.pop("column")
        cells[key] = SupportCell(**row)
    return cells


def print_table(cells: Cells, models: Mapping[str, str], columns: Iterable[str]) -> None:
    """The table, and below it the lines of refusals, by number.

    Args:
        models: the published model of each family.
    """
    refusals: list[str] = []
    columns = list(columns)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}\n")
    print(f"| family | as in | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 2)}")
    for family, model in models.items():
        shown = [shown_cell(cells.get((family, column)), refusals) for column in columns]
        print(f"| {family} | {model} | {' | '.join(shown)} |")
    print()
    for number, line in enumerate(refusals, 1):
        print(f"{number}. `{line}`")


def shown_cell(cell: SupportCell | None, refusals: list[str]) -> str:
    if cell is None:
        return ""
    if cell.refused:
        if cell.refused not in refusals:
            refusals.append(cell.refused)
        return f"refused ({refusals.index(cell.refused) + 1})"
    if cell.error:
        return f"**{cell.error}**"
    number = "" if cell.apart is None else f"{cell.apart:.1e}" if cell.is_right else f"**{cell.apart:.1e}**"
    return ", ".join(filter(None, (number, cell.said)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="a JSON line for each cell")
    all_families = read_published()
    parser.add_argument(
        "--families", nargs="*", metavar="FAMILY", choices=list(all_families), help="only these, in this order"
    )
    parser.add_argument("--columns", nargs="*", default=list(COLUMNS), choices=list(COLUMNS), help="only these")
    given = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for module in LATE:
        importlib.import_module(module)
    families = [all_families[name] for name in given.families or all_families]
    measure_missing(given.results, families, given.columns)
    cells = read_cells(given.results)
    print_table(cells, {family.name: family.model for family in families}, COLUMNS)
    return count_wrong(cells, [(family.name, column) for family in families for column in given.columns])


def count_wrong(cells: Cells, wanted: Sequence[tuple[str, str]]) -> int:
    """Print how many cells are wrong or missing. Returns the exit status."""
    wrong = [" ".join(key) for key in wanted if key in cells and not cells[key].is_right]
    missing = [" ".join(key) for key in wanted if key not in cells]
    print(f"\n{len(wanted)} cells, {len(wrong)} wrong {', '.join(wrong)}, {len(missing)} missing {', '.join(missing)}")
    return int(bool(wrong or missing))


if __name__ == "__main__":
    sys.exit(main())
