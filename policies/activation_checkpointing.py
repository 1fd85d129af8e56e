"""Activation checkpointing: drop a layer's activations, compute them again in backward."""

from __future__ import annotations

from typing import Any

from configs.errors import ConfigError
from configs.run import RunConfig
from utils.compat import enable_activation_checkpointing


def checkpointing_mode(config: RunConfig) -> str:
    """`off` or `full`: --activation_checkpointing where given, else fsdp_activation_checkpointing under FSDP."""
    if config.train_config.activation_checkpointing is not None:
        return config.train_config.activation_checkpointing
    return "full" if config.train_config.enable_fsdp and config.fsdp_config.fsdp_activation_checkpointing else "off"


def apply_activation_checkpointing(model: Any, mode: str) -> None:
    """Checkpoint every layer under `full`.

    The library's own switch leaves parameter names as they are, unlike torch's `checkpoint_wrapper`.

    Raises:
        ConfigError: where the model cannot.
    """
    if mode == "off":
        return
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ConfigError(
            f"--activation_checkpointing: {type(model).__name__} does not support it; "
            "give --activation_checkpointing off"
        )
    enable_activation_checkpointing(model)
