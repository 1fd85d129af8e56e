"""The number of positions of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
    if positions is None:
        return None
    if text_config.model_type in AFTER_PADDING:
        return positions - (text_config.pad_token_id or 0) - 1
    return _stretched(positions, rope_sets(text_config).get("", {}))


def rope_sets(text_config: PreTrainedConfig) -> dict[str, Mapping[str, Any]]:
    """The parameters of rotary positions by the kind of layers that they are for.

    One set for all layers is named "". Without rotary positions there is none.
    """
    return sets_of(getattr(text_config, "rope_parameters", None))


def sets_of(rope_parameters: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """`rope_sets` of the value that config.json has."""
    found = rope_parameters or {}
    nested = {name: own for name, own in found.items() if isinstance(own, Mapping)}
    # A kind of layers that has no rotary positions has None there.
    is_single = not nested and any(value is not None for value in found.values())
    return {"": found} if is_single else nested


def _stretched(positions: int, rope: Mapping[str, Any]) -> int:
    """The positions under a factor that `max_position_embeddings` may not have in it.

    So read vLLM and SGLang it. transformers documents the unscaled number for linear factors; for YaRN people add the
    factor to a config.json by hand, as Qwen's model cards say, and leave the number.
    """
    factor = rope.get("factor") or 1
    if rope.get("rope_type") == "linear":
        return int(positions * factor)
    if rope.get("rope_type") == "yarn":
        return max(positions, int(rope.get("original_max_position_embeddings", positions) * factor))
    return positions
