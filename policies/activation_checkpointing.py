"""Activation checkpointing: drop a layer's activations and recompute them in the backward pass.

| mode      | kept of a layer                                                            | recomputed |
|-----------|----------------------------------------------------------------------------|------------|
| off       | all that the backward pass needs                                           | nothing    |
| selective | its input, and the outputs of attention and of every second matrix product | the rest   |
| full      | its input                                                                  | all        |
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from configs.fsdp import FsdpConfig
from configs.training import TrainConfig
from policies.float8_linear import FLOAT8_PRODUCTS
from policies.lora_layers import LORA_PRODUCTS
from policies.quantized_linear import QUANTIZED_PRODUCTS
from policies.wrapping import find_layers
from utils.errors import ConfigError

# Products with a weight. Attention's own products (bmm) grow with the square of the sequence and are never kept.
MATRIX_PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
    *QUANTIZED_PRODUCTS,
    *FLOAT8_PRODUCTS,
    *LORA_PRODUCTS,
)


def checkpointing_mode(model: Any, train: TrainConfig, fsdp: FsdpConfig, *, quantized: bool) -> tuple[str, list[str]]:
    """The mode of this run (`off`, `selective` or `full`), and lines to print.

    --activation_checkpointing decides if given, else --fsdp_activation_checkpointing. If neither is given the mode is
    `full` under --enable_fsdp and for a quantized base. If the model does not support this default it is `off`.

    Raises:
        ConfigError: if checkpointing was asked for and the model does not support it.
    """
    asked = train.activation_checkpointing
    wanted = fsdp.fsdp_activation_checkpointing
    if wanted is None:
        # A quantized run is short of memory, and most of what is left is activations.
        wanted = train.enable_fsdp or quantized
    mode = asked or ("full" if wanted else "off")
    if train.use_peft and train.peft_method == "prefix":  # configs/validation.py refuses the flags
        reason = "a recomputed layer would add to the cache in which prefix tuning passes its prefix"
        return "off", [f"activation_checkpointing: off, {reason}"] if mode != "off" else []
    if mode == "off" or (getattr(model, "supports_gradient_checkpointing", False) and find_layers(model)):
        return mode, []
    reason = f"{type(model).__name__} does not support it"
    if asked or fsdp.fsdp_activation_checkpointing is not None:
        raise ConfigError(f"--activation_checkpointing: {reason}; give --activation_checkpointing off")
    return "off", [f"activation_checkpointing: off, {reason}"]


def apply_activation_checkpointing(model: Any, mode: str) -> None:
    """Checkpoint every layer, unless `mode` is `off`.

    Each layer's forward is replaced. Unlike torch's `checkpoint_wrapper`, this keeps parameter names. Unlike the switch
    of transformers before about 5.20, it is inside the hooks of sharding, which then do not run again, and inside the
    compiled code: selective checkpointing around compiled code would keep tensors that this code overwrites.
    """
    if mode == "off":
        return
    options: Any = {"context_fn": selective_contexts} if mode == "selective" else {}

    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(type(layer).forward, layer, **kwargs), *args, use_reentrant=False, **options)

    for layer in find_layers(model):
        layer.forward = MethodType(forward, layer)  # one function, so that one compiled graph serves all layers


def selective_contexts() -> tuple[Any, Any]:
    """The contexts in which a checkpointed layer runs, in forward and in recomputation; after torchtitan.

    The second of every two matrix products is kept (torchtitan keeps the first). So the last one of a layer often is
    not kept, and it is not recomputed either, because the layer's backward does not need it. Of an adapter, the small
    inner product is kept.
    """
    num_products = {False: 0, True: 0}  # in forward, and in recomputation, where some versions of torch ask too

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = is_attention(op) and not draws_random_numbers(op, args, kwargs)
        if op in MATRIX_PRODUCTS:
            num_products[context.is_recompute] += 1
            keep = num_products[context.is_recompute] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def is_attention(op: Any) -> bool:
    """Whether `op` is a fused attention, by its name: every device has its own kernels."""
    return "scaled_dot_product" in str(op) or "varlen_attn" in str(op)


def draws_random_numbers(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an attention uses dropout: without recomputing it, all later dropout would get other random numbers."""
    names = [argument.name for argument in op._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p", 0.0) > 0
