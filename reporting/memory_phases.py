"""The phases of an optimizer step at which memory is recorded. They stand here, apart from torch, for readers of
metrics.jsonl."""

PHASES = ("before_forward", "after_forward", "after_backward", "after_optimizer_step")
