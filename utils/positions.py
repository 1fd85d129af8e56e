"""The number of positions of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

AFTER_PADDING = (
    *("camembert", "data2vec-text", "roberta", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
)
"""Model types whose first token has the position after the padding id; positions up to that id hold no token."""


def positions_of(text_config: PreTrainedConfig) -> int | None:
    """The most tokens that a model with this config has positions for; None if there is no limit."""
    positions: int | None = getattr(text_config, "max_position_embeddings", None)
    if positions is not None and text_config.model_type in AFTER_PADDING:
        return positions - (text_config.pad_token_id or 0) - 1
    return positions
