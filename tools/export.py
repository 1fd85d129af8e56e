"""Turn a run, a checkpoint or an adapter into a folder that Hugging Face's libraries load.

    python -m tools.export RUN_OR_CHECKPOINT --to DIR [--merge] [--dtype bf16|fp16|fp32] [--verify] [--base FOLDER]
                           [--check gguf|vllm] [--push_to_hub NAME [--public]]
    python -m tools.export RUN_OR_FOLDER [--check gguf|vllm] [--push_to_hub NAME [--public]]

--check says whether llama.cpp's converter or vLLM takes DIR, and prints the commands that use it. --push_to_hub uploads
DIR to the Hugging Face hub, privately. Without --to both take a folder that is in Hugging Face format already.
It takes one process, no GPU, and memory for the largest tensors only (docs/export.md says when it is more).
Exit status: 0 exported, 2 refused before anything was written, 1 failed; DIR is there only after 0, or if --check or
--push_to_hub came to nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tools.serving.export_flags import export_flags

# Before the imports below: they take seconds, and some of them print.
if __name__ == "__main__":
    from tools.beginning import begin_importing

    imports_ended = begin_importing(lambda: export_flags(None, __doc__))
    from utils.compat import import_bitsandbytes_without_inductor

    import_bitsandbytes_without_inductor()  # before peft, below

import torch

from checkpointing.exporting.export_card import export_card
from checkpointing.exporting.model_source import open_source
from checkpointing.exporting.plan import plan_export
from checkpointing.exporting.verify import check_logits
from checkpointing.exporting.write import check_place, write_export
from tools.ending import status_of
from tools.hub_upload import check_for_others, find_place, upload
from tools.model_class import model_class, task_of
from tools.serving.checks import CHECKS
from tools.serving.folder import ServedFolder, ready_folder
from utils.compat import return_freed_tensors
from utils.errors import ConfigError
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
    auto_model = model_class(source)
    plan = plan_export(source, auto_model, merge=merge, dtype=dtype)
    for note in plan.notes:
        print_line(note)

    def check(folder: Path) -> None:
        rounded_to = plan.dtype if plan.rounds else torch.float32
        inputs_of = partial(task_of(source).inputs_of, plan.tokenizer)
        found = check_logits(source, auto_model, folder, merged=merge, dtype=rounded_to, inputs_of=inputs_of)
        print_line(
            f"verified: logits differ by at most {found.largest:.3g} (rounding to {_short(found.dtype)} explains "
            f"{found.explained:.3g}; the largest is {found.largest_logit:.3g})"
        )

    write_export(plan, to, _bar, check if verify else None, export_card(source, merge=merge))
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
    quiet_tool()
    return_freed_tensors()
    return status_of(lambda: work(export_flags(argv, __doc__)))


def work(given: argparse.Namespace) -> None:
    """What the command line asks for.

    Raises:
        ConfigError, TrainingError: see `export`, `tools.serving.checks` and `tools.hub_upload`.
    """
    ready = None if given.to is not None else _as_it_is(given)
    place = find_place(given.push_to_hub, public=given.public) if given.push_to_hub is not None else None
    folder = ready or _exported(given, is_for_others=place is not None)
    _check(folder, given.check)
    if place is not None:
        upload(folder, place, print_line)


def _exported(given: argparse.Namespace, *, is_for_others: bool) -> ServedFolder:
    to = given.to.expanduser()
    refuse_url("--to", str(to))
    if is_for_others and not given.merge:
        source = open_source(given.path, given.base)
        if source.is_adapter:
            check_for_others(str(source.base))
    dtype = DTYPES[given.dtype] if given.dtype else None
    export(given.path, to, merge=given.merge, dtype=dtype, verify=given.verify, base=given.base)
    return ServedFolder(to)


def _check(folder: ServedFolder, programs: Sequence[str]) -> None:
    """Print the commands of the programs that take the folder.

    Raises:
        ConfigError: if some do not.
    """
    refusals = []
    for program in programs:
        version, check = CHECKS[program]
        try:
            commands = check(folder)
        except ConfigError as error:
            refusals.append(str(error))
            continue
        print_line(f"{program}: {version} takes {folder.path} by its rules; to use it:")
        for command in commands:
            print_line(f"  {command}")
    if refusals:
        raise ConfigError("; ".join(refusals))


def _as_it_is(given: argparse.Namespace) -> ServedFolder:
    """The folder that is checked or uploaded without an export."""
    return ready_folder(given.path.expanduser())


if __name__ == "__main__":
    imports_ended()
    sys.exit(main())
