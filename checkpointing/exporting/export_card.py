"""The README.md of an exported folder: that of the run it comes from, with what a person has written into it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from checkpointing.exporting.model_source import ModelSource
from reporting.card.card_file import CARD, card_of_run
from reporting.card.edits import renewed, with_license_of
from reporting.card.model_card import model_card
from reporting.report.run_files import read_run
from run_folder.checkpoint_folder import STATE, is_step_folder, step_of
from run_folder.other_runs import checkpoint_root_of, run_folder_of
from run_folder.run_yaml import is_of_a_run, read_run_yaml, saved_in
from utils.small_files import read_json, read_text


def export_card(source: ModelSource, *, merge: bool) -> str | None:
    """The card; None if nobody knows what the model was trained on.

    A merged model gets a new one: an adapter's card says how to load an adapter.
    """
    folder = source.path if source.path.is_dir() else source.path.parent
    run, is_adapter = _run_of(folder), source.is_adapter and not merge
    card = None
    with suppress(OSError):
        card = card_of_run(read_run(run), is_adapter=is_adapter, step=_step(folder, run)) if run else None
    if card is None and (notes := _notes(folder, source)):
        card = model_card(notes, [], [], title=folder.absolute().name, is_adapter=is_adapter)
    earlier = None
    with suppress(OSError, ValueError):
        own = run / ("adapter" if source.is_adapter else "model") if run else folder
        earlier = read_text(own / CARD)
    if merge:
        return with_license_of(card, earlier) if card is not None else None
    return renewed(card, earlier) if card is not None else earlier


def _run_of(folder: Path) -> Path | None:
    """The run whose checkpoint or weights this folder holds; a folder that only lies in a run's is none of these."""
    run = run_folder_of(folder)
    if run is None or folder.absolute().parent not in (run, checkpoint_root_of(run).absolute()):
        return None
    return run


def _step(folder: Path, run: Path) -> int | None:
    if is_step_folder(folder):
        return step_of(folder)
    saved = saved_in(read_run_yaml(run))
    return saved["step"] if saved is not None and saved["folder"] == folder.name else None


def _notes(folder: Path, source: ModelSource) -> dict[str, Any] | None:
    """What stands in run.yaml, as far as a checkpoint or an adapter says it, too."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        notes = {"settings": read_json(folder / STATE)["settings"]}
        return notes if is_of_a_run(notes) else None
    return {"settings": {"train_config": {"model_name": source.base}}} if source.is_adapter and source.base else None
