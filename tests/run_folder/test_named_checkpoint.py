"""checkpoints/latest and checkpoints/best can be given wherever a checkpoint can."""

from __future__ import annotations

from pathlib import Path

import pytest

from run_folder.checkpoint_folder import BEST, COMPLETE, LATEST, STATE, point_to, step_folder
from run_folder.other_runs import named_checkpoint
from run_folder.resuming import find_checkpoints


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "run/checkpoints"
    for step in (10, 20):
        step_folder(root, step).mkdir(parents=True)
        for name in (COMPLETE, STATE):
            (step_folder(root, step) / name).touch()
    point_to(step_folder(root, 20), LATEST)
    point_to(step_folder(root, 10), BEST)
    return root


@pytest.mark.parametrize(("name", "step"), [(LATEST, 20), (BEST, 10)])
def test_a_run_resumes_from_the_checkpoint_that_is_named(name: str, step: int, root: Path) -> None:
    assert find_checkpoints(str(root / name), None, [], restarted=False) == [step_folder(root, step)]


def test_any_other_path_is_taken_as_it_is(root: Path) -> None:
    (root / BEST).write_text("../../elsewhere\n")
    for path in (root / BEST, root, step_folder(root, 10), root / "gone/latest"):
        assert named_checkpoint(path) == path
