"""The loaders of a run: this rank's micro-batches of every step, from rows or from a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from configs.training import TrainConfig
from data.batches.layout import BatchLayout
from data.batches.step_loader import StepLoader
from data.pipeline import RunData
from data.sequences.tokenized import Row
from data.streaming.block_share import open_share
from data.streaming.loader import StreamLoader
from ranks.environment import Environment


@dataclass(frozen=True)
class Loaders:
    """The loaders of a run; each yields this rank's micro-batches of a step."""

    train: StepLoader | StreamLoader
    evaluation: StepLoader | None  # None without validation


def make_loaders(
    data: RunData,
    train_config: TrainConfig,
    layout: BatchLayout,
    env: Environment,
    collate_of: Callable[[int], Callable[[list[Row]], Any]],
    say: Callable[[str], None],
) -> Loaders:
    """The loaders of a run's data: training rows are shuffled by seed and epoch, validation rows keep their order.

    Args:
        collate_of: what makes micro-batches of at most so many rows.
        say: prints a stream's lines while it is read.
    """
    options: dict[str, Any] = {
        "rank": env.rank * layout.data_parallel_size // env.world_size,  # neighbours share rows, if any do
        "num_workers": train_config.num_workers_dataloader,
        "pin_memory": env.device.type == "cuda",
    }
    collate = collate_of(layout.rows_per_micro_batch)
    train_loader: StepLoader | StreamLoader
    if data.stream is not None:
        train_loader = StreamLoader(data.stream.shared(open_share(env)), layout, collate=collate, say=say, **options)
    else:
        assert data.train_rows is not None
        num_epochs = train_config.num_epochs
        train_loader = StepLoader(
            data.train_rows, layout, seed=train_config.seed, collate=collate, num_epochs=num_epochs, **options
        )
    if data.eval_rows is None:
        return Loaders(train_loader, None)
    eval_layout = BatchLayout(train_config.val_batch_size, 1, layout.data_parallel_size)
    collate = collate_of(eval_layout.rows_per_micro_batch)
    return Loaders(train_loader, StepLoader(data.eval_rows, eval_layout, seed=None, collate=collate, **options))
