"""Steps looked at closely: counted FLOPs against a formula by hand, traces, and runs that are too short for either."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from configs.tracking import TrackingConfig
from data.batches.counts import BatchCounts
from ranks.environment import read_environment
from ranks.process_group import start_process_group
from reporting.flop_counter import attention_formulas
from reporting.profiling import step_recorder
from tests.helpers.limited_files import files_limited_to
from tests.helpers.pairwise import keep_fast
from tests.helpers.processes import ProcessGroup, log_lines, read_metrics, train_events
from tests.helpers.refusals import error_lines
from tests.helpers.tracking_files import trace_events
from utils.printing import print_line

# Eight rows of ten tokens, each but a row's first learned; four rows make a step.
RECIPE = """
def get_rows(dataset_config, tokenizer, split):
    rows = [[(7 * index + 3 * place) % 500 + 3 for place in range(10)] for index in range(8)]
    return [{"input_ids": ids, "labels": ids} for ids in rows]
"""
LAYERS, ROWS, TOKENS, LEARNED = 2, 4, 40, 36
DOWN = 32 * 64
LAYER = 4 * 32 * 32 + 2 * 32 * 64 + DOWN
HEAD = 600 * 32


def attention(products: int) -> int:
    """FLOPs of so many products of queries and keys, or of scores and values: 4 heads of 8, 55 causal pairs a row."""
    return LAYERS * ROWS * products * 2 * 4 * 8 * 55


def rotary() -> int:
    """FLOPs of the products of positions and frequencies, which transformers forms as matrices before 5.23."""
    config = LlamaConfig(hidden_size=32, num_attention_heads=4)
    with FlopCounterMode(display=False) as counter:
        LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(10).expand(ROWS, 10))
    return counter.get_total_flops()


# Forward, input gradients, weight gradients; and a fused attention forms its scores again in backward.
ONCE = 6 * TOKENS * LAYERS * LAYER + 6 * LEARNED * HEAD + attention(2 + 5) + rotary()
# Recomputing a layer ends with the last tensor that backward needs, which is the input of its last matrix.
LAYERS_AGAIN = 2 * TOKENS * LAYERS * (LAYER - DOWN) + attention(2)

COUNTED = {
    "nothing recomputed": (1, "--batch_size_training 4", ONCE),
    "layers recomputed": (1, "--batch_size_training 4 --activation_checkpointing full", ONCE + LAYERS_AGAIN),
    "head in chunks": (1, "--batch_size_training 4 --loss_chunk_size 20", ONCE),
    "accumulated": (1, "--batch_size_training 1 --gradient_accumulation_steps 4", ONCE),
    "FULL_SHARD": (2, "--batch_size_training 2 --enable_fsdp", ONCE),
    "DDP": (2, "--batch_size_training 2", ONCE),
}


def flags(model: Path, folder: Path, *given: str) -> list[str]:
    recipe = folder.parent / "recipe.py"
    recipe.write_text(RECIPE)
    words = ["--model_name", str(model), "--output_dir", str(folder), "--dataset", f"{recipe}:get_rows"]
    words += ["--batching_strategy", "padding", "--pad_to_multiple_of", "1"]  # the ten tokens of a row, and no padding
    words += ["--run_validation", "False", "--save_model", "False"]
    return [*words, "--num_workers_dataloader", "0", *given]


@pytest.mark.parametrize("case", keep_fast(COUNTED, ["nothing recomputed", "accumulated", "FULL_SHARD"]))
def test_counted_flops_are_those_by_hand(
    case: str, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    ranks, given, expected = COUNTED[case]
    # Three steps, the fewest that --flop_counter takes.
    words = ["--flop_counter", "--num_epochs", "2", "--max_train_step", "3", *given.split()]
    argv = flags(tiny_model, tmp_path / "run", *words)
    printed = process_group.train(argv, ranks)[0].stdout
    (line,) = [line for line in printed.splitlines() if "flop counter | " in line]
    notes = yaml.safe_load((tmp_path / "run/run.yaml").read_text())["flop_counter"]
    assert notes["step"] == 3
    assert notes["counted_flops_per_device"] * ranks == expected
    step = train_events(tmp_path / "run")[2]
    model_flops = step["model_tflops_per_device"] * 1e12 * step["step_seconds"]
    assert notes["model_flops_per_device"] == pytest.approx(model_flops)
    found = re.search(
        r"flop counter \| step 3 \| counted (\S+) TFLOP per device, (\S+) TFLOP/s \(.*\) "
        r"\| model (\S+) TFLOP per device \| counted / model (\S+)",
        line,
    )
    counted = notes["counted_flops_per_device"]
    figures = [counted, counted / notes["step_seconds"], model_flops, counted / model_flops * 1e12]
    assert [float(text) * 1e12 for text in found.groups()] == pytest.approx(figures, rel=1e-3)


def test_counting_changes_no_figure_and_happens_once(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    losses = {}
    for name, given in {"plain": (), "counted": ("--flop_counter", "--flop_counter_start", "1")}.items():
        argv = flags(tiny_model, tmp_path / name, "--enable_fsdp", "--batch_size_training", "2", *given)
        printed = process_group.train(argv, 1)[0].stdout
        assert printed.count("flop counter | step 1 |") == printed.count("flop counter | ") == len(given) // 2
        losses[name] = [(event["loss"], event["grad_norm"]) for event in train_events(tmp_path / name)]
    assert losses["counted"] == losses["plain"]


class NoFlops:
    def count(self, counts: BatchCounts) -> float:
        return 0.0


def count_where_run_yaml_cannot_be_written(folder: Path) -> None:
    env = read_environment()
    start_process_group(env)
    tracking = TrackingConfig(flop_counter=True, flop_counter_start=1)
    record = step_recorder(tracking, env, folder, NoFlops(), print_line)
    with files_limited_to(2000):
        for step in (1, 2):
            with record(step, BatchCounts(1, 1, 1)):
                torch.ones(2, 3) @ torch.ones(3, 4)


def test_figures_that_the_disk_refuses_are_printed_and_the_run_goes_on(
    process_group: ProcessGroup, tmp_path: Path
) -> None:
    earlier = f"command: {'a' * 2000}\n"
    (tmp_path / "run.yaml").write_text(earlier)
    (outcome,) = process_group.train(partial(count_where_run_yaml_cannot_be_written, tmp_path), 1)
    counted, refused = log_lines(outcome.stdout)
    assert counted.startswith("flop counter | step 1 | counted 4.8e-11 TFLOP per device, ")
    said = "flop counter: run.yaml cannot be written (File too large); it lacks these figures, and the run goes on"
    assert refused == said
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"run.yaml": earlier}


@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_grouped_heads_is_counted_by_query_heads(causal: bool) -> None:
    """The GPU's kernels, on tensors without data; torch before 2.13 has no formula that takes them."""
    query = torch.empty(3, 8, 16, 32, device="meta", dtype=torch.bfloat16)
    key = torch.empty(3, 2, 16, 32, device="meta", dtype=torch.bfloat16)
    with FlopCounterMode(display=False, custom_mapping=attention_formulas()) as counter:
        torch.ops.aten._scaled_dot_product_flash_attention(query, key, key, 0.0, causal)
    pairs = 16 * 17 // 2 if causal else 16 * 16
    assert counter.get_total_flops() == 2 * 2 * 3 * 8 * 32 * pairs


# Traces


def test_a_trace_goes_where_it_is_asked_for_and_no_step_after_it_is_recorded(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    given = ["--use_profiler", "--profiler_dir", str(tmp_path / "traces/here"), "--num_epochs", "5"]
    process_group.train(flags(tiny_model, tmp_path / "run", *given), 1)
    assert not (tmp_path / "run/profiler").exists()
    (file,) = (tmp_path / "traces/here").iterdir()
    updates = [event for event in trace_events(file) if is_update(event)]
    assert len(updates) == 3
    assert len(train_events(tmp_path / "run")) == 10


def is_update(event: dict[str, Any]) -> bool:
    return event["name"].startswith("Optimizer.step#AdamW") and event["cat"] == "user_annotation"


def test_a_run_that_fails_leaves_no_profiler_to_the_shortest_run_that_can_be_traced(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    failing = flags(tiny_model, tmp_path / "a", "--use_profiler", "--optimizer", "SGD", "--lr", "1e18")
    assert process_group.run([*failing, "--batch_size_training", "1"], 1)[0].status == 1
    assert read_metrics(tmp_path / "a")[-1]["status"] == "failed"
    # In the same process: only one profiler can be on.
    shortest = ("--use_profiler", "--batch_size_training", "1", "--max_train_step", "7")
    process_group.train(flags(tiny_model, tmp_path / "b", *shortest), 1)
    assert list((tmp_path / "b/profiler").iterdir())


# Refusals


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--use_profiler --max_train_step 6", ["--use_profiler", "6 optimizer steps", "--max_train_step"]),
        ("--use_profiler --num_epochs 3", ["--use_profiler", "6 optimizer steps", "more than 6", "--num_epochs"]),
        ("--flop_counter --num_epochs 1", ["--flop_counter_start", "2 optimizer steps", "step 3", "--num_epochs"]),
        ("--flop_counter --flop_counter_start 9 --max_train_step 5", ["5 optimizer steps", "step 9"]),
        ("--use_profiler --profiler_dir /proc/version/traces", ["--profiler_dir", "/proc/version"]),
    ],
)
def test_what_would_never_be_recorded_is_refused(
    given: str, named: list[str], tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    argv = flags(tiny_model, tmp_path / "run", "--batch_size_training", "4", *given.split())
    outcome = process_group.run(argv, 1)[0]
    assert outcome.status == 2
    (line,) = error_lines(outcome.stderr)
    for name in named:
        assert name in line
    assert not (tmp_path / "run").exists()
