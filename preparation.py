"""What a run trains with, in the order in which a mistake is cheapest: flags, files, data, weights, run folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from checkpointing.base_fingerprint import base_fingerprint
from checkpointing.comparison import check_same
from checkpointing.finding import Checkpoint, find_checkpoints, open_checkpoint, resolve_resume
from checkpointing.huggingface_files import config_facts, huggingface_files
from checkpointing.resume import load_checkpoint, take_up_results
from checkpointing.saving import CheckpointSaver, choose_async, choose_keep_last, planned_bytes
from checkpointing.state import TrainState
from configs.run import RunConfig
from data.loader import BatchLayout, StepLoader
from data.padding import PaddedWidth
from data.run_data import RunData, load_data, make_loaders
from data.stream_loader import StreamLoader
from data.tokenizer import num_rows_needed
from planning.preflight import batch_layout, check_environment, resolve_context_length, resolve_num_steps
from policies.attention import check_packing_isolates
from policies.building import BuiltModel, build_for_training
from policies.loading import load_model_config
from policies.loss_scaling import LossScaler
from policies.mixed_precision import Precision, resolve_precision
from policies.optimizers.offload import share_out_cores
from policies.optimizers.optimizer import build_optimizer, build_scheduler, optimizer_notes
from policies.quantization import resolve_quantization
from policies.quantized_linear import Quantization
from policies.sharding import Layout, accumulates_unsharded, choose_layout, num_units, unit_notes, unwrap
from reporting.data_preview import look
from reporting.memory_ledger import MemoryLedger
from reporting.metrics_file import MetricsFile
from reporting.profiling import step_recorder
from reporting.run_facts import run_facts, start_event
from reporting.run_folder import checkpoint_root, create_run_folder
from reporting.run_reporter import RunReporter
from reporting.summary import print_for_people, start_table, start_warnings
from reporting.trackers import open_trackers
from supervision.watchdog import Watchdog
from tasks.flops import StepFlops
from tasks.task import Task, find_task
from utils.distributed import on_rank_zero, start_process_group
from utils.environment import Environment, print_rank_zero
from utils.seeding import seed_everything, use_deterministic_kernels


@dataclass(frozen=True)
class Job:
    """What prepare() built and train() uses; all of it stays but the state, which train() moves on."""

    config: RunConfig
    env: Environment
    task: Task
    tokenizer: Any
    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    scaler: LossScaler
    train_loader: StepLoader | StreamLoader
    eval_loader: StepLoader | None
    num_steps: int
    accumulate_unsharded: bool
    state: TrainState
    saver: CheckpointSaver
    folder: Path
    reporter: RunReporter
    watchdog: Watchdog


@dataclass(frozen=True)
class Inputs:
    """What is known of a run before other ranks are met and weights are read."""

    batches: BatchLayout
    precision: Precision
    layout: Layout
    quantization: Quantization | None
    task: Task
    model_config: Any
    context_length: int
    tokenizer: Any
    vocab_size: int
    data: RunData
    data_facts: dict[str, Any]
    width: PaddedWidth
    num_steps: int


@dataclass(frozen=True)
class Parts:
    """What a run trains, and by what."""

    built: BuiltModel
    optimizer: Optimizer
    scheduler: LRScheduler
    scaler: LossScaler
    train_loader: StepLoader | StreamLoader
    eval_loader: StepLoader | None


def prepare(config: RunConfig, env: Environment, watchdog: Watchdog) -> Job:
    """Everything that trains, in the order in which a mistake is cheapest: flags, files, data, weights, run folder.

    Raises:
        ConfigError: where the run is refused; nothing has been written.
    """
    config = resolve_resume(config, env)
    train_config = config.train_config
    if train_config.deterministic:
        use_deterministic_kernels()
    check_environment(config, env)
    found = find_checkpoints(config, env)
    inputs = read_inputs(config, env, open_checkpoint(found, env, every_file=False))
    batches, num_steps = inputs.batches, inputs.num_steps

    start_process_group(env)
    watchdog.start(train_config.step_timeout_seconds)
    inputs.data.check_same_on_all_ranks()
    checkpoint = open_checkpoint(found, env, every_file=True)
    known = {"precision": inputs.precision.name, "data_fingerprint": inputs.data.fingerprint()}
    if checkpoint is not None:
        print_rank_zero(env, *check_same(checkpoint, config, known, num_steps=num_steps))
    seed_everything(train_config.seed)
    parts = build_parts(inputs, config, env)
    built, model, say = parts.built, parts.built.model, partial(print_rank_zero, env)
    seed_everything(train_config.seed, env.rank)

    files = huggingface_files(model, inputs.tokenizer)
    base = on_rank_zero(lambda: base_fingerprint(config, model))
    known_of_model = {"model_config": config_facts(files), "base_fingerprint": base}
    state = TrainState()
    if checkpoint is not None:
        print_rank_zero(env, *check_same(checkpoint, config, known_of_model))
        state = load_checkpoint(checkpoint, model, parts.optimizer, parts.scheduler, parts.scaler, config, env)
    keep_last, disk_notes = on_rank_zero(lambda: choose_keep_last(config, model))
    runs_beside, memory_notes = choose_async(config, env, model)
    print_rank_zero(env, *disk_notes, *memory_notes)

    facts = run_facts(model, built.architecture, inputs.data_facts, env, load_seconds=built.load_seconds)
    start = start_event(facts, env, steps_per_epoch=len(parts.train_loader), num_steps=num_steps)
    accumulate_unsharded = accumulates_unsharded(config, inputs.layout, model, env.device)
    resolved = {
        "precision": inputs.precision.name,
        "sharding_strategy": inputs.layout.strategy,
        "mesh_shape": list(inputs.layout.mesh_shape),
        "num_units": num_units(model),
        "activation_checkpointing": built.checkpointing,
        "attention": built.attention,
        "accumulate_unsharded": accumulate_unsharded,
        "context_length": inputs.context_length,
        "gradient_accumulation_steps": batches.gradient_accumulation_steps,
        "global_batch_size": batches.global_batch_size,
        "keep_last": keep_last,
        "checkpoint_bytes": planned_bytes(model, config),
    }
    resumed = None if checkpoint is None else checkpoint.summary(env)
    folder = on_rank_zero(lambda: create_run_folder(config, env, resolved, facts, resumed))
    if checkpoint is not None:
        take_up_results(checkpoint, state, folder, num_steps)
    watchdog.traces = folder / "traces"
    metrics = MetricsFile(None)
    if env.is_rank_zero:
        print_for_people("", start_table(config, env, start, resolved, facts), "")
        print_rank_zero(env, *start_warnings(config, start), f"run folder: {folder}")
        trackers = open_trackers(config, folder, resolved | start, say, after_step=state.step)
        metrics = MetricsFile(folder / "metrics.jsonl", trackers)
    flops = StepFlops(unwrap(model))
    reporter = RunReporter(
        config.tracking_config,
        env,
        folder,
        metrics=metrics,
        ledger=MemoryLedger(model, parts.optimizer, env.device),
        recorder=step_recorder(config, env, folder, flops, say),
        flops=flops,
        scaler=parts.scaler,
        num_epochs=train_config.num_epochs,
        num_steps=num_steps,
        compiles=train_config.compile,
    )
    saver = CheckpointSaver(
        config,
        env,
        checkpoint_root(config, folder),
        model=model,
        optimizer=parts.optimizer,
        scheduler=parts.scheduler,
        scaler=parts.scaler,
        facts={
            "settings": config.to_dict(),
            "global_batch_size": batches.global_batch_size,
            "num_steps": num_steps,
            **known,
            **known_of_model,
        },
        files=files,
        keep_last=keep_last,
        runs_beside=runs_beside,
        say=say,
        write_event=reporter.checkpoint,
    )
    watchdog.beside.append(saver.group)
    saver.begin(checkpoint)
    reporter.run_started(start, seconds_before=state.seconds)
    return Job(
        config=config,
        env=env,
        task=inputs.task,
        tokenizer=inputs.tokenizer,
        model=model,
        optimizer=parts.optimizer,
        scheduler=parts.scheduler,
        scaler=parts.scaler,
        train_loader=parts.train_loader,
        eval_loader=parts.eval_loader,
        num_steps=num_steps,
        accumulate_unsharded=accumulate_unsharded,
        state=state,
        saver=saver,
        folder=folder,
        reporter=reporter,
        watchdog=watchdog,
    )


def read_inputs(config: RunConfig, env: Environment, checkpoint: Checkpoint | None) -> Inputs:
    """What each rank can know and refuse alone, before the process group starts: no collective can time out while
    someone tokenises.

    Args:
        checkpoint: that the run goes on from, its small files read.
    """
    train_config = config.train_config
    batches, batch_notes = batch_layout(config, env, checkpoint.global_batch_size if checkpoint else None)
    precision, notes = resolve_precision(config, env.device)
    layout = choose_layout(config, precision, env)
    quantization = resolve_quantization(config, precision, layout, env.device)
    model_config = load_model_config(train_config)
    task = find_task(model_config)
    context_length, length_notes = resolve_context_length(config, model_config)
    tokenizer = task.load_processor(config)
    vocab_size = max(model_config.get_text_config().vocab_size, num_rows_needed(tokenizer))
    data = load_data(config, tokenizer, vocab_size=vocab_size, context_length=context_length)
    notes += [*batch_notes, *length_notes, *task.loss_notes(model_config), *data.notes]
    print_rank_zero(env, *config.notes, *notes)
    width = PaddedWidth(train_config.pad_to_multiple_of, context_length)
    return Inputs(
        batches=batches,
        precision=precision,
        layout=layout,
        quantization=quantization,
        task=task,
        model_config=model_config,
        context_length=context_length,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        data=data,
        data_facts=look(data, tokenizer, config, batches, width, env),
        width=width,
        num_steps=resolve_num_steps(config, data.steps_per_epoch(batches)),
    )


def build_parts(inputs: Inputs, config: RunConfig, env: Environment) -> Parts:
    """The model with its weights, what updates it and what feeds it. Every rank must call this."""
    packing, task = config.train_config.batching_strategy == "packing", inputs.task
    built = build_for_training(
        config,
        inputs.model_config,
        inputs.tokenizer,
        auto_model=task.AUTO_MODEL,
        task_type=task.PEFT_TYPE,
        check_model=task.check_model,
        find_backbone=task.backbone,
        precision=inputs.precision,
        quantization=inputs.quantization,
        layout=inputs.layout,
        row_length=inputs.context_length,
        env=env,
    )
    model = built.model
    optimizer = build_optimizer(model, config)
    print_rank_zero(env, *unit_notes(model, config), *optimizer_notes(model, config), *share_out_cores(config, env))
    collate = task.make_collator(
        inputs.tokenizer, inputs.vocab_size, inputs.width, packing=packing, offsets=built.offsets
    )
    if packing:
        check_packing_isolates(
            model,
            lambda rows: task.summed_loss(model, collate(rows).to(env.device)),
            vocab_size=inputs.vocab_size,
            row_length=inputs.context_length,
        )
    say = partial(print_rank_zero, env)
    train_loader, eval_loader = make_loaders(inputs.data, config, inputs.batches, env, collate, say)
    model.train()
    return Parts(
        built=built,
        optimizer=optimizer,
        scheduler=build_scheduler(optimizer, config, steps_per_epoch=len(train_loader), num_steps=inputs.num_steps),
        scaler=LossScaler(active=inputs.precision.scales_loss),
        train_loader=train_loader,
        eval_loader=eval_loader,
    )
