"""The plan of a run: its memory, its time and its price, from its settings and the hardware alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from configs.run import RunConfig
from planning.chosen_checkpointing import (
    Seconds,
    choose_checkpointing,
    is_to_be_chosen,
    is_to_be_spared,
    spare_layers,
)
from planning.chosen_offloading import choose_offloading, with_offloading
from planning.chosen_replication import Chosen, choose_replication
from planning.chosen_tiles import choose_tiles, may_tile
from planning.cost.counted_work import counted_work
from planning.cost.row_counts import assumed_counts, attended_share, mean_counts, shared_counts, slowest_counts
from planning.cost.step_work import micro_batch_work
from planning.cost.time_plan import TimePlan, plan_time, why_no_time
from planning.machines.cards import Card
from planning.machines.group_speeds import Speeds
from planning.machines.hardware import Hardware
from planning.machines.planned_environment import planned_environment
from planning.memory.memory_plan import MemoryPlan
from planning.memory.row_lengths import RowLengths, rows_of_run
from planning.memory.run_memory import plan_memory
from planning.model.planned_model import PlannedModel, build_planned_model, with_checkpointing
from policies.activations.checkpointing import Checkpointing
from policies.compilation.choice import uncompiled, why_too_short
from ranks.environment import Environment
from resolving.data_facts import DataFacts
from resolving.resolved import Resolved, resolve, with_choice
from utils.units import GIB


@dataclass(frozen=True)
class Plan:
    """The prediction of a run: its memory, time and price, and what they were made from."""

    hardware: Hardware
    env: Environment  # rank 0 of that hardware
    resolved: Resolved
    model: PlannedModel
    rows: RowLengths
    memory: MemoryPlan
    time: TimePlan | None  # None if the hardware's rates or the model's FLOPs are not known; a note says so
    notes: tuple[str, ...]  # lines to print: adapted defaults, and what the plan assumes
    choices: tuple[str, ...] = ()  # lines to print: choices made by this plan; notes has them, too
    too_short: str | None = None  # why it is not compiled, as a clause, if it would be by its settings
    chose_checkpointing: bool = False  # this plan chose which layers are recomputed; neither a flag nor an earlier plan

    def to_dict(self) -> dict[str, Any]:
        """The plan in plain types, as --dry_run_json and plan.json hold it."""
        return {
            "hardware": self.hardware.name,
            "world_size": self.env.world_size,
            **self.resolved.to_dict(),
            "activation_checkpointing": str(self.model.empty.checkpointing),
            "num_offloaded_layers": self.model.empty.num_offloaded,
            "num_replicated_layers": self.resolved.policies.layout.num_replicated,
            "micro_batch": {"rows": self.rows.rows, "widths": self.rows.widest, "source": self.rows.source},
            **self.memory.to_dict(),
            "seconds_per_step": None,
            "price": None,
            **(self.time.to_dict() if self.time is not None else {}),
            "notes": list(self.notes),
        }


def plan_of(
    config: RunConfig,
    hardware: Hardware,
    data: DataFacts | None = None,
    *,
    checkpointing: Checkpointing | None = None,
    num_replicated: int | None = None,
    resumed_size: int | None = None,
    may_be_too_short: bool = False,
) -> Plan:
    """The plan of a run with these settings on this hardware, one rank for each card.

    It reads the model's config.json, and neither weights nor data.

    Args:
        data: what is known of the data; unset: rows are as long as --context_length lets them be.
        checkpointing, num_replicated: what an earlier plan chose; None: it is chosen here.
        resumed_size: as in `resolve`.
        may_be_too_short: to be compiled, as --compile auto chose.

    Raises:
        ConfigError: if such a run would be refused.
    """
    data = data or DataFacts()
    env = planned_environment(hardware, config.train_config)
    resolved = with_choice(resolve(config, env, resumed_size=resumed_size), checkpointing, None, num_replicated)
    rows = data_rows(resolved, data)
    model = build_planned_model(resolved, env, num_embeddings=data.num_embeddings, new_tokens=data.new_tokens)
    if config.train_config.activation_offloading == "auto":
        model = with_offloading(model, 0)  # until it is chosen
    if resolved.chose_to_compile or may_be_too_short:
        # Before layers are chosen to be recomputed, which takes long: as fast as the run could be.
        fastest = time_of(model, hardware, rows, data)
        why = None if fastest is None else why_too_short(fastest.seconds_per_run)
        if why is not None:
            config = uncompiled(config, why)
            plan = plan_of(
                config,
                hardware,
                data,
                checkpointing=checkpointing,
                num_replicated=num_replicated,
                resumed_size=resumed_size,
            )
            return replace(plan, too_short=why)

    def seconds(planned: PlannedModel, memory: MemoryPlan) -> float | None:
        time = time_of(planned, hardware, rows, data, moved_bytes=memory.moved_gib * GIB)
        return None if time is None else time.seconds_per_step

    def choose(planned: PlannedModel) -> Chosen:
        return _with_choices(planned, hardware.card, rows, seconds)

    chooses = is_to_be_chosen(model) or (hardware.card.is_gpu and is_to_be_spared(model))
    model, memory, choices = choose_replication(model, hardware.card, rows, choose, seconds)
    time = time_of(model, hardware, rows, data, moved_bytes=memory.moved_gib * GIB)
    time_notes = (why_no_time(model, hardware),) if time is None else time.notes
    notes = (*resolved.config.notes, *resolved.notes, *model.empty.notes, *model.adapted.notes, *data.notes, *choices)
    notes += (*memory.notes, *filter(None, time_notes))
    return Plan(hardware, env, model.resolved, model, rows, memory, time, notes, choices, chose_checkpointing=chooses)


def data_rows(resolved: Resolved, data: DataFacts) -> RowLengths:
    """How long the rows of such a run are, by what is known of its data."""
    rows = rows_of_run(resolved, data.lengths, eval_lengths=data.eval_lengths, is_start=data.is_start)
    if data.label_share is None:
        return rows
    return replace(rows, label_share=data.label_share, images=data.images, teacher_size=data.teacher_size)


def _with_choices(model: PlannedModel, card: Card, rows: RowLengths, seconds: Seconds) -> Chosen:
    """The model with its checkpointing, tiles and offloading chosen, the plan of its memory, and lines to print."""
    model, memory, lines = _with_recomputing(model, card, rows, seconds)
    if model.config.train_config.activation_offloading != "auto":
        return model, memory, lines
    model, memory, line = choose_offloading(model, card, rows)
    return model, memory, (*lines, line)


def _with_recomputing(model: PlannedModel, card: Card, rows: RowLengths, seconds: Seconds) -> Chosen:
    asked = model.empty.checkpointing
    if is_to_be_chosen(model):
        model, memory, line = choose_checkpointing(model, card, rows, seconds)
        lines: tuple[str, ...] = (line,)
    elif card.is_gpu and is_to_be_spared(model):
        model, memory, lines = spare_layers(model, card, rows)
    else:
        model, memory, lines = model, plan_memory(model, card, rows), ()
    if not may_tile(model, card, memory):
        return model, memory, lines
    chosen = model.empty.checkpointing
    whole = chosen if is_to_be_chosen(model) else asked  # no layer is spared where room is short
    model, tiled, of_tiles = choose_tiles(with_checkpointing(model, whole), memory, card, rows)
    if not of_tiles:
        return with_checkpointing(model, chosen), memory, lines
    if is_to_be_chosen(model) and tiled.device_verdict == "fits":  # there may be room for layers that recompute less
        model, tiled, line = choose_checkpointing(model, card, rows, seconds)
        return model, tiled, (*of_tiles, line)
    return model, tiled, (*(lines if whole == chosen else ()), *of_tiles)


def time_of(
    model: PlannedModel,
    hardware: Hardware,
    rows: RowLengths,
    data: DataFacts,
    speeds: Speeds | None = None,
    *,
    moved_bytes: float = 0.0,
) -> TimePlan | None:
    """The time of the run, with its real rows if they are known; None if it cannot be planned (`why_no_time`).

    Args:
        speeds: of collectives, as measured by tools.doctor; None: from the hardware's figures.
        moved_bytes: activations of a micro-batch that wait in host memory.
    """
    if why_no_time(model, hardware, speeds) is not None:
        return None
    train, evaluation = model.config.train_config, data.eval_counts
    evaluates = evaluation is not None and train.run_validation is not False
    eval_work = reference_work = None
    if model.resolved.task.READS_IMAGES:
        # No formula per token holds for models of images (planning/cost/counted_work.py).
        share = attended_share(data.counts, rows)
        counts, work = counted_work(model, hardware.card, rows.rows, rows.typical, rows, attended_share=share)
        if data.counts is not None and data.images is not None:
            # Without padding. Rows of captions apart from their images have none of the images' tokens.
            counts = mean_counts(data.counts, rows.rows)
        if evaluates:
            _, eval_work = counted_work(
                *(model, hardware.card, rows.eval_rows, rows.typical, rows),
                trains=False,
                attended_share=attended_share(data.eval_counts, rows),
            )
    else:
        num_sharing = model.resolved.policies.context.size
        counts = assumed_counts(rows) if data.counts is None else mean_counts(data.counts, rows.rows)
        counts = shared_counts(counts, num_sharing)
        # In each micro-batch all ranks wait for the one with the most tokens.
        slowest = counts
        if data.counts is not None:
            slowest = slowest_counts(data.counts, rows.rows, model.resolved.batches.data_parallel_size)
            slowest = shared_counts(slowest, num_sharing)
        work = micro_batch_work(model, slowest)
        if model.resolved.task.needs_reference:
            reference_work = micro_batch_work(model, slowest, trains=False)
        if evaluation is not None and evaluates:
            eval_counts = shared_counts(mean_counts(evaluation, rows.eval_rows), num_sharing)
            eval_work = micro_batch_work(model, eval_counts, trains=False)
    return plan_time(
        model,
        hardware,
        counts,
        work=work,
        moved_bytes=moved_bytes,
        num_rows=None if data.counts is None else len(data.counts),
        eval_work=eval_work,
        reference_work=reference_work,
        num_eval_rows=0 if evaluation is None else len(evaluation),
        speeds=speeds,
    )
