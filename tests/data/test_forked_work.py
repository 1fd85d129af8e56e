"""Work in forked processes: results in order, errors from this process, and nothing left running."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from configs.formats import DATASETS
from data import tokenizing
from data.dataset_functions.importing import find_dataset_function
from data.forked_work import in_processes, num_processes
from tests.helpers.chat_templates import FAMILIES
from utils.errors import ConfigError


def no_process_is_left(before: list[multiprocessing.Process]) -> bool:
    """Whether only those are there that an earlier test of this process has left."""
    return set(multiprocessing.active_children()) <= set(before)


def test_results_come_in_the_order_of_the_items_and_from_other_processes() -> None:
    before = multiprocessing.active_children()
    found = list(in_processes(lambda item: (item * item, os.getpid()), range(50), 3))
    assert [square for square, _ in found] == [item * item for item in range(50)]
    assert len({process for _, process in found} - {os.getpid()}) > 1
    assert no_process_is_left(before)
    assert list(in_processes(str, [], 3)) == []


def test_an_error_is_raised_here_at_the_first_item_that_fails() -> None:
    before = multiprocessing.active_children()

    def invert(item: int) -> float:
        return 1 / (item - 7)

    results = in_processes(invert, range(20), 2)
    assert [next(results) for _ in range(7)] == [invert(item) for item in range(7)]
    with pytest.raises(ZeroDivisionError) as error:
        next(results)
    assert error.traceback[-1].name == "invert"
    assert no_process_is_left(before)


def test_items_of_a_process_that_is_killed_are_worked_on_here() -> None:
    here = os.getpid()

    def end(item: int) -> int:
        if item == 3 and os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    assert list(in_processes(end, range(10), 2)) == list(range(10))
    assert list(in_processes(end, [3] * 5, 2)) == [3] * 5, "no process is left"


def test_a_caller_that_stops_reading_leaves_no_process() -> None:
    before = multiprocessing.active_children()
    results = in_processes(str, range(100), 2)
    assert next(results) == "0"
    results.close()
    assert no_process_is_left(before)


def test_there_are_as_many_processes_as_cores_that_may_be_used() -> None:
    assert num_processes() == min(16, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize("name", ["chat_dataset", "text_dataset"])
def test_several_processes_give_the_tokens_of_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, Any]] = []
    for number in range(70):
        turns = [{"role": "user", "content": f"Is it {number}?"}, {"role": "assistant", "content": f"It is {number}."}]
        rows.append({"messages": turns, "text": f"It is {number}."})
    rows[33] = {"messages": rows[33]["messages"][:1], "text": None}

    def tokens(folder: Path, **options: Any) -> list[Any]:
        folder.mkdir()
        (folder / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        config = DATASETS[name](data_path=str(folder / "a.jsonl"), **options)
        data = find_dataset_function(name, config)(config, FAMILIES["ChatML"].tokenizer(), "train")
        return [data["input_ids"], data["labels"], data["num_empty_answers"]]

    alone = tokens(tmp_path / "alone", skip_bad_rows=True)
    monkeypatch.setattr(tokenizing, "BATCH_SIZE", 3)
    monkeypatch.setattr(tokenizing, "num_processes", lambda: 2)
    processes = []
    monkeypatch.setattr(tokenizing, "in_processes", lambda *args: processes.append(args[2]) or in_processes(*args))
    assert tokens(tmp_path / "several", skip_bad_rows=True) == alone
    assert processes == [2]
    with pytest.raises(ConfigError, match="row 34"):
        tokens(tmp_path / "refused")
