"""The model of a run with its weights, its optimizer and its data loaders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from checkpointing.trained import Trained
from data.batches.packing import offsets_of_one_graph
from data.batches.padding import one_width
from data.batches.rows import make_rows
from data.loaders import Loaders, make_loaders
from data.pipeline import RunData
from data.processors.tokenizer_loading import added_token_ids, num_rows_needed, tokenizer_of
from policies.attention.packing_leaks import check_packing_isolates
from policies.building import BuiltModel, MetaModel, build_for_training
from policies.loss_scaling import LossScaler
from policies.optimizers.build import build_optimizer, optimizer_notes
from policies.optimizers.offload import share_out_cores
from policies.optimizers.schedule import build_scheduler
from policies.quantization.float8 import computed_in_bf16, keep_scales
from policies.sharding import Accumulation, choose_accumulation, reduction_notes, unit_notes
from preparation.trial_rows import check_label_leaks
from ranks.environment import Environment, print_rank_zero
from resolving.inputs import Inputs
from resolving.resolved import Resolved
from tasks.task import BatchForm, MicroBatch
from utils.processor_type import Processor


class SummedLoss(Protocol):
    """The loss of a task: a sum over the label tokens of a micro-batch."""

    def __call__(self, model: nn.Module, batch: MicroBatch, loss_grad: float | None = None) -> torch.Tensor:
        """Returns a scalar. `loss_grad` is the gradient that backward will bring (`policies.loss.summed_loss`)."""


@dataclass(frozen=True)
class Trainable(Trained):
    """All that an optimizer step uses besides its data: the model, its loss, its optimizer, schedule and loss scale."""

    summed_loss: SummedLoss
    accumulation: Accumulation  # of the gradients of a step's micro-batches
    max_norm: float | None  # clip the gradient norm to this; None: no clipping


@dataclass(frozen=True)
class TrainingParts:
    """The model with its optimizer, and the loaders of its data."""

    trainable: Trainable
    loaders: Loaders
    empty: MetaModel  # the same model without values, before it was wrapped
    load_seconds: float  # to build, shard and fill the model


def build(inputs: Inputs, env: Environment) -> TrainingParts:
    """Build everything that a step needs. Every rank must call this."""
    resolved, task = inputs.resolved, inputs.resolved.task
    built = build_model(resolved, inputs.processor, env)
    model, empty = built.model, built.empty
    # --lr, scaled with the ranks if --lr_scale_with_world_size asks for it.
    train, fsdp = replace(resolved.config.train_config, lr=resolved.lr), resolved.config.fsdp_config
    optimizer = build_optimizer(model, train, fsdp)
    keep_scales(model, optimizer, resolved.policies.float8)
    layout, precision = resolved.policies.layout, resolved.policies.precision
    how_reduced = (fsdp.accumulate_unsharded, layout, precision, model, env.device_facts)
    notes = [*unit_notes(model, fsdp.wrap), *optimizer_notes(model, train.lr, fsdp), *share_out_cores(fsdp, env)]
    notes += reduction_notes(*how_reduced, resolved.batches.gradient_accumulation_steps)
    print_rank_zero(env, *notes)
    packing, offsets, widths = train.batching_strategy == "packing", empty.offsets, resolved.widths
    if train.compile and packing:  # one graph serves all rows; packed ones are full, or nearly
        offsets = offsets_of_one_graph(offsets, sequences_of_rows(inputs.data, resolved), train.batch_size_training)
        longest = longest_row(inputs.data, resolved)
        widths = tuple(one_width(width, longest) for width in widths)

    def collate_of(num_rows: int) -> Callable[[list[Any]], Any]:
        form = BatchForm(inputs.vocab_size, widths, packing, offsets, num_rows if train.compile else 0)
        return task.make_collator(inputs.processor, empty.model.config, form)

    check_label_leaks(built, inputs, env)  # first: a model that it refuses may not be packed at all
    if packing:
        collate = collate_of(1)
        with computed_in_bf16(model):  # in float8 the scale of activations is that of all documents
            check_packing_isolates(
                model,
                lambda rows: task.token_losses(model, collate(rows).to(env.device)),
                vocab_size=inputs.vocab_size,
                row_length=resolved.context_length,
                device_type=env.device.type,
            )
    say = partial(print_rank_zero, env)
    loaders = make_loaders(inputs.data, train, resolved.batches, env, collate_of, say)
    model.train()
    trainable = Trainable(
        model=model,
        optimizer=optimizer,
        scheduler=build_scheduler(optimizer, train, steps_per_epoch=len(loaders.train), num_steps=inputs.num_steps),
        scaler=LossScaler(active=precision.scales_loss),
        summed_loss=built.routing.watching(task.summed_loss),
        accumulation=choose_accumulation(*how_reduced),
        max_norm=train.gradient_clipping_threshold if train.gradient_clipping else None,
        routing=built.routing,
    )
    return TrainingParts(trainable, loaders, empty, built.load_seconds)


def sequences_of_rows(data: RunData, resolved: Resolved) -> np.ndarray:
    """Sequences of each packed row, int64 [rows]; of a stream, of rows made of its first sequences."""
    rows = data.train_rows
    if rows is None:
        rows = make_rows(data.train, batching_strategy="packing", context_length=resolved.context_length)
    return rows.num_sequences


def longest_row(data: RunData, resolved: Resolved) -> int:
    """The most tokens of a packed row of the run. A stream's rows are not known yet, so one may be full."""
    if data.train_rows is None:
        return resolved.context_length
    return max(int(rows.lengths.max(initial=1)) for rows in (data.train_rows, data.eval_rows) if rows is not None)


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
