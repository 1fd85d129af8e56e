"""Precision: what weights are stored in, what they are computed in, what gradients are reduced in.

| mode       | trained weights | frozen weights | compute | gradient reduction |
|------------|-----------------|----------------|---------|--------------------|
| fp32       | fp32            | fp32           | fp32    | fp32               |
| bf16-true  | bf16            | bf16           | bf16    | fp32 (bf16 in DDP) |
| bf16-mixed | fp32            | bf16           | bf16    | fp32               |

Adapters are trained in fp32 and peft computes them in it, whatever the base: so LoRA never needs a cast policy.
What the checkpoint's dtype happens to be decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from configs.errors import ConfigError
from configs.run import RunConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "uint8": torch.uint8}
"""By the names that flags give them."""


@dataclass(frozen=True)
class Precision:
    name: str  # "fp32", "bf16-true" or "bf16-mixed"
    storage_dtype: torch.dtype  # of the weights as loaded (adapters are made in fp32)
    compute_dtype: torch.dtype

    @property
    def casts(self) -> bool:
        """Whether weights are cast for computing, which only `fully_shard` does here."""
        return self.storage_dtype != self.compute_dtype

    @property
    def policy(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(param_dtype=self.compute_dtype if self.casts else None, reduce_dtype=torch.float32)


def has_bf16(device: torch.device) -> bool:
    """Whether the device computes bf16 natively; CPUs do in software, so they count only when asked for."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8


def resolve_precision(config: RunConfig, device: torch.device) -> tuple[Precision, list[str]]:
    """The run's precision and the lines to print about what was adapted.

    Raises:
        ConfigError: where only fp16 would do.
    """
    train, fsdp = config.train_config, config.fsdp_config
    if fsdp.pure_bf16:
        notes = []
        if device.type == "cuda" and not has_bf16(device):
            notes = ["pure_bf16: this card has no bf16; it is emulated and slow"]
        return Precision("bf16-true", torch.bfloat16, torch.bfloat16), notes
    asked = config.was_given("train_config.mixed_precision") or config.was_given("fsdp_config.mixed_precision")
    mixed = train.mixed_precision and fsdp.mixed_precision
    fp32 = Precision("fp32", torch.float32, torch.float32)
    if not mixed:
        return fp32, []
    if device.type == "cpu" and not asked:
        return fp32, ["mixed_precision: computing in fp32 on CPU; --mixed_precision True asks for bf16"]
    if device.type == "cuda" and not has_bf16(device):
        fp16_declined = config.was_given("train_config.use_fp16") or config.was_given("fsdp_config.use_fp16")
        if fp16_declined:
            return fp32, ["mixed_precision: this card has no bf16 and use_fp16 is False: computing in fp32"]
        raise ConfigError(
            "--mixed_precision: this card has no bf16, and fp16 is not available in this version yet; "
            "give --mixed_precision False for fp32"
        )
    storage = torch.bfloat16 if train.use_peft else torch.float32
    return Precision("bf16-mixed", storage, torch.bfloat16), []
