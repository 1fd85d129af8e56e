"""A larger micro-batch, proposed if a GPU waits for the host, which starts each kernel of a step, large or small."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from configs.training import TrainConfig
from data.batches.layout import BatchLayout
from planning.memory.run_memory import plan_memory
from planning.planned_run import Plan, data_rows, time_of
from resolving.batches_and_steps import steps_of_run, with_batches
from resolving.data_facts import DataFacts
from utils.units import GIB

LEAST_WAIT = 0.1  # of a step
LEAST_GAIN = 1.2  # in tokens per second
LEAST_STEPS = 100  # of a run, if each step takes more rows
MOST_TIMES = 64


def larger_micro_batch(plan: Plan, data: DataFacts, *, begins: bool = True) -> str | None:
    """A line to print that names a larger micro-batch which fits and is faster by its plan; None if there is none.

    First those that keep the rows of a step, with less accumulation. If they gain little, others.

    Args:
        begins: the run goes on from no checkpoint, so a step may take more rows.
    """
    if plan.time is None or not plan.hardware.card.is_gpu:
        return None
    if plan.resolved.config.train_config.limit_train_batches:
        return None  # it counts micro-batches: larger ones would make another run of it
    waits = plan.time.step.host_launches / plan.time.seconds_per_step
    if waits < LEAST_WAIT:
        return None
    for sizes in (_of_the_same_step(plan), _of_larger_steps(plan, data) if begins else ()):
        found = _largest_needed(plan, data, sizes)
        if found is not None:
            return _line(plan.resolved.config.train_config, plan.resolved.batches, *found, waits)
    return None


def _of_the_same_step(plan: Plan) -> Iterator[BatchLayout]:
    batches = plan.resolved.batches
    accumulation = batches.gradient_accumulation_steps
    for times in range(2, min(accumulation, MOST_TIMES) + 1):
        if accumulation % times == 0:
            yield _cut(batches, times, accumulation // times)


def _of_larger_steps(plan: Plan, data: DataFacts) -> Iterator[BatchLayout]:
    """None if the flags name the rows of a step, and none with which a run has few steps."""
    train, batches = plan.resolved.config.train_config, plan.resolved.batches
    if train.global_batch_size is not None:
        return
    times = 2
    while times <= MOST_TIMES:
        larger = _cut(batches, times, batches.gradient_accumulation_steps)
        num_steps = train.max_train_step  # of a stream, say, whose rows nobody has counted; 0 if it is not known either
        if data.counts is not None:
            num_steps = steps_of_run(train, larger.num_steps(len(data.counts)))
        if num_steps and num_steps < max(LEAST_STEPS, train.min_steps or 0):
            return
        yield larger
        times *= 2


def _cut(batches: BatchLayout, times: int, accumulation: int) -> BatchLayout:
    rows = batches.rows_per_micro_batch * times
    return replace(batches, rows_per_micro_batch=rows, gradient_accumulation_steps=accumulation)


def _largest_needed(plan: Plan, data: DataFacts, sizes: Iterable[BatchLayout]) -> tuple[BatchLayout, float] | None:
    """The smallest one with which the GPU hardly waits, or the largest that fits, and its speed as a multiple of the
    run's; None if none gains enough.

    Args:
        sizes: from small to large.
    """
    gains: list[tuple[BatchLayout, float]] = []
    for size in sizes:  # their times take milliseconds to plan, memory up to a second
        gain, waits = _gain_and_waits(plan, data, size)
        gains.append((size, gain))
        if waits < LEAST_WAIT:
            break
    wanted = [(size, gain) for size, gain in reversed(gains) if gain >= LEAST_GAIN]
    return next(((size, gain) for size, gain in wanted if _fits(plan, data, size)), None)


def _gain_and_waits(plan: Plan, data: DataFacts, batches: BatchLayout) -> tuple[float, float]:
    """Tokens per second with such batches, as a multiple of the run's, and the share of a step that the GPU waits."""
    assert plan.time is not None
    other = _with_batches(plan, data, batches)
    times = batches.rows_per_micro_batch / plan.resolved.batches.rows_per_micro_batch
    time = time_of(other.model, plan.hardware, other.rows, data, moved_bytes=plan.memory.moved_gib * GIB * times)
    assert time is not None
    gain = time.tokens_per_second_per_device / plan.time.tokens_per_second_per_device
    return gain, time.step.host_launches / time.seconds_per_step


def _fits(plan: Plan, data: DataFacts, batches: BatchLayout) -> bool:
    """Whether it fits with the same checkpointing, with room to spare."""
    other = _with_batches(plan, data, batches)
    return plan_memory(other.model, plan.hardware.card, other.rows).verdict == "fits"


def _with_batches(plan: Plan, data: DataFacts, batches: BatchLayout) -> Plan:
    """The plan with the model and the rows of such batches; memory and time are those of before."""
    config = with_batches(plan.resolved.config, batches)
    resolved = replace(plan.resolved, config=config, batches=batches)
    model = replace(plan.model, config=with_batches(plan.model.config, batches), resolved=resolved)
    return replace(plan, resolved=resolved, model=model, rows=data_rows(resolved, data))


def _line(train: TrainConfig, before: BatchLayout, after: BatchLayout, gain: float, waits: float) -> str:
    flags, accumulation = f"--batch_size_training {after.rows_per_micro_batch}", after.gradient_accumulation_steps
    if accumulation != before.gradient_accumulation_steps and train.global_batch_size is None:  # which sets it
        flags += f" --gradient_accumulation_steps {accumulation}"
    rows, steps = after.global_batch_size, "with the same rows in each step"
    if rows != before.global_batch_size:
        steps = f"with {rows:,} rows in each step instead of {before.global_batch_size:,}: fewer updates for each epoch"
    return (
        f"batch_size_training: by the plan the GPU waits for the host in {100 * waits:.0f} % of each step; {flags} "
        f"would fit and train on tokens {gain:.1f} times as fast, {steps}"
    )
