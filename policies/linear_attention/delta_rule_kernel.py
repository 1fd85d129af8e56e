"""The gated delta rule by flash-linear-attention's kernels, as an operator.

The package's own function ends compiled code, so a layer would be three graphs, each of which keeps its inputs and
outputs for backward. As an operator the rule stands inside of one graph. It calls the two functions that the package's
autograd function calls (`fla/ops/gated_delta_rule/chunk.py` of flash-linear-attention 0.6.0).
"""

from __future__ import annotations

import math
from typing import Any

import torch

CHUNK = 64  # tokens; the rule keeps a product of each token with those of its chunk


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    """The outputs of the rule (Yang et al., "Gated Delta Networks", 2024, equation 10), [batch, seq, heads, value_dim].

    Args:
        query: [batch, seq, key_heads, key_dim], as is the key; both are divided by their norms first. Each key head
            serves heads / key_heads value heads.
        value: [batch, seq, heads, value_dim].
        decay: [batch, seq, heads], in log space.
        beta: [batch, seq, heads].
        cu_seqlens: int32 [documents + 1] in the flattened [batch x seq]; None: each row is a document.
    """
    output: torch.Tensor = delta_rule(query, key, value, decay, beta, cu_seqlens)[0]
    return output


@torch.library.custom_op("linear_attention::delta_rule", mutates_args=())
def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The outputs, and for backward: the normalized queries and keys, the factors of both (fp32 [batch, seq,
    key_heads]), sums of the decay in chunks (fp32), and products in chunks [batch, seq, heads, CHUNK]."""
    from fla.modules.norm.l2norm import l2norm_fwd
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd

    queries, keys, values, decays, betas = _for_kernel((query, key, value, decay, beta), cu_seqlens)
    (queries, of_query), (keys, of_key) = l2norm_fwd(queries), l2norm_fwd(keys)
    names = {"q": queries, "k": keys, "v": values, "g": decays, "beta": betas}
    options = {"scale": query.shape[-1] ** -0.5, "initial_state": None, "cu_seqlens": cu_seqlens}
    sums, output, products, *_ = chunk_gated_delta_rule_fwd(
        **names, **options, output_final_state=False, chunk_indices=_chunks(cu_seqlens)
    )
    normalized = queries.view(query.shape), keys.view(key.shape)
    factors = of_query.view(query.shape[:3]), of_key.view(key.shape[:3])
    output = output.to(value.dtype).view(value.shape)
    return output, *normalized, *factors, sums.view(decay.shape), products.view(*beta.shape, CHUNK)


@delta_rule.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    normalized = query.new_empty(query.shape), key.new_empty(key.shape)
    factors = (tensor.new_empty(tensor.shape[:3], dtype=torch.float32) for tensor in normalized)
    of_query, of_key = factors
    sums, products = decay.new_empty(decay.shape, dtype=torch.float32), key.new_empty(*beta.shape, CHUNK)
    return value.new_empty(value.shape), *normalized, of_query, of_key, sums, products


@torch.library.custom_op("linear_attention::delta_rule_backward", mutates_args=())
def delta_rule_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sums: torch.Tensor,
    beta: torch.Tensor,
    products: torch.Tensor,
    of_query: torch.Tensor,
    of_key: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key, value, decay (fp32) and beta.

    Args:
        query, key, of_query, of_key: normalized, and their factors.
    """
    from fla.modules.norm.l2norm import l2norm_bwd
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd

    tensors = (grad, query, key, value, sums, beta, products, of_query, of_key)
    *tensors_of_rule, of_query, of_key = _for_kernel(tensors, cu_seqlens)
    names = dict(zip(("do", "q", "k", "v", "g", "beta", "A"), tensors_of_rule, strict=True))
    options = {"scale": query.shape[-1] ** -0.5, "initial_state": None, "cu_seqlens": cu_seqlens, "dht": None}
    query_grad, key_grad, *grads = chunk_gated_delta_rule_bwd(**names, **options, chunk_indices=_chunks(cu_seqlens))
    grads = [l2norm_bwd(names["q"], of_query, query_grad), l2norm_bwd(names["k"], of_key, key_grad), *grads]
    likes = zip(grads, (query, key, value, sums, beta), strict=False)  # the kernel returns others after these
    found = [gradient.to(like.dtype).view(like.shape) for gradient, like in likes]
    return found[0], found[1], found[2], found[3], found[4]


@delta_rule_backward.register_fake
def _(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sums: torch.Tensor,
    beta: torch.Tensor,
    products: torch.Tensor,
    of_query: torch.Tensor,
    of_key: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    found = [tensor.new_empty(tensor.shape) for tensor in (query, key, value, sums, beta)]
    return found[0], found[1], found[2], found[3], found[4]


def _for_kernel(tensors: tuple[torch.Tensor, ...], cu_seqlens: torch.Tensor | None) -> list[torch.Tensor]:
    """Without gaps, and [1, batch x seq, ...] for documents of several rows: the kernels take those of one row."""
    whole = [tensor.contiguous() for tensor in tensors]
    return whole if cu_seqlens is None else [tensor.flatten(0, 1)[None] for tensor in whole]


def _chunks(cu_seqlens: torch.Tensor | None) -> torch.Tensor | None:
    """The chunks of all documents. The package makes the table once for all layers of a pass: it knows the offsets by
    the tensor itself, so these must not be copied on the way."""
    from fla.ops.utils.index import prepare_chunk_indices

    return None if cu_seqlens is None else prepare_chunk_indices(cu_seqlens, CHUNK)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, _, value, decay, beta, cu_seqlens = inputs
    _, query, key, of_query, of_key, sums, products = output
    ctx.save_for_backward(query, key, value, sums, beta, products, of_query, of_key, cu_seqlens)
    ctx.mark_non_differentiable(*output[1:])
    ctx.decay_dtype = decay.dtype


def _backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    of_query, of_key, of_value, of_decay, of_beta = delta_rule_backward(grad, *ctx.saved_tensors)
    return of_query, of_key, of_value, of_decay.to(ctx.decay_dtype), of_beta, None


delta_rule.register_autograd(_backward, setup_context=_keep)

DELTA_RULE = torch.ops.linear_attention.delta_rule.default
DELTA_RULE_BACKWARD = torch.ops.linear_attention.delta_rule_backward.default


def temporary_bytes(function: Any, args: tuple[Any, ...]) -> int:
    """What one of these two operators holds for itself until it returns; 0 for another.

    Forward: keys and values of the heads, values less what the state predicted, and the states of all chunks. Backward
    computes these again, with the gradients of all. A chunk that a document's end cuts short counts as a full one.
    """
    if function not in (DELTA_RULE, DELTA_RULE_BACKWARD):
        return 0
    key, value = args[1:3] if function is DELTA_RULE else args[2:4]
    of_key = math.prod(value.shape[:3]) * key.shape[-1] * key.element_size()
    chunks = -(-value.shape[1] // CHUNK)
    states = value.shape[0] * chunks * value.shape[2] * key.shape[-1] * value.shape[-1] * key.element_size()
    return of_key + 2 * value.nbytes + states if function is DELTA_RULE else 5 * of_key + 4 * value.nbytes + 2 * states
