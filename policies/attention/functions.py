"""Causal attention that takes sequences' offsets in the place of masks, as functions that transformers calls.

All have the signature of transformers' attention functions. `policies.attention.choice` says which models may call
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from policies.attention.each_sequence import attention_of_each_sequence
from policies.attention.flash_attention_4 import NO_WINDOW, flash_attention_4
from policies.attention.shared_keys import copy_keys
from policies.attention.sinks import attention_with_sinks
from utils.compat import GROUPED_HEADS

UNSUPPORTED = ("softcap", "position_bias", "cache")  # arguments that a model may pass and flash does not take


class Keys(NamedTuple):
    """Keys of sequences end to end, of which some may be copies of another sequence's."""

    key: torch.Tensor  # [keys, heads, head_dim]
    value: torch.Tensor
    cu_seqlens: torch.Tensor  # int32 [sequences + 1], where those of each sequence begin, and where the last end
    max_length: int  # of a sequence

    @classmethod
    def of(
        cls,
        key: torch.Tensor,
        value: torch.Tensor,
        own: tuple[torch.Tensor, int],
        shared: dict[str, Any],
    ) -> Keys:
        """The keys that these sequences see.

        Args:
            key, value: of each token, [tokens, heads, head_dim].
            own: offsets and most keys if each token's key is its sequence's alone.
            shared: the arguments of `tasks.pair_batches.keys_of`, if any; they are taken out.
        """
        places, copies = (shared.pop(name, None) for name in ("key_places", "key_copies"))
        offsets, longest = (shared.pop(name, None) for name in ("cu_seq_lens_k", "max_length_k"))
        if places is None:
            return cls(key, value, *own)
        return cls(copy_keys(key, places, copies), copy_keys(value, places, copies), offsets, longest)


def attention_by_offsets(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside sequences, with the signature of transformers' attention functions.

    A batch without offsets (padded rows, rows of one sequence each) goes to SDPA, or row by row to the kernel if a
    window cuts it: SDPA's causal kernel knows no windows. Generation takes another attention (policies/generating.py):
    keys in a cache come with masks, which are not made here.

    Args:
        query: [batch, heads, seq, head_dim]; key and value may have fewer heads.
        cu_seq_lens_q: int32 [sequences + 1], where each begins in the flattened [batch x seq], and where the last ends.
        max_length_q: tokens of the longest sequence.
        s_aux: [heads], the sinks (policies/attention/sinks.py). Then batches without offsets are served alike.
        kwargs: the keys of sequences that share some (`tasks.pair_batches.keys_of`), and what else a model passes.

    Returns:
        [batch, seq, heads, head_dim], and no attention weights.
    """
    if key.shape[2] != query.shape[2]:
        raise ValueError("attention by offsets takes no cache")
    if s_aux is not None and not query.is_meta:  # a plan counts SDPA's kernels instead, which keep the same
        _check_options(attention_mask, dropout, kwargs)
        sequences = (cu_seq_lens_q, max_length_q)
        return _with_sinks(query, key, value, s_aux, scaling, sliding_window, sequences, kwargs), None
    if cu_seq_lens_q is None:
        has_values = type(query) is torch.Tensor and not query.is_meta  # unlike a plan's; SDPA's kernels keep the same
        is_cut = has_values and sliding_window is not None and key.shape[2] > sliding_window
        key, value = _with_copies(key, value, kwargs)
        if not is_cut or attention_mask is not None:
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
            )
        cu_seq_lens_q, max_length_q = _rows_as_sequences(query)
    _check_options(attention_mask, dropout, kwargs)
    rows, _, length, _ = query.shape
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    kernel: Callable[..., Any] = attention_of_each_sequence if query.is_cpu else varlen_attn
    assert max_length_q is not None, "offsets come with the longest sequence"
    keys = Keys.of(key, value, (cu_seq_lens_q, max_length_q), kwargs)
    output = kernel(
        query,
        keys.key,
        keys.value,
        cu_seq_lens_q,
        keys.cu_seqlens,
        max_length_q,
        keys.max_length,
        scale=scaling,
        window_size=(_tokens_before(sliding_window), 0),
        **GROUPED_HEADS,
    )
    return output.unflatten(0, (rows, length)), None


def _with_copies(key: torch.Tensor, value: torch.Tensor, shared: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of a plan's rows, [batch, heads, seq, head_dim], in storages that hold all copies, too.

    They are as many as the queries, since a plan's time counts its rows as if nothing were shared.

    Args:
        shared: the arguments of `tasks.pair_batches.keys_of`, if any; they are taken out.
    """
    if shared.get("key_places") is None:
        return key, value
    rows, _, length, _ = key.shape
    key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (key, value))
    keys = Keys.of(key, value, (shared["key_places"], 0), shared)
    copied = (tensor.unflatten(0, (rows, -1)).transpose(1, 2) for tensor in (keys.key, keys.value))
    key, value = (tensor[:, :, :length] for tensor in copied)
    return key, value


def _tokens_before(sliding_window: int | None) -> int:
    """How many tokens before its own a query sees. transformers' windows count its own token, too."""
    return NO_WINDOW if sliding_window is None else sliding_window - 1


def _rows_as_sequences(query: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Offsets that make each row of [batch, heads, seq, head_dim] one sequence, and its length. Its padding is at its
    end, where causal attention never looks."""
    rows, _, length, _ = query.shape
    return torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=query.device), length


def _with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    scale: float | None,
    sliding_window: int | None,
    sequences: tuple[torch.Tensor | None, int | None],
    shared: dict[str, Any],
) -> torch.Tensor:
    """[batch, seq, heads, head_dim]. Without offsets each row is a sequence: SDPA has no sinks."""
    rows, _, length, _ = query.shape
    cu_seqlens, max_length = sequences
    if cu_seqlens is None or max_length is None:
        cu_seqlens, max_length = _rows_as_sequences(query)
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    keys = Keys.of(key, value, (cu_seqlens, max_length), shared)
    window = _tokens_before(sliding_window)
    output = attention_with_sinks(
        query, keys.key, keys.value, sinks, cu_seqlens, max_length, keys[2:], scale=scale, window=window
    )
    return output.unflatten(0, (rows, length))


def _check_options(attention_mask: torch.Tensor | None, dropout: float, others: dict[str, Any]) -> None:
    """Raises ValueError for what attention by offsets does not take."""
    present = [name for name in UNSUPPORTED if others.get(name) is not None]
    if attention_mask is not None or dropout > 0 or present:
        raise ValueError(f"attention by offsets takes no mask, no dropout and no {', '.join(present) or 'bias'}")


def attention_by_flash_4(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Like `attention_by_offsets`, which serves a plan's rows and those with a mask, by FlashAttention 4."""
    if query.is_meta or attention_mask is not None:
        options = (attention_mask, dropout, scaling, sliding_window, cu_seq_lens_q, max_length_q, s_aux)
        return attention_by_offsets(module, query, key, value, *options, **kwargs)
    if key.shape[2] != query.shape[2]:
        raise ValueError("attention by offsets takes no cache")
    _check_options(attention_mask, dropout, kwargs)
    window = _tokens_before(sliding_window)
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if cu_seq_lens_q is None:
        return flash_attention_4(query, key, value, scale=scaling, window=window, sinks=s_aux), None
    rows = query.shape[:2]
    query, key, value = (tensor.flatten(0, 1) for tensor in (query, key, value))
    assert max_length_q is not None, "offsets come with the longest sequence"
    keys = Keys.of(key, value, (cu_seq_lens_q, max_length_q), kwargs)
    output = flash_attention_4(
        query,
        keys.key,
        keys.value,
        cu_seqlens=cu_seq_lens_q,
        max_length=max_length_q,
        of_keys=keys[2:],
        scale=scaling,
        window=window,
        sinks=s_aux,
    )
    return output.unflatten(0, rows), None
