"""The folder of a run's checkpoints: what else may lie there is refused by name, or left as it is."""

from __future__ import annotations

from pathlib import Path

from configs.training import TrainConfig
from run_folder.checkpoint_folder import COMPLETE, checkpoints, foreign_entries, remove_all
from run_folder.final_copy import foreign_copy
from run_folder.run_folder import checkpoint_root
from utils.errors import ConfigError


def check_root(train: TrainConfig, folder: Path, *, afresh: bool) -> None:
    """Refuse a folder in which the run would replace what is not its own. Writes nothing.

    Args:
        folder: the run's.
        afresh: whether the run goes on from no checkpoint.

    Raises:
        ConfigError: with the remedy.
    """
    root = checkpoint_root(train, folder)
    elsewhere = bool(train.dist_checkpoint_root_folder)
    flag = "--dist_checkpoint_folder" if elsewhere else "--output_dir"
    foreign = foreign_entries(root)
    if elsewhere and train.save_model:
        foreign += foreign_copy(root)
    if foreign:
        raise ConfigError(
            f"{flag}: {root} holds {', '.join(foreign)}, which this program did not write and would have to replace; "
            "give another folder, or move that away"
        )
    held = checkpoints(root)[:1] + [root] * (elsewhere and (root / COMPLETE).exists())
    if held and afresh and not train.overwrite:
        goes_on = f", --resume {held[0]} with the --output_dir of its run" if train.resume else ""
        raise ConfigError(f"{flag}: {root} already holds a checkpoint; give another folder{goes_on}, or --overwrite")


def delete_checkpoints(train: TrainConfig, folder: Path) -> None:
    """Delete those of an earlier run: the first restart of this one would resume from them."""
    for root in {checkpoint_root(train, folder), folder / "checkpoints"}:
        remove_all(root)
