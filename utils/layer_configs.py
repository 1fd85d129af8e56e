"""The config of each layer of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def layer_configs(model_config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """The text config of each layer.

    In some families layers differ, for instance in their heads (Gemma 4). transformers then refuses to read such a
    setting from the config of the whole model.
    """
    text = model_config.get_text_config()
    if getattr(text, "is_heterogeneous", False):
        return list(text.per_layer_config)
    return [text] * getattr(text, "num_hidden_layers", 1)


def head_dim_of(layer: PreTrainedConfig) -> int:
    """The width of an attention head by its layer's config; 0 without heads."""
    heads = getattr(layer, "num_attention_heads", 0)
    return getattr(layer, "head_dim", None) or getattr(layer, "hidden_size", 0) // max(1, heads)
