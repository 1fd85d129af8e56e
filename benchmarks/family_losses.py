"""Which families train right: losses of a batch of three beside transformers' own of one sample at a time, as a table.

    python -m benchmarks.family_losses --output losses.jsonl

Every family of causal language models and encoder-decoders that transformers has, with tiny random weights in fp32 on
the CPU. The batch goes the run's own way (task, collator, packing, attention, loss), padded and packed, after the trial
of labels in sight, which found nothing where a number stands. A cell is right if the losses agree to 1e-5, or if the
run refuses the family in one line. A call measures the families that the file lacks, so it can be interrupted. It
prints the table of all rows there are. The exit status is 1 while a row is missing or wrong.
`python -m tests.helpers.family_table` has models of image and text, too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from benchmarks.families.measured_losses import Cell, OwnLossError, make_samples, measure, own_losses
from benchmarks.families.random_weights import make_random_model
from benchmarks.families.tiny_configs import tiny_config
from utils.errors import in_one_line

BATCHINGS = ("padding", "packing")
MOST_PARAMETERS = 40_000_000  # of a tiny model; a family of which some part stays large is not built
LIMIT_SECONDS = 120


@dataclass(frozen=True)
class FamilyRow:
    """A family's cells by batching; or why it was not measured."""

    kind: str  # causal, seq2seq
    family: str
    cells: dict[str, Cell]
    not_measured: str = ""

    @property
    def is_right(self) -> bool:
        return bool(self.not_measured) or all(cell.is_right for cell in self.cells.values())


KINDS: dict[str, tuple[Any, Sequence[str]]] = {
    "causal": (AutoModelForCausalLM, list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)),
    "seq2seq": (AutoModelForSeq2SeqLM, list(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)),
}


def measure_family(kind: str, family: str) -> FamilyRow:
    """Both batchings of a family; an encoder-decoder is only padded."""
    auto_model, _ = KINDS[kind]
    try:
        config = tiny_config(family)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in auto_model.from_config(config).parameters())
    except Exception as error:
        return FamilyRow(kind, family, {}, f"not built so small: {type(error).__name__}: {in_one_line(error)}")
    if size > MOST_PARAMETERS:
        return FamilyRow(kind, family, {}, "not built so small: a part of it stays large")
    samples = make_samples(apart=kind == "seq2seq")
    try:
        own = own_losses(make_random_model(auto_model, config), samples)
    except OwnLossError as error:
        own, failed = [], f"transformers' own loss fails: {error}"
    batchings = BATCHINGS if kind == "causal" else BATCHINGS[:1]
    cells = {batching: measure(family, config, auto_model, own, batching) for batching in batchings}
    if not own and not all(cell.refused for cell in cells.values()):
        return FamilyRow(kind, family, {}, failed)
    return FamilyRow(kind, family, cells)


def measure_missing(output: Path, families: Sequence[str]) -> None:
    """Append a line for each family that the file lacks. Measured in another process, which may hang or die."""
    there = {(row.kind, row.family) for row in read_rows(output)}
    missing = [
        (kind, family)
        for kind, (_, names) in KINDS.items()
        for family in names
        if (kind, family) not in there and (not families or family in families)
    ]
    context, pool = multiprocessing.get_context("spawn"), None
    for kind, family in missing:
        pool = pool or ProcessPoolExecutor(1, mp_context=context, initializer=_be_quiet)
        try:
            row = pool.submit(measure_family, kind, family).result(LIMIT_SECONDS)
        except (TimeoutError, BrokenProcessPool) as error:
            row = FamilyRow(kind, family, {}, f"ended: {type(error).__name__}")
            for process in list((pool._processes or {}).values()):
                process.kill()
            pool = None
        with output.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        print(f"{kind} {family}: {'right' if row.is_right else 'WRONG'}", file=sys.stderr, flush=True)


def _be_quiet() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)


def read_rows(output: Path) -> list[FamilyRow]:
    if not output.exists():
        return []
    rows = map(json.loads, output.read_text().splitlines())
    return [FamilyRow(**row | {"cells": {name: Cell(**cell) for name, cell in row["cells"].items()}}) for row in rows]


def print_table(rows: Sequence[FamilyRow]) -> None:
    print(f"torch {torch.__version__}, transformers {transformers.__version__}\n")
    print("| kind | family | padded | packed |\n|---|---|---|---|")
    for row in sorted(rows, key=lambda row: (row.kind, row.family)):
        shown = [_shown(row.cells.get(batching)) for batching in BATCHINGS]
        if row.not_measured:
            shown = [row.not_measured, ""]
        elif len(set(shown)) == 1:
            shown[1] = "the same" if row.cells[BATCHINGS[0]].refused else shown[0]
        print(f"| {row.kind} | {row.family} | {shown[0]} | {shown[1]} |")


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell.apart is not None:
        return f"{cell.apart:.1e}"
    return f"refused: {cell.refused}" if cell.refused else f"**{cell.error}**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a JSON line for each family")
    parser.add_argument("--families", nargs="*", default=[], help="only these, by their model types")
    args = parser.parse_args()
    measure_missing(args.output, args.families)
    rows = read_rows(args.output)
    print_table(rows)
    num_families = sum(len(names) for _, names in KINDS.values())
    wrong = [row.family for row in rows if not row.is_right]
    print(f"\n{len(rows)} of {num_families} families, {len(wrong)} wrong {' '.join(wrong)}")
    sys.exit(bool(wrong) or (not args.families and len(rows) < num_families))


if __name__ == "__main__":
    main()
