"""Changes of a run's flags with which it would fit, one by one and combined, each with its peak and its speed."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from configs.run import RunConfig
from planning.alternatives.less_memory import (
    Change,
    device_changes,
    host_changes,
    joined,
    keeps_result,
    needed_flags,
    parsed_with,
)
from planning.machines.hardware import Hardware
from planning.machines.planned_environment import planned_hardware
from planning.memory.memory_plan import MemoryPlan
from planning.planned_run import Plan, plan_of
from ranks.environment import Environment
from resolving.data_facts import DataFacts
from utils.errors import ConfigError
from utils.progress import progress_bar

MOST_CARDS_PER_NODE = 8
NUM_SHOWN = 12
NOTHING_FITS = "no change of these flags that a plan can try would fit; take a smaller model, or larger cards"

Predict = Callable[[RunConfig], Plan]
"""Plans a run with these settings, on the hardware that they name."""


@dataclass(frozen=True)
class Tried:
    """A change, and the plan of the run with it."""

    change: Change
    plan: Plan


def predictor(config: RunConfig, data: DataFacts, env: Environment) -> Predict:
    """Plans runs in closed form, on the hardware that their flags name.

    Args:
        config: the run whose data is known. Runs that cut or pack rows otherwise count with their limits.
        env: of this process.
    """
    decide_rows = ("context_length", "max_source_length", "max_target_length", "batching_strategy")

    def predict(changed: RunConfig) -> Plan:
        rows_are_known = all(
            getattr(changed.train_config, name) == getattr(config.train_config, name) for name in decide_rows
        )
        facts = data if rows_are_known else DataFacts(num_embeddings=data.num_embeddings, new_tokens=data.new_tokens)
        return plan_of(changed, planned_hardware(changed.train_config, changed.planning_config, env), facts)

    return predict


def what_fits(argv: Sequence[str], plan: Plan, predict: Predict) -> list[Change]:
    """The nearest changes of these flags that fit, the cheapest in time first.

    Every one was parsed and planned as a run of its own, so none would be refused.

    Args:
        argv: the run's flags.
        plan: of the run, which does not fit.
    """
    config = plan.resolved.config
    candidates = list(_candidates(config, plan))
    tried = [
        found
        for change in progress_bar("planning what would fit", candidates)
        if (found := _try(change, argv, plan, predict)) is not None
    ]
    more_cards = [one.change for one in tried if one.change.fits and one.plan.hardware != plan.hardware]
    fitting = [one.change for one in tried if one.change.fits and one.plan.hardware == plan.hardware]
    # More cards change what a run costs: the fewest that fit are offered, and not combined with other changes.
    fitting += more_cards[:1]
    here = [one for one in tried if not one.change.fits and one.plan.hardware == plan.hardware]
    # First a combination that keeps the run's result; any other if no change so far fits.
    for keeps_only in (True, False):
        if any(change.keeps_result or not keeps_only for change in fitting if change not in more_cards):
            continue  # one change is enough
        some = [one for one in here if one.change.keeps_result or not keeps_only]
        together = _combine(some, argv, plan, predict)
        fitting += [] if together is None else [together]
    fitting.sort(key=lambda change: (change.slower is None, change.slower or 0.0))
    return fitting[:NUM_SHOWN]


def fits_table(changes: Iterable[Change], memory: MemoryPlan) -> Table:
    """The changes for people: each with the flags to paste.

    Args:
        memory: of the run that does not fit.
    """
    names = ["change", "flags", "peak GiB", *(["host GiB"] if memory.host_verdict != "fits" else []), "time", "result"]
    table = Table(box=None, pad_edge=False, title="What would fit, the soonest first", title_justify="left")
    for name in names:
        table.add_column(name, justify="right" if "GiB" in name or name == "time" else "left", overflow="fold")
    for change in changes:
        cells = {
            "change": change.what,
            "flags": shlex.join(change.flags),
            "peak GiB": f"{change.peak_gib:.1f} of {memory.capacity_gib:.1f}",
            "host GiB": f"{change.host_gib or 0.0:.1f} of {memory.host_capacity_gib or 0.0:.1f}",
            "time": "" if change.slower is None else f"x {change.slower:.2f}",
            "result": "" if change.keeps_result else "changes",
        }
        table.add_row(*(cells[name] for name in names))
    return table


def _candidates(config: RunConfig, plan: Plan) -> Iterator[Change]:
    """Each change once: those suggested when memory runs out, for each phase, and a few more."""
    seen: set[tuple[str, ...]] = set()
    for change in (*_by_phase(config, plan), *_more(config), *_more_cards(config, plan.hardware)):
        if change.flags not in seen:
            seen.add(change.flags)
            yield change


def _by_phase(config: RunConfig, plan: Plan) -> Iterator[Change]:
    """The changes for each phase that does not fit."""
    memory = plan.memory
    is_cpu, checkpointing = not plan.hardware.card.is_gpu, plan.model.empty.checkpointing
    for phase, parts in memory.phases.items():
        if parts.total + memory.overhead_gib > memory.capacity_gib:
            yield from device_changes(config, phase, plan.env.world_size, is_cpu=is_cpu, checkpointing=checkpointing)
    if memory.host_verdict == "does_not_fit":
        if is_cpu:
            phase = memory.peak_phase
            yield from device_changes(config, phase, plan.env.world_size, is_cpu=True, checkpointing=checkpointing)
        yield from host_changes(config, is_cpu=is_cpu)


def _more(config: RunConfig) -> Iterator[Change]:
    train, fsdp = config.train_config, config.fsdp_config
    if fsdp.optimizer != "SGD":
        yield Change("SGD: at most one state per weight", ("--optimizer", "SGD"))
    if not fsdp.pure_bf16 and not train.use_peft:
        flags = ("--pure_bf16", "True", "--optimizer", "anyprecision", "--use_kahan_summation", "True")
        yield Change("all in bf16, with what rounding loses kept", flags)


def _more_cards(config: RunConfig, hardware: Hardware) -> Iterator[Change]:
    """All of a node's cards, and then more nodes, sharded over; the global batch stays if it divides."""
    train, world_size = config.train_config, hardware.world_size
    sizes = [n for n in (2, 4, 8) if hardware.cards_per_node < n <= MOST_CARDS_PER_NODE]
    larger = [replace(hardware, cards_per_node=n) for n in sizes]
    if hardware.network_gbps is not None or (hardware.measured is not None and hardware.measured.between.size > 1):
        full = replace(hardware, cards_per_node=max(hardware.cards_per_node, MOST_CARDS_PER_NODE))
        larger += [replace(full, nodes=hardware.nodes * n) for n in (2, 4)]
    for more in larger:
        factor = more.world_size // world_size
        rows, accumulation = train.batch_size_training, train.gradient_accumulation_steps
        if accumulation % factor == 0:
            accumulation //= factor
        elif rows % factor == 0:
            rows //= factor
        cards = f"{more.cards_per_node}x{more.card.name}"
        sharded: tuple[str, ...] = ("--dry_run_hardware", cards, "--enable_fsdp", "True")
        nodes = ("--nodes", str(more.nodes)) if more.nodes > 1 else ()
        flags = (*sharded, *nodes)
        flags += ("--batch_size_training", str(rows))
        flags += ("--gradient_accumulation_steps", str(accumulation)) if train.global_batch_size is None else ()
        yield Change(f"{more.world_size} cards", flags)
        if train.batch_size_training == 1 and more.nodes == hardware.nodes:  # a row may be too long for one card
            size = config.fsdp_config.context_parallel_size * factor
            shared = (*sharded, "--context_parallel_size", str(size))
            yield Change(f"{more.world_size} cards, each row shared by {size}", shared)


def _try(change: Change, argv: Sequence[str], plan: Plan, predict: Predict) -> Tried | None:
    """The change with its figures; None if it is refused, changes nothing, or saves nothing that lacks."""
    before = plan.resolved.config
    config = parsed_with(argv, change)
    if config is None:
        return None
    try:
        after = predict(config)
    except ConfigError:
        return None
    if after.memory.lacking_gib >= plan.memory.lacking_gib:
        return None
    rows = [p.resolved.batches.global_batch_size for p in (plan, after)]
    keeps = keeps_result(before, config) and rows[0] == rows[1]
    return Tried(
        replace(
            change,
            keeps_result=keeps,
            flags=needed_flags(argv, change.flags),
            saves_gib=plan.memory.peak_gib - after.memory.peak_gib,
            peak_gib=after.memory.peak_gib,
            host_gib=after.memory.host_gib,
            fits=after.memory.verdict != "does_not_fit",
            slower=_slower(plan, after),
        ),
        after,
    )


def _slower(before: Plan, after: Plan) -> float | None:
    """Time per token, as a multiple of that before."""
    if before.time is None or after.time is None:
        return None
    rates = [p.time.tokens_per_second_per_device * p.env.world_size for p in (before, after) if p.time is not None]
    return rates[0] / rates[1]


def _combine(tried: Sequence[Tried], argv: Sequence[str], plan: Plan, predict: Predict) -> Change | None:
    """The changes that fit together, added from the cheapest on and dropped again if not needed; None if none do."""
    members: list[Change] = []
    best = plan.memory.lacking_gib
    ordered = sorted(tried, key=lambda one: one.change.slower or 1.0)
    found: Tried | None = None
    for one in progress_bar("planning combinations", ordered):
        together = _try(_all_of([*members, one.change]), argv, plan, predict)
        if together is None or together.plan.memory.lacking_gib >= best:
            continue
        members, best, found = [*members, one.change], together.plan.memory.lacking_gib, together
        if together.change.fits:
            break
    if found is None or not found.change.fits:
        return None
    # An early change may be superfluous once a later one was added.
    for member in list(members):
        fewer = [other for other in members if other is not member]
        without = _try(_all_of(fewer), argv, plan, predict) if fewer else None
        if without is not None and without.change.fits:
            members, found = fewer, without
    return found.change


def _all_of(changes: Sequence[Change]) -> Change:
    together = Change("")
    for change in changes:
        together = joined(together, change)
    return together
