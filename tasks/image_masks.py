"""The masks of packed rows whose images are seen both ways: each token of an image sees all of that image.

transformers draws them for padded rows. In packed ones 5.23 looks up images in windows by places inside samples, as if
all samples had theirs where the first one has (`packed_sequence_compatibility_function`), so they are drawn here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

TYPES_OF_IMAGES = ("gemma3",)
"""Model types whose token type 1 marks an image, and that take a mask for each kind of layer."""


@dataclass(frozen=True)
class ImageMasks:
    """Draws the masks of a family.

    Attributes:
        window: tokens that a layer with a sliding window sees, the query's own counted.
    """

    window: int

    @classmethod
    def of_config(cls, model_config: PreTrainedConfig) -> ImageMasks | None:
        """The masks of models with this config; None if transformers draws right ones, or none are needed."""
        if model_config.model_type not in TYPES_OF_IMAGES:
            return None
        return cls(model_config.get_text_config().sliding_window)

    def draw(self, position_ids: torch.Tensor, token_types: torch.Tensor) -> dict[str, torch.Tensor]:
        """Which keys (last dimension) a query sees, by the kind of layer: bool [batch, 1, seq, seq].

        Args:
            position_ids: int64 [batch, seq], 0 where a sample begins.
            token_types: int64 [batch, seq], 1 at the tokens of images.
        """
        sample = (position_ids == 0).cumsum(1)
        is_image = token_types == 1
        follows = torch.zeros_like(is_image)
        follows[:, 1:] = is_image[:, :-1] & (sample[:, 1:] == sample[:, :-1])
        image = torch.where(is_image, (is_image & ~follows).cumsum(1), 0)
        places = torch.arange(sample.shape[1], device=sample.device)
        after = places[:, None] - places
        same_image = (image[:, :, None] == image[:, None]) & is_image[:, None]
        full = (sample[:, :, None] == sample[:, None]) & ((after >= 0) | same_image)
        return {"full_attention": full[:, None], "sliding_attention": (full & (after < self.window))[:, None]}
