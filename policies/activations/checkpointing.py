"""Activation checkpointing: drop a layer's activations and recompute them in the backward pass.

| mode      | kept of a layer                                                            | recomputed |
|-----------|----------------------------------------------------------------------------|------------|
| off       | all that the backward pass needs                                           | nothing    |
| selective | its input, and the outputs of attention and of every second matrix product | the rest   |
| full      | its input                                                                  | all        |

Layers need not be alike: the first ones may recompute more than the others. A plan chooses so
(planning/chosen_checkpointing.py): for `auto`, to fit, and for `full` where it costs no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from configs.fsdp import FsdpConfig
from configs.run import RunConfig
from configs.training import TrainConfig
from policies.adapters.lora_products import LORA_PRODUCTS, WRITTEN_ONCE
from policies.quantization.float8_linear import FLOAT8_PRODUCTS
from policies.quantization.quantized_experts import EXPERTS_PRODUCT
from policies.quantization.quantized_linear import QUANTIZED_PRODUCTS
from policies.tiling.tiles import set_tiles, tiled_parts
from policies.wrapping import find_layers
from utils.errors import ConfigError

# Products with a weight. Attention's own products (bmm) grow with the square of the sequence and are never kept.
MATRIX_PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
    *QUANTIZED_PRODUCTS,
    EXPERTS_PRODUCT,
    *FLOAT8_PRODUCTS,
    *LORA_PRODUCTS,
)


MODES = ("off", "selective", "full")
"""The modes of a layer, from the one that keeps most."""


@dataclass(frozen=True)
class Checkpointing:
    """The mode of each layer: `first` of the first ones, `mode` of all others.

    The first layers of a model are the last ones in backward. When they are recomputed, what the others kept is gone.
    So they cost the least memory, and they are the ones to recompute more.
    """

    mode: str
    first: str = "off"
    num_first: int = 0
    tile_tokens: int = (
        0  # of a tile of the layers' MLPs (policies/tiling/), which is recomputed in any mode; 0: no tiles
    )

    def __str__(self) -> str:
        tiles = f", MLPs in tiles of {self.tile_tokens:,} tokens" if self.tile_tokens else ""
        if not self.num_first:
            return self.mode + tiles
        layers = "layer" if self.num_first == 1 else f"{self.num_first} layers"
        return f"{self.first} in the first {layers}, {self.mode} in the others{tiles}"

    def alike(self, mode: str) -> Checkpointing:
        """The same tiles, with every layer in this mode."""
        return Checkpointing(mode, tile_tokens=self.tile_tokens)

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes in use, from the one that keeps most."""
        used = {self.mode, self.first} if self.num_first else {self.mode}
        return tuple(mode for mode in MODES if mode in used)

    @property
    def strongest(self) -> str:
        return self.modes[-1]

    def of(self, layers: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
        """Each layer of a model, and its mode, in the order in which the model lists them.

        Args:
            layers: as `policies.wrapping.find_layers` returned them, the last one first.
        """
        for place, layer in enumerate(reversed(layers)):
            yield layer, self.first if place < self.num_first else self.mode


def with_default_mode(config: RunConfig, device_type: str) -> RunConfig:
    """The settings with --activation_checkpointing decided if neither it nor fsdp_activation_checkpointing was given.

    The default is `auto` on a GPU and `off` on a CPU. With --activation_offloading True it is `full`: then the input of
    each layer is all that is moved. With `auto` layers are recomputed first, and offloaded where that is not enough.
    """
    train = config.train_config
    if train.activation_checkpointing is not None or config.fsdp_config.fsdp_activation_checkpointing is not None:
        return config
    mode: Literal["full", "auto", "off"] = "auto" if device_type == "cuda" else "off"
    if train.activation_offloading is True:
        mode = "full"
    return replace(config, train_config=replace(train, activation_checkpointing=mode))


def mode_of_flags(train: TrainConfig, fsdp: FsdpConfig, *, quantized: bool) -> str:
    """The mode that the flags ask for: "off", "selective" or "full".

    --activation_checkpointing decides if given, else --fsdp_activation_checkpointing. `auto` without a plan is `full`
    under --enable_fsdp and for a quantized base: such a run is short of memory, and most of what is left is
    activations.
    """
    if train.activation_checkpointing == "auto":
        return "full" if train.enable_fsdp or quantized else "off"
    return train.activation_checkpointing or ("full" if fsdp.fsdp_activation_checkpointing else "off")


def checkpointing_mode(
    model: PreTrainedModel,
    train: TrainConfig,
    fsdp: FsdpConfig,
    *,
    quantized: bool,
    chosen: Checkpointing | None = None,
) -> tuple[Checkpointing, list[str]]:
    """The checkpointing of this run, and lines to print.

    It is what the flags ask for (`mode_of_flags`), or what the plan chose. A default or a choice that the model does
    not support becomes `off`.

    Args:
        chosen: the plan's choice, if it made one.

    Raises:
        ConfigError: if checkpointing was asked for and the model does not support it.
    """
    asked = train.activation_checkpointing
    tile_tokens = train.tile_tokens if isinstance(train.tile_tokens, int) else 0
    checkpointing = Checkpointing(mode_of_flags(train, fsdp, quantized=quantized), tile_tokens=tile_tokens)
    # Any other choice means that the flags' mode is not supported, which is decided and said below.
    if chosen is not None and (asked == "auto" or chosen.strongest == checkpointing.strongest):
        checkpointing = chosen
    if checkpointing.strongest == "off" and asked != "auto":
        return checkpointing, []
    reason = why_not_checkpointed(model, train)
    if reason is None:
        return checkpointing, []
    is_demand = asked is not None or fsdp.fsdp_activation_checkpointing is not None
    if is_demand and asked != "auto" and train.peft_method != "prefix":  # configs/validation.py refuses the flags
        raise ConfigError(f"--activation_checkpointing: {reason}; give --activation_checkpointing off")
    return checkpointing.alike("off"), [f"activation_checkpointing: off, {reason}"]


def why_not_checkpointed(model: PreTrainedModel, train: TrainConfig) -> str | None:
    """Why no layer of this model can be checkpointed, as a clause; None if they can."""
    if train.use_peft and train.peft_method == "prefix":
        return "a recomputed layer would add to the cache in which prefix tuning passes its prefix"
    if getattr(model, "supports_gradient_checkpointing", False) and find_layers(model):
        return None
    return f"{type(model).__name__} does not support it"


def checkpoint_layers(layers: Sequence[nn.Module], checkpointing: Checkpointing) -> None:
    """Checkpoint layers, each as its mode says, and let their MLPs run in tiles if there are any.

    A plan calls this again with other modes and tiles.

    Args:
        layers: as `policies.wrapping.find_layers` returned them, perhaps adapted and sharded since.

    Each layer's forward is replaced. Unlike torch's `checkpoint_wrapper`, this keeps parameter names. Unlike the switch
    of transformers before about 5.20, it is inside the hooks of sharding, which then do not run again, and inside the
    compiled code: selective checkpointing around compiled code would keep tensors that this code overwrites.
    """
    set_tiles(layers, checkpointing.tile_tokens)
    # One function for all layers of a mode, so that one compiled graph serves them.
    forwards = {"full": _checkpointed({}), "selective": _checkpointed({"context_fn": selective_contexts})}
    for layer, mode in checkpointing.of(layers):
        # Uncovers the classes' forwards, in case an earlier call had put others before them.
        for part in (layer, *_with_products(layer)):
            part.__dict__.pop("forward", None)
        has_tiles = bool(tiled_parts(layer))
        if has_tiles:
            _checkpoint_around_tiles(layer, mode, forwards)
        elif mode != "off":
            layer.forward = MethodType(forwards[mode], layer)
        _write_wide_inputs_once(layer, mode != "off" and not has_tiles)


def _write_wide_inputs_once(layer: nn.Module, is_recomputed: bool) -> None:
    """Say so to the adapters of the widest inputs, those of an MLP's last product.

    Only in a layer that is computed again in the graph of its backward: elsewhere the input would be kept. Not of other
    inputs: their masks have other kernels in forward and in backward, and inductor would write the sums of their keys.
    """
    # peft's layers have None for what it does not know.
    linear: list[Any] = [m for m in layer.modules() if getattr(m, "in_features", None) and m.out_features]
    widest = max((max(module.in_features, module.out_features) for module in linear), default=0)
    for module in linear:
        if hasattr(module, "lora_A"):
            is_last = module.in_features == widest > module.out_features
            setattr(module, WRITTEN_ONCE, is_recomputed and is_last)


def _checkpoint_around_tiles(layer: nn.Module, mode: str, forwards: dict[str, Callable[..., Any]]) -> None:
    """The same for a layer whose MLP runs in tiles, between which code is not compiled.

    `full` is around the compiled code before and after them. `selective` is inside it: the MLP keeps its input alone in
    any case, so the choice is among the outputs of the attention.
    """
    if mode == "full":
        layer.forward = MethodType(_around_compiled, layer)
    elif mode == "selective":
        for part in _with_products(layer):
            part.forward = MethodType(forwards[mode], part)


def _with_products(layer: nn.Module) -> Iterator[nn.Module]:
    """The parts of a layer that multiply with weights; not those with another forward, of tiles or of an adapter."""
    for child in layer.children():
        if isinstance(child, nn.ModuleList):
            yield from _with_products(child)
        elif any(parameter.dim() > 1 for parameter in child.parameters()):
            own = vars(child).get("forward")
            if own is None or getattr(own.__func__, "checkpoints", False):
                yield child


def _checkpointed(options: dict[str, Any]) -> Callable[..., Any]:
    def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Only non-reentrant checkpointing takes a context_fn, and so can be selective.
        return checkpoint(partial(type(layer).forward, layer, **kwargs), *args, use_reentrant=False, **options)

    forward.checkpoints = True  # type: ignore[attr-defined]
    return forward


def _around_compiled(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    compute = getattr(layer, "compiled_forward", type(layer).forward)
    return checkpoint(partial(compute, layer, **kwargs), *args, use_reentrant=False)


def selective_contexts() -> tuple[Any, Any]:
    """The contexts in which a checkpointed layer runs, in forward and in recomputation; after torchtitan.

    The second of every two matrix products is kept (torchtitan keeps the first). So the last one of a layer often is
    not kept, and it is not recomputed either, because the layer's backward does not need it. Of an adapter, the small
    inner product is kept.
    """
    # Counted apart, in forward and in recomputation: some versions of torch ask in both, and must get the same answers.
    choices = {False: SelectiveChoice(), True: SelectiveChoice()}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = choices[context.is_recompute].keeps(op, args, kwargs)
        # PREFER, since torch.compile may still keep a tensor that costs it less than computing it again.
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class SelectiveChoice:
    """Which outputs a selective layer keeps. It is asked about the layer's operators in the order in which they run."""

    def __init__(self) -> None:
        self._num_products = 0

    def keeps(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if op in LORA_PRODUCTS:
            # Its few numbers per token are kept. What it adds is soon computed from them, and large: fp32.
            return op is torch.ops.lora.product_down.default
        if op in MATRIX_PRODUCTS:
            self._num_products += 1
            return self._num_products % 2 == 0
        return is_attention(op) and not draws_random_numbers(op, args, kwargs)


def is_attention(op: Any) -> bool:
    """Whether `op` is a fused attention, by its name: every device has its own kernels."""
    return any(name in str(op) for name in ("scaled_dot_product", "varlen_attn", "flash_attention_4", "delta_rule"))


def draws_random_numbers(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an attention uses dropout. It must be recomputed, or all later dropout would get other random numbers."""
    # Positional and named arguments by their names in the operator's schema: kernels differ in their order.
    names = [argument.name for argument in op._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p", 0.0) > 0
