"""Conflicts between the losses of preferences, their settings, and the rest of a run."""

from configs.formats import DATASETS
from configs.names import flag
from configs.preference import PREFERENCE, PREFERENCE_LOSSES, REWARD_MODEL, TAKEN_BY
from configs.run import RunConfig
from utils.errors import ConfigError

_LOSSES = ", ".join(PREFERENCE_LOSSES)


def check_preferences(config: RunConfig) -> None:
    """Check that losses of pairs have pairs and what else they need, and that other losses have none of it.

    Raises:
        ConfigError: for the first conflict.
    """
    loss_type = config.train_config.loss_type
    for field, losses in TAKEN_BY.items():
        if config.was_given(name := f"preference_config.{field}") and loss_type not in losses:
            others = " or ".join(losses)
            raise ConfigError(f"{flag(name)}: {loss_type} has none; give --loss_type {others}, or leave this out")
    if loss_type in PREFERENCE_LOSSES:
        _check_losses_of_pairs(config)
    else:
        _check_other_losses(config)


def _check_other_losses(config: RunConfig) -> None:
    if config.train_config.task == PREFERENCE:
        raise ConfigError(f"--task: {PREFERENCE} is that of --loss_type {_LOSSES}; give one of these")
    for name in config.train_config.datasets:
        if DATASETS[name].HAS_PAIRS and config.train_config.task != REWARD_MODEL:
            raise ConfigError(
                f"--dataset: {name} has pairs of answers, and --loss_type {config.train_config.loss_type} learns all "
                f"that it is given; give --loss_type {_LOSSES}, or learn the good answers with --dataset chat_dataset "
                "--chat_dataset.preference chosen"
            )


def _check_losses_of_pairs(config: RunConfig) -> None:
    train = config.train_config
    start = f"--loss_type: {train.loss_type}"
    if train.task != PREFERENCE:
        raise ConfigError(f"{start} is for --task {PREFERENCE}, not {train.task}; leave --task out")
    for name in train.datasets:
        if name != "custom_dataset" and not DATASETS[name].HAS_PAIRS:
            raise ConfigError(
                f"{start} compares pairs of answers, and {name} has none; give --dataset preference_dataset"
            )
    if config.streams:
        raise ConfigError(f"{start} reads all pairs before the first step; leave --streaming out")
    if train.label_smoothing:
        raise ConfigError("--label_smoothing: is of tokens; give --preference_smoothing, of pairs, or leave this out")
    if train.truncation in ("right", "split"):
        raise ConfigError(
            f"--truncation: {train.truncation} would cut answers; give left (their prompt), drop or error, or leave "
            "this out"
        )
    if config.fsdp_config.context_parallel_size > 1:
        raise ConfigError(
            "--context_parallel_size: ranks that share a row have parts of its answers, and their losses need whole "
            "ones; leave this out"
        )
    if train.loss_type == "dpo" and train.use_peft and train.peft_method == "prefix":
        raise ConfigError(
            "--peft_method: dpo compares with the model before training, which a new prefix changes; give lora, "
            "or --loss_type simpo or orpo"
        )
