"""The time and price of a run: its steps, evaluations and epochs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from data.batches.counts import BatchCounts
from planning.cost.kernel_rates import KernelRates, kernel_rates
from planning.cost.link_speeds import expected_speeds
from planning.cost.step_time import HIDDEN_SHARE, StepParts, time_of_step
from planning.cost.step_work import MicroBatchWork, micro_batch_work, token_launch_seconds
from planning.cost.traffic import Traffic, find_traffic
from planning.machines.group_speeds import Speeds
from planning.machines.hardware import Hardware
from planning.model.planned_model import PlannedModel
from policies.mixed_precision import DTYPES
from resolving.batches_and_steps import resolve_num_steps
from tasks.flops import shares_of_experts


@dataclass(frozen=True)
class TimePlan:
    """Seconds, tokens and money. Figures that depend on the number of rows are None if it is not known."""

    step: StepParts
    communication_seconds: float  # of a step, hidden or not
    tokens_per_second_per_device: float  # without padding
    steps_per_epoch: int | None
    num_steps: int | None
    evaluation_seconds: float  # of one evaluation; 0 if there is none
    reference_seconds: float  # of the pass before the first step (`tasks.preference`); 0 if there is none
    seconds_per_epoch: float | None  # its evaluation included
    seconds_per_run: float | None  # without loading, compiling and saving
    price: float | None  # of the run, of all nodes
    price_per_million_tokens: float | None  # the same, without evaluations
    notes: tuple[str, ...] = ()

    @property
    def seconds_per_step(self) -> float:
        return self.step.total

    @property
    def waits_for(self) -> str:
        """The kind of work that most of a step is spent on."""
        return self.step.largest

    def to_dict(self) -> dict[str, Any]:
        """The plan in plain types, as --dry_run_json holds it."""
        return {
            "seconds_per_step": self.seconds_per_step,
            "tokens_per_second_per_device": self.tokens_per_second_per_device,
            "steps_per_epoch": self.steps_per_epoch,
            "num_steps": self.num_steps,
            "evaluation_seconds": self.evaluation_seconds,
            "reference_seconds": self.reference_seconds,
            "seconds_per_epoch": self.seconds_per_epoch,
            "seconds_per_run": self.seconds_per_run,
            "price": self.price,
            "price_per_million_tokens": self.price_per_million_tokens,
            "waits_for": self.waits_for,
            "step_seconds": asdict(self.step),
            "communication_seconds": self.communication_seconds,
        }


def plan_time(
    planned: PlannedModel,
    hardware: Hardware,
    counts: BatchCounts,
    *,
    work: MicroBatchWork | None = None,
    num_rows: int | None = None,
    eval_work: MicroBatchWork | None = None,
    num_eval_rows: int = 0,
    reference_work: MicroBatchWork | None = None,
    traffic: Traffic | None = None,
    speeds: Speeds | None = None,
    hidden_share: float = HIDDEN_SHARE,
    moved_bytes: float = 0.0,
) -> TimePlan | None:
    """The time of a run; None if the hardware's rates are not known (`why_no_time`).

    Args:
        counts: of one rank's micro-batch, on average.
        work: of the rank that the others wait for in each micro-batch; None: that of `counts`.
        num_rows: of the training data, if it is at hand.
        eval_work: of one rank's micro-batch of an evaluation.
        num_eval_rows: of all ranks together.
        reference_work: of one rank's micro-batch of training rows, forward alone, if all are computed so once.
        traffic: of another system that trains the same model; None: this tool's.
        speeds: as measured by tools.doctor; None: from the hardware's figures.
        hidden_share: 0 for a system that communicates after computing.
        moved_bytes: activations of a micro-batch that wait in host memory.
    """
    train, policies = planned.config.train_config, planned.resolved.policies
    batches, layout = planned.resolved.batches, policies.layout
    world_size = planned.env.world_size
    hardware = hardware if world_size > 1 else hardware.of_one_card()
    if why_no_time(planned, hardware, speeds) is not None:
        return None
    rates = kernel_rates(hardware.card, _compute_name(planned), in_float8=policies.float8 is not None)
    speeds = speeds or expected_speeds(hardware, layout.mesh_shape[1] if layout.strategy == "HYBRID_SHARD" else None)
    assert rates is not None
    assert speeds is not None
    traffic = traffic or find_traffic(planned)
    work = work or micro_batch_work(planned, counts)
    step, communication, moving = time_of_step(
        planned, hardware, counts, work, rates, traffic, speeds, hidden_share=hidden_share, moved_bytes=moved_bytes
    )
    evaluation = 0.0
    if train.run_validation is not False and eval_work is not None and num_eval_rows:
        evaluation = _evaluation_seconds(planned, eval_work, num_eval_rows, rates, traffic, speeds)
    reference = 0.0
    if reference_work is not None and num_rows:
        num_batches = -(-num_rows // (batches.rows_per_micro_batch * batches.data_parallel_size))
        reference = num_batches * _forward_seconds(planned, reference_work, rates, traffic, speeds)
    steps_per_epoch, num_steps, seconds_per_epoch, seconds_per_run = _run_seconds(planned, step, num_rows, evaluation)
    seconds_per_run = None if seconds_per_run is None else seconds_per_run + reference
    speed = batches.gradient_accumulation_steps * counts.num_tokens / step.total
    per_second = None if hardware.price_per_hour is None else hardware.nodes * hardware.price_per_hour / 3600
    return TimePlan(
        step=step,
        communication_seconds=communication,
        tokens_per_second_per_device=speed,
        steps_per_epoch=steps_per_epoch,
        num_steps=num_steps,
        evaluation_seconds=evaluation,
        reference_seconds=reference,
        seconds_per_epoch=seconds_per_epoch,
        seconds_per_run=seconds_per_run,
        price=None if per_second is None or seconds_per_run is None else per_second * seconds_per_run,
        price_per_million_tokens=None if per_second is None else per_second * 1e6 / (speed * world_size),
        notes=(*rates.notes, *_notes_on_experts(planned), *_notes_on_moving(moving)),
    )


def _notes_on_experts(planned: PlannedModel) -> tuple[str, ...]:
    if not shares_of_experts(planned.adapted.model):
        return ()
    return ("time: how fast a mixture's experts are multiplied was not measured; the rate of other products is taken",)


def _notes_on_moving(seconds: float) -> tuple[str, ...]:
    if not seconds:
        return ()
    why = "copying what a layer keeps takes longer than computing it"
    return (f"activation_offloading: each step waits {seconds:.2g} s for copies to and from host memory, since {why}",)


def _run_seconds(
    planned: PlannedModel, step: StepParts, num_rows: int | None, evaluation: float
) -> tuple[int | None, int | None, float | None, float | None]:
    """Steps of an epoch and of the run, and seconds of an epoch and of the run; None where they are not known.

    Without the data a run is as long as --max_train_step, and its evaluations are not counted.
    """
    train, batches = planned.config.train_config, planned.resolved.batches
    if num_rows is None:
        num_steps = train.max_train_step or None
        return None, num_steps, None, None if num_steps is None else num_steps * step.total
    steps_per_epoch = batches.num_steps(num_rows)
    num_steps = resolve_num_steps(train, planned.config.tracking_config, steps_per_epoch)
    of_epoch = batches.num_micro_batches(batches.rows_of_epoch(num_rows)) / batches.gradient_accumulation_steps
    # An epoch's last step may have fewer micro-batches, but its update is a whole one.
    training = of_epoch * (step.total - step.optimizer) + steps_per_epoch * step.optimizer
    # One at the end of each epoch.
    eval_every = train.eval_every(steps_per_epoch)
    num_evaluations = 1 + (steps_per_epoch // eval_every if eval_every else 0)
    seconds_per_epoch = training + num_evaluations * evaluation
    return steps_per_epoch, num_steps, seconds_per_epoch, seconds_per_epoch * num_steps / steps_per_epoch


def why_no_time(planned: PlannedModel, hardware: Hardware, speeds: Speeds | None = None) -> str | None:
    """A line to print if no time can be planned; None if one can.

    Args:
        speeds: as of `plan_time`.
    """
    if kernel_rates(hardware.card, _compute_name(planned)) is None:
        return (
            f"time: not planned, the rates of {hardware.card.name} are not known; name the cards (--dry_run_hardware)"
        )
    if planned.env.world_size > 1 and (speeds or expected_speeds(hardware)) is None:
        return "time: not planned, the network between nodes is not known; give --network_gbps or --network_speeds"
    return None


def _compute_name(planned: PlannedModel) -> str:
    dtype = planned.resolved.policies.precision.compute_dtype
    return next(name for name, named in DTYPES.items() if named == dtype)


def _forward_seconds(
    planned: PlannedModel, work: MicroBatchWork, rates: KernelRates, traffic: Traffic, speeds: Speeds
) -> float:
    """Seconds of a micro-batch that is computed without backward, its weights gathered."""
    layout = planned.resolved.policies.layout
    forward = max(sum(work.device_seconds(rates)), work.launch_seconds)
    if layout.mesh_shape[1] > 1:
        group = speeds.node if layout.strategy == "HYBRID_SHARD" else speeds.world
        forward += group.all_gather.seconds(traffic.units_bytes + traffic.root_bytes, traffic.num_units)
    return forward


def _evaluation_seconds(
    planned: PlannedModel,
    work: MicroBatchWork,
    num_rows: int,
    rates: KernelRates,
    traffic: Traffic,
    speeds: Speeds,
) -> float:
    """Seconds of one evaluation: forward over all rows, and generated answers of the greatest length."""
    train = planned.config.train_config
    world_size, data_parallel_size = planned.env.world_size, planned.resolved.batches.data_parallel_size
    num_batches = -(-num_rows // (train.val_batch_size * data_parallel_size))
    if train.max_eval_step:
        num_batches = min(num_batches, train.max_eval_step)
    seconds = num_batches * _forward_seconds(planned, work, rates, traffic, speeds)
    if train.eval_generate:
        num_answers = min(num_rows, train.max_generate_samples or num_rows)
        per_token = max(token_launch_seconds(planned), work.weight_bytes / rates.memory_bytes)  # each reads all weights
        seconds += -(-num_answers // (train.val_batch_size * world_size)) * train.max_new_tokens * per_token
    return seconds
