"""Builds all that a run trains with. The cheapest mistakes are found first: flags, files, data, weights, folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from checkpointing.base_fingerprint import base_fingerprint, num_packed_weights
from checkpointing.continuation import continuing, name_end_tokens
from checkpointing.huggingface_files import huggingface_files, model_config_values
from checkpointing.model_folder import export_model
from checkpointing.resume import restore_results
from checkpointing.save_plan import plan_saves
from checkpointing.saver import CheckpointSaver
from checkpointing.train_state import TrainState
from configs.run import RunConfig
from data.loaders import Loaders
from planning.cost.network_waits import RunNetwork
from planning.out_of_memory.predicted import Decided
from planning.plan_file import write_plan
from preparation.building import Trainable, build, build_model, check_losses
from preparation.compile_trial import try_to_compile
from preparation.outputs import open_reporter, open_saver, record_run, show_start, take_folder
from preparation.reference_scores import reference_files, with_reference
from preparation.resuming import find_checkpoint, load_state
from preparation.start import (
    agree_on_attention,
    agree_to_compile,
    follow_plan,
    join_ranks_of_rows,
    meet_ranks,
    start_ranks,
)
from preparation.vision_features import with_vision_features
from ranks.agreement import check_agreement
from ranks.collectives import on_rank_zero
from ranks.environment import Environment, print_rank_zero
from reporting.run_reporter import RunReporter
from reporting.start_warnings import few_steps_lines
from resolving.agreement import facts_found
from resolving.inputs import read_inputs
from resolving.resume_state import find_resume_state
from run_folder.lock import RunLock
from supervision.watchdog import Watchdog
from tasks.task import Task
from utils.seeding import seed_everything
from utils.streams import take_standard_output

if TYPE_CHECKING:
    from evaluation.generation import Generation


@dataclass(frozen=True)
class Job:
    """The parts that prepare() built for train(); only the state changes, as train() moves it on."""

    config: RunConfig
    env: Environment
    task: Task
    trainable: Trainable
    loaders: Loaders
    generation: Generation | None
    num_steps: int
    state: TrainState
    saver: CheckpointSaver
    reporter: RunReporter
    network: RunNetwork | None  # None if the run could not be planned
    watchdog: Watchdog
    folder: Path
    export: Callable[[], Path]  # writes the weights in Hugging Face format and returns their folder
    decided: Decided  # for the plan of an out-of-memory report
    advice: tuple[str, ...]  # lines to print at the end
    batch_flags: tuple[str, ...]  # of the batches that the run chose


def prepare(config: RunConfig, env: Environment, watchdog: Watchdog, lock: RunLock) -> Job:
    """Build everything that trains. Every rank must call this.

    Raises:
        ConfigError: if the run is refused; nothing has been written.
    """
    # All that each rank can read and refuse alone: no collective waits for a tokenizer.
    # Before this run prints anything: under --log_format json events alone go to standard output.
    screen = take_standard_output() if config.tracking_config.log_format == "json" else None
    config, meeting = meet_ranks(config, env)
    with meeting.sharing_refusals():
        resume = find_resume_state(config, env, meeting)
        inputs = read_inputs(resume.config, env, resume.checkpoint)
        config, num_steps = inputs.resolved.config, inputs.num_steps
        start_ranks(meeting, config, env, watchdog)

    # Facts in which all ranks must agree, and choices that decide how the model is built.
    check_agreement(facts_found(inputs))
    checkpoint = find_checkpoint(resume.folder, inputs, env)
    resolved = join_ranks_of_rows(agree_on_attention(inputs.resolved, env), env)
    resolved, plan = follow_plan(resolved, env, inputs.data_facts, checkpoint)
    resolved, plan = agree_to_compile(resolved, plan, env, inputs.data_facts, checkpoint)
    inputs = replace(inputs, resolved=resolved)
    train = resolved.config.train_config

    # Weights.
    built = build_model(resolved, inputs.processor, env)
    check_losses(built, inputs, env)
    built, inputs, plan = try_to_compile(built, inputs, plan, env, checkpoint)
    inputs = with_vision_features(built, inputs, env)
    resolved, config = inputs.resolved, inputs.resolved.config
    inputs = with_reference(built, inputs, checkpoint, env, watchdog)
    parts = build(built, inputs, env)
    print_rank_zero(env, *plan.notes)
    model = parts.trainable.model
    seed_everything(train.seed, env.rank)  # from here on, dropout differs from rank to rank
    continuation = inputs.continuation()
    print_rank_zero(env, *name_end_tokens(model, inputs.processor, continuation))
    saved = continuing(inputs.processor, continuation)
    files = huggingface_files(model, saved, resolved.config_overrides) | reference_files(inputs.data)
    base = on_rank_zero(lambda: base_fingerprint(model, train))
    model_identity = {
        "model_config": model_config_values(files),
        "base_fingerprint": base,
        "packed_weights": num_packed_weights(model),
    }
    state = load_state(checkpoint, parts, model_identity, config, env)
    save_plan, save_notes = plan_saves(model, train, config.fsdp_config, resume.folder.checkpoint_root, env)
    print_rank_zero(env, *save_notes)

    # The run's outputs.
    record = record_run(inputs, parts, save_plan, env)
    run_folder = take_folder(resume.folder, lock, config, record, checkpoint, env)
    folder, root = run_folder.path, run_folder.checkpoint_root
    # Before the reporter opens metrics.jsonl: it appends, and counts the lines that are there.
    if checkpoint is not None:
        restore_results(checkpoint, state, folder, num_steps)
    watchdog.leave_traces_in(folder / "traces")
    if env.is_rank_zero:
        write_plan(folder, plan.values)
        show_start(config, env, record, folder)
    reporter = open_reporter(inputs, parts, record, env, folder, screen, after_step=state.step)
    saver = open_saver(
        *(inputs, parts, plan, save_plan, root, reporter),
        checkpoint=checkpoint,
        model_identity=model_identity,
        files=files,
    )
    watchdog.leave_out(saver.group)  # its thread's collectives tell nothing of the main thread
    saver.begin(checkpoint)
    reporter.run_started(record.start, seconds_before=state.seconds)
    return Job(
        config=config,
        env=env,
        task=resolved.task,
        trainable=parts.trainable,
        loaders=parts.loaders,
        generation=inputs.generation and replace(inputs.generation, collate=parts.collate),
        num_steps=num_steps,
        state=state,
        saver=saver,
        reporter=reporter,
        network=plan.network,
        watchdog=watchdog,
        folder=folder,
        export=partial(export_model, model, saved, folder, dtype=resolved.saved_dtype, rope=resolved.config_overrides),
        decided=Decided(
            parts.empty.checkpointing,
            resolved.policies.layout.num_replicated,
            resumed_size=None if checkpoint is None else resolved.batches.global_batch_size,
        ),
        advice=tuple(few_steps_lines(config, record.start, record.resolved, record.description["data"])),
        batch_flags=resolved.batch_flags,
    )
