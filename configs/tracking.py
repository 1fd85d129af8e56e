"""Settings of logging and recording."""

from dataclasses import dataclass
from typing import Literal

from configs.setting import setting


@dataclass(frozen=True)
class TrackingConfig:
    """Log lines, metrics and traces."""

    log_every_steps: int = setting(10, "print a line every so many optimizer steps", unit="steps", minimum=1)
    log_format: Literal["text", "json"] = setting(
        "text",
        "json: print the lines of metrics.jsonl to standard output, and nothing else there; lines for people go to "
        "standard error",
    )
    print_memory: bool = setting(
        False, "print what holds each rank's memory at steps 1, 2, every 50th and the last of an epoch"
    )
    save_metrics: bool = setting(False, "also write losses and perplexities into one JSON file of lists")
    report: bool = setting(
        False, "write report.html into the run folder when the run ends: curves, memory, time and settings on one page"
    )
    use_wandb: bool = setting(False, "send metrics and settings to Weights & Biases (offline with WANDB_MODE=offline)")
    use_tensorboard: bool = setting(False, "write metrics and settings for TensorBoard into the run folder")
    flop_counter: bool = setting(False, "count the floating-point operations of one step")
    flop_counter_start: int = setting(3, "optimizer step to count (flop_counter)", unit="steps", minimum=1)
    use_profiler: bool = setting(
        False, "record a PyTorch profiler trace on every rank: wait 1 step, warm up 2, record 3"
    )
    profiler_dir: str | None = setting(
        None, "folder for profiler traces", default_text="profiler/ in the run folder", is_path=True
    )
