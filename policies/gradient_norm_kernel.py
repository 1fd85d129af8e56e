"""The Triton kernel of policies/clipping.py. Torch brings Triton for GPUs, and for Linux, alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

NUMBERS = 2**16  # summed by one program
STEP = 2**13  # read by it at a time
ALIGNMENT = 16  # in bytes, of addresses; and in numbers, of sizes: wide loads need to know

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def fits(tensor: torch.Tensor) -> bool:
    """Whether the kernel can read this tensor of a GPU."""
    size = tensor.numel()
    is_aligned = size > 0 and size % ALIGNMENT == 0 and tensor.data_ptr() % ALIGNMENT == 0
    return is_aligned and tensor.dtype in _DTYPES and tensor.is_contiguous()


def sum_in_kernel(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The squares of all numbers of tensors of one dtype and device, each of which fits(): [], in fp32.

    All are read in one launch, since the device would stand still between those of single tensors.
    """
    device = tensors[0].device
    counts = [triton.cdiv(tensor.numel(), NUMBERS) for tensor in tensors]  # programs of each
    *firsts, total = accumulate(counts, initial=0)
    sizes = [tensor.numel() // ALIGNMENT for tensor in tensors]
    addresses = [tensor.data_ptr() // ALIGNMENT for tensor in tensors]
    rows = list(zip(addresses, sizes, firsts, counts, strict=True))
    # From pinned memory, so the copy is queued like a kernel and the host does not wait for the device.
    table = torch.tensor(rows, dtype=torch.int64).pin_memory().to(device, non_blocking=True)
    owners = torch.repeat_interleave(table[:, 3], output_size=total)  # the tensor of each program
    sums = torch.empty(total, device=device, dtype=torch.float32)
    with torch.cuda.device(device):
        _sum[(total,)](
            table, owners, sums, dtype=_DTYPES[tensors[0].dtype],
            NUMBERS=NUMBERS, STEP=STEP, ALIGNMENT=ALIGNMENT, num_warps=8,
        )  # fmt: skip
    return sums.sum()


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    table, owners, sums, dtype: tl.constexpr, NUMBERS: tl.constexpr, STEP: tl.constexpr, ALIGNMENT: tl.constexpr
):
    program = tl.program_id(0)
    row = table + 4 * tl.load(owners + program)
    # A product with a constant is known to be aligned, a number that was read is not.
    numbers = tl.multiple_of((tl.load(row) * ALIGNMENT).to(tl.pointer_type(dtype)), [ALIGNMENT])
    size = tl.load(row + 1) * ALIGNMENT
    first = (program - tl.load(row + 2)) * NUMBERS
    total = tl.zeros((STEP,), tl.float32)
    for start in range(0, NUMBERS, STEP):
        places = first + start + tl.arange(0, STEP)
        values = tl.load(numbers + places, mask=places < size, other=0.0).to(tl.float32)
        total += values * values
    tl.store(sums + program, tl.sum(total))
