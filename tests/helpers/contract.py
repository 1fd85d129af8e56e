"""What metrics.jsonl promises: the keys of every event besides `event` and `time`, and the phases of a memory event."""

KEYS = {
    "start": "world_size num_parameters num_trainable_parameters num_train_samples num_eval_samples num_train_rows "
    "steps_per_epoch num_steps",
    "train": "step epoch loss perplexity grad_norm lr num_label_tokens num_tokens step_seconds tokens_per_second "
    "tokens_per_second_per_device model_tflops_per_device data_wait_seconds",
    "eval": "step epoch loss perplexity num_label_tokens token_accuracy token_entropy",
    "memory": "step phase rank params_gib grads_gib optimizer_gib activations_gib other_gib allocated_gib "
    "peak_allocated_gib reserved_gib optimizer_cpu_gib host_rss_gib num_alloc_retries",
    "communication": "step exposed_seconds straggler_seconds all_gather_seconds all_gather_sent_gb "
    "reduce_scatter_seconds reduce_scatter_sent_gb all_reduce_seconds all_reduce_sent_gb",
    "checkpoint": "step seconds blocked_seconds bytes",
    "epoch": "epoch seconds train_loss eval_loss",
    "end": "step status seconds peak_allocated_gib best_eval_loss",
}
FP16_KEYS = {"train": "loss_scale"}
"""What events have besides under fp16."""

PHASES = ["before_forward", "after_forward", "after_backward", "after_optimizer_step"]
