"""Turn a run, a checkpoint or an adapter into a folder that Hugging Face's libraries load.

    python -m tools.export RUN_OR_CHECKPOINT --to DIR [--merge] [--dtype bf16|fp16|fp32] [--verify] [--base FOLDER]

It takes one process, no GPU, and memory for the largest tensors only (docs/export.md says when it is more).
Exit status: 0 exported, 2 refused before anything was written, 1 failed; DIR is there only after 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

# Before the imports below: they take seconds, and some of them print.
if __name__ == "__main__":
    from tools.beginning import begin_importing

    imports_ended = begin_importing()

import torch

from checkpointing.exporting.blueprint import read_model_config
from checkpointing.exporting.model_source import open_source
from checkpointing.exporting.plan import plan_export
from checkpointing.exporting.verify import check_logits
from checkpointing.exporting.write import check_place, write_export
from tasks.finding import find_task
from tools.ending import status_of
from tools.model_class import model_class
from utils.compat import return_freed_tensors
from utils.printing import print_line
from utils.progress import phase, progress_bar
from utils.quiet import quiet_tool
from utils.units import readable
from utils.urls import refuse_url
from utils.wording import plural

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def export(path: Path, to: Path, *, merge: bool, dtype: torch.dtype | None, verify: bool, base: str | None) -> None:
    """Write the folder and print its contents in a line.

    Raises:
        ConfigError, TrainingError: see `checkpointing.exporting.plan` and `write`.
    """
    check_place(to)
    source = open_source(path, base)
    print_line(f"from {source.path}")
    auto_model = model_class(source.settings)
    plan = plan_export(source, auto_model, merge=merge, dtype=dtype)
    for note in plan.notes:
        print_line(note)

    def check(folder: Path) -> None:
        rounded_to = plan.dtype if plan.rounds else torch.float32
        inputs_of = partial(find_task(read_model_config(source.settings)).inputs_of, plan.tokenizer)
        found = check_logits(source, auto_model, folder, merged=merge, dtype=rounded_to, inputs_of=inputs_of)
        print_line(
            f"verified: logits differ by at most {found.largest:.3g} (rounding to {_short(found.dtype)} explains "
            f"{found.explained:.3g}; the largest is {found.largest_logit:.3g})"
        )

    write_export(plan, to, _bar, check if verify else None)
    size = f"{plural(len(plan.entries), 'tensor')}, {readable(plan.num_bytes)}, {_short(plan.dtype)}"
    print_line(f"exported: {to} ({size}; every tensor read back)")


@contextmanager
def _bar(what: str, num_bytes: int) -> Iterator[Any]:
    options: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1000, "is_hidden": not num_bytes}
    with phase(what), progress_bar(what, total=num_bytes, **options) as bar:
        yield bar


def _short(dtype: torch.dtype) -> str:
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype).removeprefix("torch."))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="a run, a checkpoint's folder or .pt file, or an adapter's folder")
    parser.add_argument("--to", type=Path, required=True, help="the folder to make; it must not exist")
    parser.add_argument("--merge", action="store_true", help="merge a LoRA adapter into its base model")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; default: as stored; merged: as the base's")
    parser.add_argument(
        "--verify", action="store_true", help="compare logits too; needs memory for the whole model in fp32"
    )
    parser.add_argument("--base", help="the model that training started from, if the checkpoint does not say it")
    given = parser.parse_args(argv)
    quiet_tool()
    return_freed_tensors()
    dtype, to = DTYPES[given.dtype] if given.dtype else None, given.to.expanduser()

    def work() -> None:
        refuse_url("--to", str(to))
        export(given.path, to, merge=given.merge, dtype=dtype, verify=given.verify, base=given.base)

    return status_of(work)


if __name__ == "__main__":
    imports_ended()
    sys.exit(main())
