"""Micro-batches without values, on the meta device, with the shapes of a run's own."""

from __future__ import annotations

from dataclasses import replace

import torch

from resolving.resolved import Resolved
from tasks.causal_batches import CausalMicroBatch
from tasks.micro_batch import BatchShape, MicroBatch, meta_ids


def meta_batch(resolved: Resolved, shape: BatchShape, *, teacher_size: int = 0) -> MicroBatch:
    """A micro-batch of the run's task; see `tasks.task.Task.meta_batch`, also for what is raised.

    Args:
        teacher_size: likeliest tokens of a teacher at each label token; 0: rows have none.
    """
    batch = resolved.task.meta_batch(resolved.model_config, resolved.config.train_config, shape)
    if not teacher_size or not isinstance(batch, CausalMicroBatch):
        return batch
    of_teacher = (len(batch.targets), teacher_size)
    return replace(batch, teacher_ids=meta_ids(*of_teacher), teacher_logprobs=torch.empty(of_teacher, device="meta"))
