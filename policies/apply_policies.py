"""How the model is laid out on the hardware and computed. `apply_policies` is the order, in one place."""

from __future__ import annotations

from typing import Any

from torch import nn

from configs.run import RunConfig
from policies.activation_checkpointing import apply_activation_checkpointing
from policies.adapters import apply_adapters, store_adapters
from policies.compilation import compile_layers
from policies.dora import set_magnitudes
from policies.freezing import freeze_layers
from policies.lora_layers import use_lean_forward
from policies.loss import use_summed_loss
from policies.mixed_precision import Precision
from policies.quantization import quantize_linears
from policies.quantized_linear import Quantization
from policies.sharding import Layout, replicate, shard
from policies.weights import Weights, materialise
from policies.wrapping import find_layers, find_units
from utils.environment import Environment, print_rank_zero


def apply_policies(
    model: Any,
    config: RunConfig,
    *,
    precision: Precision,
    quantization: Quantization | None,
    layout: Layout,
    checkpointing: str,
    weights: Weights,
    env: Environment,
) -> nn.Module:
    """Everything that is done to a model before it trains, in the order that each step needs.

    Args:
        model: as `policies.loading.build_model` returns it, on the meta device.
        checkpointing: what `policies.activation_checkpointing.checkpointing_mode` says of it.

    Returns:
        The model to call: `model(..., labels=labels)` gives the summed loss.
    """
    causal_lm = model
    # The loss comes before all else: its code runs inside whatever wraps the model, where sharded weights are whole.
    use_summed_loss(causal_lm, config.train_config.loss_chunk_size)
    # Found now: sharding renames their classes.
    layers, units = find_layers(causal_lm), find_units(causal_lm, config.fsdp_config.wrap)

    # 1. PEFT, on quantized layers or plain ones
    if quantization is not None:
        print_rank_zero(env, quantize_linears(causal_lm, quantization))
    if config.train_config.use_peft:
        model = apply_adapters(model, config)
        store_adapters(model, precision.adapter_dtype)
        use_lean_forward(model)
    # 2. freeze: adapters froze what they need frozen
    if config.train_config.freeze_layers:
        freeze_layers(model, causal_lm.get_decoder(), config.train_config.num_freeze_layers)
    # 3. precision: weights have their storage dtype since they were built; the policy that casts belongs to sharding
    # 4. activation checkpointing
    apply_activation_checkpointing(causal_lm, checkpointing)
    # 5. compile, inside the hooks that sharding adds
    if config.train_config.compile:
        compile_layers(layers)
    # 6. shard
    shard(model, units, layout, precision, env.device)
    # 7. materialise weights; DistributedDataParallel goes around real ones
    materialise(
        model,
        causal_lm,
        weights,
        parameter_device=layout.parameter_device(env.device),
        compute_device=env.device,
        show_progress=env.is_rank_zero,
    )
    if config.lora_config.use_dora:  # an adapter that is trained on from a folder has its own
        set_magnitudes(model)
    return replicate(model, layout)
