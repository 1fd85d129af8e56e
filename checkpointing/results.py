"""Results that could not be written, for the line that the run ends with. Call these on rank 0 alone."""

from __future__ import annotations

from pathlib import Path

from run_folder.checkpoint_folder import COMPLETE, checkpoints, step_folder, step_of
from run_folder.saved_weights import SavedWeights
from utils.small_files import is_there


def lacking_checkpoint(root: Path, last_step: int, *, was_written: bool) -> list[str]:
    """A clause on the newest checkpoint, if it is not the last one that was due; empty if none was due.

    Args:
        root: the folder of the checkpoints.
        last_step: the step of the last checkpoint that was due; below 0 if none was.
        was_written: whether this session wrote it to the end. It decides if the folder cannot be looked at.
    """
    found = is_there(step_folder(root, last_step) / COMPLETE) if last_step >= 0 else True
    if found or (found is None and was_written):
        return []
    what = f"the checkpoint of step {last_step} could not be written"
    try:
        newest = next(iter(checkpoints(root)), None)
    except OSError as error:
        return [f"{what}, and {root} cannot be read ({error.strerror})"]
    if newest is None:
        return [f"{what}, and there is none before it"]
    return [f"{what}: the newest is that of step {step_of(newest)}, {newest}"]


def lacking_weights(weights: SavedWeights, best_score: float) -> list[str]:
    """A clause on the step of the saved weights, if they are not those of the best evaluation.

    Args:
        best_score: of the weights that are saved (`TrainState.best_score`).
    """
    lost, saved = weights.lost, weights.read()
    if lost is None and (gone := weights.gone()):
        return [gone]
    if lost is None or not lost.score < best_score:
        return []
    where = "none are saved"
    if saved is not None and is_there(weights.folder / saved["folder"]) is not False:
        where = f"{weights.folder / saved['folder']} holds those of step {saved['step']}"
    return [f"the {lost.which} weights, those of step {lost.step}, could not be saved: {where}"]
