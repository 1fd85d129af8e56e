"""What a run writes down: the events' keys, and counts made by hand."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import subprocess
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from reporting.end_summary import end_figures
from reporting.instruments import DataWait
from reporting.llama_recipes_lists import write_metrics_data
from reporting.log_line import perplexity
from reporting.metrics_file import MetricsFile, keep_until
from reporting.report.run_files import read_run
from reporting.trackers import Trackers
from resolving.killed import how_it_was_killed
from tests.helpers.contract import KEYS
from tests.helpers.limited_files import files_limited_to
from tests.helpers.processes import ProcessGroup, read_metrics
from utils import software

GIB = 2**30
# Nine documents of 10 tokens, of which the last i + 1 are learned; three packed rows of three.
RECIPE = """
def get_custom_dataset(dataset_config, tokenizer, split):
    rows = []
    for index in range(9 if split == "train" else 4):
        ids = [(7 * index + 3 * place) % 500 + 3 for place in range(10)]
        rows.append({"input_ids": ids, "labels": [-100] * (9 - index) + ids[9 - index:]})
    return rows
"""
LEARNED = [1, 2, 3, 4, 5, 6, 7, 8, 9]  # of the last document all ten are given, but nothing precedes its first


@dataclass(frozen=True)
class Run:
    folder: Path
    events: list[dict[str, Any]]

    def of(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event]


def start(group: ProcessGroup, model: Path, folder: Path, ranks: int, *flags: str, evaluates: bool = True) -> Run:
    recipe = folder.parent / "recipe.py"
    recipe.write_text(RECIPE)
    argv = ["--model_name", str(model), "--output_dir", str(folder), "--dataset", f"{recipe}:get_custom_dataset"]
    argv += ["--num_workers_dataloader", "0", "--num_epochs", "2", "--save_model", "False", *flags]
    argv += ["--eval_before_training", "--eval_every_steps", "1"] if evaluates else ["--run_validation", "False"]
    group.train(argv, ranks)
    return Run(folder, read_metrics(folder))


@pytest.fixture(scope="module")
def packed(tiny_model: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks, one row each: two steps an epoch, of two rows and of one."""
    folder = tmp_path_factory.mktemp("packed") / "run"
    flags = ("--context_length", "30", "--batch_size_training", "1", "--save_metrics", "--gamma", "0.5", "--lr", "1e-3")
    return start(process_group, tiny_model, folder, 2, *flags)


@pytest.fixture(scope="module")
def padded(tiny_model: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks, two rows each, two micro-batches a step: two steps an epoch, of eight rows and of one."""
    folder = tmp_path_factory.mktemp("padded") / "run"
    flags = ("--batching_strategy", "padding", "--batch_size_training", "2", "--gradient_accumulation_steps", "2")
    return start(process_group, tiny_model, folder, 2, *flags, evaluates=False)


def test_every_event_has_the_keys_that_were_promised_and_no_others(packed: Run) -> None:
    assert {event["event"] for event in packed.events} == set(KEYS)
    for event in packed.events:
        assert sorted(event) == sorted(["event", "time", *KEYS[event["event"]].split()])


def test_figures_are_numbers_and_never_strings(packed: Run) -> None:
    for event in packed.events:
        for key, value in event.items():
            if key in ("event", "phase", "status", "time"):
                assert isinstance(value, str)
            else:
                assert value is None or type(value) in (int, float), f"{event['event']}.{key}: {value!r}"


def test_every_event_says_when_it_was_written(packed: Run) -> None:
    times = [datetime.fromisoformat(event["time"]) for event in packed.events]
    assert times == sorted(times)
    assert all(time.utcoffset() is not None for time in times)
    steps = [event for event in packed.events if event["event"] == "train"]
    apart = (datetime.fromisoformat(steps[-1]["time"]) - datetime.fromisoformat(steps[0]["time"])).total_seconds()
    assert apart >= sum(event["step_seconds"] for event in steps[1:]) - 0.1


def test_counts_at_the_start(packed: Run, padded: Run, tiny_model: Path) -> None:
    num_parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tiny_model).parameters())
    wanted = {"event": "start", "world_size": 2, "num_train_samples": 9, "steps_per_epoch": 2, "num_steps": 4}
    wanted |= {"num_parameters": num_parameters, "num_trainable_parameters": num_parameters}
    starts = [{key: value for key, value in run.events[0].items() if key != "time"} for run in (packed, padded)]
    assert starts[0] == wanted | {"num_eval_samples": 4, "num_train_rows": 3}
    assert starts[1] == wanted | {"num_eval_samples": 0, "num_train_rows": 9}


def test_one_line_per_optimizer_step_counted_from_1(packed: Run, padded: Run) -> None:
    for run in (packed, padded):
        assert [(event["step"], event["epoch"]) for event in run.of("train")] == [(1, 1), (2, 1), (3, 2), (4, 2)]


def test_tokens_are_counted_over_all_ranks_and_micro_batches_without_padding(packed: Run, padded: Run) -> None:
    assert [event["num_tokens"] for event in packed.of("train")] == [60, 30, 60, 30]
    assert [event["num_tokens"] for event in padded.of("train")] == [80, 10, 80, 10]
    for run in (packed, padded):
        learned = [event["num_label_tokens"] for event in run.of("train")]
        assert learned[0] + learned[1] == learned[2] + learned[3] == sum(LEARNED)
    assert padded.of("train")[1]["num_label_tokens"] in LEARNED


def test_the_learning_rate_is_the_one_that_the_step_used(packed: Run) -> None:
    assert [event["lr"] for event in packed.of("train")] == pytest.approx([1e-3, 1e-3, 5e-4, 5e-4])


def test_evaluations_stand_where_they_were_asked_for(packed: Run) -> None:
    assert [(event["step"], event["epoch"]) for event in packed.of("eval")] == [(0, 0), (1, 1), (2, 1), (3, 2), (4, 2)]
    assert {event["num_label_tokens"] for event in packed.of("eval")} == {1 + 2 + 3 + 4}


def test_rates_follow_from_counts_and_seconds(packed: Run, padded: Run) -> None:
    for event in packed.of("train") + padded.of("train"):
        rate = event["num_tokens"] / event["step_seconds"]
        assert event["tokens_per_second"] == pytest.approx(rate)
        assert event["tokens_per_second_per_device"] == pytest.approx(rate / 2)
        assert 0 <= event["data_wait_seconds"] < event["step_seconds"]
        assert event["perplexity"] == pytest.approx(math.exp(event["loss"]))


@pytest.mark.parametrize(("previous_ended", "counts"), [(9.0, 2.0), (10.5, 1.5), (12.0, 0.0), (13.0, 0.0)])
def test_a_wait_for_data_counts_after_the_end_of_the_previous_step(previous_ended: float, counts: float) -> None:
    assert DataWait(began=10.0, seconds=2.0).seconds_after(previous_ended) == counts


def test_epochs_and_the_end_sum_up_the_steps(packed: Run) -> None:
    steps, evals = packed.of("train"), packed.of("eval")
    for index, epoch in enumerate(packed.of("epoch")):
        own = steps[2 * index : 2 * index + 2]
        mean = sum(e["loss"] * e["num_label_tokens"] for e in own) / sum(e["num_label_tokens"] for e in own)
        assert epoch["epoch"] == index + 1
        assert epoch["train_loss"] == pytest.approx(mean)
        assert epoch["eval_loss"] == evals[2 * index + 2]["loss"]
        assert epoch["seconds"] >= sum(event["step_seconds"] for event in own)
    end = packed.events[-1]
    assert (end["event"], end["status"], end["step"]) == ("end", "finished", 4)
    assert end["best_eval_loss"] == min(event["loss"] for event in evals[1:])
    assert end["peak_allocated_gib"] == max(event["peak_allocated_gib"] for event in packed.of("memory"))


def test_a_run_without_evaluation_says_so_with_null(padded: Run) -> None:
    assert padded.of("eval") == []
    assert [event["eval_loss"] for event in padded.of("epoch")] == [None, None]
    assert padded.events[-1]["best_eval_loss"] is None


def test_model_flops_are_those_of_the_formula(packed: Run, padded: Run) -> None:
    """Tied Llama: 2 layers of 4 x 32 x 32 + 3 x 32 x 64 weights, a head of 600 x 32; 55 pairs per document and head."""
    layers, head = 2 * (4 * 32 * 32 + 3 * 32 * 64), 600 * 32
    per_document = 10 * 6 * layers + 3 * 55 * 4 * 32 * 2
    for event in packed.of("train") + padded.of("train"):
        flops = event["model_tflops_per_device"] * 1e12 * event["step_seconds"] * 2
        of_head = 6 * head * event["num_label_tokens"]  # only where something is learned
        assert flops == pytest.approx(event["num_tokens"] / 10 * per_document + of_head, rel=1e-6)


def test_save_metrics_writes_the_eight_lists(packed: Run, padded: Run) -> None:
    lists = json.loads((packed.folder / "metrics_data.json").read_text())
    losses = {
        "train_step_loss": [event["loss"] for event in packed.of("train")],
        "train_epoch_loss": [event["train_loss"] for event in packed.of("epoch")],
        "val_step_loss": [event["loss"] for event in packed.of("eval") if event["step"] > 0],
        "val_epoch_loss": [event["eval_loss"] for event in packed.of("epoch")],
    }
    assert {name: lists[name] for name in losses} == losses
    perplexities = {name.replace("loss", "perplexity"): [math.exp(x) for x in xs] for name, xs in losses.items()}
    assert set(lists) == set(losses) | set(perplexities)
    for name, values in perplexities.items():
        assert lists[name] == pytest.approx(values)
    assert not (padded.folder / "metrics_data.json").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_written_as_null(value: float, tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.write("eval", step=1, loss=value, perplexity=2.5)
    metrics.write("eval", step=2, loss=1.0, perplexity=math.e)
    first, second = ({key: event[key] for key in ("loss", "perplexity")} for event in metrics.read())
    assert first == {"loss": None, "perplexity": 2.5}
    assert second == {"loss": 1.0, "perplexity": math.e}


def test_a_rank_without_a_file_writes_and_reads_nothing() -> None:
    metrics = MetricsFile(None)
    metrics.write("eval", step=1)
    assert metrics.read() == []


def test_a_loss_that_is_not_finite_neither_stops_the_end_nor_the_lists(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    events = [
        {"event": "train", "step": 1, "loss": 800.0},
        {"event": "eval", "step": 1, "loss": None},
        {"event": "epoch", "train_loss": 800.0, "eval_loss": None},
    ]
    assert end_figures(events) == {"peak_allocated_gib": None, "best_eval_loss": None}
    write_metrics_data(tmp_path, events)
    lists = json.loads((tmp_path / "metrics_data.json").read_text(), parse_constant=refuse)
    assert lists["val_step_loss"] == [None]
    assert lists["train_step_perplexity"] == [None]


def test_perplexity_overflows_to_infinity() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(5000.0) == math.inf


def written(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_lines_that_the_disk_refuses_wait_and_come_in_their_order(tmp_path: Path) -> None:
    said: list[str] = []
    folder = tmp_path / "run"
    metrics = MetricsFile(folder / "metrics.jsonl", Trackers(said.append))
    for step in range(1, 4):
        metrics.write("train", step=step)
    assert metrics.num_missing() == 3
    assert [event["step"] for event in metrics.read()] == [1, 2, 3]
    folder.mkdir()
    metrics.write("end", step=4)
    assert written(folder / "metrics.jsonl") == [1, 2, 3, 4]
    assert (metrics.num_missing(), metrics.refusal) == (0, "")
    (line,) = said
    assert line.endswith("cannot be written (No such file or directory); its lines wait until it can be")


class FullAtItsEnd(io.FileIO):
    """A file of a server that tells of a full disk when the file is closed."""

    def close(self) -> None:
        was_open = not self.closed
        super().close()
        if was_open:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_lines_that_the_disk_refuses_at_the_files_end_are_not_written_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.write("train", step=1)
    with monkeypatch.context() as patched:
        patched.setattr("reporting.metrics_file.open", lambda fd, *_, **__: FullAtItsEnd(fd, "rb+"), raising=False)
        metrics.write("train", step=2)
    assert written(tmp_path / "metrics.jsonl") == [1]
    assert metrics.num_missing() == 1
    metrics.write_waiting()
    assert written(tmp_path / "metrics.jsonl") == [1, 2]


def test_lines_wait_in_bounded_memory_and_the_end_always_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reporting.metrics_file.MOST_WAITING_BYTES", 300)
    folder = tmp_path / "run"
    metrics = MetricsFile(folder / "metrics.jsonl", Trackers(lambda line: None))
    for step in range(10, 20):
        metrics.write("train", step=step)  # 72 bytes each
    assert (metrics.num_lost, metrics.num_missing()) == (6, 10)
    metrics.write("end", step=20)
    folder.mkdir()
    metrics.write_waiting()
    assert written(folder / "metrics.jsonl") == [10, 11, 12, 13, 20]
    assert metrics.num_missing() == metrics.num_lost == 6


@pytest.mark.parametrize("torn", ['{"event": "tr', "x" * 10_000])
def test_a_torn_line_is_cut_off_before_the_next_one_is_written(torn: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for before in ("", '{"event": "train", "step": 1}\n'):
        path.write_text(before + torn)
        MetricsFile(path).write("train", step=2)
        assert re.fullmatch(re.escape(before) + r'{"event": "train", "step": 2, "time": "[^"]+"}\n', path.read_text())


def test_lines_that_cannot_be_cut_back_are_all_there_and_the_file_is_named(tmp_path: Path) -> None:
    """A resumed run that may not write has lost nothing of what the earlier session recorded."""
    path = tmp_path / "metrics.jsonl"
    for step in range(1, 6):
        MetricsFile(path).write("train", step=step)
    before = path.read_text()
    with files_limited_to(50), pytest.raises(OSError, match="cannot be written") as refused:
        keep_until(path, path, step=3, epoch=1)
    assert str(refused.value) == f"{path} cannot be written (File too large)"
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"metrics.jsonl": before}
    keep_until(path, path, step=3, epoch=1)
    assert written(path) == [1, 2, 3]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


NO_EVENTS: list[Any] = [
    [], 3, None, "text", {}, {"step": 1}, {"event": None, "step": 1}, {"event": ["train"], "step": 1},
    {"event": "train"}, {"event": "train", "step": "1"}, {"event": "eval", "step": None},
    {"event": "eval", "step": True}, {"event": "sample", "step": -1}, {"event": "checkpoint", "step": 1.5},
    {"event": "epoch"}, {"event": "epoch", "epoch": {}}, {"event": "memory", "step": 1, "rank": "0", "phase": "end"},
    {"event": "memory", "step": 1, "rank": 0, "phase": ["after_forward"]}, {"event": "memory", "step": 1, "rank": 0},
]  # fmt: skip


def test_lines_that_are_no_events_are_left_out_by_all_readers_and_counted(tmp_path: Path) -> None:
    """A line that was written halfway is not counted: every kill may leave one."""
    events = [
        {"event": "start", "num_steps": 5},
        {"event": "train", "step": 1, "loss": "of any kind"},
        {"event": "of a later version", "rank": 0},
        {"event": "memory", "step": 2, "rank": 0, "phase": "after_forward", "host_rss_gib": 1.5},
    ]
    path = tmp_path / "metrics.jsonl"
    bad = [*map(json.dumps, NO_EVENTS), "", "[" * 100_000, "\x00\ufffd", '{"event": "tr']
    lines = [*bad, *map(json.dumps, events)]
    path.write_text("\n".join([*lines, '{"event": "train", "st']), encoding="utf-8")
    (tmp_path / "run.yaml").write_text("machine: another\n")
    assert MetricsFile(path).read() == events
    (line,) = how_it_was_killed(tmp_path)
    assert line.startswith("resume: the session before ended without a word after step 1, as if it was killed")
    assert line.endswith("; host memory of its ranks when it was last measured: rank 0 1.50 GiB")
    assert read_run(tmp_path).num_unread == len(bad)
    assert keep_until(path, path, step=3, epoch=1) == len(bad)
    assert [json.loads(line) for line in path.read_text().splitlines()] == events
    assert keep_until(path, path, step=3, epoch=1) == 0


def test_naming_the_commit_leaves_the_checkout_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose time changed is read anew, and the index not written."""
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@b", "-C", str(tmp_path)]
    file = tmp_path / "code.py"
    file.write_text("1")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(software, "_ROOT", tmp_path)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    os.utime(file, (1, 1))
    before = (tmp_path / ".git/index").read_bytes()
    assert software.git_commit() == commit
    file.write_text("2")
    assert software.git_commit() == f"{commit}-dirty"
    assert (tmp_path / ".git/index").read_bytes() == before
