"""How much a batch's images are for a vision encoder: patches, and pairs of them that attention visits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from data.images.vision_features import PREFIX
from tasks.image_rows import GRIDS


class ImageCounts(NamedTuple):
    """The counts of the images of a batch. Class tokens are left out, and whatever fills up smaller images."""

    num_image_features: int  # tokens of the text that stand for images
    num_patches: int
    num_patch_pairs: int  # (query, key) pairs of patches in whole images, or in the tiles that they were cut into
    num_window_pairs: int = 0  # the same in windows, if some layers attend in windows


def count_images(inputs: Mapping[str, torch.Tensor], model_config: Any) -> ImageCounts:
    """The counts of a batch with these inputs of the model, in host memory."""
    token = getattr(model_config, "image_token_id", None)
    token = getattr(model_config, "image_token_index", None) if token is None else token
    num_features = 0 if token is None else int((inputs["input_ids"] == token).sum())
    vision = model_config.vision_config
    if any(name.startswith(PREFIX) for name in inputs):  # the vision encoder's work was done before
        return ImageCounts(num_features, 0, 0)
    if GRIDS in inputs:
        return _of_grids(num_features, inputs[GRIDS], vision)
    areas = _tile_patches(inputs, vision.patch_size)
    return ImageCounts(num_features, int(areas.sum()), int((areas**2).sum()))


def _of_grids(num_features: int, grids: torch.Tensor, vision: Any) -> ImageCounts:
    areas = grids[:, 1] * grids[:, 2]
    num_pairs = int((grids[:, 0] * areas**2).sum())
    num_windowed = 0
    if getattr(vision, "fullatt_block_indexes", None):
        merged = vision.spatial_merge_size
        side = vision.window_size // vision.patch_size // merged
        rows, columns = (_squares(grids[:, axis] // merged, side) for axis in (1, 2))
        num_windowed = int((grids[:, 0] * rows * columns).sum()) * merged**4
    return ImageCounts(num_features, int(grids.prod(-1).sum()), num_pairs, num_windowed)


def _squares(lengths: torch.Tensor, size: int) -> torch.Tensor:
    """The sum of the squares of the parts when each length is cut into parts of this size."""
    return lengths // size * size**2 + (lengths % size) ** 2


def _tile_patches(inputs: Mapping[str, torch.Tensor], patch_size: Any) -> torch.Tensor:
    """Patches of each image or tile, int64 [tiles]."""
    height, width = patch_size if isinstance(patch_size, (list, tuple)) else (patch_size, patch_size)
    pixels = inputs["pixel_values"]
    if "image_position_ids" in inputs:  # Gemma 4's patches; those that fill up have none
        return (inputs["image_position_ids"] >= 0).all(-1).sum(-1)
    if "image_sizes" in inputs and pixels.dim() == 4:  # Pixtral's, padded to the largest
        sizes = inputs["image_sizes"]
        return sizes[:, 0] // height * (sizes[:, 1] // width)
    tiles = pixels.flatten(0, -4)
    is_real = tiles.flatten(1).any(1)  # tiles of zeros fill up
    return is_real * (pixels.shape[-2] // height * (pixels.shape[-1] // width))
