"""README.md next to saved weights, written and renewed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from reporting.card.edits import renewed
from reporting.card.model_card import model_card
from reporting.report.run_files import RunFiles, read_run
from run_folder.run_yaml import is_of_a_run, saved_in
from utils.atomic_write import write_atomically
from utils.small_files import read_text

CARD = "README.md"


def card_of_run(run: RunFiles, *, is_adapter: bool, step: int | None) -> str | None:
    """The card of a run's weights; None if this is no run.

    Args:
        step: after which the weights were saved.
    """
    if not is_of_a_run(run.notes):
        return None
    title = run.folder.absolute().name
    return model_card(run.notes, run.train, run.evals, title=title, is_adapter=is_adapter, step=step)


def renew_card(run_folder: Path) -> str:
    """Write the card next to the weights that a run has saved; what a person wrote into it stays (`renewed`).

    Returns:
        Why that failed, or "".
    """
    try:
        run = read_run(run_folder)
        saved = saved_in(run.notes)
        if saved is None:
            return ""
        card = card_of_run(run, is_adapter=saved["folder"] == "adapter", step=saved["step"])
        if card is not None:
            write_card(run_folder / saved["folder"] / CARD, card)
    except (OSError, ValueError) as error:
        return " ".join(str(error).split())
    return ""


def write_card(file: Path, card: str) -> None:
    """Write a card, or renew the one that is there.

    Raises:
        OSError: if the file cannot be read or written.
        ValueError: if it is no text.
    """
    earlier = read_text(file) if file.exists() else None
    text = renewed(card, earlier)
    if text != earlier:
        write_atomically(file, text)


def copy_card(earlier: Path, folder: Path) -> None:
    """Put the card of an earlier folder, if it has one, into the one that takes its place, instead of peft's form."""
    with suppress(FileNotFoundError):
        (folder / CARD).unlink()
    with suppress(FileNotFoundError):
        (folder / CARD).write_bytes((earlier / CARD).read_bytes())
