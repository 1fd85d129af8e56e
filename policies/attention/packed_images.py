"""Which models of images and text pack their rows by default."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from configs.run import RunConfig
from utils.errors import ConfigError

KNOWN_TO_PACK = frozenset(
    (
        *("aya_vision", "gemma3", "idefics3", "internvl", "llava", "llava_next", "llava_onevision", "mistral3"),
        *("glm46v", "glm4v", "glm4v_moe", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm"),
    )
)
"""The model types whose losses and gradients of packed rows were measured to be those of one sample at a time
(docs/support.md). Others are padded, unless packing is asked for: then `policies.attention.packing_leaks` decides."""


def keep_images_apart(config: RunConfig, model_config: PreTrainedConfig) -> RunConfig:
    """The settings, with padding for a model of images that is not known to keep packed samples apart.

    Raises:
        ConfigError: if packing was asked for, and the model is an encoder-decoder.
    """
    train, model_type = config.train_config, model_config.model_type
    if train.batching_strategy != "packing" or not hasattr(model_config, "vision_config"):
        return config
    is_apart = getattr(model_config.get_text_config(), "is_encoder_decoder", False)
    is_asked = config.was_given("train_config.batching_strategy")
    if is_apart and is_asked:
        raise ConfigError(
            f"--batching_strategy: {train.batching_strategy} is for models of one text, and the language model of "
            f"{train.model_name} is an encoder-decoder; give padding, or leave it out"
        )
    if is_asked or model_type in KNOWN_TO_PACK:
        return config
    note = f"--batching_strategy is padding: packing was not tried with {model_type} models"
    return replace(config, train_config=replace(train, batching_strategy="padding"), notes=(*config.notes, note))
