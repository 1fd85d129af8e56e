"""How soon ranks end after one of them has told its error, and what they tell each other."""

from __future__ import annotations

import pytest

from supervision.messages import message_bytes
from supervision.verdict import Report, Verdict
from tests.helpers.failing_alone import HELD_SECONDS, fail_on_rank_one, fail_on_rank_zero_too
from tests.helpers.processes import SHORT_GRACE, ProcessGroup


def test_ranks_look_often_once_one_of_them_holds_an_error(process_group: ProcessGroup) -> None:
    outcomes = process_group.run(fail_on_rank_one, 2)
    assert [outcome.status for outcome in outcomes] == [1, 1]
    usual = HELD_SECONDS / (5.0 * float(SHORT_GRACE["FINETUNING_GRACE_SCALE"]))  # rounds every five seconds
    assert int(outcomes[0].stdout.split()[-1]) > 1.5 * usual


def test_a_rank_0_that_fails_after_another_has_told_says_nothing(process_group: ProcessGroup) -> None:
    outcomes = process_group.run(fail_on_rank_zero_too, 2)
    assert [outcome.status for outcome in outcomes] == [1, 1]
    assert [outcome.stderr.count("error:") for outcome in outcomes] == [0, 1]
    assert "error: rank 1: it failed" in outcomes[1].stderr


@pytest.mark.parametrize("world_size", [2, 512, 100_000])
def test_a_message_has_the_length_that_others_wait_for_however_many_ranks_it_names(world_size: int) -> None:
    report = Report("running", "in step 123456789", "x" * 120, 10**9, 1e4, 1e4, 10**12)
    verdicts = [Verdict("go"), Verdict("go", tuple(range(world_size)))]
    assert {len(message_bytes(one, world_size)) for one in (report, *verdicts)} == {
        len(message_bytes(None, world_size))
    }
