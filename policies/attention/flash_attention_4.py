"""FlashAttention 4, where it is installed: attention for Hopper and Blackwell GPUs, faster than torch's own kernels.

On an H200 it takes 0.84 to 0.91 of the time of cuDNN's, which torch takes for rows of one document, and half to 0.8 of
that of FlashAttention 2, which is all that torch has for packed rows (docs/performance.md). It compiles each kernel
when that is first called, in about five seconds; later starts read them from its cache.

Its forward and backward are operators, not autograd functions, for the reason in
policies/quantization/quantized_linear.py. They call the two functions that torch.nn.attention calls for the same
purpose; torch 2.11 reads fewer outputs than they have since.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula, sdpa_flop_count
from transformers import PreTrainedConfig

from policies.attention.sequence_flops import backward_flop_count, flops_of_sequences
from policies.mixed_precision import Precision
from utils.compat import has_sinks
from utils.errors import in_one_line
from utils.layer_configs import head_dim_of, layer_configs

NO_WINDOW = -1
LARGEST_HEAD = 128  # elements; larger ones have other kernels, which were not compared
CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"  # "1": compiled kernels are kept for the next start


class AttentionKind(NamedTuple):
    """The properties of attention that a kernel is compiled for."""

    num_heads: int
    num_key_heads: int
    head_dim: int
    window: int  # tokens before its own that a query sees, or NO_WINDOW
    packed: bool
    has_sinks: bool = False  # policies/attention/sinks.py
    shares_keys: bool = False  # sequences of a packed row begin with tokens of others (policies/attention/shared_keys)


def attention_kinds(model_config: PreTrainedConfig, *, packed: bool) -> set[AttentionKind]:
    """The kinds that the layers of a causal model may call.

    Args:
        packed: several documents may share a row. A row of one alone calls the kernel of padded rows all the same.
    """
    found = set()
    for layer in layer_configs(model_config):
        heads = getattr(layer, "num_attention_heads", 0)
        key_heads = getattr(layer, "num_key_value_heads", None) or heads
        # A window's size is an argument of the kernel, so any one shorter than the probe's sequences will do.
        windows = {NO_WINDOW} if getattr(layer, "sliding_window", None) is None else {NO_WINDOW, 15}
        found |= {
            AttentionKind(heads, key_heads, head_dim_of(layer), window, of_row, has_sinks(model_config))
            for window in windows
            for of_row in {False, packed}
        }
    return found


def find_flash_attention_4(
    device: torch.device | None, precision: Precision, kinds: Iterable[AttentionKind]
) -> tuple[bool, list[str]]:
    """Whether attention of this run can use it, and lines to print. Each kind is tried, forward and backward.

    Args:
        device: that computes; None if it is not here, as in a plan, which counts torch's kernels: both keep the same.
    """
    kinds, is_half = set(kinds), precision.compute_dtype in (torch.bfloat16, torch.float16)
    if device is None or device.type != "cuda" or not is_half or torch.version.hip is not None:
        return False, []
    # Hopper and Blackwell of data centers. find_spec imports nothing here.
    if torch.cuda.get_device_capability(device)[0] not in (9, 10) or find_spec("flash_attn") is None:
        return False, []
    if not kinds or not all(8 <= kind.head_dim <= LARGEST_HEAD and kind.head_dim % 8 == 0 for kind in kinds):
        return False, []
    os.environ.setdefault(CACHE, "1")  # read when the package is imported
    try:
        if find_spec("flash_attn.cute") is None:  # FlashAttention 2, which is imported to see that
            return False, []
        apart = torch.stack([_distance_to_torch(kind, device, precision.compute_dtype) for kind in kinds]).max().item()
    except Exception as error:  # of a package that does not fit: a compiler's, an import's, any
        return False, [f"attention: flash-attn-4 does not work here, so torch's kernels serve ({in_one_line(error)})"]
    if not apart < 0.02:
        return False, [f"attention: flash-attn-4 is {100 * apart:.0f} % off here, so torch's kernels serve"]
    return True, []


def _distance_to_torch(kind: AttentionKind, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The largest relative distance, of outputs and gradients, to attention in fp32; NaN if one is."""
    lengths = (350, 3, 31) if kind.packed else (192, 192)  # tokens: more than a block of the kernel
    key_lengths = (350, 203, 31) if kind.shares_keys else lengths
    offsets, key_offsets = (
        torch.tensor([0, *of], device=device).cumsum(0, dtype=torch.int32) for of in (lengths, key_lengths)
    )
    generator = torch.Generator(device).manual_seed(0)
    *leaves, probe = (
        torch.randn(sum(of), number, kind.head_dim, device=device, dtype=dtype, generator=generator)
        for of, number in zip(
            (lengths, key_lengths, key_lengths, lengths),
            (kind.num_heads, kind.num_key_heads, kind.num_key_heads, kind.num_heads),
            strict=True,
        )
    )
    if kind.has_sinks:  # of the size that the sums of a row have, or they would not show
        leaves.append(4 + torch.randn(kind.num_heads, device=device, dtype=dtype, generator=generator))
    mask = visible_keys(offsets, key_offsets, kind.window)

    def by_flash_4(*inputs: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"window": kind.window, "sinks": inputs[3] if kind.has_sinks else None}
        if kind.packed:
            options |= {"cu_seqlens": offsets, "max_length": max(lengths), "of_keys": (key_offsets, max(key_lengths))}
            return flash_attention_4(*inputs[:3], **options)
        query, key, value = (tensor.unflatten(0, (2, -1)) for tensor in inputs[:3])
        return flash_attention_4(query, key, value, **options).flatten(0, 1)

    def plain(*inputs: torch.Tensor) -> torch.Tensor:
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in inputs[:3])
        seen = mask
        if kind.has_sinks:  # a key of zeros, whose score is the sink, with a value of zeros
            key, value = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (key, value))
            scores = torch.where(mask, 0.0, -torch.inf).expand(kind.num_heads, -1, -1)
            seen = torch.cat([scores, inputs[3][:, None, None].expand(-1, len(mask), 1)], 2)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)

    def run(attend: Any, to: torch.dtype) -> list[torch.Tensor]:
        with torch.enable_grad():
            inputs = [leaf.to(to).requires_grad_() for leaf in leaves]
            output = attend(*inputs)
            return [output.detach(), *torch.autograd.grad(output, inputs, probe.to(to))]

    pairs = zip(run(by_flash_4, dtype), run(plain, torch.float32), strict=True)
    distances = [(found.float() - wanted).norm() / wanted.norm() for found, wanted in pairs]
    return torch.stack(distances).max()  # Python's max would pass over NaN


def visible_keys(offsets: torch.Tensor, key_offsets: torch.Tensor, window: int) -> torch.Tensor:
    """Which keys each query sees, bool [queries, keys]. The last query of a sequence is at its last key."""
    sequences, from_end = [], []
    for of in (offsets, key_offsets):
        places = torch.arange(int(of[-1]), device=of.device)
        sequences.append(torch.bucketize(places, of, right=True))
        from_end.append(of[sequences[-1]] - places)
    before = from_end[1] - from_end[0][:, None]  # how many tokens a key is before the query
    visible = (sequences[0][:, None] == sequences[1]) & (before >= 0)
    return visible if window == NO_WINDOW else visible & (before <= window)


def flash_attention_4(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    max_length: int | None = None,
    of_keys: tuple[torch.Tensor, int] | None = None,
    scale: float | None = None,
    window: int = NO_WINDOW,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention.

    Args:
        query: [batch, seq, heads, head_dim], or with `cu_seqlens` [tokens, heads, head_dim]; key and value may have
            fewer heads.
        cu_seqlens: int32 [sequences + 1], where each sequence begins, and where the last ends.
        max_length: tokens of the longest sequence.
        of_keys: the same two of keys and values, if sequences have more of them: the last query is at the last key.
        window: how many tokens before its own a query sees.
        sinks: [heads] (policies/attention/sinks.py).

    Returns:
        As the query.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    cu_seqlens_k, max_length_k = of_keys or (cu_seqlens, max_length)
    offsets = (cu_seqlens, cu_seqlens_k, max_length, max_length_k)
    output: torch.Tensor = attend(query, key, value, *offsets, scale, window, sinks)[0]
    return output


@torch.library.custom_op("flash_attention_4::attend", mutates_args=())
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_length: int | None,
    max_length_k: int | None,
    scale: float,
    window: int,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and fp32 [batch, heads, seq] or [heads, tokens]: the logarithm of each query's sum."""
    from flash_attn.cute.interface import _flash_attn_fwd

    options = _options(cu_seqlens, cu_seqlens_k, max_length, max_length_k, scale, window, sinks)
    output, log_sums, *_ = _flash_attn_fwd(query, key, value, **options, return_lse=True)
    return output, log_sums


@attend.register_fake
def _(query: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *rows, heads, _ = query.shape
    shape = (heads, *rows) if len(rows) == 1 else (rows[0], heads, rows[1])
    return query.new_empty(query.shape), query.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("flash_attention_4::attend_backward", mutates_args=())
def attend_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sums: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_length: int | None,
    max_length_k: int | None,
    scale: float,
    window: int,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key, value and sinks; of no sinks an empty one."""
    from flash_attn.cute.interface import _flash_attn_bwd

    of_query, of_key, of_value, *of_sinks = _flash_attn_bwd(
        query,
        key,
        value,
        output,
        grad.contiguous(),
        log_sums,
        **_options(cu_seqlens, cu_seqlens_k, max_length, max_length_k, scale, window, sinks),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return of_query, of_key, of_value, query.new_empty(0) if sinks is None else of_sinks[0]


@attend_backward.register_fake
def _(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    sinks = args[-1]
    of_sinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), of_sinks


def _options(
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_length: int | None,
    max_length_k: int | None,
    scale: float,
    window: int,
    sinks: torch.Tensor | None,
) -> dict[str, Any]:
    """The arguments that forward and backward share."""
    options: dict[str, Any] = {"softmax_scale": scale, "causal": True}
    if window != NO_WINDOW:
        options |= {"window_size_left": window, "window_size_right": 0}
    if cu_seqlens is not None:
        options |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens_k}
        options |= {"max_seqlen_q": max_length, "max_seqlen_k": max_length_k}
    if sinks is not None:
        options["learnable_sink"] = sinks
    return options


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, cu_seqlens, cu_seqlens_k, *ctx.options, sinks = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seqlens, cu_seqlens_k, sinks)


def _backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    *tensors, sinks = ctx.saved_tensors
    *of_heads, of_sinks = attend_backward(grad, *tensors, *ctx.options, sinks)
    return *of_heads, *[None] * 6, None if sinks is None else of_sinks


attend.register_autograd(_backward, setup_context=_keep)


@register_flop_formula(torch.ops.flash_attention_4.attend, get_raw=True)
def _(query: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    return flops_of_sequences(sdpa_flop_count, query, args[2], args[3])


@register_flop_formula(torch.ops.flash_attention_4.attend_backward, get_raw=True)
def _(grad: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    return flops_of_sequences(backward_flop_count, grad, args[5], args[6])
