"""Experts stored in MXFP4, as OpenAI publishes gpt-oss: two tensors in files, read as the one that the model has.

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
_GROUP, _BIAS = 32, 127
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_OF_BYTE = [(_NUMBERS[byte & 15], _NUMBERS[byte >> 4]) for byte in range(256)]


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
    return [name for name in names if shapes[name + BLOCKS] == (*shapes.get(name + SCALES, ()), _GROUP // 2)]


def plain_shape(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the model's tensor: [experts, inputs, outputs]."""
    num_experts, num_outputs, num_groups, _ = blocks
    return num_experts, num_groups * _GROUP, num_outputs


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The model's tensor in bf16, computed for one expert at a time, which takes little memory.

    Args:
        blocks: uint8 [experts, outputs, groups, 16].
        scales: uint8 [experts, outputs, groups].
    """
    numbers = torch.tensor(_OF_BYTE, device=blocks.device)  # [256, 2]
    whole = torch.empty(plain_shape(tuple(blocks.shape)), dtype=torch.bfloat16, device=blocks.device)
    for matrix, of_expert, exponents in zip(whole, blocks, scales, strict=True):
        values = torch.ldexp(numbers[of_expert.long()], exponents.int().sub(_BIAS)[..., None, None])
        matrix.copy_(values.flatten(1).t())
    return whole
