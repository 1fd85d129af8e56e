"""A run that has made all its steps, resumed: it says so, and stays the run that it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.processes import ProcessGroup, log_lines, train_events
from tests.helpers.resuming import PLAIN, flags_of, weights


@pytest.fixture(scope="module")
def finished(tiny_model: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    process_group.train(flags_of(tiny_model, run, *PLAIN, "--max_train_step", "2"), 1)
    return run


@pytest.mark.parametrize("asked_for", ["2", "1"])
def test_a_run_resumed_past_its_end_trains_nothing_and_says_so(
    asked_for: str, finished: Path, tiny_model: Path, process_group: ProcessGroup
) -> None:
    before, steps = (finished / "run.yaml").read_bytes(), train_events(finished)
    trained = weights(finished)
    flags = flags_of(tiny_model, finished, *PLAIN, "--max_train_step", asked_for, "--resume", "auto")
    (outcome,) = process_group.train(flags, 1)
    (line,) = [line for line in log_lines(outcome.stdout) if "nothing is trained" in line]
    assert line == (
        f"resume: nothing is trained: the run has made 2 steps and is to make {asked_for}; to go on, give more "
        "--max_train_step"
    )
    assert (finished / "run.yaml").read_bytes() == before
    assert train_events(finished) == steps
    assert all(trained[name].equal(tensor) for name, tensor in weights(finished).items())


def test_a_run_with_steps_left_is_noted_in_run_yaml(
    finished: Path, tiny_model: Path, process_group: ProcessGroup
) -> None:
    """The last test here: it goes on with the run of the others."""
    flags = flags_of(tiny_model, finished, *PLAIN, "--max_train_step", "3", "--resume", "auto")
    (outcome,) = process_group.train(flags, 1)
    assert "nothing is trained" not in outcome.stdout
    assert "max_train_step: 3" in (finished / "run.yaml").read_text()
    assert len(train_events(finished)) == 3
