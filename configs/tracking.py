"""What is written down about a run."""

from dataclasses import dataclass

from configs.setting import setting

_METRICS = "leave it out; metrics.jsonl in the run folder holds every figure"
_TFLOPS = "leave it out; metrics.jsonl holds model_tflops_per_device of each step"
_TIMES = "leave it out; metrics.jsonl holds step_seconds and data_wait_seconds of each step"


@dataclass(frozen=True)
class TrackingConfig:
    """Log lines, metrics and traces."""

    log_every_steps: int = setting(
        10, "print a line every so many optimizer steps; 1: each step", unit="steps", minimum=1
    )
    save_metrics: bool = setting(False, "also write losses and perplexities as one JSON file of lists")
    use_wandb: bool = setting(False, "send metrics to Weights & Biases", later=_METRICS)
    use_tensorboard: bool = setting(False, "write metrics for TensorBoard", later=_METRICS)
    flop_counter: bool = setting(False, "count floating-point operations", later=_TFLOPS)
    flop_counter_start: int = setting(
        3, "optimizer step at which counting starts", unit="steps", minimum=1, later=_TFLOPS
    )
    use_profiler: bool = setting(False, "record a PyTorch profiler trace", later=_TIMES)
    profiler_dir: str | None = setting(None, "folder for the traces", later=_TIMES)
