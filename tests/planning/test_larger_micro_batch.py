"""A larger micro-batch is proposed if the host bounds a run's steps, and a run with it is what the line says."""

from __future__ import annotations

import re

import numpy as np
import pytest
from transformers import LlamaConfig

from benchmarks.runs.shapes import SHAPES
from configs.flags import parse_flags
from data.batches.counts import BatchCounts, causal_pairs
from planning.larger_micro_batch import larger_micro_batch
from planning.machines.hardware import parse_hardware
from planning.planned_run import Plan, plan_of
from resolving.data_facts import DataFacts

SHORT = "--context_length 128 --run_validation False --pure_bf16"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the config.json of four of TinyLlama-1.1B's layers: 0.3 billion parameters."""
    folder = tmp_path_factory.mktemp("models") / "four-layers"
    shape = SHAPES["tinyllama"] | {"num_hidden_layers": 4}
    LlamaConfig(**shape, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return str(folder)


def planned(model: str, given: str, *, memory_gib: float | None = None, data: DataFacts | None = None) -> Plan:
    config = parse_flags(["--model_name", model, *SHORT.split(), *given.split()])
    return plan_of(config, parse_hardware("A100-80GB", device_memory_gib=memory_gib), data)


def speed(plan: Plan) -> float:
    assert plan.time is not None
    return plan.time.tokens_per_second_per_device


def rows_of(num_rows: int) -> DataFacts:
    counts = np.tile(np.array(BatchCounts(100, 100, causal_pairs(100))), (num_rows, 1))
    return DataFacts(lengths=(np.full(num_rows, 100),), counts=counts)


def test_with_accumulation_the_rows_of_a_step_stay_and_the_run_is_as_much_faster_as_the_line_says(model: str) -> None:
    before = planned(model, "--batch_size_training 1 --gradient_accumulation_steps 64")
    line = larger_micro_batch(before, DataFacts())
    assert line is not None
    assert line.endswith(", with the same rows in each step")
    found = re.search(
        r"(--batch_size_training \d+ --gradient_accumulation_steps \d+) would fit and train on tokens (.+) times", line
    )
    assert found is not None
    after = planned(model, found[1])
    assert after.resolved.batches.global_batch_size == before.resolved.batches.global_batch_size == 64
    assert f"{speed(after) / speed(before):.1f}" == found[2]
    assert float(found[2]) > 2
    assert after.memory.verdict == "fits"
    assert larger_micro_batch(after, DataFacts()) is None  # the device bounds it


def test_with_rows_of_a_step_that_a_flag_names_the_line_can_be_added_to_the_command(model: str) -> None:
    rows_of_step = "--global_batch_size 64"
    line = larger_micro_batch(planned(model, f"{rows_of_step} --batch_size_training 1"), DataFacts())
    assert line is not None
    (found,) = re.findall(r"; (--.*) would fit", line)
    after = planned(model, f"{rows_of_step} {found}")
    assert after.resolved.batches.global_batch_size == 64
    assert after.resolved.batches.rows_per_micro_batch > 1


@pytest.mark.parametrize(
    ("flags", "is_proposed"),
    [
        ("--gradient_accumulation_steps 64 --limit_train_batches 640", False),  # they would be other rows
        ("--streaming --max_train_step 50", False),
        ("--streaming --max_train_step 500", True),
    ],
)
def test_the_rest_of_the_run_stays_what_it_is(flags: str, is_proposed: bool, model: str) -> None:
    plan = planned(model, f"--batch_size_training 1 {flags}")
    assert (larger_micro_batch(plan, DataFacts()) is not None) is is_proposed


def test_without_accumulation_the_line_says_that_a_step_has_more_rows(model: str) -> None:
    plan = planned(model, "--batch_size_training 2")
    line = larger_micro_batch(plan, DataFacts())
    assert line is not None
    found = re.search(r"--batch_size_training (\d+) would fit .* with \1 rows in each step instead of 2:", line)
    assert found is not None
    assert larger_micro_batch(plan, DataFacts(), begins=False) is None  # a checkpoint's place is counted in steps
    assert larger_micro_batch(planned(model, "--batch_size_training 2 --global_batch_size 2"), DataFacts()) is None


@pytest.mark.parametrize(("num_rows", "is_proposed"), [(10_000, True), (300, False)])
def test_a_run_keeps_a_hundred_steps(num_rows: int, is_proposed: bool, model: str) -> None:
    data = rows_of(num_rows)
    flags = "--batch_size_training 2 --num_epochs 1 --batching_strategy padding --compile True"
    assert (larger_micro_batch(planned(model, flags, data=data), data) is not None) is is_proposed


def test_none_is_proposed_that_does_not_fit(model: str) -> None:
    flags = "--batch_size_training 1 --gradient_accumulation_steps 64 --activation_checkpointing off"
    plan = planned(model, flags)
    room = plan.memory.peak_gib + plan.memory.overhead_gib
    rows = []
    for share in (1.5, 1.1, 1.05):
        line = larger_micro_batch(planned(model, flags, memory_gib=share * room), DataFacts())
        found = None if line is None else re.search(r"--batch_size_training (\d+)", line)
        rows.append(1 if found is None else int(found[1]))
    assert rows[0] > rows[1] > rows[2] == 1
