"""The model of a run: built without weights, adapted, sharded and filled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from configs.run import RunConfig
from data.batches.packing import Offsets
from policies.activations.checkpointing import Checkpointing, checkpoint_layers, checkpointing_mode
from policies.activations.offloading import Offloaded, Offloading, num_offloaded
from policies.activations.transfers import transfers_for
from policies.adapters.folder import saved_parts
from policies.apply_policies import Policies, adapt_model, shard_and_fill
from policies.attention.choice import choose_attention, rows_that_need_offsets
from policies.attention.vision_encoders import read_images_apart
from policies.compilation.layers import EagerFallback, set_compiler_in_backward
from policies.context_parallel.attention import share_attention
from policies.context_parallel.choice import check_attention
from policies.experts.forward import compute_by_products
from policies.linear_attention.choice import use_offsets_in_states
from policies.loading import build_model, grow_embeddings
from policies.model_task import ModelTask
from policies.pretrained import generation_settings
from policies.routing.coefficient import check_routers
from policies.routing.expert_loads import Routing
from policies.text_scores import new_parts
from policies.weights.materialise import find_weights
from policies.wrapping import find_layers, outermost
from ranks.environment import Environment, print_rank_zero
from utils.cudnn_attention import leave_out_cudnn
from utils.device import DeviceFacts


@dataclass(frozen=True)
class MetaModel:
    """A model without weights, on the meta device, with the choices made for it."""

    model: PreTrainedModel  # of transformers, before anything wraps it
    architecture: str  # its class; sharding and adapters rename it
    attention: str  # the name of its attention implementation
    offsets: Offsets  # which rows need `cu_seqlens`
    checkpointing: Checkpointing  # of activations
    num_offloaded: int  # the first layers, whose activations wait in host memory for backward
    notes: tuple[str, ...]  # lines to print


@dataclass(frozen=True)
class BuiltModel:
    """A model that can be called."""

    model: nn.Module
    empty: MetaModel  # its origin
    routing: Routing  # of its experts; before the first forward its routers are watched
    layers: list[nn.Module]  # the repeated ones, as `policies.wrapping.find_layers` returns them
    fallback: EagerFallback | None  # if --compile auto chose to compile, what can undo that
    vision_fallback: EagerFallback | None  # the same of the vision encoder's layers alone
    offloading: Offloading | None  # of activations, if that was asked for
    load_seconds: float


def build_empty(
    config: RunConfig,
    model_config: PreTrainedConfig,
    task: ModelTask,
    *,
    policies: Policies,
    row_length: int,
    num_embeddings: int,
    device: DeviceFacts,
    new_tokens: Sequence[int] = (),
) -> MetaModel:
    """The model of a config.json, without weights. A run fills it; a plan of the run does not.

    Args:
        row_length: the most tokens that a row of the run holds.
        num_embeddings: rows that its embeddings need at least.
        new_tokens: the ids of the tokens of --add_special_tokens.

    Raises:
        ConfigError: if the config describes no model that can be trained so.
    """
    train = config.train_config
    model = build_model(train, model_config, task.AUTO_MODEL, policies.precision.storage_dtype)
    notes = task.check_model(model, train.model_name)
    compute_by_products(model)
    notes += check_routers(model, policies.router_aux_loss_coef, asked=train.router_aux_loss_coef)
    packs = task.packs(model_config)
    packed = packs and train.batching_strategy == "packing"
    if task.READS_IMAGES:
        read_images_apart(model, device, policies.precision.compute_dtype)
    if packed or (packs and not task.READS_IMAGES):
        notes += use_offsets_in_states(model, device, packed=packed)
        notes += choose_attention(
            model,
            train,
            policies.precision,
            device,
            row_length,
            flash_4=policies.flash_4,
            shares_rows=policies.context.shares_rows,
        )
        check_attention(model, policies.context, row_length)
    if policies.context.shares_rows:
        share_attention(model, policies.context)
    notes += grow_embeddings(model, num_embeddings, use_peft=train.use_peft, new_tokens=new_tokens)
    notes += filter(None, [generation_settings(train.model_name)[1]])
    if train.use_peft:
        from policies.adapters.apply import adapter_notes  # peft takes seconds to import

        notes += adapter_notes(model, train, config.lora_config, config.llama_adapter_config, device)
    if train.activation_offloading and device.type == "cpu":
        notes += ("activation_offloading: the device is the host itself, so nothing is saved",)
    checkpointing, checkpointing_notes = checkpointing_mode(
        model,
        train,
        config.fsdp_config,
        quantized=policies.quantization is not None and policies.float8 is None,
        chosen=policies.checkpointing,
    )
    return MetaModel(
        model=model,
        architecture=type(model).__name__,
        attention=model.config.get_text_config()._attn_implementation,
        offsets=rows_that_need_offsets(model, row_length, packed=packed),
        checkpointing=checkpointing,
        num_offloaded=num_offloaded(
            train,
            len(outermost(find_layers(model))),
            chosen=None if policies.offloaded is None else policies.offloaded.num_layers,
        ),
        notes=(*notes, *checkpointing_notes),
    )


def build_for_training(
    config: RunConfig,
    model_config: PreTrainedConfig,
    *,
    task: ModelTask,
    policies: Policies,
    row_length: int,
    num_embeddings: int,
    env: Environment,
    new_tokens: Sequence[int] = (),
) -> BuiltModel:
    """The model, adapted, sharded and filled; notes on adapted defaults are printed. Every rank must call this.

    Args: as of `build_empty`.

    Raises:
        ConfigError: on every rank, if the model cannot be built, read or trained so.
    """
    started = time.perf_counter()
    if config.train_config.batching_strategy == "padding":  # batches have many widths
        leave_out_cudnn()
    empty = build_empty(
        config,
        model_config,
        task,
        policies=policies,
        row_length=row_length,
        num_embeddings=num_embeddings,
        device=env.device_facts,
        new_tokens=new_tokens,
    )
    dtype = policies.precision.storage_dtype
    # Before adapters are added: files are compared with the plain model, and a mismatch is refused before any value is
    # read.
    weights = find_weights(
        config.train_config,
        empty.model,
        task.AUTO_MODEL,
        dtype,
        env,
        num_rows=num_embeddings,
        new_parts=new_parts(empty.model) if task.HEAD == "texts" else (),
        in_adapter=saved_parts(config.train_config),
    )
    print_rank_zero(env, *empty.notes, *weights.notes)
    fallback = vision_fallback = None
    if policies.compile_is_tried:
        # Of several ranks one that went on uncompiled alone would enter other collectives than the others.
        say = partial(print_rank_zero, env) if env.world_size == 1 else None
        fallback, vision_fallback = EagerFallback(say), EagerFallback(say, "the vision encoder")
    adapted = adapt_model(
        empty.model,
        config,
        policies,
        task=task,
        checkpointing=empty.checkpointing,
        new_tokens=new_tokens,
        fallback=fallback,
        vision_fallback=vision_fallback,
    )
    print_rank_zero(env, *adapted.notes)
    if config.train_config.compile:
        set_compiler_in_backward(env.device, falls_back=fallback is not None)
    offloading = None
    if config.train_config.activation_offloading:
        offloading = Offloading(env.device, transfers_for(env.device, env.local_world_size))
        # Before weights are read, which takes long enough to pin much of what the first step needs.
        move_activations(offloading, empty, adapted.layers, policies.offloaded)
    model = shard_and_fill(adapted, config.lora_config, policies, weights, env, offloading=offloading)
    routing = Routing(adapted.routers, coefficient=policies.router_aux_loss_coef, device=env.device)
    seconds = time.perf_counter() - started
    return BuiltModel(model, empty, routing, adapted.layers, fallback, vision_fallback, offloading, seconds)


def with_choices(built: BuiltModel, checkpointing: Checkpointing, offloaded: Offloaded | None) -> BuiltModel:
    """The model with other checkpointing and offloading of activations; it may be sharded, and is not trained yet."""
    checkpoint_layers(built.layers, checkpointing)
    empty = replace(built.empty, checkpointing=checkpointing)
    if offloaded is not None and built.offloading is not None:
        empty = replace(empty, num_offloaded=offloaded.num_layers)
        move_activations(built.offloading, empty, built.layers, offloaded)
    return replace(built, empty=empty)


def move_activations(
    offloading: Offloading, empty: MetaModel, layers: Sequence[nn.Module], offloaded: Offloaded | None
) -> None:
    """Move the activations of as many layers as was chosen.

    Args:
        layers: as of `BuiltModel`. offloaded: by the run's plan; None: it has none, and memory is made when needed.
    """
    whole = {id(layer) for layer in outermost(layers)}
    modes = [mode for layer, mode in empty.checkpointing.of(layers) if id(layer) in whole]
    offloading.move(empty.num_offloaded, modes, 0 if offloaded is None else offloaded.host_bytes)
