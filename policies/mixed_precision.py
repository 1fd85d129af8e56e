"""Precision: the dtypes in which weights are stored and computed, and gradients reduced.

| mode       | trained weights | frozen weights | compute | gradient reduction |
|------------|-----------------|----------------|---------|--------------------|
| fp32       | fp32            | fp32           | fp32    | fp32               |
| bf16-true  | bf16            | bf16           | bf16    | fp32 (bf16 in DDP) |
| bf16-mixed | fp32            | bf16           | bf16    | fp32               |
| fp16-mixed | fp32            | fp16           | fp16    | fp32               |

Adapters are stored in fp32, or in bf16 with --peft_dtype bf16. peft computes an adapter in its own dtype, whatever the
base's, so LoRA never needs a cast policy. The dtype of the model's files plays no role. fp16-mixed scales the loss
(policies/loss_scaling.py). --reduce_dtype bf16 reduces gradients in bf16 if they are computed in bf16. Two ranks do so
by default if that gives the same bits (`two_in_bf16`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from configs.fsdp import FsdpConfig
from configs.training import TrainConfig
from utils.device import DeviceFacts
from utils.errors import ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "uint8": torch.uint8}
"""torch's dtypes by the names in flags."""


@dataclass(frozen=True)
class Precision:
    name: str  # "fp32", "bf16-true", "bf16-mixed" or "fp16-mixed"
    storage_dtype: torch.dtype  # of the loaded weights; adapters have their own
    compute_dtype: torch.dtype
    adapter_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32  # of `fully_shard`; DistributedDataParallel has no choice

    @property
    def casts(self) -> bool:
        """Whether weights are cast before they are used; only `fully_shard` does that here."""
        return self.storage_dtype != self.compute_dtype

    @property
    def scales_loss(self) -> bool:
        """Whether the loss must be scaled, because small gradients would be rounded to zero."""
        return self.compute_dtype == torch.float16

    @property
    def policy(self) -> MixedPrecisionPolicy:
        param_dtype = self.compute_dtype if self.casts else None
        return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=self.reduce_dtype)

    def gradient_dtype(self, train: TrainConfig) -> torch.dtype:
        """The dtype in which backward computes gradients, before they are reduced."""
        return self.adapter_dtype if train.use_peft else self.compute_dtype


def resolve_precision(train: TrainConfig, fsdp: FsdpConfig, device: DeviceFacts) -> tuple[Precision, list[str]]:
    """The run's precision, and lines to print about defaults that were adapted.

    Raises:
        ConfigError: if adapters or sums of gradients should be in bf16 but the model computes in another dtype.
    """
    precision, notes = _precision_of_model(train, fsdp, device)
    computes_in_bf16 = precision.compute_dtype == torch.bfloat16
    if train.peft_dtype == "bf16":
        if not computes_in_bf16:
            raise ConfigError(
                f"--peft_dtype: bf16 adapters need a model that computes in bf16, and this run is {precision.name}; "
                "give --mixed_precision True or --pure_bf16, or leave this out"
            )
        precision = replace(precision, adapter_dtype=torch.bfloat16)
    if fsdp.reduce_dtype == "bf16":
        # Rounding others would lose digits, and torch's kernel that packs gradients on a GPU only widens them.
        if precision.gradient_dtype(train) != torch.bfloat16:
            reason = f"this run is {precision.name}" if not computes_in_bf16 else "adapters have theirs in fp32"
            remedy = "--peft_dtype bf16" if computes_in_bf16 else "--mixed_precision True or --pure_bf16"
            raise ConfigError(
                f"--reduce_dtype: bf16 needs gradients that are computed in bf16, and {reason}; give {remedy}, or "
                "leave this out"
            )
        precision = replace(precision, reduce_dtype=torch.bfloat16)
    return precision, notes


def two_in_bf16(
    precision: Precision, train: TrainConfig, fsdp: FsdpConfig, mesh_shape: tuple[int, int], num_micro_batches: int
) -> Precision:
    """The precision with gradients reduced in bf16 if that sends half of the bytes and changes no bit.

    The mean of two bf16 numbers is one sum, and halving is exact. In fp32 the sum is exact, or one number is too small
    to matter, and it is rounded to bf16 for the gradient; in bf16 it is rounded the same way. So it holds for two ranks
    that share one copy of weights in bf16, with one micro-batch, since `fully_shard` adds several in the dtype in which
    it reduces.
    """
    stored = precision.adapter_dtype if train.use_peft else precision.storage_dtype
    is_open = fsdp.reduce_dtype is None and not fsdp.accumulate_unsharded
    if not is_open or stored != torch.bfloat16 or mesh_shape != (1, 2) or num_micro_batches > 1:
        return precision
    return replace(precision, reduce_dtype=torch.bfloat16)


def _precision_of_model(train: TrainConfig, fsdp: FsdpConfig, device: DeviceFacts) -> tuple[Precision, list[str]]:
    lacks_bf16 = device.type == "cuda" and not device.has_bf16
    if fsdp.pure_bf16:
        notes = ["pure_bf16: this card has no bf16; it is emulated and slow"] if lacks_bf16 else []
        return Precision("bf16-true", torch.bfloat16, torch.bfloat16), notes
    fp32 = Precision("fp32", torch.float32, torch.float32)
    if train.mixed_precision is False:
        return fp32, []
    # A frozen base is stored in its compute dtype: the same numbers as casting it each time, and half the memory.
    bf16, fp16 = (
        Precision(name, dtype if train.use_peft else torch.float32, dtype)
        for name, dtype in (("bf16-mixed", torch.bfloat16), ("fp16-mixed", torch.float16))
    )
    if train.use_fp16:
        return fp16, []
    if device.type == "cpu" and train.mixed_precision is None:
        return fp32, ["mixed_precision: computing in fp32 on CPU; --mixed_precision True asks for bf16"]
    if lacks_bf16 and train.use_fp16 is False:
        return fp32, ["mixed_precision: this card has no bf16 and use_fp16 is False: computing in fp32"]
    if lacks_bf16:
        return fp16, ["use_fp16: this card has no bf16: computing in fp16 with a loss scale; False means fp32"]
    return bf16, []


def resolve_saved_dtype(
    train: TrainConfig, base_dtype: torch.dtype | None, precision: Precision
) -> tuple[torch.dtype | None, list[str]]:
    """The dtype of the weights in output_dir/model, None for that of training, and lines to print.

    By default that of the base's files: a bf16 model that trains in fp32 would take twice its disk. A base in fp32
    gains nothing if it was trained in bf16.
    """
    asked = DTYPES.get(train.save_dtype, base_dtype)
    trained = precision.storage_dtype
    by_default = train.save_dtype == "base"
    if train.use_peft or asked is None or asked == trained or (by_default and asked.itemsize >= trained.itemsize):
        return None, []
    names = {dtype: name for name, dtype in DTYPES.items()}
    why = f", as {train.model_name} is (--save_dtype {names[trained]} keeps all bits)" if by_default else ""
    return asked, [f"save_dtype: the trained weights are saved in {names[asked]}{why}"]
