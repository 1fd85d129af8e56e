"""Which models have adapters, and which parameters are the adapters' own, told without importing peft.

Importing peft takes a second, and bitsandbytes comes with it; a run without adapters imports neither.
"""

from __future__ import annotations

from typing import Any

from torch import nn

OWN_NAMES = {
    "LORA": ("lora_", "trainable_tokens_", "modules_to_save."),
    "ADAPTION_PROMPT": ("adaption_",),
    "PREFIX_TUNING": ("prompt_encoder.",),
}
"""Parts of names, by peft's kind: each of an adapter's own parameters has one of them in its name, and no other has."""


def has_adapter(model: nn.Module) -> bool:
    """Whether the model is a PeftModel. It must be out of what wraps it (`policies.sharding.unwrap`)."""
    return hasattr(model, "get_base_model")  # transformers' own classes have none


def base_model(model: nn.Module) -> Any:
    """The transformers model, without the PeftModel around it."""
    inner: Any = model
    return inner.get_base_model() if has_adapter(inner) else inner


def is_own_name(model: Any, name: str) -> bool:
    """Whether a PeftModel's parameter of this name is the adapter's own, and not its base model's."""
    return any(own in name for own in OWN_NAMES[model.peft_config[model.active_adapter].peft_type])
