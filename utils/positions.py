"""How many tokens a model has positions for."""

from __future__ import annotations

from typing import Any

BEHIND_PADDING = (
    *("camembert", "data2vec-text", "roberta", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
)
"""Model types whose first token is at the position behind that of the padding id; those up to it hold no token."""


def positions_of(text_config: Any) -> int | None:
    """Tokens that the model with this config has positions for; None if it has no limit."""
    positions: int | None = getattr(text_config, "max_position_embeddings", None)
    if positions is not None and text_config.model_type in BEHIND_PADDING:
        return positions - (text_config.pad_token_id or 0) - 1
    return positions
