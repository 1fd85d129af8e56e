"""Attention of vision encoders that read the patches of all images in one row: by the images' offsets.

Qwen-VL's and GLM-V's are such. transformers gives the offsets to flash attention alone; otherwise it splits the row by
them, layer after layer, for which the host waits for the device, and compiled layers break.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from policies.attention.each_sequence import attention_of_each_sequence
from utils.device import DeviceFacts
from utils.model_parts import vision_part

OF_EACH_IMAGE = "flash_of_each_image"
"""The name by which transformers knows `attention_of_each_image`. It hands offsets to names that hold "flash"."""

_OF_TEXT = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_BOTH_WAYS = (-1, -1)


def attention_of_each_image(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention inside images, both ways, with the signature of transformers' attention functions.

    Args:
        query: [1, heads, patches, head_dim]; key and value alike.
        cu_seq_lens_q: int32 [images + 1], or of windows inside images: where each begins, and where the last ends.
        max_length_q: patches of the largest one.

    Returns:
        [1, patches, heads, head_dim], and no attention weights.
    """
    if query.is_meta and cu_seq_lens_q is not None and not cu_seq_lens_q.is_meta:
        return _without_values(module, query, key, value, cu_seq_lens_q, scaling), None
    if cu_seq_lens_q is None or query.is_meta:
        return sdpa_attention_forward(
            module, query, key, value, None, dropout=dropout, scaling=scaling, is_causal=False
        )
    patches = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    longest = query.shape[2] if max_length_q is None else max_length_q
    kernel: Callable[..., Any] = attention_of_each_sequence if query.is_cpu else varlen_attn
    output = kernel(*patches, cu_seq_lens_q, cu_seq_lens_q, longest, longest, scale=scaling, window_size=_BOTH_WAYS)
    return output[None], None


def _without_values(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offsets: torch.Tensor, scale: Any
) -> torch.Tensor:
    """The same of a plan, which counts SDPA's kernels: they keep as much. Images of one size are computed at once."""
    outputs = []
    for length, number in Counter(offsets.diff().tolist()).items():
        parts = [t[0, :, : length * number].unflatten(1, (number, length)).transpose(0, 1) for t in (query, key, value)]
        output, _ = sdpa_attention_forward(module, parts[0], parts[1], parts[2], None, scaling=scale, is_causal=False)
        outputs.append(output.flatten(0, 1))
    return torch.cat(outputs)[None]


def read_images_apart(model: PreTrainedModel, device: DeviceFacts, compute_dtype: torch.dtype) -> None:
    """Let the vision encoder attend by offsets if it reads them, and keep those of the text's samples from it.

    transformers hands all arguments of a forward pass that it does not know to the vision encoder, too.
    """
    for encoder in vision_part(model):
        encoder.register_forward_pre_hook(_without_offsets_of_text, with_kwargs=True)
        if isinstance(encoder, PreTrainedModel) and _reads_offsets(encoder) and _has_kernel(device, compute_dtype):
            AttentionInterface.register(OF_EACH_IMAGE, attention_of_each_image)
            encoder.config._attn_implementation = OF_EACH_IMAGE


def _without_offsets_of_text(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {name: value for name, value in kwargs.items() if name not in _OF_TEXT}


def _reads_offsets(encoder: PreTrainedModel) -> bool:
    """Whether layers attend by offsets, of images or of windows in them."""
    return any("cu_seqlens" in inspect.signature(module.forward).parameters for module in encoder.modules())


def _has_kernel(device: DeviceFacts, compute_dtype: torch.dtype) -> bool:
    """A CPU computes image by image. torch's flash kernels need cards that have bf16, and half precision."""
    return device.type == "cpu" or (device.has_bf16 and compute_dtype != torch.float32)
