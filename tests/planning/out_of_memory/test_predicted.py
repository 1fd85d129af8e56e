"""Plans of a run that has failed count with the batch that did not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from configs.flags import parse_flags
from planning.out_of_memory.failure_scene import FailedBatch
from planning.out_of_memory.predicted import plans_for
from ranks.environment import lone_process
from utils.memory_errors import AllocatorFigures


def test_rows_and_label_tokens_are_those_of_the_batch_that_failed(tiny_model: Path) -> None:
    config = parse_flags(
        ["--model_name", str(tiny_model), "--batching_strategy", "padding", "--batch_size_training", "4"]
    )
    figures = AllocatorFigures(asked=2**20, capacity=2**30, allocated=2**29)

    def peak_gib(batch: FailedBatch) -> float:
        plans = plans_for(config, lone_process(), figures, "forward", batch)
        assert plans is not None
        return plans.predict(config).phase_gib("forward")

    long = FailedBatch(rows=4, width=64, longest_row=64, targets_width=None, num_label_tokens=4 * 63)
    assert peak_gib(replace(long, longest_row=32, num_label_tokens=4 * 31)) < peak_gib(long)
    assert peak_gib(replace(long, num_label_tokens=4)) < peak_gib(long), "logits of four tokens alone"
    assert peak_gib(replace(long, num_label_tokens=None)) >= peak_gib(long), "not known: all have a loss"
