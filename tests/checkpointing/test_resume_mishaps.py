"""Mishaps beside the checkpoints do not cost the run: a damaged run.yaml, a copy that cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointing.folder import damage
from tests.helpers.processes import ProcessGroup
from tests.helpers.resuming import as_if_killed_after, assert_bit_equal, flags_of

PLAIN = ["--run_validation", "False"]


@pytest.fixture(scope="module")
def whole(tiny_model: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    process_group.train(flags_of(tiny_model, run, *PLAIN), 1)
    return run


@pytest.mark.parametrize("text", ["", "settings: {train_config: {output", "\x00\x00"])
def test_a_run_whose_run_yaml_is_damaged_goes_on(
    text: str, whole: Path, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    run = as_if_killed_after(3, whole, tmp_path / "run")
    (run / "run.yaml").write_text(text)
    process_group.train(flags_of(tiny_model, run, *PLAIN, "--resume", "auto"), 1)
    assert_bit_equal(run, whole)


def test_a_copy_that_cannot_be_written_is_said_on_every_rank_and_written_after_resuming(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """A file is in the place of a folder. The remains of an earlier copy of another type are deleted."""
    copy = tmp_path / "copies/fine-tuned"
    given = [*PLAIN, "--dist_checkpoint_root_folder", str(tmp_path / "copies"), "--max_train_step", "3"]
    copy.mkdir(parents=True)
    (copy / "huggingface").write_text("in the way")
    (copy / "state.pt").write_text("of an earlier copy")
    outcomes = process_group.run(flags_of(tiny_model, tmp_path / "run", *given), 2)
    assert [outcome.status for outcome in outcomes] == [1, 1]
    assert "the copy of the final weights could not be written; free the disk" in outcomes[0].stderr
    assert "Traceback" not in outcomes[0].stderr
    assert damage(copy / "step-00000003") == ""
    (copy / "huggingface").unlink()
    process_group.train(flags_of(tiny_model, tmp_path / "run", *given, "--resume", "auto"), 2)
    assert damage(copy) == ""
    assert not (copy / "state.pt").exists()
