"""How soon ranks end after one of them has told its error."""

from __future__ import annotations

from tests.helpers.failing_alone import HELD_SECONDS, fail_on_rank_one
from tests.helpers.processes import SHORT_GRACE, ProcessGroup


def test_ranks_look_often_once_one_of_them_holds_an_error(process_group: ProcessGroup) -> None:
    outcomes = process_group.run(fail_on_rank_one, 2)
    assert [outcome.status for outcome in outcomes] == [1, 1]
    usual = HELD_SECONDS / (5.0 * float(SHORT_GRACE["FINETUNING_GRACE_SCALE"]))  # rounds every five seconds
    assert int(outcomes[0].stdout.split()[-1]) > 1.5 * usual
