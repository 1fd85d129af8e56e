"""The step whose weights a run has saved, as run.yaml records it, and weights that could not be saved."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ranks.environment import Environment, print_rank_zero
from run_folder.run_yaml import NAME, SavedEntry, read_run_yaml, restore_run_yaml, saved_in
from utils.small_files import is_there


class LostWeights(NamedTuple):
    """Weights that the disk did not take."""

    step: int
    score: float  # of their evaluation, lower is better; -inf if there was none
    which: str  # "best" or "last"


class SavedWeights:
    """The weights that one session of a run saves. Rank 0 writes run.yaml; every rank makes the same calls."""

    def __init__(self, env: Environment, folder: Path) -> None:
        """
        Args:
            folder: the run's.
        """
        self.env, self.folder = env, folder
        self.lost: LostWeights | None = None  # the best of those that could not be saved
        self._saved: SavedEntry | None = None  # run.yaml's entry of the weights that were
        self._run_yaml: dict[str, Any] = {}  # its contents, if the folder is deleted or cannot be read

    def note_saved(self, step: int, folder: Path) -> None:
        """Note in run.yaml which step's weights the folder holds."""
        self._saved = SavedEntry(step=step, folder=folder.name)
        if self.lost_at(step):  # the disk took them at the second try
            self.lost = None
        if self.env.is_rank_zero and (reason := self.write()):
            print_rank_zero(
                self.env, f"run.yaml cannot be written ({reason}): {folder} holds the weights of step {step}"
            )

    def note_lost(self, step: int, score: float | None) -> None:
        """Note that weights could not be saved.

        Args:
            score: of the evaluation that makes them the best, lower is better; None if they are the run's last.
        """
        if score is None:
            self.lost = self.lost or LostWeights(step, -math.inf, "last")
        elif self.lost is None or score < self.lost.score:
            self.lost = LostWeights(step, score, "best")

    def lost_at(self, step: int) -> bool:
        """Whether this step's weights are those that could not be saved."""
        return self.lost is not None and self.lost.step == step

    def read(self) -> SavedEntry | None:
        """The step whose weights are saved, and their folder, perhaps by an earlier session; None if none are saved."""
        return self._saved or saved_in(self._contents())

    def _contents(self) -> dict[str, Any]:
        """run.yaml's contents: as they were last read, if that cannot be done now."""
        with suppress(OSError):
            return read_run_yaml(self.folder) or self._run_yaml
        return self._run_yaml

    def gone(self) -> str:
        """A clause if the weights that this session saved were deleted or moved; "" if they are there."""
        if self._saved is None or is_there(self.folder / self._saved["folder"]) is not False:
            return ""
        return f"{self.folder / self._saved['folder']}, with the weights of step {self._saved['step']}, is gone"

    def keep_run_yaml(self) -> None:
        """Read run.yaml, or write it again if the folder was deleted or renamed and is back."""
        if not self.env.is_rank_zero:
            return
        with suppress(OSError):  # a disk that takes nothing is told of with the results
            if (self.folder / NAME).exists():
                self._run_yaml = read_run_yaml(self.folder) or self._run_yaml
            elif self._run_yaml and self.folder.is_dir():
                restore_run_yaml(self.folder, self._run_yaml)

    def write(self) -> str:
        """Write to run.yaml which weights are saved, if it does not say so yet. Returns why that failed, or "".

        Call this on rank 0.
        """
        self.keep_run_yaml()
        try:
            contents = self._contents()
            if self._saved is not None and (saved_in(contents) != self._saved or is_there(self.folder / NAME) is False):
                restore_run_yaml(self.folder, contents | {"saved": dict(self._saved)})
        except OSError as error:
            return error.strerror or str(error)
        return ""
