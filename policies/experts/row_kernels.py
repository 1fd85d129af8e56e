"""The Triton kernels of policies/experts/row_order.py. Torch brings Triton for GPUs, and for Linux, alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS, WARPS = 1024, 4  # of a program, which works for one token


def copy_to_rows(tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[tokens, width] and the rows of each token, int64 [tokens * chosen], to [tokens * chosen, width]."""
    tokens = tokens.contiguous()
    num_tokens, width = tokens.shape
    rows = tokens.new_empty(len(places), width)
    with torch.cuda.device(tokens.device):
        _copy[_programs(num_tokens, width)](
            tokens, places, rows, width, CHOSEN=len(places) // num_tokens, COLUMNS=COLUMNS, num_warps=WARPS
        )
    return rows


def sum_of_rows(rows: torch.Tensor, places: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[tokens * chosen, width] and the rows of each token to their sums in fp32, rounded once: [tokens, width]."""
    rows = rows.contiguous()
    width = rows.shape[1]
    tokens = rows.new_empty(num_tokens, width)
    with torch.cuda.device(rows.device):
        _sum[_programs(num_tokens, width)](
            rows, places, tokens, width, CHOSEN=len(places) // num_tokens, COLUMNS=COLUMNS, num_warps=WARPS
        )
    return tokens


def _programs(num_tokens: int, width: int) -> tuple[int, int]:
    return num_tokens, triton.cdiv(width, COLUMNS)


@triton.jit
def _copy(tokens, places, rows, width, CHOSEN: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    values = tl.load(tokens + token * width + columns, mask=columns < width, other=0.0)
    for choice in tl.static_range(CHOSEN):
        row = tl.load(places + token * CHOSEN + choice)
        tl.store(rows + row * width + columns, values, mask=columns < width)


@triton.jit
def _sum(rows, places, tokens, width, CHOSEN: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for choice in tl.static_range(CHOSEN):
        row = tl.load(places + token * CHOSEN + choice)
        total += tl.load(rows + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    tl.store(tokens + token * width + columns, total.to(tokens.dtype.element_ty), mask=columns < width)
