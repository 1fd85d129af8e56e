"""A run's results: figures of evaluations, weights, checkpoints, the end event, and the closing table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from checkpointing.model_folder import WriteError
from checkpointing.results import lacking_checkpoint, lacking_weights
from checkpointing.save_plan import is_due
from evaluation.measure import Answer
from evaluation.measures import deciding_figure, measure
from planning.against_run import compare_with_plan
from policies.finite import weights_not_finite
from policies.optimizers.host_optimizer import wait_for_weights
from preparation.building import Evaluated
from preparation.prepare import Job
from ranks.collectives import gather_to_all, on_rank_zero
from reporting.card.card_file import CARD, renew_card
from reporting.instruments import StepRecord
from supervision.divergence import describe_divergence, has_diverged, note_loss
from supervision.non_finite import NonFiniteError, describe_non_finite
from supervision.stopping import StopRequests
from utils.errors import TrainingError
from utils.progress import phase, progress_bar
from utils.wording import plural


@contextmanager
def naming_samples(job: Job, step: int) -> Iterator[None]:
    """A context in which a step's numbers are read. If they are not finite, TrainingError names the step's samples."""
    try:
        yield
    except NonFiniteError as error:
        weights, names = weights_not_finite(job.trainable.model), tuple(job.config.sources)
        is_fp16 = job.trainable.scaler.active
        raise TrainingError(describe_non_finite(step, error, names, weights, is_fp16=is_fp16)) from None


def watch_loss(job: Job, step: int, loss: float) -> None:
    """Count a step's loss, and say once that the losses diverge."""
    first, last = job.state.first_losses, job.state.last_losses
    before = has_diverged(first, last)
    note_loss(loss, first, last)
    if has_diverged(first, last) and not before:
        job.reporter.say(f"step {step}: warning: {_divergence(job)}")


def _divergence(job: Job) -> str:
    return describe_divergence(job.state.first_losses, job.state.last_losses, lr=job.config.train_config.lr)


def ends_by_divergence(job: Job) -> bool:
    """Whether --stop_on_divergence ends the run now. Every rank has the same losses, and so the same answer."""
    return job.config.train_config.stop_on_divergence and has_diverged(job.state.first_losses, job.state.last_losses)


def stop_if_diverged(job: Job) -> None:
    """Write a checkpoint and end the run, if --stop_on_divergence asks for that.

    Raises:
        TrainingError: on every rank; it says why, and where the checkpoint is.
    """
    if not ends_by_divergence(job):
        return
    stop_early(job)
    where = f"step {job.state.step} of {job.num_steps}"
    raise TrainingError(f"--stop_on_divergence: {where}: {_divergence(job)}; checkpoints are in {job.saver.root}")


def eval_is_due(job: Job, record: StepRecord) -> bool:
    """Whether an evaluation is due after this step."""
    return record.ends_epoch or is_due(record.step, job.config.train_config.eval_every(len(job.loaders.train)))


def stopped_improving(job: Job) -> bool:
    """Whether --early_stopping_patience ends the run: so many evaluations in a row were not the best."""
    patience = job.config.train_config.early_stopping_patience
    return 0 < patience <= job.state.evals_since_best


def report_evaluation(job: Job, evaluated: Evaluated, stopping: StopRequests) -> bool:
    """Generate answers if asked to, report the evaluation, and save the weights if they are the best so far.

    Returns:
        False if a stop came first; then nothing is reported.
    """
    state, train_config = job.state, job.config.train_config
    answers = _generate_answers(job, stopping)
    if answers is None:
        return False
    loss, own = evaluated.loss, job.task.eval_figures(evaluated.sums, evaluated.num_loss_terms)
    figures = measure(answers, job.generation.measures) if job.generation else {}
    samples = job.generation.shown(answers, tuple(job.config.sources)) if job.generation else []
    of_experts = job.trainable.routing.take_loads()
    job.reporter.evaluated(
        state.step,
        state.epoch_of_step,
        loss,
        evaluated.num_loss_terms,
        own,
        figures,
        samples,
        of_experts=of_experts,
    )
    decisive = deciding_figure(own | figures, train_config.best_metric, job.task)  # None if the loss decides
    if decisive == -math.inf:
        job.reporter.say(f"step {state.step}: {train_config.best_metric} is undefined, so this is not the best step")
    is_best = state.is_best(loss, decisive)
    if state.step > 0:
        state.evals_since_best = 0 if is_best else state.evals_since_best + 1
    if state.step > 0 and is_best:
        # Only once its weights are saved, so that a later evaluation that beats the earlier best is saved, too.
        if not train_config.save_model or save_weights(job):
            state.best_eval_loss, state.best_rouge, state.best_step = loss, decisive, state.step
        else:
            job.reporter.weights.note_lost(state.step, loss if decisive is None else -decisive)
    return True


def _generate_answers(job: Job, stopping: StopRequests) -> list[Answer] | None:
    """The model's answers to validation prompts, none without --eval_generate; None if a stop came first.

    Raises:
        TrainingError: on every rank, if a function of the user's fails on one; a checkpoint is written before.
    """
    if job.generation is None:
        return []
    rounds = stopping.until_asked(job.watchdog.each(job.generation.rounds(), job.state.step, "generating"))
    with phase("generating"):
        bar = progress_bar("generate", rounds, total=job.generation.num_rounds, leave=False)
        try:
            answers = job.generation.answers(job.trainable.model, bar)
        except TrainingError as error:
            stop_early(job)
            raise TrainingError(f"{error}; --resume auto goes on from {job.saver.root}") from error
    return None if rounds.cut_short else answers


def save_checkpoint(job: Job, *, best: bool = False, is_last: bool = False) -> None:
    """Write a checkpoint of the run as it is now."""
    job.watchdog.at(job.state.step, "saving")
    wait_for_weights(job.trainable.optimizer)
    job.saver.save(job.state, best=best, is_last=is_last)


def save_if_due(job: Job, *, by_time: bool, ends_epoch: bool) -> None:
    """Write a checkpoint if one is due after this step, by steps, by time, or as the best."""
    state = job.state
    is_last = state.step == job.num_steps
    is_best = job.config.train_config.keep_best and state.best_step == state.step
    if by_time or is_best or job.saver.due(state.step, ends_epoch=ends_epoch, ends_run=is_last):
        save_checkpoint(job, best=is_best, is_last=is_last)


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
    _renew_card(job)
    return True


def _renew_card(job: Job) -> None:
    """Write README.md next to the saved weights, as far as the run has come."""
    if reason := on_rank_zero(lambda: renew_card(job.folder)):
        job.reporter.say(f"the weights' {CARD} could not be written ({reason})")


def save_results(job: Job) -> None:
    """Save the last weights, unless an evaluation has saved the best. Try again to write a checkpoint that failed."""
    state = job.state
    wait_for_weights(job.trainable.optimizer)
    # The best loss is infinite until an evaluation has saved its weights.
    if job.config.train_config.save_model and not math.isfinite(state.best_eval_loss) and not save_weights(job):
        job.reporter.weights.note_lost(state.step, None)
    was_saved = job.saver.wait() and not stopped_improving(job)  # which ends a run where no checkpoint is due
    if not was_saved and job.saver.tried_step != state.step:
        save_checkpoint(job, is_last=True)
    job.saver.wait()


def stop_early(job: Job) -> str:
    """Write a checkpoint to resume the run from. Returns the run's status, "stopped"."""
    save_checkpoint(job, is_last=True)
    job.saver.wait()
    return "stopped"


def finish_run(job: Job, status: str, asked: str) -> None:
    """Write the run's end, and print its results.

    Args:
        status: "finished" or "stopped".
        asked: the request that stopped it, in words; empty if none did.

    Raises:
        TrainingError: on every rank, if some results could not be written; it says which, and where the others are.
    """
    reporter = job.reporter
    how = f"stopped by {asked} after step" if asked else "finished step"
    how += f" {job.state.step} of {job.num_steps}"
    lacking = _lacking_results(job, status)
    job.saver.close()
    reporter.run_ended("failed" if lacking else status)
    lacking += on_rank_zero(reporter.write_rest)
    _renew_card(job)
    if lacking:
        raise TrainingError(
            f"{how}, but {'; '.join(lacking)}; free the disk, or bring the folder back, and give --resume auto"
        )
    if status == "stopped":
        where = "" if job.config.was_given("train_config.output_dir") else f" --output_dir {job.folder}"
        reporter.say(f"{how}; to go on, give the same command with --resume auto{where}")
    _show_end(job, status)


def _lacking_results(job: Job, status: str) -> list[str]:
    """A clause for each result that could not be written. The copy of the final state is made here."""
    train_config, saver = job.config.train_config, job.saver
    weights, best_score = job.reporter.weights, job.state.best_score
    lacking = on_rank_zero(
        lambda: [
            *lacking_checkpoint(saver.root, saver.tried_step, was_written=saver.saved_step == saver.tried_step),
            *lacking_weights(weights, best_score),
        ]
    )
    if status == "finished" and train_config.dist_checkpoint_root_folder and train_config.save_model:
        job.watchdog.at(job.state.step, "saving")
        lacking += [] if saver.save_copy(job.state) else ["the copy of the final weights could not be written"]
    return lacking


def _show_end(job: Job, status: str) -> None:
    """Print plan against measurement, remedies for waits between ranks, and the closing table."""
    reporter, state = job.reporter, job.state
    if status == "finished" and stopped_improving(job):
        in_a_row = f"{plural(state.evals_since_best, 'evaluation')} in a row"
        why = (
            f"were no better than step {state.best_step}'s"
            if state.best_step
            else f"had no {job.config.train_config.best_metric} that could be the best"
        )
        reporter.say(f"early_stopping_patience: ended after step {state.step} of {job.num_steps}: {in_a_row} {why}")
    if has_diverged(state.first_losses, state.last_losses):
        reporter.say(f"warning: {_divergence(job)}")
    reporter.say(*job.advice)
    peaks, has_allocator = gather_to_all(reporter.ledger.peak_gib()), reporter.ledger.has_allocator
    if job.env.is_rank_zero:
        events = reporter.metrics.read()
        reporter.say(*compare_with_plan(job.folder, events, peaks, has_allocator=has_allocator))
        if job.network is not None:
            reporter.say(*job.network.lines(events, peaks))
    reporter.show_end(status)
