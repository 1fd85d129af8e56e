"""The plan of a run whose ranks share rows: each rank's half of the work, of what is kept, and what is exchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.planned_times import plan_model
from benchmarks.runs.shapes import SHAPES
from planning.cost.counted_work import counted_work
from planning.cost.link_speeds import expected_speeds
from planning.cost.time_plan import plan_time
from planning.cost.traffic import exchange_seconds
from planning.machines.hardware import parse_hardware
from planning.memory.row_lengths import RowLengths
from planning.memory.run_memory import plan_memory
from planning.model.planned_model import PlannedModel

WIDTH = 4096
ROWS = RowLengths(1, (WIDTH,), (WIDTH,), packed=True)
FLAGS = ["--pure_bf16", "--context_length", str(WIDTH), "--batch_size_training", "1", "--compile", "False"]


def planned(folder: Path, num_ranks: int, *flags: str) -> PlannedModel:
    hardware = parse_hardware(f"{num_ranks}xH100-80GB")
    return plan_model(folder, SHAPES["tiny"], hardware, [*FLAGS, "--context_parallel_size", str(num_ranks), *flags])


@pytest.mark.parametrize("checkpointing", ["off", "full"])
def test_each_of_two_ranks_has_half_of_the_work_and_of_the_activations(checkpointing: str, tmp_path: Path) -> None:
    card = parse_hardware("H100-80GB").card
    whole, half = (planned(tmp_path, n, "--activation_checkpointing", checkpointing) for n in (1, 2))
    one, other = (counted_work(model, card, 1, (WIDTH,), ROWS) for model in (whole, half))
    assert other.counts.num_tokens == one.counts.num_tokens / 2
    assert other.work.matrix_flops == pytest.approx(one.work.matrix_flops / 2, rel=1e-3)
    assert other.work.attention_flops == pytest.approx(one.work.attention_flops / 2, rel=1e-3)
    of_one, of_other = (plan_memory(model, card, ROWS).phases["forward"].activations for model in (whole, half))
    assert of_other == pytest.approx(of_one / 2, rel=0.05)


def test_exchanges_take_as_long_as_their_bytes(tmp_path: Path) -> None:
    """Queries and outputs of all heads, keys and values of theirs, in bf16; half of it stays where it is."""
    hardware = parse_hardware("2xH100-80GB")
    speeds = expected_speeds(hardware)
    assert speeds is not None
    text = SHAPES["tiny"]
    heads = text["num_attention_heads"]  # as many of keys
    for checkpointing, times in (("off", 2), ("full", 3)):
        model = planned(tmp_path, 2, "--activation_checkpointing", checkpointing)
        counts, _ = counted_work(model, hardware.card, 1, (WIDTH,), ROWS)
        num_bytes = WIDTH / 2 * (3 * heads + heads) * text["hidden_size"] / heads * 2
        seconds = speeds.node.all_gather.seconds(num_bytes, 2)  # of two ranks, which send half of them, too
        found = exchange_seconds(model, counts, speeds, 2)
        assert found == pytest.approx(text["num_hidden_layers"] * times * seconds)
        time = plan_time(model, hardware, counts)
        assert time is not None
        assert time.communication_seconds > found
