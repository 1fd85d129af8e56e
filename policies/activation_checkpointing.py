"""Activation checkpointing: drop a layer's activations, compute them again in backward.

| mode      | kept of a layer                                                        | computed again |
|-----------|------------------------------------------------------------------------|----------------|
| off       | whatever backward needs                                                | nothing        |
| selective | its input, what attention gave, what every second matrix product gave | the rest       |
| full      | its input                                                              | all            |
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from configs.run import RunConfig
from policies.lora_layers import LORA_PRODUCTS
from policies.quantized_linear import QUANTIZED_PRODUCTS
from policies.wrapping import find_layers
from utils.errors import ConfigError

# Products with a weight. Attention's own (bmm) are as large as the sequence squared: never kept.
MATRIX_PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    *QUANTIZED_PRODUCTS,
    *LORA_PRODUCTS,
)


def checkpointing_mode(config: RunConfig, model: Any) -> tuple[str, list[str]]:
    """`off`, `selective` or `full`: --activation_checkpointing, else fsdp_activation_checkpointing under FSDP; without
    it `full` for a quantized base.

    Returns:
        The mode, and lines to print: a default that the model cannot follow is `off`.

    Raises:
        ConfigError: where the flag asks for what the model cannot.
    """
    train, fsdp = config.train_config, config.fsdp_config
    asked = train.activation_checkpointing
    wanted = fsdp.fsdp_activation_checkpointing
    if wanted is None:
        # Who quantizes is short of memory, and most of what is left is activations.
        wanted = train.enable_fsdp or config.quantization_config.quantization is not None
    mode = asked or ("full" if wanted else "off")
    if train.use_peft and train.peft_method == "prefix":  # validation has refused what was asked for
        reason = "a layer that is computed again would add to the cache in which prefix tuning hands its prefix over"
        return "off", [f"activation_checkpointing: off, {reason}"] if mode != "off" else []
    if mode == "off" or (getattr(model, "supports_gradient_checkpointing", False) and find_layers(model)):
        return mode, []
    reason = f"{type(model).__name__} does not support it"
    if asked or fsdp.fsdp_activation_checkpointing is not None:
        raise ConfigError(f"--activation_checkpointing: {reason}; give --activation_checkpointing off")
    return "off", [f"activation_checkpointing: off, {reason}"]


def apply_activation_checkpointing(model: Any, mode: str) -> None:
    """Checkpoint every layer, unless `mode` is `off`.

    The forward of each layer is replaced. That leaves parameter names as they are, unlike torch's `checkpoint_wrapper`,
    and stands, unlike the switch of transformers before 5.20 or so, inside the hooks of sharding, which then do not run
    again, and inside what is compiled: around compiled code, selective checkpointing would keep tensors that this code
    writes over.
    """
    if mode == "off":
        return
    options: Any = {"context_fn": selective_contexts} if mode == "selective" else {}

    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(type(layer).forward, layer, **kwargs), *args, use_reentrant=False, **options)

    for layer in find_layers(model):
        layer.forward = MethodType(forward, layer)  # one function for all: so one compiled graph serves all layers


def selective_contexts() -> tuple[Any, Any]:
    """What one checkpointed layer runs in, in forward and when it is computed again, after torchtitan.

    Of every two matrix products the second is kept (there: the first). So the last of a layer often is not, and need
    not be computed again either, because nothing in the layer's backward asks for it; and of an adapter the small inner
    product is kept.
    """
    num_products = {False: 0, True: 0}  # in forward, and when computing again: some versions of torch ask there too

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = is_attention(op) and not draws_random_numbers(op, args, kwargs)
        if op in MATRIX_PRODUCTS:
            num_products[context.is_recompute] += 1
            keep = num_products[context.is_recompute] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def is_attention(op: Any) -> bool:
    """By name: every device has its own fused kernels."""
    return "scaled_dot_product" in str(op) or "varlen_attn" in str(op)


def draws_random_numbers(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an attention drops out: not running it again would shift the random numbers of all dropout after it."""
    names = [argument.name for argument in op._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p", 0.0) > 0
