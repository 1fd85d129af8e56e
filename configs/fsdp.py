"""Settings of sharding, precision and optimizer."""

from dataclasses import dataclass
from typing import Literal

from configs.optimizers import OPTIMIZERS
from configs.setting import setting


@dataclass(frozen=True)
class FsdpConfig:
    """Sharding, precision and optimizer. Precision and optimizer apply without --enable_fsdp too."""

    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"] = setting(
        "FULL_SHARD",
        "FULL_SHARD gathers the weights of one layer at a time; SHARD_GRAD_OP keeps them from forward to backward; "
        "HYBRID_SHARD shards within groups of ranks and replicates across groups; NO_SHARD replicates",
    )
    hsdp: bool | None = setting(
        None,
        "short for sharding_strategy HYBRID_SHARD",
        stands_for=False,
        default_text="True under HYBRID_SHARD, else False",
    )
    sharding_group_size: int = setting(
        0, "ranks per group of HYBRID_SHARD; 0: the ranks of one node", unit="ranks", minimum=0
    )
    replica_group_size: int = setting(
        0, "copies of a HYBRID_SHARD model; 0: world size / sharding_group_size", unit="copies", minimum=0
    )
    context_parallel_size: int = setting(
        1,
        "ranks that share the tokens of each row, for rows that are too long for one: attention exchanges tokens for "
        "heads; applies without --enable_fsdp too",
        unit="ranks",
        minimum=1,
    )
    num_replicated_layers: int | Literal["auto"] | None = setting(
        None,
        "layers whose frozen weights stay whole on each GPU, so that they are not gathered twice for each micro-batch; "
        "it counts from the first layer, and includes what is frozen outside of layers; changes no result",
        unit="layers",
        minimum=0,
        stands_for="auto",
        default_text="auto: as many as the plan has room for on a GPU, and none on a CPU",
    )
    accumulate_unsharded: bool | None = setting(
        None,
        "keep gradients unsharded between micro-batches and reduce them once per step: least communication, 4 more "
        "bytes of memory per trained parameter",
        stands_for="auto",
        default_text="auto: if that is less than a tenth of the GPU's memory, and on a CPU",
    )
    reduce_dtype: Literal["bf16", "fp32"] | None = setting(
        None,
        "dtype in which gradients are summed over ranks: bf16 sends half of fp32's bytes, and every micro-batch is "
        "reduced, so that micro-batches are added in the dtype of the weights",
        stands_for="fp32",
        default_text="fp32, but DistributedDataParallel sums gradients in their own dtype, and two ranks in bf16 if "
        "that gives the same bits",
    )
    direct_collectives: bool = setting(
        False,
        "gather each shard right into its whole weight, and reduce gradients from where they are, without packing "
        "buffers; results differ by rounding at most",
    )
    fsdp_activation_checkpointing: bool | None = setting(
        None,
        "recompute each layer's activations in the backward pass",
        stands_for=True,
        default_text="as activation_checkpointing says",
    )
    wrap: tuple[str, ...] = setting(
        ("layer",),
        "gather the weights of one layer at a time (layer; the layers are found in the model), of each module of the "
        "named classes (OPTDecoderLayer,Blip2EncoderLayer), or of the whole model (root): fewer and larger transfers, "
        "but all weights and gradients are in device memory at once",
    )
    fsdp_cpu_offload: bool = setting(
        False,
        "keep parameters, gradients and optimizer states in host memory: layers are copied to the device to compute, "
        "and the optimizer steps on the CPU",
    )
    optimizer_cpu_offload: bool = setting(
        False,
        "keep only the optimizer states in host memory, and step on the CPU; applies without --enable_fsdp too",
    )
    mixed_precision: bool | None = setting(
        None,
        "the same as train_config.mixed_precision; the two always agree",
        stands_for=True,
        default_text="as train_config.mixed_precision",
    )
    use_fp16: bool | None = setting(
        None,
        "the same as train_config.use_fp16; the two always agree",
        stands_for=False,
        default_text="as train_config.use_fp16",
    )
    pure_bf16: bool = setting(False, "keep weights, gradients and optimizer states in bf16")
    optimizer: str = setting(
        "AdamW", "; ".join(f"{name}: {listed.help}" for name, listed in OPTIMIZERS.items()), one_of=tuple(OPTIMIZERS)
    )
    compile_optimizer: bool | None = setting(
        None,
        "update tensors of 4 million weights or more by a compiled kernel, which clips without writing gradients",
        default_text="if layers are compiled and AdamW steps on the device",
    )
    momentum_dtype: Literal["bf16", "fp32"] = setting("bf16", "dtype of the averaged gradients (anyprecision)")
    variance_dtype: Literal["bf16", "fp32"] = setting("bf16", "dtype of the averaged squared gradients (anyprecision)")
    use_kahan_summation: bool = setting(
        False,
        "keep the rounding error of each update and add it to the next, so that weights in bf16 learn from small "
        "updates; 2 bytes per parameter (anyprecision)",
    )
    checkpoint_type: Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT"] = setting(
        "SHARDED_STATE_DICT",
        "format of checkpoints: each rank writes its own shards, or rank 0 gathers all in its host memory and writes "
        "one file",
    )
