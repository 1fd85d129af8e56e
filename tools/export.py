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

# Before the imports below: they take seconds, and some of them print.
if __name__ == "__main__":
    from tools.beginning import begin_importing

    imports_ended = begin_importing()

import torch

from checkpointing.exporting.blueprint import read_model_config
from checkpointing.exporting.export_card import export_card
from checkpointing.exporting.model_source import open_source
from checkpointing.exporting.plan import plan_export
from checkpointing.exporting.verify import check_logits
from checkpointing.exporting.write import check_place, write_export
from tasks.finding import find_task
from tools.ending import status_of
from tools.hub_upload import check_for_others, find_place, upload
from tools.model_class import model_class
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
    parser = argparse.ArgumentParser(
        prog="python -m tools.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="a run, a checkpoint's folder or .pt file, or an adapter's folder")
    parser.add_argument("--to", type=Path, help="the folder to make; it must not exist")
    parser.add_argument("--merge", action="store_true", help="merge a LoRA adapter into its base model")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; default: as stored; merged: as the base's")
    parser.add_argument(
        "--verify", action="store_true", help="compare logits too; needs memory for the whole model in fp32"
    )
    parser.add_argument("--base", help="the model that training started from, if the checkpoint does not say it")
    parser.add_argument("--check", choices=CHECKS, action="append", default=[], help="does this program take it?")
    parser.add_argument("--push_to_hub", metavar="NAME", help="upload it to NAME or OWNER/NAME, private if it is new")
    parser.add_argument("--public", action="store_true", help="of --push_to_hub: let everybody read it")
    given = parser.parse_args(argv)
    quiet_tool()
    return_freed_tensors()
    return status_of(lambda: work(given))


def work(given: argparse.Namespace) -> None:
    """What the command line asks for.

    Raises:
        ConfigError, TrainingError: see `export`, `tools.serving.checks` and `tools.hub_upload`.
    """
    if given.public and given.push_to_hub is None:
        raise ConfigError("--public: it belongs to --push_to_hub; give both, or neither")
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
    """The folder that is checked or uploaded without an export.

    Raises:
        ConfigError: if a new folder is asked for, or is needed.
    """
    for flag in ("merge", "dtype", "verify", "base"):
        if getattr(given, flag):
            raise ConfigError(f"--{flag}: it is for a new folder; give --to DIR as well")
    if not given.check and given.push_to_hub is None:
        raise ConfigError("--to: there is nothing to do; give --to DIR, --check or --push_to_hub")
    return ready_folder(given.path.expanduser())


if __name__ == "__main__":
    imports_ended()
    sys.exit(main())
