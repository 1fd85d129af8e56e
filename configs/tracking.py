"""What is written down about a run."""

from dataclasses import dataclass

from configs.setting import setting


@dataclass(frozen=True)
class TrackingConfig:
    """Log lines, metrics and traces."""

    log_every_steps: int = setting(
        10, "print a line every so many optimizer steps; 1: each step", unit="steps", minimum=1
    )
    save_metrics: bool = setting(False, "also write losses and perplexities as one JSON file of lists")
    use_wandb: bool = setting(False, "send metrics and settings to Weights & Biases (offline with WANDB_MODE=offline)")
    use_tensorboard: bool = setting(False, "write metrics and settings for TensorBoard, in the run folder")
    flop_counter: bool = setting(False, "count one step's floating-point operations as they are made")
    flop_counter_start: int = setting(3, "optimizer step that is counted (flop_counter)", unit="steps", minimum=1)
    use_profiler: bool = setting(
        False, "record a PyTorch profiler trace: after 1 step of waiting and 2 of warm-up, 3 steps on every rank"
    )
    profiler_dir: str | None = setting(None, "folder for the traces; unset: profiler/ in the run folder")
