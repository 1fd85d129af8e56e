"""The changes to a model before it trains, in the order that they need: adapt_model(), then shard_and_fill()."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel

from configs.peft import LoraConfig
from configs.run import RunConfig
from policies.activations.checkpointing import Checkpointing, checkpoint_layers
from policies.activations.offloading import Offloaded, Offloading
from policies.adapters.adapted_model import has_adapter
from policies.compilation.layers import EagerFallback, compile_layers
from policies.freezing import freeze_layers, freeze_parts
from policies.loss.compiled_cross_entropy import compile_cross_entropy
from policies.loss.summed_loss import CrossEntropy, summed_cross_entropy, use_summed_loss
from policies.mixed_precision import Precision
from policies.model_task import ModelTask
from policies.quantization.choice import quantize_weights
from policies.quantization.float8 import Float8, compute_in_float8, store_in_float8
from policies.quantization.packing import Quantization
from policies.replicated_weights import gathered_units, replicated_weights
from policies.routing.routers import Router, find_routers
from policies.sharding import Layout, replicate, shard
from policies.text_scores import new_parts, use_text_scores
from policies.tiling.finding import why_not_tiled
from policies.weights.materialise import Weights, materialise
from policies.wrapping import find_layers, find_outer_norms, find_units
from ranks.context_group import ContextGroup
from ranks.environment import Environment
from utils.errors import ConfigError
from utils.model_parts import has_vision, qformer_part, vision_layers, vision_part
from utils.parameters import mark_vocabulary


class Policies(NamedTuple):
    """The decisions about a model before it is built."""

    precision: Precision
    quantization: Quantization | None
    layout: Layout
    float8: Float8 | None = None
    checkpointing: Checkpointing | None = None  # chosen by the run's plan; None: the flags decide
    offloaded: Offloaded | None = None  # the same
    compile_is_tried: bool = False  # --compile auto chose to compile: layers are tried before the first step
    vision_as_written: bool = False  # the vision encoder's layers failed their trial, and alone are not compiled
    flash_4: bool = False  # FlashAttention 4 works on every rank's device
    context: ContextGroup = ContextGroup()  # the ranks that share rows with this one
    router_aux_loss_coef: float = 0.0  # of the loss that evens out a mixture's experts


class Adapted(NamedTuple):
    """A model that is ready to be sharded: its parameters have shapes and no values yet, adapters aside."""

    model: nn.Module  # with its adapters
    base: PreTrainedModel  # the model that the adapters were added to; `model` itself if there are none
    units: list[nn.Module]  # the modules that are gathered one at a time; the root holds the rest
    layers: list[nn.Module]  # the repeated ones, inner ones first, as `policies.wrapping.find_layers` returns them
    routers: list[Router]  # of a mixture of experts
    notes: tuple[str, ...]  # lines to print


def adapt_model(
    model: PreTrainedModel,
    config: RunConfig,
    policies: Policies,
    *,
    task: ModelTask,
    checkpointing: Checkpointing,
    new_tokens: Sequence[int] = (),
    adapter_device: str = "cpu",
    fallback: EagerFallback | None = None,
    vision_fallback: EagerFallback | None = None,
    compiled_loss: CrossEntropy | None = None,
) -> Adapted:
    """Steps 1 to 5: everything that needs neither other ranks nor weights. A plan of the run stops here.

    Args:
        model: as `policies.loading.build_model` returns it, on the meta device.
        checkpointing: what `policies.activations.checkpointing.checkpointing_mode` returned.
        new_tokens: ids of tokens whose embeddings LoRA trains, too.
        adapter_device: "meta" for a plan, which needs no values.
        fallback: calls layers and loss, compiled or as they were written. None: what does not compile ends the call.
        vision_fallback: the same of the vision encoder's layers.
        compiled_loss: stands for the compiled cross-entropy in a plan, which compiles nothing.
    """
    base, train, backbone = model, config.train_config, task.backbone(model)
    wrapped: nn.Module = base  # in its adapters
    cross_entropy: CrossEntropy = summed_cross_entropy
    if train.compile:
        cross_entropy = compiled_loss or compile_cross_entropy(fallback)
    # The loss comes before all else: its code runs inside whatever wraps the model, where sharded weights are whole.
    if task.HEAD == "texts":
        use_text_scores(base)
    else:
        use_summed_loss(
            base,
            backbone,
            train.loss_chunk_size,
            task.compute_logits,
            label_smoothing=train.label_smoothing,
            by_probability=train.loss_type == "dft",
            teacher_weight=train.teacher_weight,
            cross_entropy=cross_entropy,
        )
    # Found now: sharding renames their classes.
    layers, routers = find_layers(base), find_routers(base)
    at_once = not (train.cache_vision_features or policies.precision.casts)
    units = find_units(base, config.fsdp_config.wrap, vision_at_once=at_once)
    if checkpointing.tile_tokens and (reason := why_not_tiled(layers, units)) is not None:
        raise ConfigError(f"--tile_tokens: {train.model_name}: {reason}")

    # 1. PEFT, on quantized layers or plain ones
    notes: tuple[str, ...] = ()
    # Quantized first: peft then wraps the packed layers, and the adapters themselves stay unquantized.
    if policies.quantization is not None:
        notes = (quantize_weights(base, policies.quantization),)
    elif policies.float8 is not None and train.use_peft:
        notes = (store_in_float8(base, policies.float8),)
    if train.use_peft:
        # Here, since peft takes seconds to import: runs without adapters do not wait for it.
        from policies.adapters.apply import apply_adapters, store_adapters
        from policies.adapters.expert_products import use_grouped_factors
        from policies.adapters.lora_layers import use_lean_forward
        from policies.adapters.new_tokens import use_lean_tokens
        from policies.adapters.saved_parts import use_own_dtype

        saved_parts = new_parts(base) if task.HEAD == "texts" else []
        wrapped = apply_adapters(base, config, task.PEFT_TYPE, new_tokens, saved_parts, adapter_device)
        store_adapters(wrapped, policies.precision.adapter_dtype)
        # After peft, whose forwards these replace (docs/decisions.md, Adapters and quantization).
        lora = config.lora_config
        use_lean_forward(wrapped, num_trained_ranks=lora.r if lora.begins_in_base else None)
        use_grouped_factors(base)
        use_lean_tokens(wrapped)
        use_own_dtype(wrapped)
    # 2. freeze: adapters froze what they need frozen
    if train.freeze_layers:
        freeze_layers(wrapped, backbone, train.num_freeze_layers)
    freeze_parts(wrapped, base, train)
    # 3. precision: weights have their storage dtype since they were built; the policy that casts belongs to sharding
    if policies.float8 is not None and not train.use_peft:
        notes = (compute_in_float8(base, policies.float8),)
    # 4. activation checkpointing, inside each layer's forward: compiled code and the hooks of sharding go around it.
    # Tiles are inside of that: a layer is recomputed while its sharded weights are whole.
    checkpoint_layers(layers, checkpointing)
    # 5. compile, inside the hooks that sharding adds. Not in a plan: to ask for it takes torch seconds of imports
    if train.compile and compiled_loss is None:
        norms = find_outer_norms(base, layers)
        widths_vary, seeing = train.batching_strategy == "padding", vision_layers(base, layers)
        others = [layer for layer in layers if layer not in seeing]
        compile_layers(others, norms, widths_vary=widths_vary, fallback=fallback)
        if seeing:
            compile_layers(seeing, widths_vary=widths_vary, fallback=vision_fallback)
    mark_vocabulary(wrapped)
    return Adapted(wrapped, base, units, layers, routers, notes)


def shard_and_fill(
    adapted: Adapted,
    lora: LoraConfig,
    policies: Policies,
    weights: Weights,
    env: Environment,
    *,
    offloading: Offloading | None = None,
) -> nn.Module:
    """Steps 6 to 8: the ranks share the model out and read its weights. Every rank must call this.

    Args:
        offloading: of activations, if they may wait in host memory for backward.

    Returns:
        The model to call: `model(..., targets=targets)` gives the summed loss.
    """
    model, base, units, layers = adapted[:4]
    layout = policies.layout
    # 6. shard
    replicated = replicated_weights(model, layers, layout.num_replicated or 0)
    gathered = gathered_units(units, replicated)
    inside = [unit for unit in vision_layers(base, gathered) if unit not in vision_part(base)]
    shard(model, gathered, layout, policies.precision, env.device, replicated=replicated, uncast=inside)
    # 7. materialise weights; DistributedDataParallel goes around real ones
    parameter_device = layout.parameter_device(env.device)
    materialise(model, base, weights, parameter_device=parameter_device, compute_device=env.device)
    # Rows of new tokens, first factors and DoRA's magnitudes are computed from the base's weights, so they come last.
    if has_adapter(model):
        from policies.adapters.dora import set_magnitudes
        from policies.adapters.initial_factors import set_factors
        from policies.adapters.new_tokens import set_token_rows
        from policies.adapters.saved_parts import set_saved_parts

        set_token_rows(model)
        set_saved_parts(model)
        if lora.begins_in_base:
            set_factors(model, lora.init_lora_weights)
        if lora.use_dora:  # an adapter from --from_peft_checkpoint has its magnitudes already
            set_magnitudes(model)
    if layout.is_direct:
        # Here, since it reads private names of torch: other runs do without. After the weights, as float8 stores them.
        from policies.direct_transfers import send_directly

        send_directly(model)
    # 8. activation offloading, around the layers as they are called
    if offloading is not None:
        offloading.wrap(layers[::-1])  # in the order of forward; `layers` has inner ones first
    # The language model reads no output of some layers of many vision encoders; a Q-Former reads them all.
    return replicate(model, layout, has_unused=has_vision(base) and not qformer_part(base))
