"""Tokens to rows sorted by expert, and rows back to tokens: two operators, each the other's backward.

torch's backward of indexing adds rows that went to several experts one by one: by atomic operations, in an order that
changes from run to run, or after sorting all indices. Here each token knows the places of its rows, so backward reads
them in one order and sums them in fp32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class RowOrder(NamedTuple):
    """The rows of a batch of tokens, one for each token and each of its experts, sorted by expert."""

    ends: torch.Tensor  # int32 [experts], where each expert's rows end
    expert_of_row: torch.Tensor  # int32 [rows]
    order: torch.Tensor  # int64 [rows], of each row its place in the flattened [tokens, chosen]
    places: torch.Tensor  # int64 [rows], the inverse: of each token and choice its row


def sort_by_expert(top_k_index: torch.Tensor, num_experts: int) -> RowOrder:
    """The order of rows for the chosen experts, [tokens, chosen]. The host waits for nothing."""
    # Sorted by their bits, of which 64 would take twice as long as 32.
    expert_of_row, order = torch.sort(top_k_index.reshape(-1).to(torch.int32), stable=True)
    numbers = torch.arange(num_experts, device=order.device, dtype=expert_of_row.dtype)
    ends = torch.searchsorted(expert_of_row, numbers, right=True, out_int32=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return RowOrder(ends, expert_of_row, order, places)


# Operators, not autograd functions, for the reason in policies/quantization/quantized_linear.py.


@torch.library.custom_op("experts::rows_of_tokens", mutates_args=())
def rows_of_tokens(tokens: torch.Tensor, order: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[tokens, width] -> [rows, width], each token once for each of its experts."""
    if tokens.is_cuda and len(tokens):
        from policies.experts.row_kernels import copy_to_rows  # needs Triton

        return copy_to_rows(tokens, places)
    return tokens[order // max(1, len(order) // max(1, len(tokens)))]


@torch.library.custom_op("experts::tokens_of_rows", mutates_args=())
def tokens_of_rows(rows: torch.Tensor, order: torch.Tensor, places: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[rows, width] -> [tokens, width], the sum of each token's rows, which is rounded once."""
    if rows.is_cuda and num_tokens:
        from policies.experts.row_kernels import sum_of_rows  # needs Triton

        return sum_of_rows(rows, places, num_tokens)
    return rows[places].view(num_tokens, len(places) // max(1, num_tokens), rows.shape[1]).sum(dim=1)


@rows_of_tokens.register_fake
def _(tokens: torch.Tensor, order: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return tokens.new_empty((order.shape[0], tokens.shape[1]))


@tokens_of_rows.register_fake
def _(rows: torch.Tensor, order: torch.Tensor, places: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return rows.new_empty((num_tokens, rows.shape[1]))


def _keep_order(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.num_tokens = inputs[0].shape[0]
    ctx.save_for_backward(*inputs[1:3])


def _backward_of_rows(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return tokens_of_rows(grad, *ctx.saved_tensors, ctx.num_tokens), None, None


def _backward_of_tokens(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    return rows_of_tokens(grad, *ctx.saved_tensors), None, None, None


rows_of_tokens.register_autograd(_backward_of_rows, setup_context=_keep_order)
tokens_of_rows.register_autograd(_backward_of_tokens, setup_context=_keep_order)
