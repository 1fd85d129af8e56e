"""What a run prints: events alone on standard output, tables of memory, a line per epoch and their averages."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.helpers.processes import ProcessGroup, read_metrics
from tests.helpers.refusals import error_lines

# It prints in Python and past it, in the training process and in the loader's.
RECIPE = """
import os

class Rows(list):
    def __getitem__(self, index):
        print("read", index)
        return super().__getitem__(index)

def get_rows(dataset_config, tokenizer, split):
    print("my function prints")
    os.write(1, b"and so does C\\n")
    return Rows({"input_ids": [5, 6, 7 + index], "labels": [5, 6, 7 + index]} for index in range(10))
"""


@dataclass(frozen=True)
class Printed:
    stdout: str
    stderr: str  # of rank 0
    others: str  # standard output of the other ranks
    events: list[dict[str, Any]]

    def of(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event]


@pytest.fixture(scope="module")
def printed(tiny_model: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Printed:
    folder = tmp_path_factory.mktemp("printed")
    (folder / "rows.py").write_text(RECIPE)
    argv = ["--model_name", str(tiny_model), "--output_dir", str(folder / "run")]
    argv += [
        "--dataset",
        f"{folder}/rows.py:get_rows",
        "--batching_strategy",
        "padding",
        "--batch_size_training",
        "1",
        "--num_epochs",
        "2",
    ]
    argv += ["--gradient_accumulation_steps", "2", "--limit_train_batches", "3", "--num_workers_dataloader", "1"]
    argv += ["--lr_scale_with_world_size", "linear", "--lr", "1e-3", "--print_memory", "--log_format", "json"]
    first, *others = process_group.train(argv, 2)
    return Printed(first.stdout, first.stderr, "".join(o.stdout for o in others), read_metrics(folder / "run"))


def test_standard_output_holds_the_events_and_nothing_else(printed: Printed) -> None:
    assert [json.loads(line) for line in printed.stdout.splitlines()] == printed.events
    assert printed.events[0]["event"] == "start"
    assert printed.events[-1]["status"] == "finished"
    assert printed.others == ""
    for words in ("my function prints", "and so does C", "step 1/4 | ", "finished: "):
        assert words in printed.stderr
    assert not error_lines(printed.stderr)


def test_limited_epochs_take_whole_steps_and_then_the_rest(printed: Printed) -> None:
    """Three micro-batches of each rank at two a step: four rows of ten, then two."""
    assert [(event["epoch"], event["num_tokens"]) for event in printed.of("train")] == [
        (1, 12),
        (1, 6),
        (2, 12),
        (2, 6),
    ]
    assert printed.of("start")[0]["steps_per_epoch"] == 2
    assert "limit_train_batches: an epoch takes 6 of 10 rows" in printed.stderr


def test_the_learning_rate_is_scaled_with_the_ranks(printed: Printed) -> None:
    assert [event["lr"] for event in printed.of("train")] == pytest.approx([2e-3, 2e-3, 1.7e-3, 1.7e-3])
    assert "lr: 0.002, 0.001 scaled with 2 ranks (linear)" in printed.stderr
    assert "AdamW, lr 0.002 step" in printed.stderr


def test_memory_is_printed_for_every_rank_and_phase_of_an_observed_step(printed: Printed) -> None:
    tables = re.findall(r"memory at step (\d+), GiB:\n(rank .*)\n((?: +\d .*\n)+)", printed.stderr)
    observed = sorted({event["step"] for event in printed.of("memory")})
    assert [int(step) for step, _, _ in tables] == observed == [1, 2, 4]
    for step, head, body in tables:
        names = re.split("  +", head)
        rows = [dict(zip(names, re.split("  +", row.strip()), strict=True)) for row in body.splitlines()]
        events = [event for event in printed.of("memory") if event["step"] == int(step)]
        assert [(int(row["rank"]), row["phase"]) for row in rows] == [(e["rank"], e["phase"]) for e in events]
        for row, event in zip(rows, events, strict=True):
            assert row["reserved"] == "-", "a CPU has no allocator"
            assert int(row["retries"]) == event["num_alloc_retries"]
            assert row["peak"] == f"{event['peak_allocated_gib']:.3f}"
            assert float(row["host peak"]) >= float(row["host"]) == pytest.approx(event["host_rss_gib"], abs=1e-3)
            for name in ("params", "grads", "optimizer", "activations", "other", "allocated"):
                assert row[name] == f"{event[f'{name}_gib']:.3f}"


def test_each_epoch_has_a_line_and_all_have_their_averages(printed: Printed) -> None:
    number = r"(\d+\.\d+)"
    names = ("train_perplexity", "train_epoch_loss", "eval_perplexity", "eval_epoch_loss")
    lines = re.findall(
        r"^\S+ Epoch (\d+): " + ", ".join(f"{name}={number}" for name in names) + rf", epoch time {number}s$",
        printed.stderr,
        re.MULTILINE,
    )
    epochs = printed.of("epoch")
    assert [(int(line[0]), *map(float, (line[2], line[4], line[5]))) for line in lines] == [
        (e["epoch"], *(pytest.approx(e[n], abs=0.05) for n in ("train_loss", "eval_loss", "seconds"))) for e in epochs
    ]
    (averages,) = re.findall(r"^averages over 2 epochs: (.*)$", printed.stderr, re.MULTILINE)
    found = {name: float(value) for name, value in (part.split("=") for part in averages.split(", "))}
    assert list(found)[:4] == ["avg_train_prep", "avg_train_loss", "avg_eval_prep", "avg_eval_loss"]
    assert found["avg_train_loss"] == pytest.approx(fmean(e["train_loss"] for e in epochs), abs=1e-4)
    assert found["avg_eval_loss"] == pytest.approx(fmean(e["eval_loss"] for e in epochs), abs=1e-4)
    assert found["avg_epoch_time"] == pytest.approx(fmean(e["seconds"] for e in epochs), abs=1e-4)
    assert found["avg_checkpoint_time"] > 0


def test_the_end_names_train_time_and_peak_memory_in_a_line(printed: Printed) -> None:
    (line,) = re.findall(r"^train time (\S+) of (\S+) \| peak memory (.*)$", printed.stderr, re.MULTILINE)
    assert line[0] <= line[1]
    assert re.fullmatch(r"[\d.]+( to [\d.]+)? GiB, host [\d.]+( to [\d.]+)?, over 2 ranks", line[2])


def test_ranks_are_announced_as_they_join(printed: Printed) -> None:
    assert "rank 1 joined: 2 of 2 ranks are here" in printed.stderr
