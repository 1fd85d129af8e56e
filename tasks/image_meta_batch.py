"""A batch of images and captions without values, on the meta device: plans are made with it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from tasks.image_batches import ImageTextMicroBatch
from tasks.image_positions import GridPositions
from tasks.micro_batch import meta_ids
from utils.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def num_image_tokens(model_config: PreTrainedConfig) -> int:
    """The positions that an image takes in the text.

    Raises:
        ConfigError: if a config does not say so, as with models that cut images into tiles.
    """
    queries = getattr(model_config, "num_query_tokens", None)
    if isinstance(queries, int):  # BLIP-2 and InstructBLIP
        return queries
    vision = model_config.vision_config
    size, patch = getattr(vision, "image_size", None), getattr(vision, "patch_size", None)
    if isinstance(size, int) and isinstance(patch, int) and hasattr(model_config, "vision_feature_layer"):  # LLaVA
        # "full" keeps the vision encoder's class token, too.
        return (size // patch) ** 2 + (getattr(model_config, "vision_feature_select_strategy", "") == "full")
    raise ConfigError(
        f"--dry_run: how many tokens an image becomes in a {model_config.model_type} model is not known before one is "
        "read; plans are made for BLIP-2 and LLaVA models, and for text"
    )


def image_meta_batch(
    config: PreTrainedConfig, rows: int, width: int, longest: int, *, packed: bool, by_offsets: bool
) -> ImageTextMicroBatch:
    """Rows of images and captions, without values; a decoder of its own writes the captions.

    Args:
        width: tokens of a row, those of images included, or of a caption that has a row of its own.
        longest: the most tokens of a caption.
    """
    vision, apart = config.vision_config, getattr(config.get_text_config(), "is_encoder_decoder", False)
    of_image, caption = num_image_tokens(config), min(width, longest)
    if not apart:
        caption = max(1, min(longest, width - of_image))
        width = width if packed else min(width, of_image + longest)
    num_images = rows * (max(1, width // (of_image + caption)) if packed else 1)
    size, channels = vision.image_size, getattr(vision, "num_channels", 3)
    read = (rows, of_image + 2 if apart else width)
    inputs = {
        "pixel_values": torch.empty(num_images, channels, size, size, device="meta"),
        "input_ids": meta_ids(*read),
    }
    if packed:
        axes = () if GridPositions.of_config(config) is None else (4,)
        inputs["position_ids"] = meta_ids(*axes, *read)
    if not by_offsets:  # packed rows get the mask that transformers makes of restarting positions
        mask = torch.empty(rows, 1, width, width, dtype=torch.bool, device="meta") if packed else meta_ids(*read)
        inputs["attention_mask"] = mask
    if apart:
        inputs["decoder_input_ids"] = meta_ids(rows, caption)
    num_labels = num_images * caption
    return ImageTextMicroBatch(
        inputs=inputs,
        target_positions=meta_ids(num_labels),
        targets=meta_ids(num_labels),
        num_tokens=math.prod(read),
        num_label_tokens=num_labels,
        num_attended_pairs=0,
        source_rows=(),
    )
