"""Mamba layers of a model: which of their linear layers are never called."""

from __future__ import annotations

from torch import nn

_PASSED_ON = ("x_proj", "dt_proj", "out_proj")


def passed_to_kernels(model: nn.Module) -> set[str]:
    """The names of linear layers whose weights a Mamba layer multiplies with itself.

    It passes them to one kernel if the package mamba_ssm is installed, and dt_proj's are a factor without it, too. So
    packed weights do not work there, and the adapter of such a layer would stay untrained.
    """
    return {
        f"{name}.{child}" if name else child
        for name, module in model.named_modules()
        if hasattr(module, "ssm_state_size")
        for child, _ in module.named_children()
        if child in _PASSED_ON
    }
