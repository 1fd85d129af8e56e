"""How far a run has come."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass
class TrainState:
    """How far the run has come. `train()` advances it, a checkpoint keeps it."""

    step: int = 0
    epoch: int = 1  # of the next step
    step_of_epoch: int = 0
    eval_due: bool = False  # still to be done after `step`, as is the end of the epoch if it is due
    epoch_end_due: bool = False
    epoch_loss_sum: float = 0.0
    epoch_label_tokens: int = 0  # or what else the loss is a mean over; checkpoints have had the name since the first
    epoch_seconds: float = 0.0
    num_tokens: int = 0  # trained on so far
    seconds: float = 0.0  # of steps and evaluations, over all sessions of the run
    best_eval_loss: float = math.inf  # of the best evaluation so far
    best_rouge: float | None = None  # of the same, if --best_metric is a ROUGE
    best_step: int = 0  # after which they were measured
    evals_since_best: int = 0
    first_losses: list[float] = field(default_factory=list)  # `supervision.divergence` compares them with the last
    last_losses: list[float] = field(default_factory=list)  # of this session

    @property
    def epoch_of_step(self) -> int:
        """The epoch that `step` was made in; 0 before the first step."""
        return self.epoch - (self.step_of_epoch == 0) if self.step else 0

    def count_step(self, seconds: float, loss: float, num_loss_terms: int, num_tokens: int) -> None:
        """Count the step that has just ended; `step` includes it already."""
        self.step_of_epoch += 1
        self.epoch_loss_sum += loss * num_loss_terms
        self.epoch_label_tokens += num_loss_terms
        self.num_tokens += num_tokens
        self.count_seconds(seconds)

    def count_seconds(self, seconds: float) -> None:
        self.seconds += seconds
        self.epoch_seconds += seconds

    def is_best(self, loss: float, rouge: float | None) -> bool:
        """Whether an evaluation is the best so far.

        Args:
            rouge: the figure of --best_metric, if that is a ROUGE: higher is better.
        """
        if rouge is None:
            return loss < self.best_eval_loss
        return math.isfinite(loss) and math.isfinite(rouge) and (self.best_rouge is None or rouge > self.best_rouge)

    @property
    def best_score(self) -> float:
        """The figure that decided, lower is better: the loss, or the ROUGE times -1."""
        return self.best_eval_loss if self.best_rouge is None else -self.best_rouge

    def forget_best(self) -> None:
        """Let the next evaluation be the best."""
        self.best_eval_loss, self.best_rouge = math.inf, None

    def begin_next_epoch(self) -> None:
        self.epoch += 1
        self.step_of_epoch = self.epoch_label_tokens = 0
        self.epoch_loss_sum = self.epoch_seconds = 0.0

    def stay_in_first_epoch(self) -> None:
        """Take back the end of the one epoch of a stream, which earlier versions ended with the run."""
        if self.epoch > 1:
            self.epoch, self.step_of_epoch = 1, self.step

    def to_dict(self) -> dict[str, Any]:
        """The fields of a checkpoint as JSON values; JSON has no infinity."""
        values = asdict(self) | {"best_eval_loss": self.best_eval_loss if math.isfinite(self.best_eval_loss) else None}
        del values["last_losses"]  # a resumed run, maybe with a lower learning rate, is judged by its own
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        """Earlier versions lacked some fields."""
        state = cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})
        if state.best_eval_loss is None:
            state.best_eval_loss = math.inf
        return state
