"""benchmarks.random_commands with its first 30 commands; `make test-all` runs 30 more."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from benchmarks.random_commands import command, main
from tests.helpers.processes import ProcessGroup


def test_a_command_is_made_of_its_number_alone(tmp_path: Path) -> None:
    made = [command(number, tmp_path) for number in range(300)]
    assert made == [command(number, tmp_path) for number in range(300)]
    assert len({" ".join(line.flags) for line in made}) > 290
    assert {line.world_size for line in made} == {1, 2}
    assert sum(line.is_dry for line in made) == 150
    words = {word for line in made for word in line.flags}
    assert words >= {"dpo", "simpo", "orpo", "reward_model", "text_classification", "--teacher_weight", "muon", "dft"}
    assert words >= {"llama_adapter", "prefix", "4bit", "8bit", "--use_dora", "--add_special_tokens"}


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.full) for first in (15, 30, 45))])
def test_random_commands_finish_or_are_refused_in_one_line(first: int, process_group: ProcessGroup) -> None:
    """Each new setting changes what is drawn: later commands make up for an end that the first ones do not have."""
    missing, count = {"finished", "planned", "refused"}, 15
    for start in (first, *range(1000, 1050, 5)):
        words = ["--first", str(start), "--count", str(count)]
        (outcome,) = process_group.run(partial(main, words), 1)
        assert outcome.status == 0, outcome.stdout + outcome.stderr
        missing -= {end for end in missing if f" {end}" in outcome.stdout}
        if not missing:
            return
        count = 5
    raise AssertionError(f"no command of 65 was {missing}")
