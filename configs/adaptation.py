"""Settings that follow from other settings. Each adapted default leaves a note, which the run prints."""

import re
from dataclasses import replace

from configs.names import flag
from configs.optimizers import OPTIMIZERS
from configs.paths import check_path
from configs.preference import PREFERENCE, PREFERENCE_LOSSES
from configs.run import RunConfig
from utils.errors import ConfigError

SHARED_FIELDS = ("mixed_precision", "use_fp16")
"""Fields of both train_config and fsdp_config, which always agree."""

FLOAT8_MULTIPLE = 16
"""Float8 kernels need matrices whose sides are multiples of this."""

CANNOT_TRACE_DORA = "torch.compile cannot trace peft's DoRA, so most of each layer would not be compiled"

_CUSTOM_FILE = re.compile(r"[^:]+\.py(:.*)?", re.DOTALL)


def adapt(config: RunConfig) -> RunConfig:
    """Expand short forms, and fill in defaults that follow from other settings.

    Raises:
        ConfigError: if --dataset and --custom_dataset.file name different files.
    """
    config = _expand_dataset(config)  # first: other steps know datasets by their names
    config = _agree_on_shared_fields(config)
    config = _agree_on_timeout(config)
    config = _choose_task_of_loss(config)
    config = _fill_momentum(config)
    config = _agree_on_hybrid_sharding(config)
    config = _make_streams_one_epoch(config)
    config = _pad_for_float8(config)
    config = _keep_asked_batches(config)
    config = _drop_no_part_of_the_base(config)
    return _note_settings_without_effect(config)


def _expand_dataset(config: RunConfig) -> RunConfig:
    """`--dataset f.py:function` -> `--dataset custom_dataset --custom_dataset.file f.py:function`."""
    names = config.train_config.datasets
    files = [name for name in names if _CUSTOM_FILE.fullmatch(name)]
    if not files:
        return config
    if len(files) > 1:
        raise ConfigError(
            f"--dataset: {' and '.join(files)} are two custom datasets, but a run can have one only; "
            "let one function return the examples of both"
        )
    (file,) = files
    try:
        check_path(file)
    except ValueError as error:
        raise ConfigError(f"--dataset: {error}") from error
    if config.was_given("custom_dataset.file") and config.custom_dataset.file != file:
        raise ConfigError(
            f"--dataset: {file} is not --custom_dataset.file {config.custom_dataset.file}; give one of the two"
        )
    dataset = ",".join("custom_dataset" if name == file else name for name in names)
    sections = {
        "train_config": replace(config.train_config, dataset=dataset),
        "custom_dataset": replace(config.custom_dataset, file=file),
    }
    return replace(config.with_sections(sections), given=config.given | {"custom_dataset.file"})


def _agree_on_shared_fields(config: RunConfig) -> RunConfig:
    """Copy a shared field that was given in one section to the other."""
    for field in SHARED_FIELDS:
        for source, target in (("train_config", "fsdp_config"), ("fsdp_config", "train_config")):
            value = config.value(f"{source}.{field}")
            if value is not None and config.value(f"{target}.{field}") is None:
                section = replace(getattr(config, target), **{field: value})
                config = _noted(
                    replace(config, **{target: section}), f"--{source}.{field} {value} applies to {target} too"
                )
    return config


def _agree_on_timeout(config: RunConfig) -> RunConfig:
    """Write the short form out, unless the two contradict each other: validation refuses that."""
    train = config.train_config
    if train.step_timeout_seconds is not None or train.timeout_seconds is None:
        return config
    return replace(config, train_config=replace(train, step_timeout_seconds=train.timeout_seconds))


def _choose_task_of_loss(config: RunConfig) -> RunConfig:
    """Losses of pairs have a task of their own. Validation refuses another one that was given."""
    train = config.train_config
    if train.loss_type not in PREFERENCE_LOSSES or train.task is not None:
        return config
    return replace(config, train_config=replace(train, task=PREFERENCE))


def _fill_momentum(config: RunConfig) -> RunConfig:
    name = config.fsdp_config.optimizer
    momentum = OPTIMIZERS[name].momentum
    if momentum is None or config.train_config.momentum is not None:
        return config
    train_config = replace(config.train_config, momentum=momentum)
    return _noted(replace(config, train_config=train_config), f"--momentum is {momentum:g} with --optimizer {name}")


def _agree_on_hybrid_sharding(config: RunConfig) -> RunConfig:
    """Make `hsdp` and `sharding_strategy` agree, unless they contradict each other: validation refuses that."""
    fsdp = config.fsdp_config
    if fsdp.hsdp and fsdp.sharding_strategy == "FULL_SHARD":  # the default: any other strategy was given
        fsdp_config = replace(fsdp, sharding_strategy="HYBRID_SHARD")
        return _noted(replace(config, fsdp_config=fsdp_config), "--hsdp selects --sharding_strategy HYBRID_SHARD")
    if fsdp.hsdp is None:
        return replace(config, fsdp_config=replace(fsdp, hsdp=fsdp.sharding_strategy == "HYBRID_SHARD"))
    return config


def _make_streams_one_epoch(config: RunConfig) -> RunConfig:
    """Set num_epochs to 1 for streams, whose epochs have no known end. Validation refuses a given --num_epochs."""
    if not config.streams or config.was_given("train_config.num_epochs"):
        return config
    return replace(config, train_config=replace(config.train_config, num_epochs=1))


def _pad_for_float8(config: RunConfig) -> RunConfig:
    """Pad batches to a width whose products need no padding of their own."""
    train = config.train_config
    if train.float8 is None or config.was_given("train_config.pad_to_multiple_of"):
        return config
    return replace(config, train_config=replace(train, pad_to_multiple_of=FLOAT8_MULTIPLE))


def _keep_asked_batches(config: RunConfig) -> RunConfig:
    """Set min_steps to 0 if the batch or the length of an epoch was asked for, or an epoch's end is unknown."""
    train = config.train_config
    if not train.min_steps:
        return config
    if config.streams:
        why = "a stream, whose end is unknown"
    elif train.global_batch_size is not None:
        why = "--global_batch_size"
    elif train.limit_train_batches:
        why = "--limit_train_batches"
    else:
        return config
    return _noted(replace(config, train_config=replace(train, min_steps=0)), f"--min_steps has no effect with {why}")


def _drop_no_part_of_the_base(config: RunConfig) -> RunConfig:
    """Set lora_dropout to 0 if the adapter begins with a part of the base. Validation refuses one that was given."""
    lora = config.lora_config
    if not lora.begins_in_base or config.was_given("lora_config.lora_dropout"):
        return config
    note = f"--lora_dropout is 0 with --init_lora_weights {lora.init_lora_weights}"
    return _noted(replace(config, lora_config=replace(lora, lora_dropout=0.0)), note)


def _note_settings_without_effect(config: RunConfig) -> RunConfig:
    """Add notes on settings that were given but have no effect, or an unexpected cost."""
    mode = config.train_config.activation_checkpointing
    own = config.fsdp_config.fsdp_activation_checkpointing
    if mode is not None and own is not None and (mode == "auto" or own != (mode != "off")):
        note = f"--activation_checkpointing {mode} overrides --fsdp_activation_checkpointing {own}"
        config = _noted(config, note)
    if config.train_config.low_cpu_fsdp is False:
        config = _noted(config, "--low_cpu_fsdp False has no effect: no run loads the whole model on every rank")
    lora = config.lora_config
    if lora.use_dora and lora.lora_dropout > 0:
        config = _noted(
            config,
            f"--use_dora with --lora_dropout {lora.lora_dropout:g} multiplies by each adapted weight twice, the second "
            "time in fp32; --lora_dropout 0 avoids that",
        )
    if config.streams:
        if config.train_config.num_workers_dataloader > 1:
            config = _noted(
                config,
                f"--num_workers_dataloader {config.train_config.num_workers_dataloader} applies to validation only; "
                "one process per rank reads the stream",
            )
        if config.train_config.scheduler == "step":
            config = _noted(
                config,
                "--scheduler step keeps lr constant, because a stream has no epochs; cosine and linear lower it",
            )
    if config.train_config.run_validation is False:
        for name in ("train_config.val_batch_size", "train_config.max_eval_step", "train_config.best_metric"):
            if config.was_given(name):
                config = _noted(config, f"{flag(name)} has no effect with --run_validation False")
    return config


def _noted(config: RunConfig, note: str) -> RunConfig:
    return replace(config, notes=(*config.notes, note))


def why_optimizer_not_compiled(config: RunConfig) -> str | None:
    """Why the step of a run's optimizer cannot be compiled, as a clause; None if it can be."""
    fsdp = config.fsdp_config
    if not OPTIMIZERS[fsdp.optimizer].compiles:
        compiled = " or ".join(f"{name}'s" for name, listed in OPTIMIZERS.items() if listed.compiles)
        return f"only {compiled} step is compiled, not {fsdp.optimizer}'s"
    for field in ("fsdp_cpu_offload", "optimizer_cpu_offload"):
        if getattr(fsdp, field):
            return f"--{field} steps on the CPU, by AdamW's own kernel"
    return None


def why_not_compiled(config: RunConfig) -> str | None:
    """Why the layers of a run with these settings cannot be compiled, as a clause; None if they can."""
    train = config.train_config
    if train.use_peft and config.lora_config.use_dora:
        return f"{CANNOT_TRACE_DORA} (--use_dora)"
    if train.use_peft and train.peft_method == "prefix":
        return (
            "--peft_method prefix passes the prefix in a cache that differs from layer to layer, so most layers would "
            "not be compiled"
        )
    if config.tracking_config.flop_counter:
        return "--flop_counter cannot count inside compiled code"
    return None
