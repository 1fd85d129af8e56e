"""Plans of a run that has failed, with other flags: on the same devices, for the batch that did not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from configs.run import RunConfig
from planning.alternatives.failed_run import Plans
from planning.machines.hardware import Hardware
from planning.machines.planned_environment import own_hardware
from planning.memory.host_memory import CPU_PROCESS_BYTES
from planning.out_of_memory.failure_scene import FailedBatch
from planning.planned_run import Plan, plan_of
from policies.activations.checkpointing import Checkpointing
from ranks.environment import Environment
from resolving.data_facts import DataFacts
from utils.memory_errors import AllocatorFigures
from utils.units import GIB


@dataclass(frozen=True)
class PredictedRun:
    """The plan of a run as `planning.alternatives.failed_run.Predicted`."""

    plan: Plan
    longest_row: int | None = None  # of the batch that failed; None: not known

    @property
    def num_tokens(self) -> float:
        resolved = self.plan.resolved
        length = min(self.longest_row or resolved.context_length, resolved.context_length)
        ranks = resolved.config.fsdp_config.context_parallel_size
        return resolved.batches.rows_per_micro_batch * length / ranks

    @property
    def peak_gib(self) -> float:
        return self.plan.memory.peak_gib

    @property
    def seconds_per_step(self) -> float | None:
        return None if self.plan.time is None else self.plan.time.seconds_per_step

    def phase_gib(self, phase: str) -> float:
        parts = self.plan.memory.phases.get(phase)
        return self.peak_gib if parts is None else parts.total


def figures_on_cpu(host_gib: Mapping[str, float]) -> AllocatorFigures:
    """The figures of a CPU whose memory ran out: the tensors that were there are all that it has room for.

    Args:
        host_gib: the process's resident memory when it ran out, as `resident`.
    """
    tensors = max(0, int(host_gib["resident"] * GIB) - CPU_PROCESS_BYTES)
    return AllocatorFigures(capacity=tensors, allocated=tensors)


class Decided(NamedTuple):
    """What the start of a run decided besides its settings."""

    checkpointing: Checkpointing | None = None  # of activations
    num_replicated: int | None = None  # layers whose frozen weights stay whole
    resumed_size: int | None = None  # rows of the global batch of the checkpoint that it went on from, and will again


def plans_for(
    config: RunConfig,
    env: Environment,
    figures: AllocatorFigures,
    phase: str,
    batch: FailedBatch | None,
    decided: Decided | None = None,
) -> Plans | None:
    """Plans runs on these ranks' devices; None if the error did not tell how full the device was.

    Args:
        phase: the one that memory ran out in.
        batch: the one that did not fit: every row counts as long as its longest, with the batch's fraction of label
            tokens.
        decided: of the run that failed. Runs with other flags may choose anew.
    """
    if figures.room is None or figures.allocated is None:
        return None
    hardware: Hardware = own_hardware(config.train_config, config.planning_config, env)
    lengths = label_share = None
    if batch is not None:
        if batch.num_label_tokens is not None and batch.targets_width is None:
            label_share = batch.num_label_tokens / (batch.rows * batch.longest_row)
        widths = (batch.longest_row, *([] if batch.targets_width is None else [batch.targets_width]))
        # The failed micro-batch shows how many rows the data gives in training; one of an evaluation does not.
        rows = batch.rows if phase in ("forward", "backward") else config.train_config.batch_size_training
        lengths = tuple(np.full(rows, width) for width in widths)

    def predict(changed: RunConfig) -> PredictedRun:
        # The failed run is planned as it was; a changed one as it would be started.
        start = decided or Decided()
        same = start if changed.to_dict() == config.to_dict() else Decided(resumed_size=start.resumed_size)
        facts = DataFacts(lengths=lengths, label_share=label_share)
        plan = plan_of(changed, hardware, facts, **same._asdict())
        return PredictedRun(plan, None if batch is None else batch.longest_row)

    return Plans(
        predict=predict,
        needed_gib=(figures.allocated + (figures.asked or 0)) / GIB,
        room_gib=figures.room / GIB,
        unused_gib=(figures.unused or 0) / GIB,
    )
