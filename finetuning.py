"""Fine-tune a Hugging Face model (causal, encoder-decoder, or of images and text) on one CPU, one GPU, or many GPUs.

    torchrun --nproc_per_node 4 finetuning.py --enable_fsdp --use_peft --model_name M --output_dir O
    python finetuning.py --model_name M --samsum_dataset.data_path my_dialogues/
    python finetuning.py --help

The run, top to bottom: carry_out() reads the flags; prepare(), in preparation/, builds everything that trains; train()
is the loop; step() is one step of the run, and train_step() what it computes; finish() reads what the step came to,
while the device computes the next one; settle() evaluates, if that is due; conclude() writes the end.
"""

from __future__ import annotations

import faulthandler
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from supervision.exit_status import FAILED, REFUSED, leave, let_ctrl_c_end_this
from supervision.failures import end_at_once, end_unless_flags_hold, end_with_error
from utils.errors import ConfigError, TrainingError
from utils.progress import phase, progress_bar, say_if_it_lasts
from utils.quiet import quiet_imports, quiet_libraries
from utils.streams import keep_standard_streams

if __name__ == "__main__":
    keep_standard_streams()
    let_ctrl_c_end_this()
    end_unless_flags_hold(sys.argv[1:])  # before the imports below, which take seconds: at once
    quiet_imports()
    imports_ended = say_if_it_lasts("importing torch and transformers")
    from utils.compat import import_bitsandbytes_without_inductor

    import_bitsandbytes_without_inductor()

import torch
from torch import nn
from torch.optim import Optimizer

from checkpointing.model_folder import WriteError
from checkpointing.results import lacking_checkpoint, lacking_weights
from checkpointing.save_plan import is_due
from configs.flags import parse_flags
from configs.run import RunConfig
from data.batches.counts import BatchCounts
from data.batches.step_loader import StepLoader
from evaluation.generation import Answer, mean_rouge
from planning.against_run import compare_with_plan
from planning.dry_run import dry_run
from planning.out_of_memory.report import OutOfMemoryReport
from policies.clipping import clip_grad_norm
from policies.compilation.layers import compilation_named
from policies.finite import weights_not_finite
from policies.guarded_step import queue_step
from policies.loss_scaling import LossScaler
from policies.sharding import Accumulation, micro_batch_context, reshard
from preparation.load_only import load_only
from preparation.prepare import Job, prepare
from ranks.collectives import gather_to_all, on_rank_zero, sum_on_host
from ranks.environment import Environment, print_rank_zero, read_environment
from ranks.process_group import stop_process_group
from reporting.run_reporter import StepRecord
from run_folder.lock import BEAT_SECONDS, RunLock
from supervision.non_finite import NonFiniteError, describe_non_finite
from supervision.step_numbers import StepNumbers
from supervision.stopping import StopRequests
from supervision.watchdog import Watchdog
from tasks.task import MicroBatch, count_globally


def main(argv: Sequence[str], *, ends_process: bool = False) -> int:
    """Run what the flags ask for. Returns the exit status: 0 finished, 1 failed, 2 refused before it started.

    Args:
        ends_process: the caller ends this process next, so a late signal must not change what it says of the run.
    """
    faulthandler.enable(file=2)  # a rank that dies in native code says where its threads were
    env = read_environment()
    quiet_libraries()
    watchdog = Watchdog(env)
    try:
        carry_out(argv, env, watchdog, ends_process=ends_process)
        status = 0
    except ConfigError as error:
        status = end_with_error(env, error, REFUSED, watchdog)
    except TrainingError as error:
        status = end_with_error(env, error, FAILED, watchdog)
    except BaseException as error:  # a dataset function may raise SystemExit or KeyboardInterrupt; Ctrl-C does not
        # Perhaps only this rank failed. The others may wait in a collective, and leaving the group would wait for them.
        return end_with_error(env, error, FAILED, watchdog)
    stop_process_group()
    return status


def carry_out(argv: Sequence[str], env: Environment, watchdog: Watchdog, *, ends_process: bool) -> None:
    """Do what the flags ask for. Nothing holds the model then: DistributedDataParallel has to end before its group."""
    beat_seconds = BEAT_SECONDS * env.grace_scale
    with RunLock(beat_seconds=beat_seconds, say=partial(print_rank_zero, env), on_loss=end_at_once) as lock:
        config = parse_flags(argv)
        with OutOfMemoryReport(argv, config, env, watchdog.where) as oom_report:
            if config.planning_config.dry_run:
                dry_run(argv, config, env, train_step)
            elif config.planning_config.load_only:
                load_only(config, env, watchdog)
            else:
                run(config, env, watchdog, lock, oom_report, ends_process=ends_process)


def run(
    config: RunConfig,
    env: Environment,
    watchdog: Watchdog,
    lock: RunLock,
    oom_report: OutOfMemoryReport,
    *,
    ends_process: bool,
) -> None:
    """One run, from its settings to the table at its end."""
    job = prepare(config, env, watchdog, lock)
    oom_report.knows(job.reporter.ledger, job.folder, job.checkpointing, job.resumed_size)
    watchdog.before_leaving = lambda: job.reporter.run_ended("failed")
    try:
        with StopRequests(env, job.folder, ends_process) as stopping:
            watchdog.was_signalled = stopping.unanswered
            with compilation_named("a layer of this model", "--compile"):
                status = train(job, stopping)
            conclude(job, status, stopping.asked if status == "stopped" else "")
            stopping.run_has_ended()
            watchdog.stop()  # a signal to one rank must not end it while others still wait for it
    except TrainingError:
        job.saver.close()  # raised on every rank: a save that was begun may still become a checkpoint
        raise
    finally:
        job.reporter.run_ended("failed")  # unless it has ended already
        job.reporter.write_page()
        watchdog.before_leaving = lambda: None  # it would hold the job


def train(job: Job, stopping: StopRequests) -> str:
    """The loop: optimizer steps, and after each whatever is due: an evaluation, a checkpoint, or an early end.

    Returns:
        "finished", or "stopped" on request, after a checkpoint.

    Raises:
        TrainingError: if an update would not be finite; it names the samples.
    """
    state, saver = job.state, job.saver
    if not settle_earlier(job, stopping):
        return stop_early(job)
    while state.step < job.num_steps:
        unread = None
        for micro_batches, ends_epoch in rest_of_epoch(job):
            queued = step(job, micro_batches, unread, ends_epoch=ends_epoch)
            asked = stopping.agree(saver.due_by_time())
            by_time = asked.flags[0]
            if not (asked.stop or by_time or must_finish(job, queued)):
                unread = queued  # the device need not wait for the host: the next step reads it
                continue
            finish(job, queued)
            unread = None
            if asked.stop or not settle(job, stopping):
                return stop_early(job)
            save_if_due(job, by_time=by_time, ends_epoch=ends_epoch)
    save_results(job)
    return "finished"


def settle_earlier(job: Job, stopping: StopRequests) -> bool:
    """Do what is due before the first step: what an earlier session left, or the evaluation before training.

    Returns:
        False if a stop came first. Then it stays due.
    """
    state, train_config = job.state, job.config.train_config
    state.eval_due |= train_config.eval_before_training and state.step == 0
    eval_was_due = state.eval_due
    if not settle(job, stopping):
        return False
    if eval_was_due and train_config.keep_best and state.best_step == state.step > 0:
        save_checkpoint(job, best=True)
    return True


def rest_of_epoch(job: Job) -> Iterator[tuple[list[MicroBatch], bool]]:
    """This rank's micro-batches for each step that is left of the epoch, and whether it is the epoch's last step."""
    state, loader = job.state, job.loaders.train
    first = state.step_of_epoch
    num_steps = min(len(loader) - first, job.num_steps - state.step)
    batches = job.reporter.timed(loader.epoch(state.epoch - 1, first))
    with job.reporter.epoch_bar(state.epoch, first_step=first, num_steps=first + num_steps):
        for index in range(num_steps):
            job.watchdog.at(state.step + 1, "training")
            yield next(batches), index == num_steps - 1


class QueuedStep(NamedTuple):
    """An optimizer step that the device may still compute."""

    step: int
    ends_epoch: bool
    eval_is_due: bool  # after it
    counts: BatchCounts
    lr: float  # the learning rate that it uses
    record: StepRecord
    numbers: StepNumbers


def step(job: Job, micro_batches: list[MicroBatch], unread: QueuedStep | None, *, ends_epoch: bool) -> QueuedStep:
    """One optimizer step of the run. It is queued when this returns.

    Args:
        unread: the step before, if that is not finished yet: it is before this one's update.

    Raises:
        TrainingError: if the update of either would not be finite; it names the samples.
    """
    train_config, trainable, state, reporter = job.config.train_config, job.trainable, job.state, job.reporter
    state.step += 1
    counts = count_globally(micro_batches)
    lr = float(trainable.scheduler.get_last_lr()[0])
    with (
        samples_named(job, state.step),
        reporter.recording(state.step, counts, last_of_epoch=ends_epoch) as record,
    ):
        numbers = train_step(
            trainable.model,
            micro_batches,
            trainable.optimizer,
            trainable.scaler,
            summed_loss=job.task.summed_loss,
            max_norm=train_config.gradient_clipping_threshold if train_config.gradient_clipping else None,
            device=job.env.device,
            num_label_tokens=counts.num_label_tokens,
            world_size=job.env.world_size,
            accumulation=trainable.accumulation,
            on_phase=reporter.on_phase,
            before_update=partial(finish, job, unread, is_late=True) if unread else lambda: None,
        )
    trainable.scheduler.step()
    eval_is_due = ends_epoch or is_due(state.step, train_config.eval_every_steps)
    return QueuedStep(state.step, ends_epoch, eval_is_due, counts, lr, record, numbers)


@contextmanager
def samples_named(job: Job, step: int) -> Iterator[None]:
    """A context in which a step's numbers are read: if they are not finite, TrainingError names its samples."""
    try:
        yield
    except NonFiniteError as error:
        weights, names = weights_not_finite(job.trainable.model), tuple(job.config.sources)
        is_fp16 = job.trainable.scaler.active
        raise TrainingError(describe_non_finite(step, error, names, weights, is_fp16=is_fp16)) from None


def train_step(
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    optimizer: Optimizer,
    scaler: LossScaler,
    *,
    summed_loss: Callable[[nn.Module, Any, float], torch.Tensor],
    max_norm: float | None,
    device: torch.device,
    num_label_tokens: float,
    world_size: int,
    accumulation: Accumulation,
    on_phase: Callable[[str], None] = lambda phase: None,
    before_update: Callable[[], None] = lambda: None,
) -> StepNumbers:
    """One optimizer step over this rank's micro-batches of the global batch.

    The host waits for the device if the optimizer needs that, or fp16's loss scale. Otherwise the step is queued when
    this returns, and the device leaves the update out if loss or gradient norm are not finite.

    Args:
        summed_loss: that of the task.
        max_norm: clip the gradient norm to this; None: no clipping.
        device: where to compute; parameters may live elsewhere.
        num_label_tokens: label tokens of the global batch, all ranks and micro-batches together.
        on_phase: called at each of `reporting.memory_phases.PHASES`.
        before_update: called when all gradients are queued, before the update is.

    Returns:
        Loss and gradient norm, to be read. If reading raises NonFiniteError, weights and optimizer states are as they
        were. If the norm that it returns is not finite, fp16 overflowed: so they are then, and the next step has a
        smaller loss scale.

    Raises:
        NonFiniteError: on every rank, if the host had to wait.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    losses = []
    # Gradients are averaged over ranks; times the world size that is their sum.
    loss_grad = world_size * scaler.scale / max(1.0, num_label_tokens)
    on_phase("before_forward")
    for index, batch in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        with micro_batch_context(model, accumulation, is_first=index == 0, is_last=is_last):
            loss = summed_loss(model, batch.to(device), loss_grad)
            if index == 0:
                on_phase("after_forward")
            (loss * loss_grad).backward()
        losses.append(loss.detach() / num_label_tokens)
    on_phase("after_backward")
    loss = torch.stack(losses).sum()
    torch.distributed.all_reduce(loss)
    grad_norm = clip_grad_norm(parameters, max_norm, scale=scaler.scale, optimizer=optimizer)
    numbers = torch.stack([loss, grad_norm])
    rows = [batch.source_rows for batch in micro_batches]
    result = StepNumbers(numbers, losses, rows, may_overflow=scaler.can_fall)
    before_update()
    is_queued = queue_step(optimizer, numbers)
    if scaler.active or not is_queued:
        overflowed = not math.isfinite(result.read()[1])
        if not (is_queued or overflowed):
            optimizer.step()
        scaler.update(overflowed=overflowed)
    on_phase("after_optimizer_step")
    optimizer.zero_grad(set_to_none=True)
    return result


def must_finish(job: Job, queued: QueuedStep) -> bool:
    """Whether something is due after this step, or is to be measured when the device has ended it."""
    ends_run = queued.step == job.num_steps
    save_is_due = job.saver.due(queued.step, ends_epoch=queued.ends_epoch, ends_run=ends_run)
    return queued.eval_is_due or save_is_due or queued.record.is_observed or job.trainable.scaler.active


def finish(job: Job, queued: QueuedStep, *, is_late: bool = False) -> None:
    """Read what a step came to and report it, and note in the state what it was and what is due after it.

    Args:
        is_late: the next step has begun.

    Raises:
        TrainingError: if its update would not have been finite; it names the samples.
    """
    state, counts = job.state, queued.counts
    with samples_named(job, queued.step):
        loss, grad_norm = queued.numbers.read()
    ready_at = queued.numbers.ready_at if is_late else None
    seconds = job.reporter.step_ended(
        queued.step, state.epoch, counts, loss, grad_norm, lr=queued.lr, record=queued.record, ready_at=ready_at
    )
    state.count_step(seconds, loss, counts.num_label_tokens, counts.num_tokens)
    state.epoch_end_due = queued.ends_epoch
    state.eval_due = queued.eval_is_due
    job.saver.after_step()


def settle(job: Job, stopping: StopRequests) -> bool:
    """Evaluate and end the epoch, if they are due. False if a stop came first; then they stay due."""
    state = job.state
    eval_loss = None
    if state.eval_due and job.loaders.evaluation is not None:
        started = time.perf_counter()
        eval_loss = validate(job, job.loaders.evaluation, stopping)
        state.count_seconds(time.perf_counter() - started)
        if eval_loss is None:
            return False
    state.eval_due = False
    if state.epoch_end_due:
        train_loss = state.epoch_loss_sum / max(1, state.epoch_label_tokens)
        job.reporter.epoch_ended(state.epoch, state.epoch_seconds, train_loss, eval_loss)
        state.epoch_end_due = False
        if job.loaders.train.ends_epoch(state.step_of_epoch):  # else --max_train_step cut it, and may be raised later
            state.begin_next_epoch()
    return True


def validate(job: Job, eval_loader: StepLoader, stopping: StopRequests) -> float | None:
    """Evaluate, report it, and save the weights if they are the best so far; None if a stop came first."""
    state, train_config = job.state, job.config.train_config
    epoch = state.epoch if state.step else 0
    steps = stopping.until_asked(job.watchdog.each(eval_loader.epoch(0), state.step, "evaluating"))
    with phase("evaluating"):
        bar = progress_bar("eval", steps, total=len(eval_loader), leave=False)
        loss, num_label_tokens = evaluate(job.trainable.model, bar, job.task.summed_loss, job.env.device)
    answers = None if steps.cut_short else generate_answers(job, stopping)
    if answers is None:
        return None
    rouge = mean_rouge(answers)
    samples = job.generation.shown(answers, tuple(job.config.sources)) if job.generation else []
    job.reporter.evaluated(state.step, epoch, loss, num_label_tokens, rouge, samples)
    decisive = rouge.get(train_config.best_metric)  # None if the loss decides
    if state.step > 0 and state.is_best(loss, decisive):
        if not train_config.save_model or save_weights(job):
            state.best_eval_loss, state.best_rouge, state.best_step = loss, decisive, state.step
        else:
            job.reporter.weights.note_lost(state.step, loss if decisive is None else -decisive)
    return loss


@torch.no_grad()
def evaluate(
    model: nn.Module,
    steps: Iterable[list[MicroBatch]],
    summed_loss: Callable[[nn.Module, Any], torch.Tensor],
    device: torch.device,
) -> tuple[float, int]:
    """The mean loss over the label tokens of the validation set, and their number.

    Every rank takes part in every batch (an empty one if rows ran out), so none waits for another.
    """
    model.eval()
    total = torch.zeros((), device=device)
    count = 0
    for micro_batches in steps:
        for batch in micro_batches:
            total += summed_loss(model, batch.to(device))
            count += batch.num_label_tokens
    model.train()
    reshard(model)
    loss_sum, num_label_tokens = sum_on_host(total.item(), count)
    return loss_sum / max(1.0, num_label_tokens), int(num_label_tokens)


def generate_answers(job: Job, stopping: StopRequests) -> list[Answer] | None:
    """The model's answers to validation prompts, none without --eval_generate; None if a stop came first."""
    if job.generation is None:
        return []
    rounds = stopping.until_asked(job.watchdog.each(job.generation.rounds(), job.state.step, "generating"))
    with phase("generating"):
        bar = progress_bar("generate", rounds, total=job.generation.num_rounds, leave=False)
        answers = job.generation.answers(job.trainable.model, bar)
    return None if rounds.cut_short else answers


def save_if_due(job: Job, *, by_time: bool, ends_epoch: bool) -> None:
    """Write a checkpoint if this step is one to save after, or if the last checkpoint is old."""
    state = job.state
    is_best = job.config.train_config.keep_best and state.best_step == state.step
    if by_time or is_best or job.saver.due(state.step, ends_epoch=ends_epoch, ends_run=state.step == job.num_steps):
        save_checkpoint(job, best=is_best, is_last=state.step == job.num_steps)


def save_checkpoint(job: Job, *, best: bool = False, is_last: bool = False) -> None:
    """Write a checkpoint of the run as it is now."""
    job.watchdog.at(job.state.step, "saving")
    job.saver.save(job.state, best=best, is_last=is_last)


def save_results(job: Job) -> None:
    """Save the last weights, unless an evaluation has saved the best, and a checkpoint that the disk refused before."""
    state = job.state
    if job.config.train_config.save_model and not math.isfinite(state.best_eval_loss) and not save_weights(job):
        job.reporter.weights.note_lost(state.step, None)
    if not job.saver.wait() and job.saver.tried_step != state.step:
        save_checkpoint(job, is_last=True)
    job.saver.wait()


def stop_early(job: Job) -> str:
    """Write a checkpoint that the run can be resumed from."""
    save_checkpoint(job, is_last=True)
    job.saver.wait()
    return "stopped"


def save_weights(job: Job) -> bool:
    """Save the weights as they are now, in Hugging Face format. False, on every rank, if they cannot be written."""
    job.watchdog.at(job.state.step, "saving")
    try:
        with phase("saving the weights"):
            folder = job.export()
    except WriteError as error:
        job.reporter.say(f"weights of step {job.state.step} could not be saved ({error}); the earlier ones stay")
        return False
    job.reporter.weights.note_saved(job.state.step, folder)
    return True


def conclude(job: Job, status: str, asked: str) -> None:
    """Write the run's end, and say what it came to.

    Args:
        status: "finished" or "stopped".
        asked: what stopped it, in words.

    Raises:
        TrainingError: on every rank, if the disk did not take all of the results; it says what is where.
    """
    reporter = job.reporter
    how = f"stopped by {asked} after step" if asked else "finished step"
    how += f" {job.state.step} of {job.num_steps}"
    lacking = lacking_results(job, status)
    job.saver.close()
    reporter.run_ended("failed" if lacking else status)
    lacking += on_rank_zero(reporter.write_rest)
    if lacking:
        raise TrainingError(
            f"{how}, but {'; '.join(lacking)}; free the disk, or bring the folder back, and give --resume auto"
        )
    if status == "stopped":
        where = "" if job.config.was_given("train_config.output_dir") else f" --output_dir {job.folder}"
        reporter.say(f"{how}; to go on, give the same command with --resume auto{where}")
    show_end(job, status)


def lacking_results(job: Job, status: str) -> list[str]:
    """What the disk did not take of the results, as clauses. A copy that was asked for is made now."""
    train_config, saver = job.config.train_config, job.saver
    weights, best_score = job.reporter.weights, job.state.best_score
    lacking = on_rank_zero(
        lambda: lacking_checkpoint(saver.root, saver.tried_step) + lacking_weights(weights, best_score)
    )
    if status == "finished" and train_config.dist_checkpoint_root_folder and train_config.save_model:
        job.watchdog.at(job.state.step, "saving")
        lacking += [] if saver.save_copy(job.state) else ["the copy of the final weights could not be written"]
    return lacking


def show_end(job: Job, status: str) -> None:
    """Print what was planned beside what was measured, what would help if steps waited for others, and the table."""
    reporter = job.reporter
    peaks, has_allocator = gather_to_all(reporter.ledger.peak_gib()), reporter.ledger.has_allocator
    if job.env.is_rank_zero:
        events = reporter.metrics.read()
        reporter.say(*compare_with_plan(job.folder, events, peaks, has_allocator=has_allocator))
        if job.network is not None:
            reporter.say(*job.network.lines(events, peaks))
    reporter.show_end(status)


if __name__ == "__main__":
    imports_ended()
    status = main(sys.argv[1:], ends_process=True)
    if status:
        leave(status)
