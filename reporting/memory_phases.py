"""The moments of an optimizer step at which memory is recorded. Readers of metrics.jsonl need no torch for them."""

PHASES = ("before_forward", "after_forward", "after_backward", "after_optimizer_step")
