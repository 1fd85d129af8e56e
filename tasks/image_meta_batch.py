"""A batch of images and text without values, on the meta device: plans are made with it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from tasks.image_batches import ImageTextMicroBatch
from tasks.image_positions import GridPositions
from tasks.image_rows import GRIDS
from tasks.micro_batch import BatchShape, meta_ids
from utils.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


_MOST_IMAGES = 512  # models loop over them; smaller ones would attend to little in any case


def num_image_tokens(model_config: PreTrainedConfig) -> int:
    """The positions that an image, or a tile that it is cut into, takes in the text.

    Raises:
        ConfigError: if the config does not say so, as with models whose images are of several sizes.
    """
    queries = getattr(model_config, "num_query_tokens", None)
    if isinstance(queries, int):  # BLIP-2 and InstructBLIP
        return queries
    found = getattr(model_config, "mm_tokens_per_image", None) or getattr(model_config, "image_seq_length", None)
    vision, kind = model_config.vision_config, model_config.model_type
    if kind in ("gemma3", "internvl") and isinstance(found, int):
        return found
    size, patch = getattr(vision, "image_size", None), getattr(vision, "patch_size", None)
    if isinstance(size, int) and isinstance(patch, int):
        side = size // patch
        if kind in ("idefics3", "smolvlm"):
            return (side // model_config.scale_factor) ** 2
        if kind in ("llava", "paligemma") and vision.model_type != "pixtral":
            # "full" keeps the vision encoder's class token, too.
            return side**2 + (getattr(model_config, "vision_feature_select_strategy", "") == "full")
    raise ConfigError(
        f"--dry_run: how many pixels the tokens of an image stand for in a {kind} model is not known before one is "
        "read; plans are made for models whose images have one size, or grids of patches (docs/images.md)"
    )


def image_meta_batch(config: PreTrainedConfig, shape: BatchShape, longest: int) -> ImageTextMicroBatch:
    """Rows of images and text, without values; a decoder of its own writes captions.

    If the data is not at hand, rows hold images of one size with captions as long as they may be, or one image alone.

    Args:
        shape: its width is of a row, tokens of images included, or of a caption that has a row of its own.
        longest: the most tokens of a caption.
    """
    rows, width, packed, images = shape.rows, shape.width, shape.packed, shape.images
    has_grids = GridPositions.of_config(config) is not None
    if getattr(config.get_text_config(), "is_encoder_decoder", False):
        return _of_captions_apart(config, rows, min(width, longest))
    of_each = None if images is None else images.of_each
    if images is not None:
        num_features, num_labels = round(images.share * rows * width), round(shape.label_share * rows * (width - 1))
    elif has_grids:
        num_features, num_labels = rows * max(1, width - longest), rows * min(width - 1, longest)
    else:
        of_image = num_image_tokens(config)
        caption = max(1, min(longest, width - of_image))
        width = width if packed else min(width, of_image + longest)
        num_images = rows * (max(1, width // (of_image + caption)) if packed else 1)
        num_features, num_labels = num_images * of_image, num_images * caption
    inputs = {"input_ids": meta_ids(rows, width)} | _pixels(config, max(1, num_features), of_each)
    if has_grids:  # unpadded ones, too: transformers would count them from the tokens
        inputs["position_ids"] = meta_ids(4, rows, width)
    elif packed:
        inputs["position_ids"] = meta_ids(rows, width)
    if not shape.by_offsets:  # packed rows get the mask that transformers makes of restarting positions
        mask = torch.empty(rows, 1, width, width, dtype=torch.bool, device="meta")
        inputs["attention_mask"] = mask if packed else meta_ids(rows, width)
    return _batch(inputs, max(1, num_labels), rows * width, config)


def _of_captions_apart(config: PreTrainedConfig, rows: int, caption: int) -> ImageTextMicroBatch:
    """A row of an image's tokens and two more, and a caption for each."""
    of_image = num_image_tokens(config)
    read = meta_ids(rows, of_image + 2)
    inputs = {"input_ids": read, "attention_mask": read} | _pixels(config, rows * of_image)
    inputs["decoder_input_ids"] = meta_ids(rows, caption)
    return _batch(inputs, rows * caption, read.numel() + rows * caption, config)


def _batch(
    inputs: dict[str, torch.Tensor], num_labels: int, num_tokens: int, config: PreTrainedConfig
) -> ImageTextMicroBatch:
    if GRIDS in inputs:
        num_features = int(inputs[GRIDS].prod(-1).sum()) // config.vision_config.spatial_merge_size**2
    else:
        num_features = math.prod(inputs["pixel_values"].shape[:-3]) * num_image_tokens(config)
    return ImageTextMicroBatch(
        inputs=inputs,
        target_positions=meta_ids(num_labels),
        targets=meta_ids(num_labels),
        num_tokens=num_tokens,
        num_label_tokens=num_labels,
        num_attended_pairs=0,
        source_rows=(),
        num_image_features=num_features,
    )


def _pixels(config: Any, num_features: int, of_each: int | None = None) -> dict[str, torch.Tensor]:
    """Images that become so many tokens, or a few more, as many of one size as it takes.

    Args:
        of_each: tokens of an image that is read as a grid of patches; None: there is one.
    """
    vision = config.vision_config
    channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3)
    if GridPositions.of_config(config) is not None:
        size = max(of_each or num_features, -(-num_features // _MOST_IMAGES))
        num_images, rest = divmod(num_features, size)
        sides = [_grid_of(size)] * num_images + ([_grid_of(rest)] if rest else [])
        grids = torch.tensor([[1, height, width] for height, width in sides])
        grids[:, 1:] *= vision.spatial_merge_size
        of_patch = channels * vision.temporal_patch_size * vision.patch_size**2
        return {"pixel_values": torch.empty(int(grids.prod(-1).sum()), of_patch, device="meta"), GRIDS: grids}
    num_images = -(-num_features // num_image_tokens(config))
    height, width = vision.image_size if isinstance(vision.image_size, (list, tuple)) else [vision.image_size] * 2
    shape = [num_images, channels, height, width]
    if config.model_type in ("idefics3", "smolvlm"):  # tiles of a sample
        shape.insert(0, 1)
    return {"pixel_values": torch.empty(shape, device="meta")}


def _grid_of(num_features: int) -> tuple[int, int]:
    """The sides of the grid of at least so many features that is nearest to their number, and to a square."""
    most = math.isqrt(num_features)
    sides = [(height, -(-num_features // height)) for height in range(most, most // 4, -1)]
    return min(sides, key=lambda grid: grid[0] * grid[1])
