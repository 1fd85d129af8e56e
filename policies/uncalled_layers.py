"""Linear layers whose weights are multiplied by another module, so that they are never called themselves."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

_PASSED_ON = ("x_proj", "dt_proj", "out_proj")


def uncalled_layers(model: nn.Module) -> set[str]:
    """Their names. Packed weights do not work there, and the adapter of such a layer would stay untrained.

    A Mamba layer passes weights to one kernel if the package mamba_ssm is installed, and dt_proj's are a factor without
    it, too. LongCat's routers multiply the weights of their `classifier` in fp32.
    """
    return {
        f"{name}.{child}" if name else child
        for name, module in model.named_modules()
        for child in _uncalled_children(module)
    }


def _uncalled_children(module: nn.Module) -> Iterator[str]:
    children = dict(module.named_children())
    if hasattr(module, "ssm_state_size"):
        yield from (name for name in _PASSED_ON if name in children)
    elif hasattr(module, "e_score_correction_bias") and isinstance(children.get("classifier"), nn.Linear):
        yield "classifier"
