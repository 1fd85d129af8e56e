"""Positions with three axes, of the Qwen-VL and GLM-V families: an image's tokens have places in a grid.

All three axes count the tokens of text. Those of an image share one place in time, and their rows and columns count
from there. The text after it goes on behind the longer side (Wang et al., "Qwen2-VL", 2024, section 2.1). transformers
computes the same of padded rows (`get_rope_index`); here each sample of a packed row counts alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig


@dataclass(frozen=True)
class GridPositions:
    """Counts the positions of a family.

    Attributes:
        image_token: the id that stands for a feature of an image.
        merged: patches along a side that become one feature.
    """

    image_token: int
    merged: int

    @classmethod
    def of_config(cls, model_config: PreTrainedConfig) -> GridPositions | None:
        """The positions of models with this config; None if they have one axis."""
        rope = getattr(model_config.get_text_config(), "rope_parameters", None) or {}
        if "mrope_section" not in rope:
            return None
        return cls(model_config.image_token_id, model_config.vision_config.spatial_merge_size)

    def count(self, ids: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        """The positions of one sample in time, row and column: int64 [3, tokens].

        Args:
            ids: int64 [tokens].
            grids: int64 [images, 3], patches of each image in time, height and width.
        """
        positions = torch.arange(len(ids)).expand(3, -1).clone()
        features = grids // torch.tensor([1, self.merged, self.merged])
        for start, grid in zip(self._starts(ids, features), features.tolist(), strict=True):
            axes = torch.meshgrid(*map(torch.arange, grid), indexing="ij")
            end = start + axes[0].numel()
            positions[:, start:end] = positions[0, start] + torch.stack(axes).flatten(1)
            positions[:, end:] -= end - start - max(grid[1:])
        return positions

    def _starts(self, ids: torch.Tensor, features: torch.Tensor) -> list[int]:
        """The place of each image's first token."""
        places, numbers = (ids == self.image_token).nonzero().squeeze(1), features.prod(-1)
        starts: list[int] = places[numbers.cumsum(0) - numbers].tolist()
        return starts
