"""What a step gathers: SHARD_GRAD_OP keeps it for all of its micro-batches, FULL_SHARD gathers for each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.generated import flags, write_rows
from tests.helpers.pairwise import slow_but
from tests.helpers.processes import ProcessGroup, read_metrics


@pytest.mark.parametrize(("strategy", "times"), slow_but(1, [("SHARD_GRAD_OP", 1), ("FULL_SHARD", 4)]))
def test_weights_are_gathered_once_in_a_step_or_for_each_micro_batch_and_losses_are_the_same(
    strategy: str, times: int, tiny_model: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    data, sent, losses = write_rows(tmp_path), {}, {}
    for rows, number in ((4, 1), (1, 4)):
        argv = ["--enable_fsdp", "--sharding_strategy", strategy, "--context_length", "64", "--max_train_step", "3"]
        argv += ["--batch_size_training", str(rows), "--gradient_accumulation_steps", str(number)]
        argv += ["--mixed_precision", "True", "--batching_strategy", "padding", "--save_model", "False"]
        process_group.train(flags(tiny_model, data, tmp_path / f"run-{number}", *argv), 2)
        events = read_metrics(tmp_path / f"run-{number}")
        sent[number] = next(e["all_gather_sent_gb"] for e in events if e["event"] == "communication")
        losses[number] = [event["loss"] for event in events if event["event"] == "train"]
    assert sent[4] == pytest.approx(times * sent[1])
    assert losses[4] == pytest.approx(losses[1], rel=2e-3)  # bf16
