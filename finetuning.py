"""Fine-tune a Hugging Face model (causal, encoder-decoder, or of images and text) on one CPU, one GPU, or many GPUs.

    torchrun --nproc_per_node 4 finetuning.py --enable_fsdp --use_peft --model_name M --output_dir O
    python finetuning.py --model_name M --samsum_dataset.data_path my_dialogues/
    python finetuning.py --help

Read train() first: it is the loop. train_step() computes one optimizer step, evaluate() the validation loss. prepare(),
in preparation/, builds what they use; preparation/results.py writes the results.
"""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from supervision.exit_status import FAILED, REFUSED, hand_refusal_over, leave

if __name__ == "__main__":  # the imports below take seconds: a wrong flag, --help and Ctrl-C are answered before them
    from supervision.process_start import begin_process

    imports_ended = begin_process(sys.argv[1:])

import torch

from configs.flags import parse_flags
from data.batches.step_loader import StepLoader
from planning.dry_run import dry_run
from planning.out_of_memory.report import OutOfMemoryReport
from policies.clipping import clip_grad_norm
from policies.compilation.layers import compilation_named
from policies.guarded_step import guarded_step
from policies.optimizers.host_optimizer import last_gradients, wait_for_weights
from policies.sharding import micro_batch_context, reshard
from preparation import results
from preparation.building import Evaluated, Trainable
from preparation.load_only import load_only
from preparation.prepare import Job, prepare
from ranks.collectives import sum_on_host
from ranks.environment import Environment, print_rank_zero, read_environment
from ranks.process_group import stop_process_group
from reporting.instruments import DataWait, StepRecord
from run_folder.lock import BEAT_SECONDS, RunLock
from supervision.failures import end_at_once, end_with_error
from supervision.step_numbers import StepNumbers
from supervision.stopping import StopRequests
from supervision.watchdog import Watchdog
from tasks.micro_batch import MicroBatch, count_globally
from utils.errors import ConfigError, TrainingError
from utils.log_clock import timed_log
from utils.progress import phase, progress_bar
from utils.quiet import quiet_libraries
from utils.seeding import deterministic_kernels_named


def main(argv: Sequence[str], *, ends_process: bool = False) -> int:
    """Run what the flags ask for. Returns the exit status: 0 finished, 1 failed, 2 refused before it started.

    Args:
        ends_process: the caller ends the process next, so no later signal may change what it says about the run.
    """
    faulthandler.enable(file=2)  # a rank that dies in native code says where its threads were
    env = read_environment()
    quiet_libraries()
    watchdog, status = Watchdog(env), 0
    try:
        carry_out(argv, env, watchdog, ends_process=ends_process)
    except ConfigError as error:
        status = end_with_error(env, error, REFUSED, watchdog)
        hand_refusal_over(env.refusal_file)
    except TrainingError as error:
        status = end_with_error(env, error, FAILED, watchdog)
    except BaseException as error:  # a dataset function may raise SystemExit or KeyboardInterrupt; Ctrl-C does not
        # This rank may have failed alone. Leaving the process group would wait for the others in their collectives.
        return end_with_error(env, error, FAILED, watchdog)
    stop_process_group()
    return status


def carry_out(argv: Sequence[str], env: Environment, watchdog: Watchdog, *, ends_process: bool) -> None:
    """Plan, load or train. On return nothing holds the model: DistributedDataParallel must end before its group."""
    say = partial(print_rank_zero, env)
    with RunLock(beat_seconds=BEAT_SECONDS * env.grace_scale, say=say, on_loss=end_at_once) as lock:
        config = parse_flags(argv)
        with OutOfMemoryReport(argv, config, env, watchdog.where) as oom_report:
            if config.planning_config.dry_run:
                dry_run(argv, config, env)
            elif config.planning_config.load_only:
                load_only(config, env, watchdog)
            else:
                with timed_log(), deterministic_kernels_named():
                    job = prepare(config, env, watchdog, lock)
                    oom_report.knows(job.reporter.ledger, job.folder, job.decided, job.batch_flags)
                    run(job, watchdog, StopRequests(env, job.folder, ends_process))


def run(job: Job, watchdog: Watchdog, stopping: StopRequests) -> None:
    """One run, from its first step to the table at its end."""
    reporter = job.reporter
    with watchdog.during_run(before_leaving=reporter.run_failed, was_signalled=stopping.unanswered):
        try:
            with stopping:
                with compilation_named("a layer of this model", "--compile"):
                    status = train(job, stopping)
                results.finish_run(job, status, stopping.asked if status == "stopped" else "")
                stopping.run_has_ended()
                watchdog.stop()  # a signal to one rank must not end it while others still wait for it
        except TrainingError:
            job.saver.close()  # raised on every rank: a save that was begun may still become a checkpoint
            raise
        finally:
            reporter.run_failed()  # unless its end is written already
            reporter.write_page()


def train(job: Job, stopping: StopRequests) -> str:
    """The loop: optimizer steps, and after each step the evaluation, checkpoint or early end that is due.

    Returns "finished", or "stopped" on request, after a checkpoint. If a loss or gradient is not finite, TrainingError
    names the samples.
    """
    state, saver = job.state, job.saver
    if not evaluate_before(job, stopping):
        return results.stop_early(job)
    while state.step < job.num_steps and not results.stopped_improving(job):
        unread: QueuedStep | None = None
        for micro_batches, wait, ends_epoch in rest_of_epoch(job):
            queued = queue_step(job, micro_batches, wait, ends_epoch=ends_epoch)
            # Reading a loss waits for the device. The previous step's is read now that this step is queued, so the
            # device never runs out of work. If it was not finite, the device has left out this step's update, too.
            if unread:
                finish_step(job, unread, is_late=True)
            # The one all-reduce of every step on the host: all ranks stop, or save by the clock, after the same step.
            asked = stopping.agree(saver.due_by_time())
            by_time = asked.flags[0]
            if not (asked.stop or by_time or must_read_now(job, queued)):
                unread = queued
                continue
            finish_step(job, queued)
            unread = None
            results.stop_if_diverged(job)
            if asked.stop or not evaluate_if_due(job, stopping):
                return results.stop_early(job)
            results.save_if_due(job, by_time=by_time, ends_epoch=ends_epoch)
            if results.stopped_improving(job):
                break
    results.save_results(job)
    return "finished"


def evaluate_before(job: Job, stopping: StopRequests) -> bool:
    """Evaluate before the first step, if asked to or left due by an earlier session. False if a stop came first."""
    state, train_config = job.state, job.config.train_config
    state.eval_due |= train_config.eval_before_training and state.step == 0
    was_due = state.eval_due
    if not evaluate_if_due(job, stopping):
        return False
    if was_due and train_config.keep_best and state.best_step == state.step > 0:
        results.save_checkpoint(job, best=True)
    return True


def rest_of_epoch(job: Job) -> Iterator[tuple[list[MicroBatch], DataWait, bool]]:
    """This rank's micro-batches of each step left in the epoch, the wait for them, and whether it is the last step."""
    state, loader, reporter = job.state, job.loaders.train, job.reporter
    first = state.step_of_epoch
    num_steps = min(len(loader) - first, job.num_steps - state.step)
    batches = reporter.timed(loader.epoch(state.epoch - 1, first))
    with reporter.epoch_bar(state.epoch, first_step=first, num_steps=first + num_steps):
        for index in range(num_steps):
            job.watchdog.at(state.step + 1, "training")
            yield *next(batches), index == num_steps - 1


class QueuedStep(NamedTuple):
    """An optimizer step that the device may still compute."""

    record: StepRecord
    numbers: StepNumbers


def queue_step(job: Job, micro_batches: list[MicroBatch], wait: DataWait, *, ends_epoch: bool) -> QueuedStep:
    """Queue one optimizer step of the run; the device may still compute it on return.

    Raises:
        TrainingError: if its loss or gradient is not finite and the host has had to wait for them.
    """
    trainable, env, state, reporter = job.trainable, job.env, job.state, job.reporter
    state.step += 1
    # Terms of the global batch's loss, such as label tokens, over all ranks and micro-batches. Every micro-batch is
    # divided by this one count, so the loss is the global mean however the batch is cut.
    counts = count_globally(micro_batches)
    lr = float(trainable.scheduler.get_last_lr()[0])
    with (
        results.naming_samples(job, state.step),
        reporter.recording(state.step, counts, wait, lr=lr, ends_epoch=ends_epoch) as record,
        trainable.routing.step(counts),
    ):
        numbers = train_step(
            trainable, micro_batches, counts.num_loss_terms, env.device, env.world_size, reporter.on_phase
        )
    trainable.scheduler.step()
    return QueuedStep(record, numbers)


def train_step(
    trainable: Trainable,
    micro_batches: Sequence[MicroBatch],
    num_loss_terms: float,
    device: torch.device,
    world_size: int,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> StepNumbers:
    """One optimizer step over this rank's micro-batches of the global batch.

    The step is queued on return. The host waits for the device only under fp16, and for optimizers that cannot leave
    out an update by themselves.

    Args:
        num_loss_terms: of the global batch, all ranks and micro-batches included.
        device: computes; parameters may live elsewhere.
        on_phase: called at each of `reporting.memory_phases.PHASES`.

    Returns:
        Loss and gradient norm, to be read. If reading raises NonFiniteError, weights have not changed, nor states that
        no CPU updates during backward. A non-finite norm means fp16 overflow: no weight has changed; the scale falls.

    Raises:
        NonFiniteError: on every rank, if the host had to wait.
    """
    model, optimizer, scaler = trainable.model, trainable.optimizer, trainable.scaler
    losses = []
    # DDP and FSDP average gradients over ranks. Times the world size that is their sum, and divided by the terms of the
    # global batch's loss it is the gradient of the global mean.
    loss_grad = world_size * scaler.scale / max(1.0, num_loss_terms)
    on_phase("before_forward")
    for index, batch in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        # Gradients are reduced over ranks in the last micro-batch's backward; in each, if they accumulate sharded.
        in_step = micro_batch_context(model, trainable.accumulation, is_first=index == 0, is_last=is_last)
        with in_step, last_gradients(optimizer, is_last=is_last):
            loss = trainable.summed_loss(model, batch.to(device), loss_grad)
            if index == 0:
                on_phase("after_forward")
            (loss * loss_grad).backward()  # fp16's loss scale is in loss_grad, so small gradients survive
        losses.append(loss.detach() / max(1.0, num_loss_terms))
    on_phase("after_backward")
    loss = torch.stack(losses).sum()
    torch.distributed.all_reduce(loss)  # every rank has the same loss, and so takes the same branches below
    # Clipping comes after the reduction, by the norm of the whole gradient, and before the update.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    grad_norm = clip_grad_norm(parameters, trainable.max_norm, scale=scaler.scale, optimizer=optimizer)
    on_device = torch.stack([loss, grad_norm])
    rows = [batch.source_rows for batch in micro_batches]
    numbers = StepNumbers(on_device, losses, rows, may_overflow=scaler.can_fall)
    guarded_step(optimizer, scaler, on_device, numbers.read)
    on_phase("after_optimizer_step")
    optimizer.zero_grad(set_to_none=True)
    return numbers


def must_read_now(job: Job, queued: QueuedStep) -> bool:
    """Whether the step is read before the next one is queued: something is due, it is measured, or it was read."""
    record = queued.record
    save_is_due = job.saver.due(record.step, ends_epoch=record.ends_epoch, ends_run=record.step == job.num_steps)
    ends_now = results.ends_by_divergence(job)
    return results.eval_is_due(job, record) or save_is_due or ends_now or record.is_observed or queued.numbers.was_read


def finish_step(job: Job, queued: QueuedStep, *, is_late: bool = False) -> None:
    """Read a step's loss, report it, and note in the state what is due after the step.

    Args:
        is_late: the next step has been queued.

    Raises:
        TrainingError: if the loss or gradient is not finite; it names the samples.
    """
    state, record = job.state, queued.record
    with results.naming_samples(job, record.step):
        loss, grad_norm = queued.numbers.read()
    ready_at = queued.numbers.ready_at if is_late else None
    seconds = job.reporter.step_ended(record, state.epoch, loss, grad_norm, ready_at=ready_at)
    state.count_step(seconds, loss, record.counts.num_loss_terms, record.counts.num_tokens)
    state.epoch_end_due, state.eval_due = record.ends_epoch, results.eval_is_due(job, record)
    results.watch_loss(job, record.step, loss)
    job.saver.after_step()


def evaluate_if_due(job: Job, stopping: StopRequests) -> bool:
    """Evaluate and end the epoch, if they are due. False if a stop came first; then they stay due."""
    state = job.state
    eval_loss = None
    if state.eval_due and job.loaders.evaluation is not None:
        started = time.perf_counter()
        eval_loss = validate(job, job.loaders.evaluation, stopping)
        state.count_seconds(time.perf_counter() - started)
        if eval_loss is None:
            return False
    # A run that is resumed from here evaluates once more, and saves the weights that the disk did not take.
    state.eval_due = job.reporter.weights.lost_at(state.step)
    if state.epoch_end_due:
        train_loss = state.epoch_loss_sum / max(1, state.epoch_label_tokens)
        job.reporter.epoch_ended(state.epoch, state.epoch_seconds, train_loss, eval_loss)
        state.epoch_end_due = False
        if job.loaders.train.ends_epoch(state.step_of_epoch):  # else --max_train_step cut it, and may be raised later
            state.begin_next_epoch()
    return True


def validate(job: Job, eval_loader: StepLoader, stopping: StopRequests) -> float | None:
    """Evaluate, report it, and save the weights if they are the best so far; None if a stop came first."""
    wait_for_weights(job.trainable.optimizer)  # answers are generated with whole weights, and the best are saved
    steps = stopping.until_asked(job.watchdog.each(eval_loader.epoch(0), job.state.step, "evaluating"))
    with phase("evaluating"):
        bar = progress_bar("eval", steps, total=len(eval_loader), leave=False)
        evaluated = evaluate(job.trainable, bar, job.env.device)
    if steps.cut_short or not results.report_evaluation(job, evaluated, stopping):
        return None
    return evaluated.loss


@torch.no_grad()
def evaluate(trainable: Trainable, steps: Iterable[list[MicroBatch]], device: torch.device) -> Evaluated:
    """The loss over the validation set, and the sums that the task's own figures are made of."""
    model = trainable.model
    model.eval()
    total = torch.zeros(1, device=device)
    count = 0
    for micro_batches in steps:
        for batch in micro_batches:
            # Every rank evaluates every batch, an empty one if its rows ran out: under FSDP each forward gathers
            # weights from all ranks, so a rank with fewer batches would leave the others waiting.
            total = total + trainable.eval_sums(model, batch.to(device))
            count += batch.num_loss_terms
    model.train()
    reshard(model)  # without a backward, gathered weights would stay in memory
    loss_sum, *own_sums, num_loss_terms = sum_on_host(*total.tolist(), count)
    return Evaluated(loss_sum / max(1.0, num_loss_terms), int(num_loss_terms), own_sums)


if __name__ == "__main__":
    imports_ended()
    if status := main(sys.argv[1:], ends_process=True):
        leave(status)
