"""The memory plan of a run: bytes per rank, phase by phase, from shapes alone.

The bytes that one layer keeps and needs are counted on meta tensors (run_passes.py, layer_memory.py); a walk through
the step adds up the bytes of all layers, the layout and the optimizer (step_memory.py). So a plan costs one pass over a
layer of each kind, also with packed weights, and for cards of other kinds than this machine's.
"""

from __future__ import annotations

from planning.machines.cards import COLLECTIVES_GIB, CONTEXT_GIB, Card
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
from planning.memory.memory_plan import ROUNDED_UP, MemoryPlan
from planning.memory.optimizer_bytes import optimizer_bytes
from planning.memory.row_lengths import RowLengths
from planning.memory.run_passes import RunBytes, RunPasses, copies_on_host
from planning.memory.sharded_bytes import largest_read, local_parts
from planning.memory.step_memory import Bytes, StepMemory
from planning.model.float8_weights import float8_weights
from planning.model.planned_model import PlannedModel, gathered_in, replicated_in
from policies.weights.sources import most_drawn_bytes
from utils.units import GIB


def plan_memory(planned: PlannedModel, card: Card, rows: RowLengths) -> MemoryPlan:
    """The plan of a run on ranks with such a card.

    Args:
        planned: its model; it gets the buffers of packed weights here, if it has not yet.

    Raises:
        ConfigError: if the inputs of such a model are not known before data is read.
    """
    return memory_of(planned, card, RunPasses(planned, card, rows).of(planned))


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
