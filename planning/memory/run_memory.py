"""The memory plan of a run: bytes per rank, phase by phase, from shapes alone.

The bytes that one layer keeps and needs are counted on meta tensors (layer_memory.py); a walk through the step adds up
the bytes of all layers, the layout and the optimizer (step_memory.py). So a plan costs one pass over a layer of each
kind, also with packed weights, and for cards of other kinds than this machine's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from planning.machines.cards import COLLECTIVES_GIB, CONTEXT_GIB, Card
from planning.memory.generation_memory import GenerationBytes, bytes_of_generation
from planning.memory.held_bytes import Scheme
from planning.memory.host_memory import (
    CPU_PROCESS_BYTES,
    checkpoint_bytes,
    copy_bytes,
    heap_bytes,
    host_load_bytes,
    host_training_bytes,
    offloaded_bytes,
    worker_bytes,
)
from planning.memory.layer_bytes import PassBytes
from planning.memory.layer_memory import measure_pass
from planning.memory.memory_plan import ROUNDED_UP, MemoryPlan
from planning.memory.meta_pass import pass_on_meta
from planning.memory.optimizer_bytes import optimizer_bytes
from planning.memory.row_lengths import RowLengths
from planning.memory.sharded_bytes import add_statistics, largest_read, local_parts
from planning.memory.step_memory import Bytes, StepMemory
from planning.model.float8_weights import float8_weights
from planning.model.planned_model import PlannedModel, gathered_in, replicated_in, with_checkpointing
from policies.activations.host_pool import chunk_bytes
from policies.weights.sources import most_drawn_bytes
from policies.wrapping import find_layers, outermost
from tasks.micro_batch import MicroBatch
from utils.model_parts import vision_layers
from utils.units import GIB


def plan_memory(planned: PlannedModel, card: Card, rows: RowLengths) -> MemoryPlan:
    """The plan of a run on ranks with such a card.

    Args:
        planned: its model; it gets the buffers of packed weights here, if it has not yet.

    Raises:
        ConfigError: if the inputs of such a model are not known before data is read.
    """
    checkpointing = planned.empty.checkpointing
    alike = {
        mode: bytes_of_run(with_checkpointing(planned, checkpointing.alike(mode)), card, rows)
        for mode in checkpointing.modes
    }
    planned = with_checkpointing(planned, checkpointing)
    return memory_of(planned, card, mixed_bytes(planned, alike))


@dataclass(frozen=True)
class RunBytes:
    """The bytes that layers keep and need in each kind of micro-batch of a run."""

    widest: PassBytes
    typical: PassBytes
    evaluation: PassBytes | None  # None if the run has none
    generation: GenerationBytes | None  # the same


def bytes_of_run(planned: PlannedModel, card: Card, rows: RowLengths) -> RunBytes:
    """The bytes of a run whose layers are all checkpointed alike.

    Raises:
        ConfigError: if the inputs of such a model are not known before data is read.
    """
    add_statistics(planned.adapted.model)
    evaluates = planned.config.train_config.run_validation is not False
    evaluation = (
        bytes_of_pass(planned, card, rows.eval_rows, rows.widest_evaluated, rows, trains=False) if evaluates else None
    )
    widest = bytes_of_pass(planned, card, rows.rows, rows.widest, rows)
    typical = widest if rows.typical == rows.widest else bytes_of_pass(planned, card, rows.rows, rows.typical, rows)
    generates = evaluates and planned.config.train_config.eval_generate
    return RunBytes(widest, typical, evaluation, bytes_of_generation(planned, card, rows) if generates else None)


def mixed_bytes(planned: PlannedModel, alike: Mapping[str, RunBytes]) -> RunBytes:
    """The bytes of this run, whose layers have different modes, and of which the first may be offloaded.

    Args:
        alike: by mode, the bytes of the same model with all layers in that mode.
    """
    checkpointing = planned.empty.checkpointing
    moving = {id(layer) for layer in layers_of(planned)[: planned.empty.num_offloaded]}
    mode_of = {id(layer): mode for layer, mode in checkpointing.of_layers(planned.adapted.base)}

    def mixed(passes: Mapping[str, PassBytes]) -> PassBytes:
        alone = passes[checkpointing.mode]
        layers = [passes[mode_of[id(layer)]].layers[place] for place, (layer, _) in enumerate(alone.layers)]
        return replace(alone, layers=tuple((a, b.offloaded() if id(a) in moving else b) for a, b in layers))

    return replace(
        alike[checkpointing.mode],
        widest=mixed({mode: run.widest for mode, run in alike.items()}),
        typical=mixed({mode: run.typical for mode, run in alike.items()}),
    )


def memory_of(planned: PlannedModel, card: Card, run: RunBytes) -> MemoryPlan:
    """The memory plan of a run, from the bytes that its layers keep and need."""
    model, scheme = planned.adapted.model, scheme_of(planned)
    on_host = copies_on_host(run.widest)
    memory = StepMemory(model, gathered_in(planned), scheme)
    peaks = {"load": _loading(planned, memory.params), **memory.step(run.widest)}
    if run.evaluation is not None:
        peaks["evaluation"] = memory.evaluation(run.evaluation)
    if run.generation is not None:
        besides = overhead_gib(0.0, planned.env.world_size) * GIB
        peaks["generation"] = memory.generation(run.generation, int(card.memory_gib * GIB - besides))
    peak = max(peak.total for peak in peaks.values())
    if card.is_gpu:
        overhead = int(overhead_gib(peak / GIB, planned.env.world_size) * GIB)
        # Memory for activations is pinned while weights are read.
        loads, trains = host_load_bytes(planned) + on_host, host_training_bytes(planned, scheme) + on_host
    else:  # the device is the host: offloaded tensors stay in the same memory
        overhead = CPU_PROCESS_BYTES + heap_bytes(peaks) + offloaded_bytes(planned, scheme) + on_host
        overhead += copy_bytes(planned, scheme)
        loads, trains = CPU_PROCESS_BYTES + peaks["load"].total, peak + overhead + worker_bytes(planned)
    return MemoryPlan(
        phases={phase: peak.in_gib() for phase, peak in peaks.items()},
        after_forward_gib=memory.after_forward(run.typical).total / GIB,
        overhead_gib=overhead / GIB,
        capacity_gib=card.memory_gib,
        host_load_gib=loads / GIB,
        host_training_gib=trains / GIB,
        host_capacity_gib=host_share_gib(planned, card),
        checkpoint_gib=checkpoint_bytes(planned) / GIB,
        pinned_gib=copies_on_host(run.typical) / GIB,
        moved_gib=sum(layer.moved for _, layer in run.widest.layers) / GIB,
        notes=_notes(planned),
    )


def host_share_gib(planned: PlannedModel, card: Card) -> float | None:
    """Host memory that each rank may take: the ranks of a machine share it; None if it is not known."""
    return None if card.host_memory_gib is None else card.host_memory_gib / planned.env.local_world_size


def overhead_gib(peak_gib: float, world_size: int) -> float:
    """Memory that a GPU holds besides the tensors of one rank."""
    return CONTEXT_GIB + (COLLECTIVES_GIB if world_size > 1 else 0.0) + ROUNDED_UP * peak_gib


def scheme_of(planned: PlannedModel) -> Scheme:
    """How this run holds its parameters."""
    precision, layout = planned.resolved.policies.precision, planned.resolved.policies.layout
    train, fsdp = planned.config.train_config, planned.config.fsdp_config
    num_shards, model = layout.mesh_shape[1] if layout.kind == "fully_shard" else 1, planned.adapted.model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Scheme(
        kind=layout.kind,
        optimizer=optimizer_bytes(list(local_parts(model, num_shards)), trained, train, fsdp),
        num_shards=num_shards,
        num_copies=layout.mesh_shape[0],
        reshards_after_forward=layout.reshard_after_forward,
        compute_dtype=precision.compute_dtype if layout.kind == "fully_shard" and precision.casts else None,
        in_float8=float8_weights(planned.adapted, planned.resolved).gathered,
        replicated=frozenset(map(id, replicated_in(planned))),
        reduce_dtype=precision.reduce_dtype,
        is_direct=layout.is_direct,
        num_micro_batches=planned.resolved.batches.gradient_accumulation_steps,
        accumulates_unsharded=planned.accumulation.unsharded,
        keeps_weights=planned.accumulation.keeps_weights,
        params_on_host=layout.cpu_offload,
        grads_on_host=layout.cpu_offload,
    )


def bytes_of_pass(
    planned: PlannedModel, card: Card, num_rows: int, widths: tuple[int, ...], rows: RowLengths, *, trains: bool = True
) -> PassBytes:
    """The bytes that the layers of a run keep for one micro-batch of this shape."""
    found = _measured_pass(planned, card, num_rows, widths, rows, trains=trains)
    checkpointing = planned.empty.checkpointing
    if not trains or not planned.config.train_config.compile or checkpointing.tile_tokens:
        return found
    if checkpointing.strongest == "off":
        return found
    # Backward computes such layers again in its own graph, of which it keeps what compiled layers keep.
    compiled = _measured_pass(with_checkpointing(planned, checkpointing.alike("off")), card, num_rows, widths, rows)
    with_checkpointing(planned, checkpointing)
    return found.recomputed_as(compiled) if checkpointing.strongest == "full" else found.selective_as(compiled)


def _measured_pass(
    planned: PlannedModel, card: Card, num_rows: int, widths: tuple[int, ...], rows: RowLengths, *, trains: bool = True
) -> PassBytes:
    model, train = planned.adapted.model, planned.config.train_config
    compiles = trains and bool(train.compile) and planned.empty.checkpointing.strongest == "off"
    layers = outermost(find_layers(planned.adapted.base))
    seeing = vision_layers(planned.adapted.base, layers) if planned.resolved.policies.vision_as_written else []
    as_written = set(map(id, seeing))
    with pass_on_meta(planned, card, num_rows, widths, rows, trains=trains) as (batch, loss):
        return measure_pass(
            model,
            layers,
            loss,
            list(_tensors(batch)),
            trains=trains,
            compiled=lambda layer: compiles and id(layer) not in as_written,
            moves=_moves(planned) if trains else "nothing",
            around_tiles=trains and bool(train.compile) and planned.empty.checkpointing.tile_tokens > 0,
        )


def _moves(planned: PlannedModel) -> Literal["all", "input", "nothing"]:
    """What offloading would move of a layer, all of which are checkpointed alike."""
    if not planned.config.train_config.activation_offloading:
        return "nothing"
    return "all" if planned.empty.checkpointing.strongest == "off" else "input"


def layers_of(planned: PlannedModel) -> list[nn.Module]:
    """The layers that are in no other, in the order in which the model lists them."""
    return outermost(find_layers(planned.adapted.base))[::-1]


def copies_on_host(use: PassBytes) -> int:
    """Host memory for the activations of a micro-batch that move there."""
    return chunk_bytes(sum(layer.on_host for _, layer in use.layers))


def _tensors(batch: MicroBatch) -> Iterator[torch.Tensor]:
    for value in vars(batch).values():
        yield from value.values() if isinstance(value, dict) else [value] if torch.is_tensor(value) else []


def _loading(planned: PlannedModel, params: int) -> Bytes:
    """While weights are read: this rank's part of all, and the largest one whole; a whole layer if they are drawn
    (policies/weights/sources.py)."""
    is_drawn = planned.config.train_config.random_weights
    whole = most_drawn_bytes(planned.adapted.base) if is_drawn else largest_read(planned.adapted.model)
    return Bytes(params=params, temporaries=whole)


def _notes(planned: PlannedModel) -> tuple[str, ...]:
    notes = []
    if planned.config.train_config.eval_generate and planned.resolved.task.READS_IMAGES:
        notes.append("eval_generate: what generation about images holds is not in the plan")
    if planned.resolved.policies.float8 is not None and not planned.config.train_config.use_peft:
        notes.append("float8: the rounded copies that one product reads are not in the plan")
    return tuple(notes)
