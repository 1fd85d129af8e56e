"""Settings that follow from others. Each adaptation of a default leaves a note that the run prints."""

import re
from dataclasses import replace

from configs.names import flag
from configs.run import RunConfig
from utils.errors import ConfigError

SHARED_FIELDS = ("mixed_precision", "use_fp16")
"""Fields that train_config and fsdp_config both have; they always agree."""

DEFAULT_SGD_MOMENTUM = 0.9

_CUSTOM_FILE = re.compile(r"[^:]+\.py(:.*)?", re.DOTALL)


def adapt(config: RunConfig) -> RunConfig:
    """The config with short forms written out and defaults that follow from other settings filled in.

    Raises:
        ConfigError: where --dataset and --custom_dataset.file name different files.
    """
    config = _expand_dataset(config)
    config = _agree_on_shared_fields(config)
    config = _fill_momentum(config)
    config = _name_hybrid_sharding_twice(config)
    config = _make_a_stream_one_epoch(config)
    return _note_what_has_no_effect(config)


def _expand_dataset(config: RunConfig) -> RunConfig:
    """`--dataset f.py:function` -> `--dataset custom_dataset --custom_dataset.file f.py:function`."""
    names = config.train_config.datasets
    files = [name for name in names if _CUSTOM_FILE.fullmatch(name)]
    if not files:
        return config
    if len(files) > 1:
        raise ConfigError(
            f"--dataset: {' and '.join(files)} are two custom datasets, and a run has one; "
            "let one function return the samples of both"
        )
    (file,) = files
    if config.was_given("custom_dataset.file") and config.custom_dataset.file != file:
        raise ConfigError(
            f"--dataset: {file} is not --custom_dataset.file {config.custom_dataset.file}; give one of the two"
        )
    return replace(
        config,
        train_config=replace(
            config.train_config, dataset=",".join("custom_dataset" if name == file else name for name in names)
        ),
        custom_dataset=replace(config.custom_dataset, file=file),
        given=config.given | {"custom_dataset.file"},
    )


def _agree_on_shared_fields(config: RunConfig) -> RunConfig:
    """A shared field that was given for one section alone holds for the other too."""
    for field in SHARED_FIELDS:
        for source, target in (("train_config", "fsdp_config"), ("fsdp_config", "train_config")):
            value = config.value(f"{source}.{field}")
            if (
                config.was_given(f"{source}.{field}")
                and not config.was_given(f"{target}.{field}")
                and value != config.value(f"{target}.{field}")
            ):
                section = replace(getattr(config, target), **{field: value})
                config = _noted(
                    replace(config, **{target: section}), f"--{source}.{field} {value} holds for {target} too"
                )
    return config


def _fill_momentum(config: RunConfig) -> RunConfig:
    if config.fsdp_config.optimizer != "SGD" or config.train_config.momentum is not None:
        return config
    train_config = replace(config.train_config, momentum=DEFAULT_SGD_MOMENTUM)
    return _noted(
        replace(config, train_config=train_config), f"--momentum is {DEFAULT_SGD_MOMENTUM} with --optimizer SGD"
    )


def _name_hybrid_sharding_twice(config: RunConfig) -> RunConfig:
    """`hsdp` is another name for HYBRID_SHARD: after this, both say the same, or validation refuses them."""
    fsdp = config.fsdp_config
    if fsdp.hsdp and fsdp.sharding_strategy == "FULL_SHARD":
        fsdp_config = replace(fsdp, sharding_strategy="HYBRID_SHARD")
        return _noted(replace(config, fsdp_config=fsdp_config), "--hsdp selects --sharding_strategy HYBRID_SHARD")
    if fsdp.hsdp is None:
        return replace(config, fsdp_config=replace(fsdp, hsdp=fsdp.sharding_strategy == "HYBRID_SHARD"))
    return config


def _make_a_stream_one_epoch(config: RunConfig) -> RunConfig:
    """Nobody knows where an epoch of a stream ends; --num_epochs is refused where it was given."""
    if not config.streams or config.was_given("train_config.num_epochs"):
        return config
    return replace(config, train_config=replace(config.train_config, num_epochs=1))


def _note_what_has_no_effect(config: RunConfig) -> RunConfig:
    """Settings that were given and act only where another setting lets them."""
    mode = config.train_config.activation_checkpointing
    own = config.fsdp_config.fsdp_activation_checkpointing
    if mode is not None and own is not None and own != (mode != "off"):
        config = _noted(config, f"--activation_checkpointing {mode} holds, not --fsdp_activation_checkpointing {own}")
    if config.was_given("train_config.low_cpu_fsdp") and not config.train_config.low_cpu_fsdp:
        config = _noted(config, "--low_cpu_fsdp False has no effect: no layout lets every rank load the whole model")
    lora = config.lora_config
    if lora.use_dora and lora.lora_dropout > 0:
        config = _noted(
            config,
            f"--use_dora with --lora_dropout {lora.lora_dropout:g} multiplies by every adapted weight twice, the "
            "second time in fp32; --lora_dropout 0 spares that",
        )
    if config.streams:
        if config.train_config.num_workers_dataloader > 1:
            config = _noted(
                config,
                f"--num_workers_dataloader {config.train_config.num_workers_dataloader} holds for validation; one "
                "process per rank reads the stream",
            )
        if config.train_config.scheduler == "step":
            config = _noted(
                config,
                "--scheduler step leaves lr as it is, since a stream has no epochs; cosine and linear lower it",
            )
    if config.train_config.run_validation is False:
        for name in ("train_config.val_batch_size", "train_config.max_eval_step"):
            if config.was_given(name):
                config = _noted(config, f"{flag(name)} has no effect with --run_validation False")
    return config


def _noted(config: RunConfig, note: str) -> RunConfig:
    return replace(config, notes=(*config.notes, note))
