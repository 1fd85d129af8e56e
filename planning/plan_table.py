"""A plan for people: what would run, what would hold the memory, and whether it fits."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta

from rich.table import Table

from planning.cost.time_plan import TimePlan
from planning.memory.memory_plan import PARTS, PHASES, MemoryPlan
from planning.planned_run import Plan
from reporting.tables import table_of
from utils.parameters import count_weights
from utils.wording import plural


def plan_table(plan: Plan) -> Table:
    """The run that is planned, in a few lines that each begin with their subject."""
    memory, resolved, model = plan.memory, plan.resolved, plan.model
    counted = list(count_weights(model.adapted.model))
    total = sum(weights.num_weights for weights in counted)
    trained = sum(weights.num_weights for weights in counted if weights.parameter.requires_grad)
    of_total = "all trained" if trained == total else f"{trained:,} trained ({100 * trained / total:.3g} %)"
    train, policies = plan.resolved.config.train_config, resolved.policies
    copies, ranks = policies.layout.mesh_shape
    sharing = f"{policies.context.size} ranks that share rows" if policies.context.shares_rows else "rank"
    widths = " and ".join(f"{width:,}" for width in plan.rows.widest)
    return table_of(
        {
            "model": f"{train.model_name} ({model.empty.architecture}), {total:,} parameters, {of_total}",
            "hardware": f"{plan.hardware.name}, {memory.capacity_gib:.2f} GiB each, "
            f"{plural(plan.env.world_size, 'rank')}",
            "layout": f"{policies.layout.strategy}: {copies} x {ranks} (copies of the model x ranks that share one)",
            "compute": f"{policies.precision.name}, activation checkpointing {model.empty.checkpointing}, attention "
            f"{model.empty.attention}, {resolved.config.fsdp_config.optimizer}",
            "micro-batch": f"{plural(plan.rows.rows, 'row')} of {widths} tokens ({plan.rows.source}), "
            f"{resolved.batches.gradient_accumulation_steps} per step and {sharing}",
            "host memory": f"{memory.host_load_gib:.1f} GiB per rank to load, {memory.host_training_gib:.1f} GiB in "
            f"training{_of_host(memory)}",
            "disk": f"{memory.checkpoint_gib:.1f} GiB for each checkpoint",
            **({} if plan.time is None else _time(plan.time)),
        }
    )


def _time(time: TimePlan) -> dict[str, str]:
    step = f"{time.seconds_per_step:.3g} s, most of it for {time.waits_for}"
    rows = {"time per step": f"{step}; {time.tokens_per_second_per_device:,.0f} tokens/s per device"}
    if time.seconds_per_run is not None and time.seconds_per_epoch is not None:
        epoch, run = (str(timedelta(seconds=round(value))) for value in (time.seconds_per_epoch, time.seconds_per_run))
        rows["time of the run"] = (
            f"{run} for {plural(time.num_steps or 0, 'step')}; {epoch} per epoch, its evaluation included"
        )
    if time.reference_seconds:
        once = str(timedelta(seconds=round(time.reference_seconds)))
        rows["reference"] = f"{once} before the first step, for log-probabilities of all pairs, once for these data"
    if time.price_per_million_tokens is not None:
        of_run = "" if time.price is None else f"{time.price:,.2f} for the run; "
        rows["price"] = f"{of_run}{time.price_per_million_tokens:,.3f} for a million tokens"
    return rows


def parts_table(memory: MemoryPlan) -> Table:
    """The parts of the fullest rank's memory at the fullest moment of each phase."""
    table = Table(box=None, pad_edge=False, title="GiB on the fullest rank", title_justify="left", title_style="bold")
    table.add_column("phase")
    for part in (*PARTS, "total"):
        table.add_column(part, justify="right")
    for phase in (phase for phase in PHASES if phase in memory.phases):
        parts = memory.phases[phase]
        figures = [*asdict(parts).values(), parts.total]
        style = "bold" if phase == memory.peak_phase else None
        table.add_row(phase.replace("_", " "), *(f"{figure:.2f}" for figure in figures), style=style)
    return table


def _of_host(memory: MemoryPlan) -> str:
    return "" if memory.host_capacity_gib is None else f", of {memory.host_capacity_gib:.1f} GiB"


def verdict_line(plan: Plan) -> str:
    """The verdict in one line, for eyes and for grep: on the device, and on host memory if there is little of it."""
    memory = plan.memory
    device, host = _device_text(memory), _host_text(memory)
    texts = (
        [host, f"on each device {device}"] if memory.host_verdict != memory.device_verdict and host else [device, host]
    )
    return f"{memory.verdict.replace('_', ' ')}: {'; '.join(filter(None, texts))}"


def _device_text(memory: MemoryPlan) -> str:
    there = f"{memory.capacity_gib:.2f} GiB"
    needed = f"peak {memory.peak_gib:.2f} GiB in {memory.peak_phase.replace('_', ' ')}"
    besides = f"{memory.overhead_gib:.2f} GiB besides torch's tensors"
    if memory.device_verdict == "does_not_fit":
        return f"{needed} and {besides} are {-memory.margin_gib:.2f} GiB more than the {there} there are"
    return f"{needed}, {besides}, {memory.margin_gib:.2f} GiB of {there} free"


def _host_text(memory: MemoryPlan) -> str:
    """Empty if host memory fits, or is not known."""
    capacity, margin = memory.host_capacity_gib, memory.host_margin_gib
    if capacity is None or margin is None or memory.host_verdict == "fits":
        return ""
    needed = f"{memory.host_gib:.2f} GiB of host memory per rank"
    if memory.host_verdict == "tight":
        return f"{needed}, {margin:.2f} GiB of {capacity:.2f} GiB free"
    return f"{needed} are {-margin:.2f} GiB more than the {capacity:.2f} GiB there are"
