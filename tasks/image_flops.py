"""Model FLOPs of a step of a model of images and text: its text by tokens, its vision encoder by patches."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedModel

from data.batches.counts import BatchCounts
from tasks.flops import Cost, StepFlops, flops_per_token, matrices_of
from utils.model_parts import vision_part
from utils.parameters import Counted

# Of a vision encoder, what computes on features: patches that were merged (Qwen-VL, GLM-V).
_MERGER = re.compile(r"(^|\.)\w*merger\w*\.")
# Of a Q-Former, the keys and values that are computed for each patch.
_OF_PATCHES = re.compile(r"\bcrossattention\.attention\.(key|value)\b")


class ImageFlops:
    """Counts the model FLOPs of a step. Recomputation is not counted.

    The language model costs what `tasks.flops.StepFlops` says, an image's tokens included. A matrix of n weights of the
    vision encoder costs 2n for each patch, one of a projector, merger or Q-Former 2n for each feature that the text
    reads; backward costs as much for the gradient of the input and, if it is trained, again for its own (Chowdhery et
    al., "PaLM", 2022, appendix B; a convolution over patches is such a matrix, Dosovitskiy et al., "An Image is Worth
    16x16 Words", 2021, equation 1). A part before all that is trained has no backward. Attention costs 4 x width per
    layer and pair of patches of an image, or of a window (Bai et al., "Qwen2.5-VL", 2025, section 2.1), and twice that
    in backward.
    """

    def __init__(self, model: Any, cost: Cost = flops_per_token) -> None:
        """
        Args: as of `StepFlops`.
        """
        base: Any = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
        of_encoder = {id(p): name for part in vision_part(base) for name, p in part.named_parameters()}
        of_text = {id(p) for p in base.get_decoder().parameters()} - of_encoder.keys()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        elsewhere = [matrix for matrix in matrices_of(model)[1] if id(matrix.parameter) not in of_text]
        # Positions and queries are tensors, too, and nothing is multiplied by them.
        multiplied = [matrix for matrix in elsewhere if names[id(matrix.parameter)].endswith("weight")]
        of_patches, of_features = list[Counted](), list[Counted]()
        for matrix in multiplied:
            name = of_encoder.get(id(matrix.parameter))
            by_patch = _OF_PATCHES.search(names[id(matrix.parameter)]) if name is None else not _MERGER.search(name)
            (of_patches if by_patch else of_features).append(matrix)
        self.text = StepFlops(model, cost, left_out=elsewhere)
        encoder_learns = any(m.parameter.requires_grad for m in of_patches)
        features_learn = encoder_learns or any(m.parameter.requires_grad for m in of_features)
        self.per_patch = _total(of_patches, cost, has_backward=encoder_learns)
        self.per_feature = _total(of_features, cost, has_backward=features_learn)
        width, num_full, num_windowed = _attention_of(base.config.vision_config)
        passes = 3 if encoder_learns else 1
        self.per_patch_pair, self.per_window_pair = (4 * passes * width * number for number in (num_full, num_windowed))

    def count(self, counts: BatchCounts) -> float:
        """FLOPs of forward and backward over a global batch."""
        return (
            self.text.count(counts)
            + counts.num_image_features * self.per_feature
            + counts.num_patches * self.per_patch
            + counts.num_patch_pairs * self.per_patch_pair
            + counts.num_window_pairs * self.per_window_pair
        )


def _total(matrices: Iterable[Counted], cost: Cost, *, has_backward: bool) -> float:
    if cost is flops_per_token and not has_backward:
        return float(sum(2 * matrix.num_weights for matrix in matrices))
    return float(sum(map(cost, matrices)))


def _attention_of(vision: Any) -> tuple[int, int, int]:
    """The width of a vision encoder's attention, its layers that attend to whole images, and to windows in them."""
    width = getattr(vision, "embed_dim", None) or vision.hidden_size
    names = ("depth", "num_hidden_layers", "num_layers")
    num_layers = next((getattr(vision, name) for name in names if isinstance(getattr(vision, name, None), int)), 0)
    num_full = len(vision.fullatt_block_indexes) if getattr(vision, "fullatt_block_indexes", None) else num_layers
    return width, num_full, num_layers - num_full
