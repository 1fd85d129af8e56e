"""The model of a run with its weights, its optimizer and its data loaders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from checkpointing.trained import Trained
from data.loaders import Loaders, make_loaders
from data.processors.tokenizer_loading import added_token_ids, num_rows_needed, tokenizer_of
from policies.activations.host_pool import HostPool
from policies.adapters.adapted_model import base_model
from policies.building import BuiltModel, MetaModel, build_for_training
from policies.context_parallel.attention import whole_rows
from policies.embedding_noise import EmbeddingNoise
from policies.loss_scaling import LossScaler
from policies.optimizers.build import build_optimizer, optimizer_notes
from policies.optimizers.offload import share_out_cores
from policies.optimizers.schedule import build_scheduler
from policies.quantization.float8 import keep_scales
from policies.sharding import Accumulation, choose_accumulation, reduction_notes, unit_notes, unwrap
from preparation.batch_forms import collator_of_run
from preparation.packing_trial import check_packing
from preparation.trial_rows import check_label_leaks, check_shared_losses
from preparation.trial_texts import check_text_scores
from ranks.environment import Environment, print_rank_zero
from resolving.inputs import Inputs
from resolving.resolved import Resolved
from tasks.micro_batch import MicroBatch
from utils.processor_type import Processor


class SummedLoss(Protocol):
    """The loss of a task: a sum over the terms of a micro-batch (`tasks.task.Task.MEAN_OVER`)."""

    def __call__(self, model: nn.Module, batch: MicroBatch, loss_grad: float | None = None) -> torch.Tensor:
        """Returns a scalar. `loss_grad` is the gradient that backward will bring (`policies.loss.summed_loss`)."""


class Evaluated(NamedTuple):
    """An evaluation of the whole validation set, over all ranks."""

    loss: float  # the mean over its terms
    num_loss_terms: int
    sums: Sequence[float]  # that `tasks.task.Task.eval_figures` takes


@dataclass(frozen=True)
class Trainable(Trained):
    """All that an optimizer step uses besides its data: the model, its loss, its optimizer, schedule and loss scale."""

    summed_loss: SummedLoss
    eval_sums: Callable[[nn.Module, MicroBatch], torch.Tensor]  # `tasks.task.Task.eval_sums`
    accumulation: Accumulation  # of the gradients of a step's micro-batches
    max_norm: float | None  # clip the gradient norm to this; None: no clipping


@dataclass(frozen=True)
class TrainingParts:
    """The model with its optimizer, and the loaders of its data."""

    trainable: Trainable
    loaders: Loaders
    empty: MetaModel  # the same model without values, before it was wrapped
    load_seconds: float  # to build, shard and fill the model
    pinned: HostPool | None  # host memory for activations
    collate: Callable[[list[Any]], Any]  # of evaluations


def check_losses(built: BuiltModel, inputs: Inputs, env: Environment) -> None:
    """Refuse a model whose losses would mean nothing. Every rank must call this.

    Raises:
        ConfigError: on every rank.
    """
    if inputs.resolved.task.HEAD == "texts":
        check_text_scores(built, inputs, env)
        return
    shares_rows = inputs.resolved.policies.context.shares_rows
    # Each rank tries whole rows, and then its part of some.
    with whole_rows(base_model(unwrap(built.model))) if shares_rows else nullcontext():
        _check_whole_rows(built, inputs, env)
    check_shared_losses(built, inputs, env)


def _check_whole_rows(built: BuiltModel, inputs: Inputs, env: Environment) -> None:
    check_label_leaks(built, inputs, env)  # first: a model that it refuses may not be packed at all
    if inputs.resolved.config.train_config.batching_strategy == "packing":
        check_packing(built, inputs, env)


def build(built: BuiltModel, inputs: Inputs, env: Environment) -> TrainingParts:
    """Build everything else that a step needs. Every rank must call this.

    Args:
        built: what `build_model` returned.
    """
    resolved, task = inputs.resolved, inputs.resolved.task
    model, empty = built.model, built.empty
    # --lr, scaled with the ranks if --lr_scale_with_world_size asks for it.
    train, fsdp = replace(resolved.config.train_config, lr=resolved.lr), resolved.config.fsdp_config
    precision = resolved.policies.precision
    optimizer = build_optimizer(
        model,
        train,
        fsdp,
        lr_ratio=resolved.config.lora_config.lr_ratio,
        layers=built.layers,
        scales_loss=precision.scales_loss,
    )
    keep_scales(model, optimizer, resolved.policies.float8)
    layout = resolved.policies.layout
    how_reduced = (fsdp.accumulate_unsharded, layout, precision, model, env.device_facts)
    notes = [*unit_notes(model, fsdp.wrap), *optimizer_notes(model, train.lr, fsdp), *share_out_cores(fsdp, env)]
    notes += reduction_notes(*how_reduced, resolved.batches.gradient_accumulation_steps)
    if layout.is_direct:
        from policies.direct_transfers import direct_notes  # only here: it reads private names of torch

        notes += direct_notes(model)
    print_rank_zero(env, *notes)
    say = partial(print_rank_zero, env)
    collate_of = collator_of_run(inputs, empty)
    loaders = make_loaders(inputs.data, train, resolved.batches, env, collate_of, say)
    model.train()
    scheduler = build_scheduler(optimizer, train, steps_per_epoch=len(loaders.train), num_steps=inputs.num_steps)
    noise = EmbeddingNoise(
        base_model(unwrap(model)).get_input_embeddings(),
        train.neftune_noise_alpha,
        seed=train.seed,
        steps_taken=lambda: scheduler.last_epoch,
    )
    trainable = Trainable(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=LossScaler(active=precision.scales_loss),
        summed_loss=built.routing.watching(noise.adding(task.summed_loss)),
        eval_sums=built.routing.watching(task.eval_sums),
        accumulation=choose_accumulation(*how_reduced),
        max_norm=train.gradient_clipping_threshold if train.gradient_clipping else None,
        routing=built.routing,
    )
    pinned = None if built.offloading is None else built.offloading.transfers.pinned
    return TrainingParts(trainable, loaders, empty, built.load_seconds, pinned, collate_of(train.val_batch_size))


def build_model(resolved: Resolved, processor: Processor, env: Environment) -> BuiltModel:
    """The model with its weights. Every rank must call this."""
    return build_for_training(
        resolved.config,
        resolved.model_config,
        task=resolved.task,
        policies=resolved.policies,
        row_length=resolved.context_length,
        num_embeddings=num_rows_needed(tokenizer_of(processor)),
        new_tokens=added_token_ids(tokenizer_of(processor), resolved.config.train_config),
        env=env,
    )
