"""Conflicts between settings of what is trained: positions, a quantized base, frozen layers, adapters."""

from configs.names import flag
from configs.peft import ALL_LINEAR
from configs.run import RunConfig
from utils.errors import ConfigError

# The section of settings for each --peft_method.
SECTIONS_OF_ADAPTERS = {"lora": "lora_config", "llama_adapter": "llama_adapter_config", "prefix": "prefix_config"}


def check_what_is_trained(config: RunConfig) -> None:
    """Check that the settings of the base, its frozen layers and its adapter fit together.

    Raises:
        ConfigError: for the first conflict.
    """
    train = config.train_config
    if config.quantization_config.quantization and not train.use_peft:
        raise ConfigError(
            "--quantization: quantized weights cannot be trained, so nothing would be trained; "
            "add --use_peft to train an adapter on them, or give --quantization False"
        )
    for field in ("rope_factor", "rope_original_positions"):
        if getattr(train, field) is not None and train.rope_scaling is None:
            raise ConfigError(f"--{field}: no position is scaled without --rope_scaling; add it, or leave this out")
    for field in ("quant_type", "use_double_quant", "compute_dtype", "quant_storage"):
        if not config.was_given(f"quantization_config.{field}"):
            continue
        if not config.quantization_config.quantization:
            raise ConfigError(f"--{field}: nothing is quantized without --quantization; add it, or leave this out")
        asked = config.quantization_config.quantization
        if asked != "4bit" and field in ("quant_type", "use_double_quant"):
            raise ConfigError(f"--{field}: {asked} has no such choice; give --quantization 4bit, or leave this out")
    _check_float8(config)
    if config.was_given("train_config.num_freeze_layers") and not train.freeze_layers:
        raise ConfigError("--num_freeze_layers: nothing is frozen without --freeze_layers; add it, or leave this out")
    _check_adapter(config)


def _check_float8(config: RunConfig) -> None:
    train = config.train_config
    if train.float8 is None:
        return
    if config.quantization_config.quantization:
        raise ConfigError(
            f"--float8: cannot be combined with --quantization {config.quantization_config.quantization}, which stores "
            "the same weights in another way; leave one of them out"
        )
    if train.use_fp16 or train.mixed_precision is False:
        asked = "--use_fp16" if train.use_fp16 else "--mixed_precision False"
        raise ConfigError(f"--float8: the rest of the model must compute in bf16, not as {asked} says; leave one out")
    if train.use_peft and train.peft_method != "lora":
        raise ConfigError(
            f"--float8: a frozen model in float8 carries LoRA alone, not --peft_method {train.peft_method}; leave one "
            "of them out"
        )
    if train.use_peft and config.lora_config.use_dora:
        raise ConfigError(
            "--float8: DoRA unpacks every adapted weight in each forward pass, which costs what float8 saves; leave "
            "--use_dora or this out"
        )


def _check_adapter(config: RunConfig) -> None:
    train = config.train_config
    method_of = {section: method for method, section in SECTIONS_OF_ADAPTERS.items()}
    settings = sorted(name for name in config.given if name.split(".")[0] in method_of)
    if not train.use_peft:
        of_adapters = ("peft_method", "peft_dtype", "from_peft_checkpoint")
        for name in (*settings, *(f"train_config.{field}" for field in of_adapters)):
            if config.was_given(name) and config.value(name) != "":
                raise ConfigError(f"{flag(name)}: there is no adapter without --use_peft; add it, or leave this out")
        return
    for name in settings:
        method = method_of[name.split(".")[0]]
        if method != train.peft_method:
            raise ConfigError(
                f"{flag(name)}: only --peft_method {method} has it, not {train.peft_method}; leave one of them out"
            )
        if train.from_peft_checkpoint:
            raise ConfigError(
                f"{flag(name)}: the adapter in --from_peft_checkpoint keeps its own settings; leave one of them out"
            )
    if ALL_LINEAR in config.lora_config.target_modules and len(config.lora_config.target_modules) > 1:
        raise ConfigError(
            f"--target_modules: {ALL_LINEAR} already means every linear layer but the head; give it alone, or a list"
        )
    if train.add_special_tokens and train.peft_method != "lora":
        raise ConfigError(
            f"--add_special_tokens: --peft_method {train.peft_method} has no room for new embeddings; give "
            "--peft_method lora, or train without --use_peft"
        )
    if train.add_special_tokens and train.from_peft_checkpoint:
        raise ConfigError(
            "--add_special_tokens: the adapter in --from_peft_checkpoint has no rows for them; leave one of them out"
        )
    _check_initial_factors(config)
    if train.peft_method == "prefix":
        _check_prefix(config)


def _check_initial_factors(config: RunConfig) -> None:
    train, lora, init = (
        config.train_config,
        config.lora_config,
        f"--init_lora_weights {config.lora_config.init_lora_weights}",
    )
    if lora.init_lora_weights == "orthogonal" and lora.r % 2:
        raise ConfigError(f"--lora_config.r: {init} halves the rank, and {lora.r} is odd; give an even one")
    if not lora.begins_in_base:
        return
    conflicts = {
        "--quantization": config.quantization_config.quantization,
        "--float8": train.float8,
        "--use_dora": lora.use_dora,
        "--use_rslora": lora.use_rslora,
        "--lora_dropout": lora.lora_dropout,
        "--weight_decay": train.weight_decay,
    }
    reasons = {
        "--quantization": "takes a part out of the weights, which are packed then",
        "--float8": "takes a part out of the weights, which are packed then",
        "--use_dora": "and DoRA both change how the weights begin",
        "--use_rslora": "scales by lora_alpha / r",
        "--lora_dropout": "would drop a part of the weights, which began in the adapter",
        "--weight_decay": "keeps the first factors, which would decay",
    }
    for name, value in conflicts.items():
        if value:
            raise ConfigError(f"{name}: {init} {reasons[name]}; leave one of them out")


def _check_prefix(config: RunConfig) -> None:
    train = config.train_config
    if train.batching_strategy == "packing":
        raise ConfigError(
            "--peft_method: prefix gives each row one prefix, and later sequences of a packed row could not attend to "
            "it; add --batching_strategy padding"
        )
    for name, off in (
        ("train_config.activation_checkpointing", "off"),
        ("fsdp_config.fsdp_activation_checkpointing", False),
    ):
        if config.value(name) not in (off, "auto", None):
            raise ConfigError(
                f"{flag(name)}: --peft_method prefix passes the prefix in a cache, which a recomputed layer would fill "
                f"twice; leave this out, or give {off}"
            )
    if train.freeze_layers:
        raise ConfigError(
            "--freeze_layers: --peft_method prefix trains nothing inside layers, so there is nothing to freeze; "
            "leave one of them out"
        )
