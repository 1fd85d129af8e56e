"""Packed rows as their documents, by the offsets of these."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch


def reference_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The plain torch function that transformers wrote beside a package's kernel."""
    found: Callable[..., Any] = inspect.unwrap(function)
    return found


def documents_of_tokens(cu_seqlens: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """The number of each token's document, counted through all rows: int32 [batch, seq], the kernels' `seq_idx`.

    Args:
        cu_seqlens: int32 [documents + 1], where each begins in the flattened [batch x seq], and where the last ends.
    """
    tokens = torch.arange(rows * length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:], tokens, right=True, out_int32=True).view(rows, length)


def in_one_row(tensor: torch.Tensor) -> torch.Tensor:
    """[batch, seq, ...] as [1, batch x seq, ...]."""
    return tensor.flatten(0, 1)[None]


@torch.compiler.disable  # compiled code would be compiled again for the lengths of every batch
def for_each_document(
    function: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor], cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """The outputs of a function that is called for each document alone.

    Args:
        function: takes tensors [1, tokens, ...] and returns one.
        tensors: [batch, seq, ...].
        cu_seqlens: as of `documents_of_tokens`. On a GPU the host waits for it.

    Returns:
        [batch, seq, ...].
    """
    lengths = cu_seqlens.diff().tolist()
    documents = zip(*(in_one_row(tensor).split(lengths, dim=1) for tensor in tensors), strict=True)
    output = torch.cat([function(*document) for document in documents], dim=1)
    return output[0].unflatten(0, tensors[0].shape[:2])
