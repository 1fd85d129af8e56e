"""Settings of the run's length, its learning rate and optimizer steps."""

import math
from dataclasses import dataclass
from typing import Literal

from configs.setting import setting


@dataclass(frozen=True)
class ScheduleSettings:
    """How long a run is, and how its steps are taken."""

    num_epochs: int = setting(3, "passes over the training data", unit="epochs", minimum=1)
    limit_train_batches: int = setting(
        0,
        "end each epoch after so many micro-batches of each rank; epochs differ in their rows; 0: no limit",
        unit="micro-batches",
        minimum=0,
    )
    max_train_step: int = setting(0, "end after so many optimizer steps; 0: no limit", unit="steps", minimum=0)
    lr: float = setting(1e-4, "peak learning rate", exclusive_minimum=0)
    lr_scale_with_world_size: Literal["none", "linear", "sqrt"] = setting(
        "none",
        "multiply lr by the number of ranks (linear), or by its square root (sqrt); a resumed run keeps the number it "
        "started with",
    )
    scheduler: Literal["step", "cosine", "linear", "constant"] = setting(
        "step",
        "how the learning rate falls: by gamma after each epoch (step), to min_lr at the last step (cosine, linear), "
        "or not at all (constant)",
    )
    min_lr: float = setting(
        0.0, "the learning rate never falls below this after warm-up (step, cosine, linear)", minimum=0
    )
    gamma: float = setting(
        0.85, "multiply the learning rate by this after each epoch (scheduler step)", exclusive_minimum=0, maximum=1
    )
    warmup_steps: int = setting(0, "optimizer steps over which the learning rate rises from 0", unit="steps", minimum=0)
    warmup_ratio: float = setting(
        0.0,
        "warmup_steps as a share of all optimizer steps of the run, rounded up",
        minimum=0,
        exclusive_maximum=1,
    )
    weight_decay: float = setting(0.0, "weight decay of the optimizer", minimum=0)
    decay_norms_and_biases: bool = setting(
        True, "apply weight_decay to parameters of one dimension too: biases and the weights of norms"
    )
    adam_beta1: float = setting(
        0.9, "decay of the averaged gradients of AdamW and its variants", minimum=0, exclusive_maximum=1
    )
    adam_beta2: float = setting(
        0.999, "decay of the averaged squared gradients of AdamW and its variants", minimum=0, exclusive_maximum=1
    )
    momentum: float | None = setting(
        None, "momentum of SGD", minimum=0, exclusive_maximum=1, default_text="0.9 with --optimizer SGD"
    )
    gradient_clipping: bool = setting(False, "scale gradients down if their norm is above gradient_clipping_threshold")
    gradient_clipping_threshold: float = setting(
        1.0, "largest norm of all gradients together (gradient_clipping)", exclusive_minimum=0
    )
    seed: int = setting(42, "seed of every random choice", minimum=0, maximum=2**32 - 1)
    deterministic: bool = setting(False, "give the same bits in every run on the same devices; some kernels are slower")
    step_timeout_seconds: int | None = setting(
        None,
        "end the run if a rank makes no progress for so long in a step after the first; 0: an hour, as outside of "
        "steps",
        default_text="300, or 3 x the longest step so far if that is more",
        unit="seconds",
        minimum=0,
        maximum=3600,
    )
    timeout_seconds: int | None = setting(
        None, "short for step_timeout_seconds", unit="seconds", minimum=0, maximum=3600
    )

    def warmup_of(self, num_steps: int) -> int:
        """Optimizer steps of warm-up in a run of so many; a ratio is rounded up, as in transformers."""
        return math.ceil(self.warmup_ratio * num_steps) if self.warmup_ratio else self.warmup_steps
