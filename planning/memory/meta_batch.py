"""Micro-batches without values, on the meta device, with the shapes of a run's own."""

from __future__ import annotations

from resolving.resolved import Resolved
from tasks.task import MicroBatch


def meta_batch(
    resolved: Resolved,
    rows: int,
    widths: tuple[int, ...],
    *,
    label_share: float,
    image_share: float | None = None,
    packed: bool,
    by_offsets: bool,
) -> MicroBatch:
    """A micro-batch of the run's task; see `tasks.task.Task.meta_batch`, also for what is raised."""
    return resolved.task.meta_batch(
        resolved.model_config,
        resolved.config.train_config,
        rows,
        widths,
        label_share=label_share,
        image_share=image_share,
        packed=packed,
        by_offsets=by_offsets,
    )
