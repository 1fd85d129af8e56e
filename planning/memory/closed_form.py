"""The memory plan of a run in closed form: bytes per rank, phase by phase, from shapes alone.

What one layer keeps and needs is counted on meta tensors (layer_use.py); a walk through the step adds up what all
layers, the layout and the optimizer hold (timeline.py). So a plan costs one pass over a layer of each kind, and it
works where the whole step cannot be traced: with packed weights, on cards of other kinds than this machine's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from planning.cards import Card
from planning.float8_weights import float8_weights
from planning.memory.generation_use import GenerationUse, generation_use
from planning.memory.host_bytes import checkpoint_bytes, host_load_bytes, host_training_bytes, offloaded_bytes
from planning.memory.layer_use import StepUse, measure_step
from planning.memory.memory_plan import ROUNDED_UP, MemoryPlan
from planning.memory.meta_pass import pass_on_meta
from planning.memory.optimizer_bytes import optimizer_bytes
from planning.memory.row_lengths import RowLengths
from planning.memory.sharded_bytes import add_statistics, local_parts
from planning.memory.timeline import Bytes, Scheme, Timeline
from planning.planned_model import PlannedModel, with_checkpointing
from policies.activations.checkpointing import Checkpointing
from policies.wrapping import find_layers
from utils.units import GIB

CONTEXT_GIB = 0.5
"""What CUDA holds of a device before the first tensor: its context and the kernels of torch, cuBLAS and cuDNN. NVIDIA
names no figure; nvidia-smi shows 0.3 to 0.6 GiB for a process with one small tensor, less on older cards."""

COLLECTIVES_GIB = 0.4
"""NCCL's own buffers, outside torch's allocator, for a process with several ranks: some tens of channels of 4 to 10 MiB
(NCCL_BUFFSIZE is 4 MiB for each channel and direction)."""


def plan_memory(planned: PlannedModel, card: Card, rows: RowLengths) -> MemoryPlan:
    """The plan of a run on ranks with such a card.

    Args:
        planned: its model; it gets the buffers of packed weights here, if it has not yet.

    Raises:
        ConfigError: if the inputs of such a model are not known before data is read.
    """
    modes = planned.empty.checkpointing.modes
    alike = {mode: use_of_run(with_checkpointing(planned, Checkpointing(mode)), card, rows) for mode in modes}
    planned = with_checkpointing(planned, planned.empty.checkpointing)
    return memory_of(planned, card, mixed_use(planned, alike))


@dataclass(frozen=True)
class RunUse:
    """What layers keep and need in the kinds of micro-batches that a run has."""

    fullest: StepUse
    first: tuple[StepUse, ...]  # fuller ones, of the first step alone
    typical: StepUse
    evaluation: StepUse | None  # None if the run has none
    generation: GenerationUse | None  # the same


def use_of_run(planned: PlannedModel, card: Card, rows: RowLengths) -> RunUse:
    """The use of a run whose layers are all checkpointed alike.

    Raises:
        ConfigError: if the inputs of such a model are not known before data is read.
    """
    add_statistics(planned.adapted.model)
    evaluates = planned.config.train_config.run_validation is not False
    evaluation = (
        step_use(planned, card, rows.eval_rows, rows.widest_evaluated, rows, trains=False) if evaluates else None
    )
    fullest = step_use(planned, card, *rows.fullest, rows)
    first = tuple(step_use(planned, card, *shape, rows) for shape in rows.first)
    typical = fullest if rows.is_alike else step_use(planned, card, rows.rows, rows.typical, rows)
    generates = evaluates and planned.config.train_config.eval_generate
    return RunUse(fullest, first, typical, evaluation, generation_use(planned, card, rows) if generates else None)


def mixed_use(planned: PlannedModel, alike: Mapping[str, RunUse]) -> RunUse:
    """The use of this run, each layer as it is if all have its mode.

    Args:
        alike: by mode, the use of this very model with all layers in that mode.
    """
    checkpointing = planned.empty.checkpointing
    mode_of = {id(layer): mode for layer, mode in checkpointing.of_layers(planned.adapted.base)}
    some = alike[checkpointing.mode]

    def mixed(uses: Iterable[StepUse]) -> StepUse:
        by_mode = dict(zip(alike, uses, strict=True))
        alone = by_mode[checkpointing.mode]
        layers = tuple(by_mode[mode_of[id(layer)]].layers[place] for place, (layer, _) in enumerate(alone.layers))
        return replace(alone, layers=layers)

    return RunUse(
        mixed(use.fullest for use in alike.values()),
        tuple(map(mixed, zip(*(use.first for use in alike.values()), strict=True))),
        mixed(use.typical for use in alike.values()),
        some.evaluation,
        some.generation,
    )


def memory_of(planned: PlannedModel, card: Card, use: RunUse) -> MemoryPlan:
    """The plan of a run whose layers are used so."""
    scheme = scheme_of(planned)
    on_host = max(sum(of_layer.on_host for _, of_layer in step.layers) for step in (use.fullest, *use.first))
    timeline = Timeline(planned.adapted.model, planned.adapted.units, scheme)
    if use.evaluation is not None:
        timeline.evaluation(use.evaluation)
    if use.generation is not None:
        beside = overhead_gib(0.0, planned.env.world_size) * GIB
        timeline.generation(use.generation.cache, use.generation.peak, int(card.memory_gib * GIB - beside))
    timeline.micro_batch(use.fullest)
    timeline.micro_batch(use.typical, notes_peaks=False)
    for first in use.first:
        timeline.first_step(first)
    timeline.step(use.fullest)
    peaks = timeline.peaks | {"load": _loading(planned.adapted.model, timeline)}
    phases = {phase: peak.in_gib() for phase, peak in peaks.items()}
    overhead = overhead_gib(max(parts.total for parts in phases.values()), planned.env.world_size)
    if not card.is_gpu:  # the host itself: what is offloaded stays in the same memory
        overhead += (offloaded_bytes(planned, scheme) + on_host) / GIB
    return MemoryPlan(
        phases=phases,
        after_forward_gib=timeline.after_forward.total / GIB,
        overhead_gib=overhead,
        capacity_gib=card.memory_gib,
        host_load_gib=host_load_bytes(planned) / GIB,
        host_training_gib=(host_training_bytes(planned, scheme) + on_host) / GIB,
        checkpoint_gib=checkpoint_bytes(planned) / GIB,
        made_by="closed form",
        moved_gib=sum(of_layer.moved for _, of_layer in use.fullest.layers) / GIB,
        notes=_notes(planned),
    )


def overhead_gib(peak_gib: float, world_size: int) -> float:
    """What a device holds beside the tensors of one rank."""
    return CONTEXT_GIB + (COLLECTIVES_GIB if world_size > 1 else 0.0) + ROUNDED_UP * peak_gib


def scheme_of(planned: PlannedModel) -> Scheme:
    """How a run of ours holds its parameters."""
    precision, layout = planned.resolved.policies.precision, planned.resolved.policies.layout
    train, fsdp = planned.config.train_config, planned.config.fsdp_config
    num_shards = layout.mesh_shape[1] if layout.kind == "fully_shard" else 1
    return Scheme(
        kind=layout.kind,
        optimizer=optimizer_bytes(list(local_parts(planned.adapted.model, num_shards)), train, fsdp),
        num_shards=num_shards,
        num_copies=layout.mesh_shape[0],
        reshards_after_forward=layout.reshard_after_forward,
        compute_dtype=precision.compute_dtype if layout.kind == "fully_shard" and precision.casts else None,
        in_float8=float8_weights(planned.adapted, planned.resolved).gathered,
        reduce_dtype=precision.reduce_dtype,
        num_micro_batches=planned.resolved.batches.gradient_accumulation_steps,
        accumulates_unsharded=planned.accumulation.unsharded,
        keeps_weights=planned.accumulation.keeps_weights,
        params_on_host=layout.cpu_offload,
        grads_on_host=layout.cpu_offload,
    )


def step_use(
    planned: PlannedModel, card: Card, num_rows: int, widths: tuple[int, ...], rows: RowLengths, *, trains: bool = True
) -> StepUse:
    """What the layers of a run keep for one micro-batch of this shape."""
    model, train = planned.adapted.model, planned.config.train_config
    with pass_on_meta(planned, card, num_rows, widths, rows, trains=trains) as (batch, loss):
        return measure_step(
            model,
            outermost(find_layers(planned.adapted.base)),
            loss,
            list(_tensors(batch)),
            trains=trains,
            compiled=trains and bool(train.compile) and planned.empty.checkpointing.strongest == "off",
            offloads=trains and train.activation_offloading,
        )


def outermost(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The layers that are in no other."""
    inside = {id(module) for layer in layers for module in layer.modules() if module is not layer}
    return [layer for layer in layers if id(layer) not in inside]


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    for value in vars(batch).values():
        yield from value.values() if isinstance(value, dict) else [value] if torch.is_tensor(value) else []


def _loading(model: nn.Module, timeline: Timeline) -> Bytes:
    """While weights are read: this rank's part of all, and the largest one whole (policies/weights/materialise.py)."""
    peak = Bytes(params=timeline.now.params)
    peak.temporaries = max((parameter.nbytes for parameter in model.parameters()), default=0)
    return peak


def _notes(planned: PlannedModel) -> tuple[str, ...]:
    notes = []
    if planned.config.train_config.eval_generate and planned.resolved.task.READS_IMAGES:
        notes.append("eval_generate: what generation about images holds is not in the plan")
    if planned.resolved.policies.float8 is not None and not planned.config.train_config.use_peft:
        notes.append("float8: the rounded copies that one product reads are not in the plan")
    return tuple(notes)
