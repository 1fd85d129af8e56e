"""An exported folder on the disk: written tensor by tensor, read back, renamed when all of it is right."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpointing.exporting.plan import ExportPlan
from checkpointing.exporting.safetensors_file import check_model_files, write_model_files
from reporting.card.card_file import CARD
from utils.deleting import delete_folder
from utils.disk_errors import disk_refusal
from utils.errors import ConfigError, RunError, TrainingError
from utils.units import readable


def check_place(folder: Path, num_bytes: int = 0) -> None:
    """Refuse a folder that exists, or a disk without room for it.

    Raises:
        ConfigError: with the remedy.
    """
    if folder.exists():
        raise ConfigError(f"--to: {folder} exists already; give another folder, or remove it")
    parent = folder.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--to: {parent} cannot be written; give a folder that can")
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise ConfigError(
            f"--to: {parent} has {readable(free)} free, and {readable(num_bytes)} are needed; free some, or give "
            "another disk"
        )


def write_export(
    plan: ExportPlan,
    folder: Path,
    progress: Callable[[str, int], Any],
    verify: Callable[[Path], object] | None = None,
    card: str | None = None,
) -> None:
    """Write FOLDER.incomplete, read it back, and rename it.

    Args:
        progress: (what, bytes) -> a progress bar like tqdm's.
        verify: checks the folder before it is renamed; raises if something is wrong.
        card: the text of README.md.

    Raises:
        ConfigError: if the folder exists, the disk is too small, or the source is damaged; nothing was written.
        TrainingError: if what was written is not what it should be; no folder is left.
    """
    check_place(folder, plan.num_bytes)
    check_bytes = sum(path.stat().st_size for path, _ in plan.source.checksums)
    with progress("checksums", check_bytes) as bar:
        plan.source.check(bar.update)
    temporary = folder.with_name(folder.name + ".incomplete")
    try:
        delete_folder(temporary)
        temporary.mkdir(parents=True)
        with progress("writing", plan.num_bytes) as bar:
            digests = write_model_files(
                temporary, plan.entries, plan.read, bar.update, stem=plan.stem, max_file_size=plan.max_file_size
            )
        plan.save_config(temporary)
        plan.tokenizer.save_pretrained(temporary)
        if card is not None:
            (temporary / CARD).write_text(card, encoding="utf-8")
        with progress("reading back", plan.num_bytes) as bar:
            check_model_files(temporary, plan.entries, digests, bar.update)
        if verify is not None:
            verify(temporary)
        temporary.rename(folder)
    except RunError:  # says itself what is wrong
        raise
    except Exception as error:
        if (reason := disk_refusal(error)) is None:
            raise
        raise TrainingError(f"--to: {folder} cannot be written ({reason})") from error
    finally:
        delete_folder(temporary)
