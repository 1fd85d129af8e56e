"""Stand-ins for the kernels of flash-linear-attention, causal-conv1d and mamba-ssm, in plain torch, token by token.

They have the signatures of flash-linear-attention 0.6.0, causal-conv1d 1.7.0 and mamba-ssm 2.2, as far as we call them,
and refuse what these refuse.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F


def put_stand_ins(monkeypatch: pytest.MonkeyPatch, *, leak: str = "", is_disabled: bool = False) -> None:
    """Let the packages be imported. Build the model first: transformers' module looks for them when it is imported.

    Args:
        leak: the function that takes no note of documents: "convolution" or "rule".
        is_disabled: torch.compile leaves them as they are, as it leaves flash-linear-attention's.
    """
    rule = _without_offsets(_delta_rule, leak == "rule")
    functions: dict[str, Any] = {
        "fla.ops.gated_delta_rule.chunk.chunk_gated_delta_rule_fwd": partial(_forward, rule),
        "fla.ops.gated_delta_rule.chunk.chunk_gated_delta_rule_bwd": partial(_backward, rule),
        "fla.modules.norm.l2norm.l2norm_fwd": _normalize,
        "fla.modules.norm.l2norm.l2norm_bwd": _normalize_backward,
        "fla.ops.utils.index.prepare_chunk_indices": lambda cu_seqlens, chunk_size: cu_seqlens,
        "fla.ops.kda.chunk_kda": rule,
        "fla.modules.convolution.causal_conv1d": _without_offsets(_convolution, leak == "convolution"),
        "causal_conv1d.causal_conv1d_fn": _convolution_by_index,
    }
    made: set[str] = set()
    for path, function in functions.items():
        *packages, name = path.split(".")
        for depth in range(1, len(packages) + 1):
            module = ".".join(packages[:depth])
            if module not in made and (module not in sys.modules or depth == len(packages)):
                monkeypatch.setitem(sys.modules, module, ModuleType(module))
                made.add(module)
        kernel = torch.compiler.disable(function) if is_disabled else function
        setattr(sys.modules[".".join(packages)], name, kernel)


def _normalize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    factors = (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    return x * factors, factors[..., 0]


def _normalize_backward(y: torch.Tensor, rstd: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    return (dy - (dy * y).sum(-1, keepdim=True) * y) * rstd[..., None]


def _forward(rule: Any, *, chunk_indices: Any, output_final_state: bool, **inputs: Any) -> tuple[Any, ...]:
    """The package's inner forward function: normalized queries and keys, and values of no meaning for backward."""
    assert not output_final_state
    q, k, v, g, beta, cu_seqlens = _inner(chunk_indices=chunk_indices, **inputs)
    return g.clone(), rule(q, k, v, g, beta, cu_seqlens=cu_seqlens)[0], k.new_zeros(*beta.shape, 64), None, None, None


def _backward(rule: Any, *, do: Any, A: Any, dht: Any, **inputs: Any) -> tuple[Any, ...]:
    """The package's inner backward function; its g is the forward function's."""
    assert A.shape[-1] == 64
    assert dht is None
    *tensors, cu_seqlens = _inner(**inputs)

    def gradients() -> tuple[torch.Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        output = rule(*leaves, cu_seqlens=cu_seqlens)[0]
        return torch.autograd.grad(output, leaves, do)

    with ThreadPoolExecutor(1) as thread:  # inside of an operator, autograd is off in its thread
        return *thread.submit(gradients).result(), None, None, None


def _inner(*, q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, cu_seqlens: Any, **options: Any) -> Any:
    assert scale == q.shape[-1] ** -0.5
    assert options == {"initial_state": None, "chunk_indices": cu_seqlens}
    return q, k, v, g, beta, cu_seqlens


def _without_offsets(function: Any, leaks: bool) -> Any:
    def call(tokens: torch.Tensor, *args: Any, cu_seqlens: torch.Tensor | None, **kwargs: Any) -> Any:
        rows, length = tokens.shape[:2]
        if cu_seqlens is None:  # each row is a document
            offsets = torch.arange(0, rows * length + 1, length)
            flat = [
                arg.flatten(0, 1)[None] if isinstance(arg, torch.Tensor) and arg.dim() > 2 else arg
                for arg in (tokens, *args)
            ]
            output, _ = function(*flat, cu_seqlens=offsets, **kwargs)
            return output[0].unflatten(0, (rows, length)), None
        return function(tokens, *args, cu_seqlens=torch.tensor([0, length]) if leaks else cu_seqlens, **kwargs)

    return call


def _delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """Yang et al., "Gated Delta Networks", 2024, equation 10; Kimi's rule has a g for each element of a key."""
    assert cu_seqlens is not None
    assert q.shape[0] == 1
    groups = v.shape[2] // q.shape[2]
    if use_qk_l2norm_in_kernel:
        q, k = (tensor * (tensor.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for tensor in (q, k))
    q, k = (tensor.repeat_interleave(groups, dim=2)[0] for tensor in (q * q.shape[-1] ** -0.5, k))
    decay = g[0].exp() if g.dim() == 4 else g[0, :, :, None].exp()
    outputs, starts = [], set(cu_seqlens.tolist())
    for token in range(v.shape[1]):
        if token in starts:
            state = v.new_zeros(v.shape[2], k.shape[-1], v.shape[-1])
        state = state * decay[token][..., None]
        predicted = torch.einsum("hk,hkv->hv", k[token], state)
        change = beta[0, token, :, None] * (v[0, token] - predicted)
        state = state + torch.einsum("hk,hv->hkv", k[token], change)
        outputs.append(torch.einsum("hk,hkv->hv", q[token], state))
    return torch.stack(outputs)[None].to(v.dtype), None


def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """[1, tokens, channels]."""
    assert cu_seqlens is not None
    assert x.shape[0] == 1
    assert activation in (None, "silu", "swish")
    outputs, width = [], weight.shape[1]
    for document in x[0].split(cu_seqlens.diff().tolist()):
        padded = F.pad(document, (0, 0, width - 1, 0))
        output = sum(weight[:, tap] * padded[tap : tap + len(document)] for tap in range(width))
        outputs.append(output if bias is None else output + bias)
    found = torch.cat(outputs)[None]
    return (F.silu(found) if activation else found), None


def _convolution_by_index(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """[batch, channels, seq], channels side by side."""
    assert seq_idx is not None
    assert seq_idx.dtype == torch.int32
    assert x.stride(1) == 1
    rows = []
    for row, documents in zip(x, seq_idx, strict=True):
        lengths = torch.unique_consecutive(documents, return_counts=True)[1]
        offsets = F.pad(lengths.cumsum(0), (1, 0))
        rows.append(_convolution(row.T[None], weight, bias, activation, offsets)[0][0].T)
    return torch.stack(rows)


def state_space_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_softplus: bool,
    seq_idx: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """mamba-ssm's `mamba_chunk_scan_combined` (Dao and Gu, "Transformers are SSMs", 2024, section 6)."""
    seq_idx = x.new_zeros(x.shape[:2], dtype=torch.int32) if seq_idx is None else seq_idx
    assert seq_idx.dtype == torch.int32
    assert dt_softplus
    heads = x.shape[2]
    dt = F.softplus(dt + dt_bias)
    B, C = (tensor.repeat_interleave(heads // tensor.shape[2], dim=2) for tensor in (B, C))
    rows = []
    for row in range(x.shape[0]):
        outputs = []
        for token in range(x.shape[1]):
            if token == 0 or seq_idx[row, token] != seq_idx[row, token - 1]:
                state = x.new_zeros(heads, x.shape[3], B.shape[3])
            change = torch.einsum("h,hn,hp->hpn", dt[row, token], B[row, token], x[row, token])
            state = state * (dt[row, token] * A).exp()[:, None, None] + change
            outputs.append(torch.einsum("hn,hpn->hp", C[row, token], state) + D[:, None] * x[row, token])
        rows.append(torch.stack(outputs))
    return torch.stack(rows)
