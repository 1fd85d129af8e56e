"""The tools that measure a run's steps, and the facts of a step that has been queued."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from data.batches.counts import BatchCounts
from reporting.communication import CommunicationRecorder, StepCommunication
from reporting.flop_counter import FlopFormula
from reporting.memory_ledger import MemoryLedger
from reporting.profiling import StepRecorder


class LossScale(Protocol):
    """The factor of the loss under fp16 (`policies.loss_scaling.LossScaler`)."""

    @property
    def active(self) -> bool: ...
    @property
    def scale(self) -> float: ...


class PinnedMemory(Protocol):
    """Host memory for activations, which is pinned before and during the first step (`policies.activations`)."""

    @property
    def num_bytes(self) -> int: ...

    making_seconds: float
    waited_seconds: float


class DataWait(NamedTuple):
    """The wait for a step's data. The step's clock starts with it."""

    began: float  # by time.perf_counter
    seconds: float

    def seconds_after(self, began: float) -> float:
        """The part of the wait after `began`, until which the device computed the previous step and lost nothing."""
        return max(0.0, self.began + self.seconds - max(self.began, began))


class StepRecord(NamedTuple):
    """The facts of a step that are known when it has been queued."""

    step: int
    counts: BatchCounts
    wait: DataWait
    lr: float  # the learning rate that it uses
    loss_scale: float
    ends_epoch: bool
    memory: list[dict[str, Any]] | None  # this rank's `memory` events, if the step is observed
    communication: StepCommunication | None  # if it is measured in this step

    @property
    def is_observed(self) -> bool:
        """Whether the step must be reported before the next one is queued."""
        return self.memory is not None or self.communication is not None


@dataclass(frozen=True)
class Instruments:
    """The tools that measure a step."""

    ledger: MemoryLedger
    communication: CommunicationRecorder
    recorder: StepRecorder  # profiles a step or counts its operations (`reporting.profiling.step_recorder`)
    flops: FlopFormula
    scaler: LossScale
    pinned: PinnedMemory | None = None
