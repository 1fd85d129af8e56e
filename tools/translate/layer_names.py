"""Names of linear layers in Hugging Face's models, for tools with names of their own (torchtune, LitGPT)."""

from __future__ import annotations

_LLAMA = {
    "query": ("q_proj",),
    "key": ("k_proj",),
    "value": ("v_proj",),
    "projection": ("o_proj",),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "head": ("lm_head",),
}
_FUSED = {**_LLAMA, **dict.fromkeys(("query", "key", "value"), ("qkv_proj",)), "mlp": ("gate_up_proj", "down_proj")}
_NEOX_ATTENTION = {**dict.fromkeys(("query", "key", "value"), ("query_key_value",)), "projection": ("dense",)}
_NEOX = {**_NEOX_ATTENTION, "mlp": ("dense_h_to_4h", "dense_4h_to_h")}

_FAMILIES = {
    "phi-3": _FUSED,
    "phi3": _FUSED,
    "phi-4": _FUSED,
    "phi4": _FUSED,
    "phi-2": {**_LLAMA, "projection": ("dense",), "mlp": ("fc1", "fc2")},
    "phi-1": {**_LLAMA, "projection": ("dense",), "mlp": ("fc1", "fc2")},
    "falcon": {**_NEOX, "head": ("lm_head",)},
    "pythia": {**_NEOX, "head": ("embed_out",)},
    "stablelm-base-alpha": {**_NEOX, "head": ("embed_out",)},
    "stablelm-tuned-alpha": {**_NEOX, "head": ("embed_out",)},
}
"""By a part of the model's name; all others are named as Llama's."""


def layers_of(model: str, place: str) -> tuple[str, ...]:
    """The names of the layers of `query`, `key`, `value`, `projection`, `mlp` or `head` in this model."""
    family = next((names for part, names in _FAMILIES.items() if part in model.lower()), _LLAMA)
    return family[place]
