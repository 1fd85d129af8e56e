"""A run's outputs, opened before its first step: its folder with run.yaml, its events, and its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from checkpointing.comparison import trains_on
from checkpointing.earlier_choice import FIELD, TILES, kept_values
from checkpointing.epochs import epochs_of
from checkpointing.finding import Checkpoint
from checkpointing.save_plan import SavePlan
from checkpointing.saver import CheckpointSaver
from configs.run import RunConfig
from data.streaming.loader import StreamLoader
from planning.plan_file import PlanAtStart
from policies.sharding import num_units, unwrap
from preparation.building import TrainingParts
from ranks.collectives import on_rank_zero
from ranks.environment import Environment, print_rank_zero
from reporting.collective_timeline import clock_of
from reporting.communication import CommunicationRecorder
from reporting.instruments import Instruments
from reporting.memory_ledger import MemoryLedger
from reporting.metrics_file import MetricsFile
from reporting.profiling import step_recorder
from reporting.run_description import describe_run, start_event
from reporting.run_reporter import RunReporter, RunSpan
from reporting.start_table import start_table
from reporting.start_warnings import start_warnings
from reporting.tables import print_for_people
from reporting.trackers import open_trackers
from resolving.inputs import Inputs
from resolving.shared_prompts import shares_prompts
from run_folder.lock import RunLock
from run_folder.run_folder import RunFolder


class RunRecord(NamedTuple):
    """Facts of a run besides its settings, for run.yaml, the start table and trackers."""

    resolved: dict[str, Any]  # the settings with their defaults decided
    description: dict[str, Any]  # model, data and devices
    start: dict[str, Any]  # the `start` event


def record_run(inputs: Inputs, parts: TrainingParts, save_plan: SavePlan, env: Environment) -> RunRecord:
    """The record of a run that is about to start. Every rank must call this."""
    empty, trainable = parts.empty, parts.trainable
    resolved = inputs.resolved.to_dict() | {
        "num_units": num_units(trainable.model),
        "activation_checkpointing": str(empty.checkpointing),
        "num_offloaded_layers": empty.num_offloaded,
        "num_replicated_layers": inputs.resolved.policies.layout.num_replicated or 0,
        "attention": empty.attention,
        "accumulate_unsharded": trainable.accumulation.unsharded,
        "keep_last": save_plan.keep_last,
        "checkpoint_bytes": save_plan.num_bytes,
    }
    description = describe_run(
        trainable.model, empty.architecture, inputs.preview, env, load_seconds=parts.load_seconds
    )
    start = start_event(description, env, steps_per_epoch=len(parts.loaders.train), num_steps=inputs.num_steps)
    return RunRecord(resolved, description, start)


def take_folder(
    folder: RunFolder,
    lock: RunLock,
    config: RunConfig,
    record: RunRecord,
    checkpoint: Checkpoint | None,
    env: Environment,
) -> RunFolder:
    """The run's folder, held by `lock`, with its run.yaml. Every rank must call this.

    Args:
        checkpoint: the one that the run goes on from.

    Raises:
        ConfigError: on every rank, if another run has written there since, or if files of others would be lost.
    """
    resumed = None if checkpoint is None else checkpoint.summary(env)
    trains = checkpoint is None or trains_on(checkpoint, record.start["num_steps"])
    resolved, description = record.resolved, record.description
    return on_rank_zero(
        lambda: folder.take(
            lock, config, env, resolved=resolved, description=description, resumed=resumed, trains=trains
        )
    )


def show_start(config: RunConfig, env: Environment, record: RunRecord, folder: Path) -> None:
    """Print the table of the run that starts. Call this on rank 0."""
    print_for_people("", start_table(config, env, record.start, record.resolved, record.description), "")
    warnings = start_warnings(config, record.start, record.resolved, record.description["data"])
    print_rank_zero(env, *warnings, f"run folder: {folder}")


def open_reporter(
    inputs: Inputs,
    parts: TrainingParts,
    record: RunRecord,
    env: Environment,
    folder: Path,
    screen: TextIO | None,
    *,
    after_step: int,
) -> RunReporter:
    """The reporter of a run, with its trackers on rank 0.

    Args:
        screen: gets the events, too, if there is one.
        after_step: the step that a resumed run goes on after.
    """
    config, say, trainable = inputs.resolved.config, partial(print_rank_zero, env), parts.trainable
    tracking = config.tracking_config
    metrics = samples = MetricsFile(None)
    if env.is_rank_zero:
        figures = record.resolved | record.start
        trackers = open_trackers(tracking, folder, config.to_dict(), figures, say, after_step=after_step)
        metrics = MetricsFile(folder / "metrics.jsonl", trackers, screen)
        samples = MetricsFile(folder / "samples.jsonl") if inputs.generation else samples
    flops = inputs.resolved.task.make_flops(unwrap(trainable.model))
    return RunReporter(
        tracking,
        env,
        folder,
        RunSpan(config.train_config.num_epochs, inputs.num_steps, after_step),
        Instruments(
            ledger=MemoryLedger(trainable.model, trainable.optimizer, env.device),
            communication=CommunicationRecorder(trainable.model, clock_of(env.device)),
            recorder=step_recorder(tracking, env, folder, flops, say),
            flops=flops,
            scaler=trainable.scaler,
            pinned=parts.pinned,
        ),
        metrics=metrics,
        samples=samples,
        mean_over=inputs.resolved.task.MEAN_OVER,
        compiles=bool(config.train_config.compile),
    )


def open_saver(
    inputs: Inputs,
    parts: TrainingParts,
    plan: PlanAtStart,
    save_plan: SavePlan,
    root: Path,
    reporter: RunReporter,
    *,
    checkpoint: Checkpoint | None,
    model_identity: Mapping[str, Any],
    files: Mapping[str, bytes],
) -> CheckpointSaver:
    """The saver of a run's checkpoints, which tells the reporter of each. Every rank must call this.

    Args:
        root: the folder of the checkpoints.
        checkpoint: the one that the run goes on from.
        model_identity: facts of the model that a resumed run must have in common with this one.
        files: small ones that every checkpoint carries.
    """
    config, loader = inputs.resolved.config, parts.loaders.train
    is_stream = isinstance(loader, StreamLoader)  # one epoch, whose steps --max_train_step may change
    before = None if checkpoint is None or is_stream else checkpoint.values
    return CheckpointSaver(
        parts.trainable,
        save_plan,
        root,
        metadata={
            "settings": config.to_dict(),
            "global_batch_size": inputs.resolved.batches.global_batch_size,
            "num_steps": inputs.num_steps,
            "epochs": epochs_of(before, len(loader)),
            "began_with": inputs.resolved.began_with._asdict(),
            "shares_prompts": shares_prompts(inputs.resolved.task),
            FIELD: kept_values(parts.empty.checkpointing, plan.card),
            TILES: parts.empty.checkpointing.tile_tokens,
            **inputs.identity(),
            **model_identity,
        },
        files=files,
        stream_state=lambda: loader.state if isinstance(loader, StreamLoader) else None,
        say=reporter.say,
        write_event=reporter.checkpoint,
    )
