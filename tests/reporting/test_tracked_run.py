"""One run with everything that watches it switched on: all that it leaves says the same."""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from reporting.plan_figures import read_plan_figures
from reporting.trackers import WandB
from tests.helpers.processes import ROOT, ProcessGroup, free_port, log_lines, read_metrics, run_command
from tests.helpers.refusals import error_lines
from tests.helpers.tracking_files import (
    tensorboard_hyperparameters,
    tensorboard_scalars,
    trace_events,
    wandb_history,
    wandb_records,
)

KEY = "0123456789abcdef" * 3
RECIPE = """
def get_rows(dataset_config, tokenizer, split):
    ids = lambda index: [(7 * index + 3 * place) % 500 + 3 for place in range(10)]
    return [{"input_ids": ids(index), "labels": ids(index)} for index in range(32 if split == "train" else 5)]
"""


def flags(model: Path, folder: Path, *given: str) -> list[str]:
    recipe = folder.parent / "recipe.py"
    recipe.write_text(RECIPE)
    words = ["--model_name", str(model), "--output_dir", str(folder), "--dataset", f"{recipe}:get_rows"]
    return [*words, "--batching_strategy", "padding", "--num_workers_dataloader", "0", *given]


@dataclass
class Run:
    folder: Path
    events: list[dict[str, Any]]
    done: subprocess.CompletedProcess[str]

    @property
    def figures(self) -> dict[str, dict[int, float]]:
        """The numbers of metrics.jsonl and plan.json by the names and steps that trackers should have."""
        figures = {f"plan/{name}": {0: value} for name, value in read_plan_figures(self.folder).items()}
        step = 0
        for event in self.events[1:]:
            step = event.get("step", step)
            place = event["event"] + (f"/rank{event['rank']}/{event['phase']}" if event["event"] == "memory" else "")
            for name in set(event) - {"event", "step", "rank", "phase", "status", "time"}:
                if event[name] is not None:
                    figures.setdefault(f"{place}/{name}", {})[step] = event[name]
        return figures


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks, eight steps, an evaluation after four."""
    folder = tmp_path_factory.mktemp("tracked") / "run"
    given = ["--use_tensorboard", "--use_wandb", "--use_profiler", "--enable_fsdp", "--max_train_step", "8"]
    given += ["--batch_size_training", "2", "--eval_every_steps", "4", "--eval_before_training", "--lr", "1e-3"]
    secret = {"WANDB_MODE": "offline", "WANDB_API_KEY": KEY}
    done = run_command(*flags(tiny_model, folder, *given), nproc=2, **secret)
    assert done.returncode == 0, done.stderr
    return Run(folder, read_metrics(folder), done)


def test_tensorboard_holds_what_metrics_holds(run: Run) -> None:
    scalars = tensorboard_scalars(run.folder / "tensorboard")
    assert set(scalars) == set(run.figures)
    for name, by_step in run.figures.items():
        assert scalars[name] == pytest.approx(by_step, rel=1e-6), name  # event files hold fp32
    assert len(scalars["train/loss"]) == 8
    assert set(scalars["eval/loss"]) == {0, 4, 8}
    assert "memory/rank1/after_backward/allocated_gib" in scalars


def test_weights_and_biases_offline_holds_what_metrics_holds(run: Run) -> None:
    records = wandb_records(run.folder)
    found: dict[str, dict[int, float]] = {}
    for row in wandb_history(records):
        for name in set(row) - {"step", "_step", "_runtime", "_timestamp"}:
            found.setdefault(name, {})[row["step"]] = row[name]
    assert found == run.figures
    assert [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"] == [0]
    assert f"wandb sync {next(run.folder.glob('wandb/offline-run-*'))}" in run.done.stdout


def test_rouge_and_the_peaks_reach_the_trackers(tiny_model: Path, samples: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    given = ["--model_name", str(tiny_model), "--samsum_dataset.data_path", str(samples), "--output_dir", str(folder)]
    given += ["--eval_generate", "--max_new_tokens", "4", "--max_train_step", "1", "--num_workers_dataloader", "0"]
    done = run_command(*given, "--use_tensorboard", "--use_wandb", "--save_model", "False", WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    run = Run(folder, read_metrics(folder), done)
    names = {"eval/rouge1", "eval/rouge2", "eval/rougeL", "end/peak_allocated_gib", "plan/peak_gib"}
    assert names <= set(run.figures)
    scalars = tensorboard_scalars(folder / "tensorboard")
    rows = wandb_history(wandb_records(folder))
    for name in names:
        assert scalars[name] == pytest.approx(run.figures[name], rel=1e-6)
        assert [{row["step"]: row[name]} for row in rows if name in row] == [run.figures[name]]


def test_settings_are_the_trackers_hyperparameters(run: Run) -> None:
    settings = tensorboard_hyperparameters(run.folder / "tensorboard")
    assert settings["train_config.lr"] == 1e-3
    assert settings["train_config.enable_fsdp"] == "True"
    assert settings["sharding_strategy"] == "FULL_SHARD"
    assert settings["num_steps"] == 8
    (start,) = [r.run for r in wandb_records(run.folder) if r.WhichOneof("record_type") == "run"]
    config = {update.key: yaml.safe_load(update.value_json) for update in start.config.update}
    assert config["train_config"]["lr"] == 1e-3
    assert config["facts"]["num_steps"] == 8
    assert start.display_name == "run"


def test_the_key_is_nowhere(run: Run) -> None:
    assert KEY not in run.done.stdout + run.done.stderr
    files = [file for file in run.folder.rglob("*") if file.is_file()]
    assert len(files) > 8
    assert not [file for file in files if KEY.encode() in file.read_bytes()]


def test_each_rank_leaves_a_trace_of_three_steps(run: Run) -> None:
    for rank in range(2):
        (file,) = (run.folder / "profiler").glob(f"rank{rank}.*.pt.trace.json.gz")
        events = trace_events(file)
        names = [event["name"] for event in events]
        assert len({name for name in names if name.startswith("ProfilerStep#")}) == 3
        updates = [e for e in events if e["name"].startswith("Optimizer.step#AdamW") and e["cat"] == "user_annotation"]
        assert len(updates) == 3
        products = [event["args"] for event in events if event["name"] == "aten::mm"]
        assert [[32, 32], [32, 64]] in [args["Input Dims"] for args in products]  # two rows of ten tokens, padded to 16
        assert any("FSDP::" in name for name in names)
        assert "[memory]" in names
    assert f"profiler | steps 4 to 6 | a trace of each rank in {run.folder / 'profiler'}" in run.done.stdout


# The run's picture


def test_run_yaml_says_what_ran_where_and_how_to_run_it_again(run: Run, tiny_model: Path) -> None:
    notes = yaml.safe_load((run.folder / "run.yaml").read_text())
    parameters = 2 * 600 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    assert 0 < notes["model"].pop("load_seconds") < 600
    assert notes["model"] == {
        "architecture": "LlamaForCausalLM",
        "num_parameters": parameters,
        "num_trainable_parameters": parameters,
        "num_parameters_by_dtype": {"float32": parameters},
    }
    assert notes["data"]["train"] == {
        "num_samples": 32,
        "num_tokens": 320,
        "num_label_tokens": 288,  # nothing precedes a document's first
        **dict.fromkeys(
            ("num_truncated", "num_tokens_cut", "num_too_long", "num_without_label", "num_empty", "num_empty_answers"),
            0,
        ),
        **dict.fromkeys(("num_split", "num_parts", "num_parts_without_label"), 0),
        "lengths": dict.fromkeys(("min", "p50", "p90", "p99", "max"), 10),
        "num_rows": 32,
        "padding_share": 0.375,  # ten of sixteen places
    }
    (group,) = notes["devices"]
    assert group["ranks"] == [0, 1]
    assert group["memory_gib"] == pytest.approx(psutil.virtual_memory().total / 2**30, rel=0.01)
    assert all(0.1 < held < group["memory_gib"] for held in group["host_rss_gib"])
    words = shlex.split(notes["command"])
    assert words[:5] == ["torchrun", "--nnodes", "1", "--nproc_per_node", "2"]
    assert (Path(notes["working_directory"]) / words[5]).samefile(ROOT / "finetuning.py")
    assert words[6:] == run.done.args[run.done.args.index("--model_name") :]


def lines_of(run: Run) -> list[str]:
    return [line.rstrip() for line in log_lines(run.done.stdout)]


def test_the_start_is_one_table_of_plain_lines(run: Run, tiny_model: Path) -> None:
    lines = lines_of(run)
    first = next(index for index, line in enumerate(lines) if line.startswith("model "))
    table = lines[first : lines.index("", first)]
    assert all(len(line) <= 110 for line in table)
    text = " ".join(" ".join(table).split())
    assert re.sub(r"(?<= )\S+(?= \(LlamaForCausalLM\))", "M", text.split(" devices ")[0]) == (
        "model M (LlamaForCausalLM), 59,040 parameters (float32) trained all parameters "
        "layout FULL_SHARD: one copy of the model over 2 ranks, on 1 host "
        "compute fp32, activation checkpointing off, not compiled "
        "optimizer AdamW, lr 0.001 step (gamma 0.85), weight decay 0, no clipping"
    )
    assert text.split(" data ")[1] == (
        "custom_dataset: train 32 samples, 320 tokens, 32 rows; validation 5 samples, 50 tokens, 5 rows "
        "(padding, rows of at most 2048 tokens) steps 8 (8 per epoch) of 4 rows = 2 per micro-batch x 1 x 2 ranks "
        "checkpoints at each epoch's end, every 30 minutes; the last 2 are kept, about 0.68 MiB each"
    )
    subjects = ["model", "trained", "layout", "compute", "optimizer", "devices", "data", "steps", "checkpoints"]
    assert [line.split()[0] for line in table if not line.startswith("    ")] == subjects


def test_the_end_is_a_few_lines_with_the_figures_of_metrics(run: Run) -> None:
    lines = lines_of(run)
    of = {name: [e for e in run.events if e["event"] == name] for name in ("train", "eval", "memory", "end")}
    first, last = of["train"][0]["loss"], of["train"][-1]["loss"]
    assert [line for line in lines if line.startswith(f"train loss {first:.4f} -> {last:.4f} over 8 steps, median ")]
    best = min(of["eval"], key=lambda event: event["loss"])
    assert [line for line in lines if line.startswith("eval loss ") and f"best {best['loss']:.4f} (step " in line]
    peaks = [max(e["peak_allocated_gib"] for e in of["memory"] if e["rank"] == rank) for rank in range(2)]
    low, high = (f"{peak:.3f}" for peak in sorted(peaks))
    of_both = low if low == high else f"{low} to {high}"
    assert [line for line in lines if line.startswith("train time ") and f" | peak memory {of_both} GiB, host " in line]
    seconds = sum(int(part) * 60**place for place, part in enumerate(reversed(clock(lines).split(":"))))
    assert math.isclose(seconds, of["end"][0]["seconds"], abs_tol=1)
    assert f"weights {run.folder / 'model'} (of step {best['step']})" in lines


def clock(lines: list[str]) -> str:
    (line,) = [line for line in lines if line.startswith("train time ")]
    return re.match(r"train time \S+ of (\S+) ", line)[1]


# Where something is missing


def main_without_trackers(argv: list[str], folder: Path) -> int:
    """finetuning.main as if neither tracker were installed, in a folder that holds what an earlier run left."""
    import finetuning

    known = metadata.distributions
    metadata.distributions = lambda **given: (  # type: ignore[assignment]
        iter(()) if given.get("name") in ("tensorboard", "wandb") else known(**given)
    )
    (folder / "wandb").mkdir()  # it can be imported, and is not the package
    os.chdir(folder)
    return finetuning.main(argv)


@pytest.mark.parametrize("flag", ["--use_wandb", "--use_tensorboard"])
def test_a_package_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    flag: str, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    argv = flags(tiny_model, tmp_path / "run", flag)
    (outcome,) = process_group.run(partial(main_without_trackers, argv, tmp_path), 1)
    assert outcome.status == 2
    package = flag.removeprefix("--use_")
    (line,) = error_lines(outcome.stderr)
    assert line.startswith(f"error: {flag}: needs the package {package}; pip install '{package}>=")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("key", [{"WANDB_API_KEY": KEY}, {}], ids=["no network", "no key"])
def test_without_network_or_key_the_run_goes_on_and_is_recorded_offline(
    key: dict[str, str], tiny_model: Path, tmp_path: Path
) -> None:
    away = {"WANDB_BASE_URL": f"http://127.0.0.1:{free_port()}", "WANDB_INIT_TIMEOUT": "3", "HOME": str(tmp_path)}
    given = flags(tiny_model, tmp_path / "run", "--use_wandb", "--max_train_step", "2", "--run_validation", "False")
    done = run_command(*given, **away, **key)
    assert done.returncode == 0, done.stderr
    said = [line for line in log_lines(done.stdout) if line.startswith("Weights & Biases: ")]
    assert len(said) == 2
    assert said[0].endswith("; recording offline")
    assert KEY not in done.stdout + done.stderr
    losses = [row["train/loss"] for row in wandb_history(wandb_records(tmp_path / "run")) if "train/loss" in row]
    assert losses == [event["loss"] for event in read_metrics(tmp_path / "run") if event["event"] == "train"]


def test_a_resumed_run_goes_on_with_its_run_of_weights_and_biases(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the id in run.yaml; a run that replaces it has another."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    given = ["--run_validation", "False", "--save_model", "False", "--save_every_steps", "2"]
    folder = tmp_path / "run"

    def tracked_id() -> str:
        """That of a run of W&B which is opened in the folder now."""
        tracker = WandB(folder, {}, {}, print)
        tracker.close(finished=True)
        assert yaml.safe_load((folder / "run.yaml").read_text())["wandb_run"] == tracker.run.id
        assert any(tracker.run.id in path.name for path in folder.glob("wandb/offline-run-*"))
        return tracker.run.id

    process_group.train(flags(tiny_model, folder, *given, "--max_train_step", "2"), 1)
    first = tracked_id()
    assert tracked_id() == first
    process_group.train(flags(tiny_model, folder, *given, "--max_train_step", "4", "--resume", "auto"), 1)
    assert tracked_id() == first
    process_group.train(flags(tiny_model, folder, *given, "--max_train_step", "2", "--overwrite"), 1)
    assert tracked_id() != first


@pytest.mark.slow
def test_a_failed_run_is_closed_as_failed(tiny_model: Path, tmp_path: Path) -> None:
    given = ["--use_wandb", "--use_tensorboard", "--fsdp_config.optimizer", "SGD", "--lr", "1e18"]
    done = run_command(*flags(tiny_model, tmp_path / "run", *given), WANDB_MODE="offline")
    assert done.returncode == 1
    records = wandb_records(tmp_path / "run")
    assert [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"] == [1]
    (train,) = [event for event in read_metrics(tmp_path / "run") if event["event"] == "train"]
    assert [row["train/loss"] for row in wandb_history(records) if "train/loss" in row] == [train["loss"]]
    scalars = tensorboard_scalars(tmp_path / "run/tensorboard")
    assert scalars["train/loss"] == pytest.approx({1: train["loss"]})
    assert "end/seconds" in scalars
