"""What a LoRA layer keeps for backward: its input as it is, where peft's code keeps a copy in the adapter's dtype.

Adapters are trained in fp32 beside a base that computes in bf16 or fp16. Then the copy, dropped out, is the largest
tensor that an adapted layer keeps, twice the size of its input, which is kept anyway. The arithmetic is peft's own.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear
from torch import nn
from torch.utils.flop_counter import register_flop_formula


def keep_inputs_as_they_are(model: nn.Module) -> None:
    """Give every plain LoRA layer of the model a forward that computes the same and keeps less."""
    plain: list[Any] = [m for m in model.modules() if isinstance(m, Linear) and not m.lora_variant]
    for layer in plain:
        layer.forward = MethodType(_forward, layer)  # one function for all: so one compiled graph serves all layers


def _forward(layer: Any, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if layer.disable_adapters or layer.merged or "adapter_names" in kwargs:
        return type(layer).forward(layer, inputs, *args, **kwargs)
    outputs = base_outputs = layer.base_layer(inputs, *args, **kwargs)
    for name in layer.active_adapters:
        share = layer.lora_dropout[name].p if layer.training and hasattr(layer.lora_dropout[name], "p") else 0.0
        # Drawn here, by an operator of torch's own: what is computed again for backward then draws the same.
        kept = torch.empty_like(inputs, dtype=torch.bool).bernoulli_(1 - share) if share else None
        low = project_down(inputs, layer.lora_A[name].weight, kept, 1 / (1 - share))
        outputs = outputs + layer.lora_B[name](low) * layer.scaling[name]
    return outputs.to(base_outputs.dtype)


@torch.library.custom_op("lora::project_down", mutates_args=())
def project_down(inputs: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor | None, scale: float) -> torch.Tensor:
    """The input, dropped out, times A: in the dtype of A, which the inputs are cast to and not kept in.

    Args:
        inputs: [..., in].
        weight: A, [r, in].
        kept: bool, as the inputs; None keeps all. scale: of what is kept.

    Returns:
        [..., r]
    """
    return F.linear(_dropped(inputs, weight.dtype, kept), weight) * scale


@project_down.register_fake
def _(inputs: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor | None, scale: float) -> torch.Tensor:
    return weight.new_empty((*inputs.shape[:-1], weight.shape[0]))


def _dropped(inputs: torch.Tensor, dtype: torch.dtype, kept: torch.Tensor | None) -> torch.Tensor:
    inputs = inputs.to(dtype)
    return inputs if kept is None else inputs * kept


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    activations, weight, kept, ctx.scale = inputs
    ctx.save_for_backward(activations, weight, kept)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    inputs, weight, kept = ctx.saved_tensors
    grad = grad * ctx.scale  # here and in forward of [..., r], the smallest tensor
    grad_inputs = None
    if ctx.needs_input_grad[0]:
        grad_inputs = _dropped(grad @ weight, weight.dtype, kept).to(inputs.dtype)
    dropped = _dropped(inputs, weight.dtype, kept)
    return grad_inputs, grad.flatten(0, -2).T @ dropped.flatten(0, -2), None, None


project_down.register_autograd(_backward, setup_context=_keep)


PROJECT_DOWN = torch.ops.lora.project_down.default


@register_flop_formula(torch.ops.lora.project_down)
def _(inputs: torch.Size, weight: torch.Size, *args: Any, **kwargs: Any) -> int:
    return 2 * inputs.numel() * weight[0]
