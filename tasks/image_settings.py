"""Settings that have no meaning for models of images and text."""

from __future__ import annotations

from configs.run import RunConfig
from utils.errors import ConfigError


def check_image_settings(config: RunConfig) -> None:
    """Check the settings that have no meaning for a model of images.

    Raises:
        ConfigError: for the first of them.
    """
    train = config.train_config
    if not all(dataset.HAS_IMAGES or dataset.MAY_HAVE_IMAGES for dataset in config.dataset_configs.values()):
        raise ConfigError(
            "--dataset: a model of image and text is trained on captions or conversations, not on "
            f"{train.dataset}; give --dataset caption_dataset or chat_dataset"
        )
    if train.truncation == "split":
        raise ConfigError("--truncation: split would part images from their text; give right, left, drop or error")
    if train.cache_vision_features and (reason := _why_not_cached(config)) is not None:
        raise ConfigError(f"--cache_vision_features: {reason}")
    if train.use_peft and train.peft_method != "lora":
        raise ConfigError(f"--peft_method: {train.peft_method} is for models of text alone; give lora")


def _why_not_cached(config: RunConfig) -> str | None:
    """Why these settings keep no features, as a clause with a remedy; None if they do."""
    train = config.train_config
    if config.streams:
        return "a stream is not read to its end before the first step; leave --streaming out"
    if not all(dataset.MAY_HAVE_IMAGES for dataset in config.dataset_configs.values()):
        return "it is for conversations with images; give --dataset chat_dataset, which reads captions, too"
    if not (train.freeze_vision or train.use_peft):
        return "the vision encoder is trained, so its features change; give --freeze_vision"
    return None
