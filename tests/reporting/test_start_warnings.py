"""Lines before the first step on settings that learn too little."""

from __future__ import annotations

import re
from typing import Any

import pytest

from configs.flags import parse_flags
from reporting.start_warnings import start_warnings
from tests.helpers.generated import flags, write_rows
from tests.helpers.processes import ProcessGroup, read_metrics


def lines(*words: str, num_rows: int = 10, num_steps: int = 9, world_size: int = 1) -> list[str]:
    config = parse_flags(["--model_name", "m", *words])
    start = {"num_train_rows": num_rows, "world_size": world_size, "num_steps": num_steps}
    accumulation = config.train_config.gradient_accumulation_steps
    resolved = {"context_length": 4096, "gradient_accumulation_steps": accumulation}
    data: dict[str, Any] = {"train": {"num_samples": 100 if num_rows > 5 else 5}}
    return start_warnings(config, start, resolved, data)


@pytest.mark.parametrize(("warmup", "number"), [(0, 0), (99, 0), (100, 1), (500, 1)])
def test_a_warm_up_that_outlasts_the_run_is_told_before_the_first_step(warmup: int, number: int) -> None:
    warnings = lines("--warmup_steps", str(warmup), num_steps=100)
    assert len(warnings) == number
    assert all("--warmup_steps), and the run ends after 100" in line for line in warnings)


@pytest.mark.parametrize(
    ("words", "num_rows", "num_steps", "flags_and_steps"),
    [
        ("", 10, 9, "too few to learn much; --min_steps 100 would make about 102"),
        ("--gradient_accumulation_steps 8", 10, 3, "too few to learn much; --min_steps 100 would make about 102"),
        (
            "--global_batch_size 32 --limit_train_batches 9",
            80,
            9,
            "without --global_batch_size and --limit_train_batches",
        ),
        # five samples in three epochs are 15 steps at most, and 100 in 20
        ("--batching_strategy padding", 5, 6, "; --min_steps 100 --num_epochs 20 would make about 100"),
        ("--batching_strategy padding --batch_size_training 1", 5, 15, "; --num_epochs 20 would make about 100"),
        ("--min_steps 100", 5, 15, "; --num_epochs 20 would make about 100"),
    ],
)
def test_a_run_of_few_steps_names_flags_that_make_more(
    words: str, num_rows: int, num_steps: int, flags_and_steps: str
) -> None:
    (line,) = lines(*words.split(), num_rows=num_rows, num_steps=num_steps)
    assert line.startswith(f"warning: {num_steps} optimizer steps in all")
    assert flags_and_steps in line


@pytest.mark.parametrize(("words", "num_steps"), [("--max_train_step 3", 3), ("", 50)])
def test_steps_that_were_asked_for_or_are_enough_are_not_spoken_of(words: str, num_steps: int) -> None:
    assert lines(*words.split(), num_steps=num_steps) == []


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("--num_epochs 7", 1),
        ("--num_epochs 6", 0),
        ("--num_epochs 40 --gamma 0.9", 0),
        ("--num_epochs 8 --lr 1", 1),
    ],
)
def test_a_schedule_that_ends_before_the_run_is_named_if_nobody_chose_it(words: str, number: int) -> None:
    found = [line for line in lines(*words.split(), num_steps=200) if line.startswith("scheduler: ")]
    assert len(found) == number
    assert all("0.85 (--gamma) after each epoch; epoch " in line for line in found)


def test_the_flags_of_the_line_make_the_steps_that_it_says_and_it_stands_at_the_end_too(
    tiny_model: Any, tmp_path: Any, process_group: ProcessGroup
) -> None:
    data = write_rows(tmp_path)
    argv = ["--context_length", "512", "--save_model", "False", "--run_validation", "False", "--num_epochs", "30"]
    argv += ["--scheduler", "constant"]
    (outcome,) = process_group.train(flags(tiny_model, data, tmp_path / "few", *argv), 1)
    printed = outcome.stdout
    assert printed.count("too few to learn much") == 2
    (suggested, steps) = re.findall(r"too few to learn much; (.*) would make about (\d+)", printed)[0]
    (outcome,) = process_group.train(flags(tiny_model, data, tmp_path / "more", *argv, *suggested.split()), 1)
    (start,) = (event for event in read_metrics(tmp_path / "more") if event["event"] == "start")
    assert start["num_steps"] == pytest.approx(int(steps), rel=0.15)
    assert "too few" not in outcome.stdout
