"""Masks of dropout: drawn by torch, or in compiled code computed from a few random keys wherever they are used."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

BLOCKS, PLACES = 4096, 1024
"""A row's key is that of its block of rows plus that of its place in the block. So as many keys are drawn for every
batch: torch 2.11 cannot compile random tensors of a varying size in layers that are recomputed for backward."""


class Dropout(NamedTuple):
    """Which elements of a tensor dropout keeps.

    Attributes:
        p: the probability that an element is dropped.
        mask_or_keys: bool, shaped like the tensor, True for what is kept; or the keys of `mask_from_keys`.
    """

    p: float
    mask_or_keys: torch.Tensor


def draw_dropout(inputs: torch.Tensor, p: float) -> Dropout:
    """Draws a new mask for the inputs, or in compiled code the keys of one.

    Torch's own operators draw it, so that recomputation for backward draws the same. Compiled code draws keys alone:
    it computes the mask where it is used, in forward and again in backward, within kernels that read or write the
    tensor anyway. A mask by torch's generator costs such a kernel several times its own time, or is kept for backward,
    a byte for each element. Uncompiled, `mask_from_keys` would be a dozen kernels.
    """
    if not torch.compiler.is_compiling():
        return Dropout(p, torch.empty_like(inputs, dtype=torch.bool).bernoulli_(1 - p))
    # Fractions, of 24 bits each: the compiler would draw integers again for every element that a key is used for.
    fractions = torch.rand(2, BLOCKS + PLACES + inputs.shape[-1], device=inputs.device)
    high, low = (fractions * 2**24).int()
    return Dropout(p, high << 8 ^ low)


def mask_from_keys(keys: torch.Tensor, shape: torch.Size, p: float) -> torch.Tensor:
    """A mask of dropout, in which each element follows from a key of its row and a key of its column.

    Args:
        keys: int32, random: BLOCKS, PLACES, and one for each column.
        shape: rows are all dimensions but the last, BLOCKS * PLACES at most.
        p: the probability that an element is dropped, to 2^-32.

    Returns:
        bool, of that shape.
    """
    of_blocks, of_places, of_columns = keys.split((BLOCKS, PLACES, shape[-1]))
    num_rows = math.prod(shape[:-1])
    # No more of them, since compiled code may keep the keys of rows for backward; one more, since it is compiled anew
    # for a single block.
    num_blocks = num_rows // PLACES + 2
    of_rows = (of_blocks[:num_blocks, None] + of_places).flatten()[:num_rows]
    bits = _mixed(of_rows[:, None] + of_columns)
    return (bits >= round(p * 2**32) - 2**31).view(shape)


def mask_like(values: torch.Tensor, mask_or_keys: torch.Tensor, p: float) -> torch.Tensor:
    """The mask for these values, as it was drawn or from its keys."""
    if mask_or_keys.dtype == torch.bool:
        return mask_or_keys
    return mask_from_keys(mask_or_keys, values.shape, p)


def _mixed(values: torch.Tensor) -> torch.Tensor:
    """int32 for int32, one to one, each bit of the result depending on every bit: "lowbias32" of Chris Wellons'
    hash-prospector. Products wrap around.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        values = (values ^ _shifted(values, shift)) * factor
    return values ^ _shifted(values, 16)


def _shifted(values: torch.Tensor, by: int) -> torch.Tensor:
    # To the right, with zeros from the left: `>>` repeats the sign.
    return (values >> by) & ((1 << (32 - by)) - 1)
