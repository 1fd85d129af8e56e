"""Whether a run may go on from a checkpoint: what would change the result is refused, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpointing.finding import Checkpoint
from configs.errors import ConfigError
from configs.names import flag
from configs.run import DATASETS, RunConfig

MAY_CHANGE = frozenset(
    f"{section}.{name}"
    for section, names in {
        "train_config": (
            # compared by what they name: config.json, the base's weights, the tokens of the data
            *("model_name", "tokenizer_name", "trust_remote_code"),
            # layout and speed
            *("use_fast_kernels", "compile", "activation_checkpointing", "loss_chunk_size", "enable_fsdp"),
            *("low_cpu_fsdp", "one_gpu", "num_workers_dataloader", "show_sample", "pad_to_multiple_of"),
            *("step_timeout_seconds", "deterministic"),
            # how the global batch, which stays, is cut
            *("batch_size_training", "gradient_accumulation_steps", "global_batch_size"),
            # length: where the learning rate depends on it, the number of steps is compared
            *("num_epochs", "max_train_step"),
            # evaluation and results
            *("run_validation", "val_batch_size", "max_eval_step", "eval_every_steps", "eval_before_training"),
            *("output_dir", "overwrite", "resume", "resume_anyway", "save_every_steps", "save_every_minutes"),
            *("keep_last", "keep_best", "async_save", "save_model", "save_optimizer"),
            *("dist_checkpoint_root_folder", "dist_checkpoint_folder"),
        ),
        "fsdp_config": (
            *("sharding_strategy", "hsdp", "sharding_group_size", "replica_group_size", "accumulate_unsharded"),
            *("fsdp_activation_checkpointing", "wrap", "fsdp_cpu_offload", "optimizer_cpu_offload"),
            "checkpoint_type",
        ),
        "quantization_config": ("quant_storage",),
    }.items()
    for name in names
)
"""Settings that do not change the result; every other one must be the checkpoint's, a new one too."""


def check_same(
    checkpoint: Checkpoint, config: RunConfig, facts: Mapping[str, Any], *, num_steps: int | None = None
) -> list[str]:
    """Refuse to go on where the result would be another.

    Args:
        facts: what is known of precision, data or model by now, as the saver is told of it.
        num_steps: of the whole run; where given, the settings are compared, too.

    Returns:
        Lines to print: with --resume_anyway, what has changed.

    Raises:
        ConfigError: which names every difference.
    """
    differences = [] if num_steps is None else _settings_that_differ(checkpoint, config, num_steps)
    differences += [_FACTS[name] for name, value in facts.items() if value != checkpoint.values[name]]
    if differences and not config.train_config.resume_anyway:
        raise ConfigError(
            f"--resume: what differs from {checkpoint.folder} would change the result: {', '.join(differences)}; "
            "give what was given there, or --resume_anyway"
        )
    _check_states(checkpoint, config)
    return [f"resume_anyway: {text}" for text in differences]


def _check_states(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Refuse another optimizer than the checkpoint's: its states mean nothing to it. What is paged is the same but for
    where it is."""
    there = checkpoint.values["settings"]["fsdp_config"]["optimizer"]
    if there.removeprefix("Paged") != config.fsdp_config.optimizer.removeprefix("Paged"):
        raise ConfigError(
            f"--resume_anyway: {config.fsdp_config.optimizer} cannot go on with the states of {there} in "
            f"{checkpoint.folder}; give --optimizer {there}, or train on from the run's weights with --model_name"
        )


_FACTS = {
    "precision": "the precision",
    "data_fingerprint": "the training data: other samples",
    "model_config": "--model_name: another config.json",
    "base_fingerprint": "--model_name: other weights than those under the checkpoint's adapter or frozen layers",
}


def _settings_that_differ(checkpoint: Checkpoint, config: RunConfig, num_steps: int) -> list[str]:
    saved, now = checkpoint.values["settings"], config.to_dict()
    unused = {name for name in DATASETS if name not in config.train_config.datasets}
    differences = [
        f"{flag(f'{section}.{name}')} {_shown(value)} (there {_shown(saved.get(section, {}).get(name))})"
        for section, values in now.items()
        if section not in unused and section != "tracking_config"
        for name, value in values.items()
        if f"{section}.{name}" not in MAY_CHANGE
        and name != "data_path"
        and value != saved.get(section, {}).get(name, value)
    ]
    if config.train_config.scheduler in ("cosine", "linear") and num_steps != checkpoint.values["num_steps"]:
        differences.append(
            f"{num_steps} optimizer steps (there {checkpoint.values['num_steps']}), over which "
            f"--scheduler {config.train_config.scheduler} lowers lr"
        )
    return differences


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
