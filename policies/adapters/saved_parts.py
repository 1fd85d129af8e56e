"""Modules that are trained whole next to LoRA, such as the head of a classifier: peft's `modules_to_save`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from peft.utils.other import ModulesToSaveWrapper
from torch import nn
from torch.distributed.tensor import DTensor

from policies.weights.sources import keep_part

PEFTS_HEADS = ("classifier", "score")
"""The names of heads that peft itself saves with an adapter of the type SEQ_CLS."""


@torch.no_grad()
def set_saved_parts(model: nn.Module) -> None:
    """Copy the base's modules, which may be sharded, into those that are trained, unless these were read.

    Every rank must call this.
    """
    for wrapper in _wrappers(model):
        if getattr(wrapper, "was_read", False):
            continue
        (trained,) = wrapper.modules_to_save.values()
        for name, parameter in trained.named_parameters():
            weight: torch.Tensor = wrapper.original_module.get_parameter(name)
            if isinstance(weight, DTensor):  # shards may be in host memory, where the mesh gathers nothing
                weight = cast(DTensor, weight.to(weight.device_mesh.device_type)).full_tensor()
            keep_part(parameter, weight.to(parameter))


def use_own_dtype(model: nn.Module) -> None:
    """Let these modules, which may be fp32 next to a bf16 base, get their inputs in the dtype that they compute in."""

    def cast(wrapper: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        (trained,) = wrapper.modules_to_save.values()
        dtype = next(trained.parameters()).dtype
        return tuple(each.to(dtype) if torch.is_tensor(each) and each.is_floating_point() else each for each in inputs)

    for wrapper in _wrappers(model):
        wrapper.register_forward_pre_hook(cast)


def keep_saved_parts(model: nn.Module) -> None:
    """Note that the values of these modules were read with the adapter."""
    for wrapper in _wrappers(model):
        wrapper.was_read = True


def _wrappers(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, ModulesToSaveWrapper))
