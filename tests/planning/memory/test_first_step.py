"""The first step finds no optimizer states: if its micro-batch is the fullest, a plan does not count both together."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig

from configs.flags import parse_flags
from data.batches.order import epoch_order
from finetuning import train_step
from planning.hardware import parse_hardware
from planning.memory.memory_plan import MemoryPlan
from planning.memory.traced_step import TrainStep
from planning.planned_run import plan_of
from resolving.data_facts import DataFacts
from tests.helpers.processes import ProcessGroup
from tests.helpers.refusals import dialogues, write_lines
from tests.helpers.small_device import on_small_device

NUM_STEPS = 4  # so few are not sorted by length
FLAGS = ["--seed", "1", "--num_epochs", "1", "--batching_strategy", "padding", "--batch_size_training", "2"]
FLAGS += ["--activation_checkpointing", "off", "--compile", "False"]


def rows_of_step(step: int, num_rows: int) -> np.ndarray:
    """The indices of the rows that a step takes, [num_rows], in a run of NUM_STEPS steps with FLAGS."""
    lengths = np.zeros(NUM_STEPS * num_rows)
    order = epoch_order(len(lengths), seed=1, epoch=0, global_batch_size=num_rows, lengths=lengths)
    return order.reshape(NUM_STEPS, num_rows)[step]


@pytest.mark.parametrize("wide_step", [0, 1])
def test_a_run_needs_what_was_planned_whichever_step_is_the_widest(
    wide_step: int, tiny_model: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    rows = dialogues(NUM_STEPS * 2)
    for row in rows_of_step(wide_step, 2):
        rows[row]["dialogue"] *= 6
    write_lines(tmp_path / "train.jsonl", rows)
    flags = ["--model_name", str(tiny_model), "--samsum_dataset.data_path", str(tmp_path), "--run_validation", "False"]
    flags += ["--mixed_precision", "False", "--save_model", "False", "--num_workers_dataloader", "0"]
    process_group.train(on_small_device([*flags, *FLAGS, "--output_dir", str(tmp_path / "run")]), 1)
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    assert plan["peak_gib"] == pytest.approx(plan["measured"]["peak_gib"], rel=0.05)
    assert plan["micro_batch"]["widths"] == [48 if wide_step == 0 else 144]
    source = "the fullest of the run's 4 steps"
    if wide_step == 0:
        source += " but the first, which has 2 x 144 tokens and no optimizer states yet"
    assert plan["micro_batch"]["source"] == source


@pytest.mark.parametrize("narrow", [64, 448])
def test_of_the_first_step_and_the_fullest_after_it_the_one_counts_that_needs_more(narrow: int, tmp_path: Path) -> None:
    shape = {"vocab_size": 2000, "hidden_size": 256, "intermediate_size": 1376, "num_hidden_layers": 4}
    LlamaConfig(**shape, num_attention_heads=8, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    config = parse_flags(["--model_name", str(tmp_path), "--enable_fsdp", "--context_length", "512", *FLAGS])

    def planned(lengths: np.ndarray, step: TrainStep | None = None) -> MemoryPlan:
        return plan_of(config, parse_hardware("2xA100-80GB"), DataFacts(lengths=(lengths,)), train_step=step).memory

    lengths = np.full(NUM_STEPS * 4, narrow)
    all_narrow, all_wide = planned(lengths), planned(np.full_like(lengths, 512))
    lengths[rows_of_step(0, 4)] = 512
    closed, traced = planned(lengths), planned(lengths, train_step)
    states = closed.phases["optimizer_step"].optimizer
    for phase in ("forward", "backward"):
        needs = all_narrow.phases[phase].total, all_wide.phases[phase].total - states
        assert closed.phases[phase].total == pytest.approx(max(needs))
        assert needs.index(max(needs)) == (1 if narrow == 64 else 0)
        assert traced.phases[phase].total == pytest.approx(closed.phases[phase].total, rel=0.05)
    assert (closed.made_by, traced.made_by) == ("closed form", "trace")
