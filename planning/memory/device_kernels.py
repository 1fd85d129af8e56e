"""A device's kernels of attention, dropout and experts, by the tensors they keep, for passes on the meta device."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

Kernel = Literal["flash", "efficient", "math"]
Capability = tuple[int, int] | None
"""The compute capability of a card; None: of a CPU, which has none."""


def kernel_on_cpu(query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout_p: float) -> Kernel:
    """The kernel that `scaled_dot_product_attention` takes on a CPU (torch's `sdp_utils_cpp.cpp`).

    Flash serves every dtype, masks and shared key heads. It knows no dropout, no gradient of a mask (T5 trains its
    bias), and no values of another size than the queries.
    """
    takes_mask = mask is None or (mask.dim() in (2, 4) and not mask.requires_grad)
    is_plain = dropout_p > 0 or not takes_mask or query.shape[-1] != value.shape[-1]
    return "math" if is_plain else "flash"


def kernel_of(
    dtype: torch.dtype, capability: tuple[int, int], *, has_mask: bool, grouped: bool, head_dim: int
) -> Kernel:
    """The kernel that `scaled_dot_product_attention` takes on such a card (torch's `sdp_utils.cpp`).

    Flash needs capability 8.0, half precision, heads up to 256 and no mask. The memory-efficient kernel takes bf16 from
    8.0 on, and as many key heads as query heads. Everything else is plain products and a softmax.

    Args:
        grouped: there are fewer key heads than query heads.
    """
    half = dtype in (torch.float16, torch.bfloat16)
    if half and capability >= (8, 0) and not has_mask and head_dim <= 256:
        return "flash"
    if grouped or (dtype == torch.bfloat16 and capability < (8, 0)):
        return "math"
    return "efficient"


class KernelsOfCard(TorchFunctionMode):
    """Inside this context attention, dropout and experts on meta tensors keep what they keep on such a device.

    Questions that models ask of values (`if mask.all()`) get one answer, because meta tensors have no values. Checks of
    inputs (`torch._check_tensor_all`, which asks for an `item`) pass.
    """

    def __init__(self, capability: Capability, *, answer: bool) -> None:
        """
        Args:
            answer: models ask whether a given mask masks nothing, and whether position ids are those of one sequence
                per row: True without a mask, False with one.
        """
        super().__init__()
        self.capability, self.answer = capability, answer

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            return _attention(self.capability, *args, **kwargs)
        if function is F.dropout and self.capability is not None:
            return _dropout(*args, **kwargs)
        if function is torch._grouped_mm:  # which F.grouped_mm calls
            return _grouped_product(*args, **kwargs)
        if function is torch.Tensor.__bool__:
            return self.answer
        if function is torch.Tensor.item and args[0].dtype == torch.bool and args[0].is_meta:
            return True
        if function is torch.Tensor.backward:
            # torch leaves a mode while it calls the function. Checkpointed layers run again in backward: with the mode.
            with self:
                return _backward_from(*args)
        return function(*args, **kwargs)


def _backward_from(loss: torch.Tensor) -> None:
    """`torch.Tensor.backward` of a scalar. An edge, unlike a tensor, has torch ask no mode again."""
    torch.autograd.backward(get_gradient_edge(loss), torch.ones_like(loss))


def _attention(
    capability: Capability,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention` by the kernel of such a device."""
    if capability is None:
        kernel = kernel_on_cpu(query, value, attn_mask, dropout_p)
    else:
        kernel = kernel_of(
            query.dtype,
            capability,
            has_mask=attn_mask is not None,
            grouped=enable_gqa and query.shape[1] != key.shape[1],
            head_dim=query.shape[-1],
        )
    if kernel == "math":
        return torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.new_empty(attn_mask.shape, dtype=query.dtype)  # as torch converts it, in every layer
    output: torch.Tensor = _fused(query, key, value, attn_mask, capability is None, is_causal)[0]
    return output


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """`F.dropout` that keeps a mask of one byte per element; elsewhere torch keeps one of the input's dtype."""
    return torch.ops.aten.native_dropout(input, p, training)[0] if training and p > 0 else input


def _grouped_product(
    mat_a: torch.Tensor, mat_b: torch.Tensor, offs: torch.Tensor, bias: None = None, out_dtype: None = None
) -> torch.Tensor:
    """The product of experts, which torch has on the meta device for bf16 alone; transformers' keeps the same."""
    if mat_a.dtype == torch.bfloat16:
        return torch._grouped_mm(mat_a, mat_b, offs, bias, out_dtype)
    output: torch.Tensor = torch.ops.transformers.grouped_mm_fallback(mat_a, mat_b, offs)
    return output


# A custom operator, whose name selective checkpointing takes for an attention (policies/activations/checkpointing.py).


@torch.library.custom_op("planning::scaled_dot_product_fused", mutates_args=())
def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    on_cpu: bool,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, [batch, heads, seq, head_dim], and one fp32 number per query and head. Computes nothing."""
    raise NotImplementedError("attention of a plan has no values")


@_fused.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    on_cpu: bool,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, length, _ = query.shape
    output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
    return output, query.new_empty(batch, heads, length, dtype=torch.float32)


# An operator of its own, so that its FLOPs can be counted (planning/cost/counted_work.py).


@torch.library.custom_op("planning::fused_attention_backward", mutates_args=())
def _fused_backward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value. Computes nothing."""
    raise NotImplementedError("attention of a plan has no values")


@_fused_backward.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Save the tensors that the flash and the memory-efficient kernel save."""
    *tensors, ctx.on_cpu, ctx.is_causal = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    query, key, value, bias, output, _ = ctx.saved_tensors
    temporaries = []
    if not ctx.on_cpu:
        # A GPU sums gradients of the query in fp32, and those of shared keys and values first for every query head.
        temporaries.append(torch.empty_like(query, dtype=torch.float32))
        if key.shape[1] != query.shape[1]:
            shape = (*query.shape[:2], *key.shape[2:])
            temporaries += [key.new_empty(shape), value.new_empty(shape)]
    grads = _fused_backward(query, key, value, ctx.is_causal)
    del output  # kernels read it for this
    temporaries.clear()  # they live until the gradients are there, as in the kernels
    return *grads, torch.empty_like(bias) if bias is not None and ctx.needs_input_grad[3] else None, None, None


_fused.register_autograd(_backward, setup_context=_keep)

FUSED_ATTENTION = torch.ops.planning.scaled_dot_product_fused.default
FUSED_ATTENTION_BACKWARD = torch.ops.planning.fused_attention_backward.default
