"""--min_steps: batches follow the data, the same in a plan, on every rank and after a resume."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from configs.flags import parse_flags
from data.batches.rows import make_rows
from data.pipeline import RunData
from data.sequences.tokenized import Sequences
from ranks.environment import Environment
from resolving.enough_steps import with_enough_steps
from resolving.resolved import Resolved, resolve
from tests.helpers.processes import ROOT, ProcessGroup, read_metrics, run_command, train_events
from tests.helpers.resuming import as_if_killed_after

LONGEST = 256
DIALOGUES = ["--samsum_dataset.data_path", str(ROOT / "datasets/samples/dialogue_summary"), "--split_slice", "20"]


def data_of(lengths: np.ndarray, strategy: str) -> RunData:
    tokens, offsets = np.ones(lengths.sum(), dtype=np.int32), np.concatenate([[0], np.cumsum(lengths)])
    sequences = Sequences(tokens, tokens, offsets, offsets, np.arange(len(lengths)))
    rows = make_rows(sequences, batching_strategy=strategy, context_length=LONGEST)
    return RunData(sequences, sequences, rows, rows, None, (), None, ())


def resolved_for(model: Path, line: str, world_size: int = 1) -> Resolved:
    config = parse_flags(["--model_name", str(model), "--context_length", str(LONGEST), *line.split()])
    return resolve(config, Environment(0, 0, world_size, world_size, launched=True))


def num_steps(resolved: Resolved, data: RunData) -> int:
    return data.steps_per_epoch(resolved.batches) * resolved.config.train_config.num_epochs


@pytest.mark.parametrize("strategy", ["packing", "padding"])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("line", ["", "--gradient_accumulation_steps 3", "--batch_size_training 16 --num_epochs 1"])
def test_a_run_has_the_steps_it_was_asked_for_if_there_are_samples_for_them(
    strategy: str, world_size: int, line: str, tiny_model: Path
) -> None:
    generator = np.random.default_rng(0)
    for num_samples in (5, 40, 200, 3000):
        data = data_of(generator.integers(2, LONGEST + 1, num_samples), strategy)
        asked = resolved_for(tiny_model, f"--min_steps 100 --batching_strategy {strategy} {line}", world_size)
        chosen, placed = with_enough_steps(asked, data)
        most = -(-num_samples // world_size) * asked.config.train_config.num_epochs  # a sample per rank in a step
        assert num_steps(chosen, placed) >= min(100, most * (0.5 if strategy == "packing" else 1))
        assert chosen.batches.global_batch_size <= asked.batches.global_batch_size
        assert placed.train_rows is not None
        assert sorted(placed.train_rows.indices) == list(range(num_samples)), "every sample is in one row"
        if num_steps(asked, data) >= 100:
            assert (chosen, placed) == (asked, data), "the flags are kept if they make the steps"
        elif num_samples == 3000:
            assert num_steps(chosen, placed) < 150, "no more steps than needed, but for whole rows"


def test_a_batch_or_an_epoch_that_was_asked_for_is_kept_and_a_line_says_so() -> None:
    for line in ("--global_batch_size 8", "--limit_train_batches 3", "--streaming --max_train_step 5"):
        config = parse_flags(["--model_name", "M", "--min_steps", "100", *line.split()])
        assert config.train_config.min_steps == 0
        assert any(note.startswith("--min_steps has no effect with ") for note in config.notes), line


def test_a_run_and_its_plan_say_what_was_chosen_in_the_same_line(tiny_model: Path, tmp_path: Path) -> None:
    given = ["--model_name", str(tiny_model), *DIALOGUES, "--context_length", "512", "--min_steps", "60"]
    given += ["--num_epochs", "4", "--save_model", "False", "--output_dir", "run"]
    plan = run_command(*given, "--dry_run", cwd=tmp_path)
    run = run_command(*given, cwd=tmp_path)
    assert (run.returncode, plan.returncode) == (0, 0), run.stderr + plan.stderr
    (line,) = re.findall(r"^(?:[0-9:]{8} )?(min_steps: .*)$", run.stdout, re.MULTILINE)
    assert line in plan.stdout.splitlines()
    filled, steps = re.fullmatch(
        r"min_steps: 1 row in a step instead of 4, filled with (\d+) tokens instead of 512, makes (\d+) steps", line
    ).groups()  # type: ignore[union-attr]
    assert len(train_events(tmp_path / "run")) == int(steps) >= 60
    record = yaml.safe_load((tmp_path / "run/run.yaml").read_text())
    assert record["settings"]["train_config"]["batch_size_training"] == 1
    assert record["resolved"]["packed_length"] == int(filled)


def test_on_other_ranks_a_run_keeps_the_batches_that_it_chose_first(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    given = ["--model_name", str(tiny_model), *DIALOGUES, "--context_length", "512", "--min_steps", "6"]
    given += ["--num_epochs", "1", "--run_validation", "False", "--save_every_steps", "3", "--keep_last", "9"]
    given += ["--num_workers_dataloader", "0"]
    process_group.train([*given, "--output_dir", str(tmp_path / "whole")], 2)
    killed = as_if_killed_after(3, tmp_path / "whole", tmp_path / "killed")
    process_group.train([*given, "--output_dir", str(killed), "--resume", "auto"], 1)
    whole, resumed = (train_events(folder) for folder in (tmp_path / "whole", killed))
    assert len(whole) >= 6
    assert [event["num_tokens"] for event in resumed] == [event["num_tokens"] for event in whole]
    assert [event["loss"] for event in resumed] == pytest.approx([event["loss"] for event in whole], abs=2e-5)
    rows = {event["num_train_rows"] for folder in (tmp_path / "whole", killed) for event in read_metrics(folder)[:1]}
    assert len(rows) == 1
