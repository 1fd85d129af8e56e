"""How the model is laid out over the ranks."""

from dataclasses import dataclass
from typing import Literal

from configs.setting import setting

OPTIMIZERS_IN_8BIT = ("AdamW8bit", "PagedAdamW8bit")


@dataclass(frozen=True)
class FsdpConfig:
    """Sharding, precision and optimizer. Precision and optimizer hold without --enable_fsdp too."""

    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"] = setting(
        "FULL_SHARD",
        "FULL_SHARD gathers weights layer by layer, SHARD_GRAD_OP keeps them between forward and backward, "
        "HYBRID_SHARD shards within groups of ranks and replicates over groups, NO_SHARD replicates",
    )
    hsdp: bool | None = setting(None, "shorter name for sharding_strategy HYBRID_SHARD", unset=False)
    sharding_group_size: int = setting(
        0, "ranks a HYBRID_SHARD model is sharded over; 0: the ranks of one node", unit="ranks", minimum=0
    )
    replica_group_size: int = setting(
        0, "copies of a HYBRID_SHARD model; 0: as many as the ranks make", unit="copies", minimum=0
    )
    accumulate_unsharded: bool | None = setting(
        None,
        "keep gradients unsharded between micro-batches and reduce once per step: least communication, "
        "4 bytes per parameter more memory; auto: if that is less than a tenth of the device's memory",
        unset="auto",
    )
    fsdp_activation_checkpointing: bool | None = setting(
        None,
        "recompute each layer's activations in the backward pass; unset: under --enable_fsdp, and for quantized "
        "weights",
        unset=True,
    )
    wrap: Literal["layer", "root"] = setting(
        "layer",
        "what is gathered at a time: one layer, or root, the whole model at once: fewer and larger transfers, all "
        "weights and gradients whole in device memory",
    )
    fsdp_cpu_offload: bool = setting(
        False,
        "keep parameters, gradients and optimizer state in host memory; what a layer computes with is copied to the "
        "device, the optimizer steps on the CPU",
    )
    optimizer_cpu_offload: bool = setting(
        False,
        "keep only the optimizer's state in host memory and step on the CPU; holds without --enable_fsdp too",
    )
    mixed_precision: bool | None = setting(
        None, "the same as train_config.mixed_precision; the two always agree", unset=True
    )
    use_fp16: bool | None = setting(None, "the same as train_config.use_fp16; the two always agree", unset=False)
    pure_bf16: bool = setting(False, "weights, gradients and optimizer state all in bf16")
    optimizer: Literal["AdamW", "SGD", "anyprecision", "AdamW8bit", "PagedAdamW8bit", "Adafactor"] = setting(
        "AdamW",
        "AdamW (fused), SGD, AdamW with states in bf16 (anyprecision) or in 8 bits (AdamW8bit; PagedAdamW8bit moves "
        "them to host memory where the GPU's is full), or Adafactor: almost no states, and lr relative to the weights",
    )
    momentum_dtype: Literal["bf16", "fp32"] = setting("bf16", "dtype of the averages of gradients (anyprecision)")
    variance_dtype: Literal["bf16", "fp32"] = setting(
        "bf16", "dtype of the averages of squared gradients (anyprecision)"
    )
    use_kahan_summation: bool = setting(
        False,
        "keep what rounding takes from each update and add it to the next, 2 bytes per parameter: weights in bf16 then "
        "learn from small updates (anyprecision)",
    )
    checkpoint_type: Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT"] = setting(
        "SHARDED_STATE_DICT",
        "form of the checkpoints: each rank writes its own shards, or rank 0 one file, gathered in its host memory",
    )
