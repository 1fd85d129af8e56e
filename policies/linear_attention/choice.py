"""Whether rows of a model with states are packed, and by which functions its layers keep documents apart."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from policies.linear_attention.kernels import find_kernels, missing_packages
from policies.linear_attention.layers import packages_against_loops, packages_of, state_layers, tell_documents_apart
from utils.device import DeviceFacts

LOOPS_WITHOUT_KERNEL = frozenset(("recurrent_gemma", "rwkv", "xlstm"))
"""Model types whose layers transformers writes as loops over tokens, with no kernel here that takes their place."""


def stateful_class(model_config: PreTrainedConfig) -> Any:
    """The model's class if its layers pass a state from token to token, as Mamba's and Qwen3-Next's do.

    Some have no class for text alone (glm5_next).
    """
    configs = (model_config, model_config.get_text_config())
    classes = [MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) for config in configs]
    for model_class in (*classes, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(model_config), None)):
        if getattr(model_class, "_is_stateful", False):  # no public name
            return model_class
    return None


def why_padded(model_class: type[nn.Module], model_type: str) -> str | None:
    """Why a run of such a model, whose layers pass a state on, is padded if nothing was asked; None if it is packed."""
    packages = packages_of(model_class)
    if packages is None:
        return f"in a packed row of {model_type} models, documents would see each other"
    missing = missing_packages(packages)
    if missing is None:
        return None
    return f"{missing}, the documents of a packed row of {model_type} models would be computed one after another"


def why_slow_to_compile(model_config: PreTrainedConfig) -> str | None:
    """Why compiling layers of such a model takes too long, as a clause; None if it does not.

    Each turn of a loop over tokens, or over those of a chunk, becomes code of its own. On an H200, 1,496 tokens of
    Qwen3.5-4B's shape had not compiled after 450 s (torch 2.11); one tiny layer of FalconMamba took 172 s on a CPU for
    rows of 32 tokens (torch 2.13).
    """
    model_class = stateful_class(model_config)
    if model_class is None:
        return None
    loop = f"the loop over tokens of {model_config.model_type} layers takes many minutes to compile"
    if model_config.get_text_config().model_type in LOOPS_WITHOUT_KERNEL:
        return loop
    missing = missing_packages(packages_against_loops(model_class))
    return missing and f"{missing}, {loop}"


def use_offsets_in_states(model: PreTrainedModel, device: DeviceFacts, *, packed: bool) -> list[str]:
    """Have the layers that pass a state on, if there are any, keep the documents of packed rows apart.

    Returns:
        Lines to print.
    """
    layers = state_layers(model)
    tell_documents_apart(layers, find_kernels(device))
    if not (layers and packed) or device.type == "cpu":
        return []
    packages = packages_of(type(model)) or set()
    if missing := missing_packages(packages):
        return [f"linear attention: {missing}, packed documents are computed one after another, which is slow"]
    line = "linear attention: packed documents are told apart by their offsets"
    # Measured on an H100: two and a half minutes for Qwen3.5's forward kernels alone.
    is_tuned = "fla" in packages
    return [line + ("; the first run on a kind of GPU tries many kernels, for minutes" if is_tuned else "")]
