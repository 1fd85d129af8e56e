"""What the watchdogs conclude from their reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

import supervision.main_thread
from supervision.main_thread import MainThread, Position, Stillness
from supervision.patience import USUAL
from supervision.verdict import Report, judge, judge_lost

WAITING = Report(
    state="running", place="in step 8", where="a.py:5", num_collectives=33, still_seconds=301, limit_seconds=300
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be moved by hand."""
    now = [1000.0]
    monkeypatch.setattr(supervision.main_thread.time, "monotonic", lambda: now[0])
    return now


def test_the_rank_that_entered_the_fewest_collectives_is_the_one_that_stopped() -> None:
    asleep = replace(WAITING, where="my_data.py:12 in read", num_collectives=31)
    verdict = judge([WAITING, WAITING, asleep, WAITING])
    assert (verdict.kind, verdict.ranks) == ("hang", (2,))
    assert verdict.message.startswith("rank 2 stopped in step 8 (my_data.py:12 in read); the others waited 301 s")
    assert judge([asleep, WAITING, asleep]).message.startswith("ranks 0, 2 stopped")


def test_where_all_ranks_entered_the_same_collective_none_is_blamed() -> None:
    verdict = judge([WAITING, WAITING])
    assert (verdict.kind, verdict.ranks) == ("hang", (0, 1))
    assert "no rank went on" in verdict.message


@pytest.mark.parametrize(
    ("states", "kind"),
    [
        (["running", "running"], "go"),
        (["running", "finished"], "go"),
        (["finished", "finished"], "finished"),
        (["running", "told"], "over"),
        (["running", "refused"], "refused"),
    ],
)
def test_ranks_that_move_go_on_until_all_have_finished_or_one_has_told_its_error(states: list[str], kind: str) -> None:
    assert judge([replace(WAITING, state=state, still_seconds=300) for state in states]).kind == kind


def test_a_rank_that_holds_an_error_is_waited_for_it_will_say_more() -> None:
    assert judge([WAITING, replace(WAITING, state="failing")]).kind == "go"


def test_a_closed_connection_is_an_end_and_silence_is_a_hang() -> None:
    verdict = judge_lost({1: None, 2: 40.0, 3: None}, "in step 8")
    assert (verdict.kind, verdict.ranks) == ("over", (1, 3))
    assert verdict.message.startswith("ranks 1, 3 ended in step 8")
    verdict = judge_lost({2: 330.0}, "in step 8")
    assert (verdict.kind, verdict.ranks) == ("hang", (2,))
    assert "330 s" in verdict.message


def test_only_training_steps_after_the_first_have_to_be_quick(clock: list[float]) -> None:
    main_thread = MainThread(60)
    for step, activity, limit in [
        (0, "evaluating", USUAL.long_seconds),
        (41, "training", USUAL.long_seconds),  # the first of a resumed run
        (42, "training", 60),
        (42, "saving", USUAL.long_seconds),
        (43, "training", 60),
    ]:
        main_thread.at(step, activity)
        assert main_thread.limit_seconds() == limit


def test_without_a_flag_the_limit_follows_the_longest_step(clock: list[float]) -> None:
    main_thread, limits = MainThread(None), []
    for seconds in (200, 30, 4000):
        main_thread.at(len(limits) + 1, "training")
        limits.append(main_thread.limit_seconds())
        clock[0] += seconds
        main_thread.at(len(limits), "saving")
        clock[0] += 3000  # is no step
    main_thread.at(4, "training")
    assert [*limits, main_thread.limit_seconds()] == [USUAL.long_seconds, 600, 600, USUAL.long_seconds]
    main_thread = MainThread(None)
    main_thread.at(1, "training")
    main_thread.at(2, "training")
    assert main_thread.limit_seconds() == 300


def test_a_pause_of_the_whole_process_is_no_hang(clock: list[float]) -> None:
    stillness, position = Stillness(interval_seconds=5), Position(3, "training", 0.0)
    assert stillness.seconds(position) == 0
    clock[0] += 5
    assert stillness.seconds(position) == 5
    clock[0] += 3600  # stopped, and continued
    assert stillness.seconds(position) == 15
    assert stillness.seconds(Position(3, "training", 0.0)) == 0, "another one, though alike"
