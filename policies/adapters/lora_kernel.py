"""The Triton kernel of policies/adapters/lora_layers.py. Torch brings Triton for GPUs, and for Linux, alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, COLUMNS = 128, 128  # of a program's outputs


def add_product(base: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[m, n] plus [m, k] times [k, n], both bf16: summed in fp32, and rounded once to the dtype of `base`."""
    outputs = torch.empty_like(base, memory_format=torch.contiguous_format)
    (rows, columns), terms = base.shape, left.shape[1]
    programs = (triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS),)
    with torch.cuda.device(base.device):
        _add[programs](
            base, left, right, outputs, rows, columns, terms,
            *base.stride(), *left.stride(), *right.stride(),
            ROWS=ROWS, COLUMNS=COLUMNS, TERMS=min(64, max(16, triton.next_power_of_2(terms))), num_warps=8,
        )  # fmt: skip
    return outputs


# Batches differ in their number of rows: for 1, and for multiples of 16, Triton would compile again.
@triton.jit(do_not_specialize=["rows"])
def _add(  # type: ignore[no-untyped-def]
    base, left, right, outputs, rows, columns, terms,
    base_row, base_column, left_row, left_column, right_row, right_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, terms, TERMS):
        of_left, of_right = first + tl.arange(0, TERMS)[None, :], first + tl.arange(0, TERMS)[:, None]
        in_left, in_right = (row < rows) & (of_left < terms), (of_right < terms) & (column < columns)
        a = tl.load(left + row * left_row + of_left * left_column, mask=in_left, other=0.0)
        b = tl.load(right + of_right * right_row + column * right_column, mask=in_right, other=0.0)
        product = tl.dot(a, b, product)
    inside = (row < rows) & (column < columns)
    product += tl.load(base + row * base_row + column * base_column, mask=inside, other=0.0).to(tl.float32)
    tl.store(outputs + row * columns + column, product.to(outputs.dtype.element_ty), mask=inside)
