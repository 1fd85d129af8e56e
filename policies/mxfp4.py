"""MXFP4, the format in which OpenAI publishes gpt-oss's experts: two tensors in files, read as the one of the model.

`NAME_blocks` holds sixteen bytes for every 32 inputs of an output, [experts, outputs, groups, 16], and `NAME_scales`
one exponent for them, [experts, outputs, groups], both uint8. A value is an e2m1 number, the lower half of a byte
first, times 2^(exponent - 127) (OCP Microscaling Formats v1.0, sections 5.3 and 6.3). bf16 holds each exactly. The
model multiplies by matrices [inputs, outputs], so they are transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

BLOCKS, SCALES = "_blocks", "_scales"  # what names in files have after the model's
GROUP = 32  # numbers with one exponent
_BIAS = 127
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between neighbours of the positive ones
_OF_BYTE = [(NUMBERS[byte & 15], NUMBERS[byte >> 4]) for byte in range(256)]


def is_mxfp4(model_config: Any) -> bool:
    """Whether a config.json says that its weights are stored so."""
    settings = getattr(model_config, "quantization_config", None)
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    return method == "mxfp4"


def forget_mxfp4(model_config: Any) -> None:
    """Remove MXFP4 from a config.json's values: the model that is built and saved holds plain numbers."""
    if is_mxfp4(model_config):
        del model_config.quantization_config


def names_in_mxfp4(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The model's names of tensors that files hold in MXFP4.

    Args:
        shapes: by the names in the files, of the tensors of uint8.
    """
    names = [name.removesuffix(BLOCKS) for name in shapes if name.endswith(BLOCKS)]
    pairs = {name: (shapes[name + BLOCKS], shapes.get(name + SCALES)) for name in names}
    return [name for name, (blocks, scales) in pairs.items() if scales and len(scales) == 3 and blocks == (*scales, 16)]


def plain_shape(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the model's tensor: [experts, inputs, outputs]."""
    num_experts, num_outputs, num_groups, _ = blocks
    return num_experts, num_groups * GROUP, num_outputs


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The model's tensor in bf16, computed for one expert at a time, which takes little memory.

    Args:
        blocks: uint8 [experts, outputs, groups, 16].
        scales: uint8 [experts, outputs, groups].
    """
    whole = torch.empty(plain_shape(tuple(blocks.shape)), dtype=torch.bfloat16, device=blocks.device)
    for matrix, of_expert, exponents in zip(whole, blocks, scales, strict=True):
        matrix.copy_(numbers_of(of_expert, exponents).flatten(1).t())
    return whole


def numbers_of(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 16] and [...] -> fp32 [..., 32]."""
    numbers = torch.tensor(_OF_BYTE, device=blocks.device)  # [256, 2]
    return (numbers[blocks.long()] * _powers_of_two(scales)[..., None, None]).flatten(-2)


def _powers_of_two(scales: torch.Tensor) -> torch.Tensor:
    """2^(scale - 127) by its bits in fp32: GPUs' functions for powers need not be exact."""
    exponents = scales.int()
    # The lowest one has no digit before the point, so it is written as a half of the next.
    return torch.where(exponents == 0, 0x400000, exponents << 23).view(torch.float32)


def to_mxfp4(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., 32] -> blocks uint8 [..., 16] and scales uint8 [...]: the nearest numbers, of ties the even ones.

    A group's exponent is the one of its largest number, less the 2 of the largest e2m1 number (section 6.3 of the
    format). Numbers that MXFP4 holds are found again, with this exponent or another one.
    """
    values = numbers.float()
    exponents = (torch.frexp(values.abs().amax(-1)).exponent - 3).clamp_(-_BIAS, _BIAS)
    scaled = values.abs() * _powers_of_two(_BIAS - exponents).unsqueeze(-1)
    codes = torch.zeros_like(scaled, dtype=torch.uint8)
    for place, middle in enumerate(_MIDDLES):
        codes += scaled >= middle if place % 2 else scaled > middle
    codes |= values.signbit().to(torch.uint8) << 3
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + _BIAS).to(torch.uint8)
