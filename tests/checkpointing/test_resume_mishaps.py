"""Mishaps beside the checkpoints do not cost the run: a damaged run.yaml, a copy that cannot be written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from run_folder.checkpoint_folder import damage
from tests.helpers.processes import ProcessGroup
from tests.helpers.resuming import PLAIN, as_if_killed_after, assert_bit_equal, flags_of


@pytest.mark.parametrize("text", ["", "settings: {train_config: {output", "\x00\x00"])
def test_a_run_whose_run_yaml_is_damaged_goes_on(
    text: str, whole: Path, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    run = as_if_killed_after(3, whole, tmp_path / "run")
    (run / "run.yaml").write_text(text)
    process_group.train(flags_of(tiny_model, run, *PLAIN, "--resume", "auto"), 1)
    assert_bit_equal(run, whole)


IN_THE_WAY = """
import os
from pathlib import Path
from data.batches.rows import Rows
from tests.helpers.random_documents import get_custom_dataset as documents

def put_in_the_way_and_read(rows, index, read=Rows.__getitem__):
    if (Path({run!r}) / "metrics.jsonl").exists():
        Path({file!r}).write_text("of another program")
    return read(rows, index)

def get_custom_dataset(dataset_config, tokenizer, split):
    if os.environ["RANK"] == "0" and not Path({run!r}).exists():
        Rows.__getitem__ = put_in_the_way_and_read
    return documents(dataset_config, tokenizer, split)
"""


def test_a_copy_that_cannot_be_written_is_said_on_every_rank_and_written_after_resuming(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """Another program has put a file there since the run began. What an earlier copy left is deleted."""
    run, copy = tmp_path / "run", tmp_path / "copies/fine-tuned-tiny"
    dataset = tmp_path / "dataset.py"
    dataset.write_text(IN_THE_WAY.format(run=str(run), file=str(copy / "huggingface")))
    given = [*PLAIN, "--dist_checkpoint_root_folder", str(tmp_path / "copies"), "--max_train_step", "3"]
    given += ["--dataset", str(dataset)]
    outcomes = process_group.run(flags_of(tiny_model, run, *given), 2)
    assert [outcome.status for outcome in outcomes] == [1, 1]
    assert "the copy of the final weights could not be written; free the disk" in outcomes[0].stderr
    assert "huggingface there was not written by this program" in outcomes[0].stdout
    assert "Traceback" not in outcomes[0].stderr
    assert damage(copy / "step-00000003") == ""
    assert (copy / "huggingface").read_text() == "of another program"
    (copy / "huggingface").unlink()
    (copy / "state.pt").write_text("of an earlier copy")
    (copy / "COMPLETE").write_text(json.dumps({"files": {"state.pt": {"bytes": 18, "crc32": "00000000"}}}))
    process_group.train(flags_of(tiny_model, run, *given, "--resume", "auto"), 2)
    assert damage(copy) == ""
    assert not (copy / "state.pt").exists()
    assert not (copy / "copy.incomplete").exists()
