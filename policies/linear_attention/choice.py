"""Whether rows of a model with states are packed, and by which functions its layers keep documents apart."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from policies.linear_attention.kernels import find_kernels, missing_packages
from policies.linear_attention.layers import packages_of, state_layers, tell_documents_apart
from utils.device import DeviceFacts


def why_padded(model_class: type[nn.Module], model_type: str) -> str | None:
    """Why a run of such a model, whose layers pass a state on, is padded if nothing was asked; None if it is packed."""
    packages = packages_of(model_class)
    if packages is None:
        return f"in a packed row of {model_type} models, documents would see each other"
    missing = missing_packages(packages)
    if missing is None:
        return None
    return f"{missing}, the documents of a packed row of {model_type} models would be computed one after another"


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
