"""What a run trains with, in the order in which a mistake is cheapest: flags, files, data, weights, run folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from checkpointing.base_fingerprint import base_fingerprint
from checkpointing.comparison import check_place, check_same
from checkpointing.finding import Checkpoint, open_checkpoint
from checkpointing.huggingface_files import huggingface_files, model_config_values
from checkpointing.model_folder import export_model
from checkpointing.resume import load_checkpoint, take_up_results
from checkpointing.root import delete_checkpoints
from checkpointing.save_plan import plan_saves
from checkpointing.saver import CheckpointSaver
from checkpointing.train_state import TrainState
from checkpointing.trained import Trained
from configs.absolute_paths import make_paths_absolute
from configs.run import RunConfig
from data.pipeline import make_loaders
from data.step_loader import StepLoader
from data.stream_loader import StreamLoader
from data.tokenizer_loading import added_token_ids, num_rows_needed, tokenizer_of
from evaluation.generation import Generation
from planning.agreement import facts_at_start, facts_found
from planning.cost.network_waits import RunNetwork
from planning.cost.traffic import traffic_of
from planning.data_facts import DataFacts
from planning.going_on import look_into_folders
from planning.inputs import Inputs, read_inputs
from planning.load_check import load_table, loaded_on_all
from planning.places import check_places
from planning.plan_file import plan_for_all, write_plan
from planning.planned_environment import own_hardware
from planning.preflight import check_environment
from planning.resolved import Resolved, resolve, with_choice
from policies.activation_checkpointing import Checkpointing
from policies.attention import check_packing_isolates
from policies.building import BuiltModel, build_for_training
from policies.float8 import computed_in_bf16, keep_scales
from policies.loss_scaling import LossScaler
from policies.optimizers.build import build_optimizer, optimizer_notes
from policies.optimizers.offload import share_out_cores
from policies.optimizers.schedule import build_scheduler
from policies.sharding import accumulates_unsharded, num_units, unit_notes, unwrap
from reporting.collectives import clock_of
from reporting.communication import CommunicationRecorder
from reporting.memory_ledger import MemoryLedger
from reporting.metrics_file import MetricsFile
from reporting.profiling import step_recorder
from reporting.run_description import describe_run, start_event
from reporting.run_folder import Marks, checkpoint_root, create_run_folder, marks_of, planned_folder
from reporting.run_lock import RunLock
from reporting.run_reporter import RunReporter
from reporting.start_table import start_table, start_warnings
from reporting.tables import print_for_people
from reporting.trackers import open_trackers
from supervision.watchdog import Watchdog
from tasks.task import Task
from utils.distributed import check_agreement, on_rank_zero, start_process_group
from utils.environment import Environment, launcher_notes, print_rank_zero
from utils.errors import ConfigError
from utils.job_store import connect
from utils.meeting import meet
from utils.seeding import seed_everything, use_deterministic_kernels
from utils.streams import take_standard_output


@dataclass(frozen=True)
class Trainable(Trained):
    """What is trained, what updates it, and how its gradients accumulate."""

    accumulate_unsharded: bool


@dataclass(frozen=True)
class Loaders:
    """What feeds the model: each gives this rank's micro-batches of a step."""

    train: StepLoader | StreamLoader
    evaluation: StepLoader | None


@dataclass(frozen=True)
class Built:
    """The model, what updates it and what feeds it."""

    built: BuiltModel
    trainable: Trainable
    loaders: Loaders


@dataclass(frozen=True)
class Job:
    """What prepare() built and train() uses; only the state changes, as train() moves it on."""

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
    network: RunNetwork
    watchdog: Watchdog
    folder: Path
    export: Callable[[], Path]  # writes the weights in Hugging Face format and returns their folder
    checkpointing: Checkpointing  # of activations


def prepare(config: RunConfig, env: Environment, watchdog: Watchdog, lock: RunLock) -> Job:
    """Build everything that trains, in the order in which a mistake is cheapest.

    Raises:
        ConfigError: if the run is refused; nothing has been written.
    """
    if config.train_config.deterministic:
        use_deterministic_kernels()
    screen = take_standard_output() if config.tracking_config.log_format == "json" else None
    print_rank_zero(env, *launcher_notes(env))
    config = make_paths_absolute(config, env.started_in)
    meeting = meet(connect(env), env)
    if env.world_size > 1:
        meeting.check_agreement(facts_at_start(config, env))
    begun = look_into_folders(config, env, meeting)
    inputs = read_inputs(begun.config, env, begun.checkpoint)
    config = inputs.resolved.config

    start_process_group(env, meeting)
    watchdog.start(config.train_config.step_timeout_seconds)
    check_agreement(facts_found(config, inputs.resolved, inputs.data, inputs.num_steps, inputs.vocab_size))
    checkpoint = open_checkpoint(begun.folders, env, every_file=True)
    if checkpoint is not None:
        print_rank_zero(env, *check_same(checkpoint, config, inputs.identity(), num_steps=inputs.num_steps))
        steps_per_epoch = inputs.data.steps_per_epoch(inputs.resolved.batches)
        check_place(checkpoint, num_steps=inputs.num_steps, steps_per_epoch=steps_per_epoch)

    plan = plan_for_all(inputs.resolved, env, inputs.data_facts)
    print_rank_zero(env, *plan.notes)
    inputs = replace(inputs, resolved=with_choice(inputs.resolved, plan.checkpointing))
    seed_everything(config.train_config.seed)
    parts = build(inputs, config, env)
    seed_everything(config.train_config.seed, env.rank)
    return open_run(inputs, parts, checkpoint, config, env, watchdog, lock, begun.marks, screen, plan.values)


def load_only(config: RunConfig, env: Environment, watchdog: Watchdog) -> None:
    """Load the model as a run would, and print what each rank holds, beside what was planned. It reads no data.

    Raises:
        ConfigError: if the run is refused.
    """
    config = make_paths_absolute(config, env.started_in)
    meeting = meet(connect(env), env)
    if env.world_size > 1:
        meeting.check_agreement(facts_at_start(config, env))
    check_environment(config, env)
    resolved = resolve(config, env)
    processor = resolved.task.load_processor(config.train_config)
    print_rank_zero(env, *resolved.config.notes, *resolved.notes)
    start_process_group(env, meeting)
    watchdog.start(config.train_config.step_timeout_seconds)
    plan = plan_for_all(resolved, env, lambda: DataFacts.of_processor(processor, resolved))
    print_rank_zero(env, *plan.notes)
    seed_everything(config.train_config.seed)
    built = build_model(with_choice(resolved, plan.checkpointing), processor, env)
    found = loaded_on_all(built.model, env)
    if env.is_rank_zero:
        print_for_people("", load_table(found, plan.values), "", f"loaded in {built.load_seconds:.1f} s")
    watchdog.stop()


def build_model(resolved: Resolved, processor: Any, env: Environment) -> BuiltModel:
    """The model with its weights. Every rank must call this."""
    return build_for_training(
        resolved.config,
        resolved.model_config,
        task=resolved.task,
        policies=resolved.policies,
        row_length=resolved.context_length,
        num_embeddings=num_rows_needed(tokenizer_of(processor)),
        new_tokens=added_token_ids(tokenizer_of(processor), resolved.config.train_config),
        env=env,
    )


def build(inputs: Inputs, config: RunConfig, env: Environment) -> Built:
    """Build the model with its weights, what updates it and what feeds it. Every rank must call this."""
    resolved, task = inputs.resolved, inputs.resolved.task
    built = build_model(resolved, inputs.processor, env)
    model = built.model
    train, fsdp = replace(config.train_config, lr=resolved.lr), config.fsdp_config
    optimizer = build_optimizer(model, train, fsdp)
    keep_scales(model, optimizer, resolved.policies.float8)
    notes = [*unit_notes(model, fsdp.wrap), *optimizer_notes(model, train.lr, fsdp), *share_out_cores(fsdp, env)]
    print_rank_zero(env, *notes)
    packing = train.batching_strategy == "packing"
    collate = task.make_collator(
        inputs.processor,
        built.empty.model.config,
        vocab_size=inputs.vocab_size,
        widths=resolved.widths,
        packing=packing,
        offsets=built.empty.offsets,
    )
    if packing:
        with computed_in_bf16(model):  # in float8 the scale of activations is that of all documents
            check_packing_isolates(
                model,
                lambda rows: task.summed_loss(model, collate(rows).to(env.device)),
                vocab_size=inputs.vocab_size,
                row_length=resolved.context_length,
            )
    say = partial(print_rank_zero, env)
    loaders = Loaders(*make_loaders(inputs.data, config.train_config, resolved.batches, env, collate, say))
    steps_per_epoch = len(loaders.train)
    model.train()
    trainable = Trainable(
        model=model,
        optimizer=optimizer,
        scheduler=build_scheduler(optimizer, train, steps_per_epoch=steps_per_epoch, num_steps=inputs.num_steps),
        scaler=LossScaler(active=resolved.policies.precision.scales_loss),
        accumulate_unsharded=accumulates_unsharded(
            fsdp.accumulate_unsharded, resolved.policies.layout, model, env.device_facts
        ),
    )
    return Built(built, trainable, loaders)


def open_run(
    inputs: Inputs,
    parts: Built,
    checkpoint: Checkpoint | None,
    config: RunConfig,
    env: Environment,
    watchdog: Watchdog,
    lock: RunLock,
    marks: Marks,
    screen: TextIO | None,
    plan: dict[str, Any] | None,
) -> Job:
    """Load the checkpoint's state, make the run folder, and open what writes to it. Every rank must call this.

    Args:
        marks: of the run's folders, when the checkpoint was looked for.
        screen: standard output, if only events are to be printed there.
        plan: for plan.json, on rank 0.
    """
    train, trainable, say = config.train_config, parts.trainable, partial(print_rank_zero, env)
    model, loader = trainable.model, parts.loaders.train
    files = huggingface_files(model, inputs.processor)
    base = on_rank_zero(lambda: base_fingerprint(model, train))
    model_identity = {"model_config": model_config_values(files), "base_fingerprint": base}
    state = TrainState()
    if checkpoint is not None:
        say(*check_same(checkpoint, config, model_identity))
        offload = config.fsdp_config.optimizer_cpu_offload
        state = load_checkpoint(checkpoint, trainable, env, seed=train.seed, optimizer_cpu_offload=offload)
        if isinstance(loader, StreamLoader):
            state.stay_in_first_epoch()
            loader.state = checkpoint.stream_state()
    planned_root = checkpoint_root(train, planned_folder(train, env))
    save_plan, save_notes = plan_saves(model, train, config.fsdp_config, planned_root, env)
    say(*save_notes)

    empty, load_seconds = parts.built.empty, parts.built.load_seconds
    description = describe_run(model, empty.architecture, inputs.preview, env, load_seconds=load_seconds)
    start = start_event(description, env, steps_per_epoch=len(parts.loaders.train), num_steps=inputs.num_steps)
    resolved = inputs.resolved.to_dict() | {
        "num_units": num_units(model),
        "activation_checkpointing": str(empty.checkpointing),
        "attention": empty.attention,
        "accumulate_unsharded": trainable.accumulate_unsharded,
        "keep_last": save_plan.keep_last,
        "checkpoint_bytes": save_plan.num_bytes,
    }
    resumed = None if checkpoint is None else checkpoint.summary(env)

    def check(folder: Path) -> None:
        if marks_of(train, env) != marks:
            raise ConfigError(
                f"--output_dir: another run wrote into {folder} while this one was loading; give the same command again"
            )
        check_places(config, folder, afresh=resumed is None)

    folder = on_rank_zero(
        lambda: create_run_folder(
            config,
            env,
            lock,
            check=check,
            delete_checkpoints=partial(delete_checkpoints, train),
            resolved=resolved,
            description=description,
            resumed=resumed,
        )
    )
    if checkpoint is not None:
        take_up_results(checkpoint, state, folder, inputs.num_steps)
    watchdog.traces = folder / "traces"
    if env.is_rank_zero:
        write_plan(folder, plan)
        print_for_people("", start_table(config, env, start, resolved, description), "")
        say(*start_warnings(train, start), f"run folder: {folder}")

    reporter = open_reporter(
        inputs, trainable, config, env, folder, screen, figures=resolved | start, after_step=state.step
    )
    saver = CheckpointSaver(
        trainable,
        save_plan,
        checkpoint_root(train, folder),
        metadata={
            "settings": config.to_dict(),
            "global_batch_size": inputs.resolved.batches.global_batch_size,
            "num_steps": inputs.num_steps,
            "began_with": inputs.resolved.began_with._asdict(),
            **inputs.identity(),
            **model_identity,
        },
        files=files,
        stream_state=lambda: loader.state if isinstance(loader, StreamLoader) else None,
        say=say,
        write_event=reporter.checkpoint,
    )
    watchdog.beside.append(saver.group)
    saver.begin(checkpoint)
    reporter.run_started(start, seconds_before=state.seconds)
    accumulates = trainable.accumulate_unsharded
    network = RunNetwork(
        inputs.resolved.policies.layout,
        traffic_of(parts.built.adapted, inputs.resolved, accumulate_unsharded=accumulates),
        own_hardware(train, config.planning_config, env),
    )
    return Job(
        config=config,
        env=env,
        task=inputs.resolved.task,
        trainable=trainable,
        loaders=parts.loaders,
        generation=inputs.generation,
        num_steps=inputs.num_steps,
        state=state,
        saver=saver,
        reporter=reporter,
        network=network,
        watchdog=watchdog,
        folder=folder,
        export=partial(export_model, model, inputs.processor, folder),
        checkpointing=empty.checkpointing,
    )


def open_reporter(
    inputs: Inputs,
    trainable: Trainable,
    config: RunConfig,
    env: Environment,
    folder: Path,
    screen: TextIO | None,
    *,
    figures: dict[str, Any],
    after_step: int,
) -> RunReporter:
    """The reporter of a run, with its trackers on rank 0.

    Args:
        screen: gets the events, too, if there is one.
        figures: what trackers keep beside the settings.
        after_step: the step that a resumed run goes on after.
    """
    tracking, say = config.tracking_config, partial(print_rank_zero, env)
    metrics = samples = MetricsFile(None)
    if env.is_rank_zero:
        trackers = open_trackers(tracking, folder, config.to_dict(), figures, say, after_step=after_step)
        metrics = MetricsFile(folder / "metrics.jsonl", trackers, screen)
        samples = MetricsFile(folder / "samples.jsonl") if inputs.generation else samples
    flops = inputs.resolved.task.make_flops(unwrap(trainable.model))
    return RunReporter(
        tracking,
        env,
        folder,
        metrics=metrics,
        samples=samples,
        ledger=MemoryLedger(trainable.model, trainable.optimizer, env.device),
        recorder=step_recorder(tracking, env, folder, flops, say),
        communication=CommunicationRecorder(trainable.model, clock_of(env.device)),
        flops=flops,
        scaler=trainable.scaler,
        num_epochs=config.train_config.num_epochs,
        num_steps=inputs.num_steps,
        compiles=config.train_config.compile,
    )
