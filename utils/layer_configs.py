"""The config of each layer of a model."""

from __future__ import annotations

from typing import Any


def layer_configs(model_config: Any) -> list[Any]:
    """The text config as each layer reads it. Some families' layers differ, in their heads for instance (Gemma 4), and
    transformers then refuses to read such a setting from the config of the whole model."""
    text = model_config.get_text_config()
    if getattr(text, "is_heterogeneous", False):
        return list(text.per_layer_config)
    return [text] * getattr(text, "num_hidden_layers", 1)


def head_dim_of(layer: Any) -> int:
    """The width of an attention head, by the config of its layer; 0 if it has none."""
    heads = getattr(layer, "num_attention_heads", 0)
    return getattr(layer, "head_dim", None) or getattr(layer, "hidden_size", 0) // max(1, heads)
