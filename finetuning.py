"""Fine-tune a Hugging Face causal language model on one CPU, one GPU, or many GPUs.

    torchrun --nproc_per_node 4 finetuning.py --enable_fsdp --use_peft --model_name M --output_dir O
    python finetuning.py --model_name M --samsum_dataset.data_path my_dialogues/
    python finetuning.py --help

The run, top to bottom: main() reads flags, prepare() builds everything that trains, train() is the loop,
train_step() one optimizer step, evaluate() one pass over the validation set.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.exit_status import FAILED, REFUSED, leave
from utils.failures import TrainingError, end_unless_flags_hold, end_with_error

if __name__ == "__main__":
    end_unless_flags_hold(sys.argv[1:])  # before the imports below, which take seconds: at once

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm

import policies.loading as loading
from checkpointing.export import export_model
from checkpointing.sharded import save_sharded
from configs.errors import ConfigError
from configs.flags import parse_flags
from configs.run import RunConfig
from planning.preflight import batch_layout, check_environment, resolve_context_length, resolve_num_steps
from policies import apply_policies
from policies.activation_checkpointing import checkpointing_mode
from policies.attention import BY_OFFSETS, check_packing_isolates, choose_attention
from policies.clipping import clip_grad_norm
from policies.loss import loss_notes
from policies.mixed_precision import resolve_precision
from policies.optimizer import build_optimizer, build_scheduler
from policies.optimizer_offload import share_out_cores
from policies.sharding import (
    accumulates_unsharded,
    choose_layout,
    gradient_sync,
    num_units,
    reshard,
    unit_notes,
    unwrap,
)
from policies.weights import find_weights
from tasks import causal_lm as task
from utils.data import load_data, make_loaders
from utils.dataloader import StepLoader
from utils.distributed import gather_to_all, on_rank_zero, start_process_group, stop_process_group, sum_on_host
from utils.environment import Environment, print_rank_zero, read_environment
from utils.look import look
from utils.memory import MemoryLedger, is_observed_step
from utils.metrics import MetricsFile, StepFlops, end_facts, log_line, perplexity, write_metrics_data
from utils.non_finite import NonFiniteError, describe_non_finite
from utils.padding import PaddedWidth
from utils.profiling import StepRecorder, step_recorder
from utils.quiet import quiet_libraries
from utils.run_facts import run_facts, start_event
from utils.run_folder import add_to_run_yaml, create_run_folder
from utils.seeding import seed_everything
from utils.stream_loader import StreamLoader
from utils.summary import end_summary, print_for_people, start_table, start_warnings
from utils.tokenization import load_tokenizer, num_rows_needed, padding_id
from utils.trackers import open_trackers
from utils.watchdog import Watchdog


def train_step(
    model: nn.Module,
    micro_batches: Sequence[task.MicroBatch],
    optimizer: Optimizer,
    config: RunConfig,
    *,
    device: torch.device,
    num_label_tokens: float,
    world_size: int,
    accumulate_unsharded: bool,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One optimizer step over this rank's micro-batches of the global batch.

    Args:
        device: where to compute; parameters may live elsewhere.
        num_label_tokens: label tokens of the global batch, all ranks and micro-batches together.
        on_phase: called at each of `utils.memory.PHASES`.

    Returns:
        Loss (mean over the label tokens of the global batch) and gradient norm before clipping: fp32 scalars in host
        memory, the same on every rank.

    Raises:
        NonFiniteError: on every rank, with weights and optimizer states as they were.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    losses = []
    on_phase("before_forward")
    for index, batch in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        with gradient_sync(model, is_last=is_last, accumulate_unsharded=accumulate_unsharded):
            loss = task.summed_loss(model, batch.to(device)) / num_label_tokens
            if index == 0:
                on_phase("after_forward")
            (loss * world_size).backward()  # ranks' gradients are averaged: this makes it their sum
        losses.append(loss.detach())
    on_phase("after_backward")
    loss = torch.stack(losses).sum()
    torch.distributed.all_reduce(loss)
    clips = config.train_config.gradient_clipping
    grad_norm = clip_grad_norm(parameters, config.train_config.gradient_clipping_threshold if clips else None)
    # The one place where the host waits for the device; the update itself then runs beside the next step's start.
    loss, grad_norm = torch.stack([loss, grad_norm]).cpu().unbind()
    if not (torch.isfinite(loss) and torch.isfinite(grad_norm)):
        bad = [not math.isfinite(micro_loss) for micro_loss in losses]
        rows = [row for batch, is_bad in zip(micro_batches, bad, strict=True) if is_bad for row in batch.source_rows]
        raise NonFiniteError(rows)
    optimizer.step()
    on_phase("after_optimizer_step")
    optimizer.zero_grad(set_to_none=True)
    return loss, grad_norm


@torch.no_grad()
def evaluate(model: nn.Module, steps: Iterable[list[task.MicroBatch]], device: torch.device) -> tuple[float, int]:
    """Mean loss over every label token of the validation set, and their number.

    Every rank takes part in every batch (an empty one where rows ran out), so none waits for another.
    """
    model.eval()
    total = torch.zeros((), device=device)
    count = 0
    for micro_batches in steps:
        for batch in micro_batches:
            total += task.summed_loss(model, batch.to(device))
            count += batch.num_label_tokens
    model.train()
    reshard(model)
    loss_sum, num_label_tokens = sum_on_host(total.item(), count)
    return loss_sum / max(1.0, num_label_tokens), int(num_label_tokens)


@dataclass(frozen=True)
class Job:
    """What prepare() built and train() uses."""

    config: RunConfig
    env: Environment
    tokenizer: Any
    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    train_loader: StepLoader | StreamLoader
    eval_loader: StepLoader | None
    num_steps: int
    accumulate_unsharded: bool
    flops: StepFlops
    ledger: MemoryLedger
    recorder: StepRecorder
    folder: Path
    metrics: MetricsFile
    watchdog: Watchdog


def train(job: Job) -> None:
    """The loop: epochs of optimizer steps, evaluation, and the best weights saved as they come.

    Raises:
        TrainingError: where an update would not be finite; it names the samples.
    """
    config, env, model, metrics = job.config.train_config, job.env, job.model, job.metrics
    log_every_steps = job.config.tracking_config.log_every_steps
    step, best_loss = 0, math.inf

    def validate(epoch: int) -> float | None:
        """Evaluate, write it down, and save the weights where they are the best so far."""
        nonlocal best_loss
        if job.eval_loader is None:
            return None
        steps, total = job.watchdog.each(job.eval_loader.epoch(0), step, "evaluating"), len(job.eval_loader)
        bar = tqdm(steps, desc="eval", total=total, leave=False, disable=not env.is_rank_zero)
        loss, num_label_tokens = evaluate(model, bar, env.device)
        ppl = perplexity(loss)
        metrics.write("eval", step=step, epoch=epoch, loss=loss, perplexity=ppl, num_label_tokens=num_label_tokens)
        say(env, f"eval | step {step} | epoch {epoch} | loss {loss:.4f} | perplexity {ppl:.3f}")
        if step > 0 and loss < best_loss:
            best_loss = loss
            if config.save_model:
                save(job, step)
        return loss

    if config.eval_before_training:
        validate(epoch=0)
    for epoch in range(1, config.num_epochs + 1):
        epoch_started, epoch_loss_sum, epoch_tokens = time.perf_counter(), 0.0, 0
        steps_left = min(len(job.train_loader), job.num_steps - step)
        last_step_of_epoch = step + steps_left
        batches = job.train_loader.epoch(epoch - 1)
        bar = tqdm(range(steps_left), desc=f"epoch {epoch}/{config.num_epochs}", disable=not env.is_rank_zero)
        for _ in bar:
            step += 1
            job.watchdog.at(step, "training")
            step_started = time.perf_counter()
            micro_batches = next(batches)
            data_wait = time.perf_counter() - step_started
            counts = task.count_globally(micro_batches)
            lr = job.scheduler.get_last_lr()[0]
            job.ledger.observe(is_observed_step(step, last_of_epoch=step == last_step_of_epoch))
            try:
                with job.recorder(step, counts):
                    loss, grad_norm = train_step(
                        model,
                        micro_batches,
                        job.optimizer,
                        job.config,
                        device=env.device,
                        num_label_tokens=counts.num_label_tokens,
                        world_size=env.world_size,
                        accumulate_unsharded=job.accumulate_unsharded,
                        on_phase=job.ledger.record,
                    )
            except NonFiniteError as error:
                every_row = [row for batch in micro_batches for row in batch.source_rows]
                raise TrainingError(describe_non_finite(step, error, every_row, config.datasets)) from None
            job.scheduler.step()
            seconds = time.perf_counter() - step_started
            epoch_loss_sum += loss.item() * counts.num_label_tokens
            epoch_tokens += counts.num_label_tokens
            rates = job.flops.rates(counts, seconds, env.world_size)
            event = {
                "step": step,
                "epoch": epoch,
                "loss": loss.item(),
                "perplexity": perplexity(loss.item()),
                "grad_norm": grad_norm.item(),
                "lr": lr,
                "num_label_tokens": counts.num_label_tokens,
                "num_tokens": counts.num_tokens,
                "step_seconds": seconds,
                **rates,
                "data_wait_seconds": data_wait,
            }
            metrics.write("train", **event)
            write_memory(job, step)
            bar.set_postfix_str(f"loss {event['loss']:.4f}", refresh=False)
            if step == 1 or step % log_every_steps == 0 or step == job.num_steps:
                say(env, log_line(event, num_steps=job.num_steps, peak_gib=job.ledger.peak_gib()))
            if config.eval_every_steps and step % config.eval_every_steps == 0 and step != last_step_of_epoch:
                validate(epoch)
        eval_loss = validate(epoch)
        epoch_seconds = time.perf_counter() - epoch_started
        train_loss = epoch_loss_sum / max(1.0, epoch_tokens)
        metrics.write("epoch", epoch=epoch, seconds=epoch_seconds, train_loss=train_loss, eval_loss=eval_loss)
        if step >= job.num_steps:
            break
    if config.save_model and not math.isfinite(best_loss):
        save(job, step)  # no validation, or none that was finite: the last weights
    if config.dist_checkpoint_root_folder and config.save_model:
        folder = Path(config.dist_checkpoint_root_folder) / config.dist_checkpoint_folder
        job.watchdog.at(step, "saving")
        save_sharded(model, job.optimizer if config.save_optimizer else None, folder)
        say(env, f"sharded copy of the trained weights: {folder}")


def say(env: Environment, line: str) -> None:
    """A line on rank 0, above the progress bar."""
    if env.is_rank_zero:
        tqdm.write(line)
        sys.stdout.flush()


def write_memory(job: Job, step: int) -> None:
    """The ledger's figures of every rank, on the steps that were observed."""
    if job.ledger.active:
        for rank, entries in enumerate(gather_to_all(job.ledger.take())):
            for entry in entries:
                job.metrics.write("memory", step=step, rank=rank, **entry)


def save(job: Job, step: int) -> None:
    """The weights as they are now, in Hugging Face format."""
    job.watchdog.at(step, "saving")
    folder = export_model(job.model, job.tokenizer, job.folder)
    if job.env.is_rank_zero:
        add_to_run_yaml(job.folder, saved={"step": step, "folder": folder.name})


def prepare(config: RunConfig, env: Environment, watchdog: Watchdog) -> Job:
    """Everything that trains, in the order in which a mistake is cheapest: flags, files, data, weights, run folder.

    Raises:
        ConfigError: where the run is refused; nothing has been written.
    """
    train_config = config.train_config
    check_environment(config, env)
    batches = batch_layout(config, env)
    precision, notes = resolve_precision(config, env.device)
    layout = choose_layout(config, precision, env)
    model_config = loading.load_model_config(config)
    context_length, length_notes = resolve_context_length(config, model_config)
    tokenizer = load_tokenizer(config)
    vocab_size = max(model_config.get_text_config().vocab_size, num_rows_needed(tokenizer))
    data = load_data(config, tokenizer, vocab_size=vocab_size, context_length=context_length)
    print_rank_zero(env, *config.notes, *notes, *length_notes, *loss_notes(model_config), *data.notes)
    width = PaddedWidth(train_config.pad_to_multiple_of, context_length)
    data_facts = look(data, tokenizer, config, batches, width, env)
    num_steps = resolve_num_steps(config, data.steps_per_epoch(batches))

    start_process_group(env)
    watchdog.start(train_config.step_timeout_seconds)
    data.check_same_on_all_ranks()
    seed_everything(train_config.seed)
    load_started, dtype = time.perf_counter(), precision.storage_dtype
    model = loading.build_model(config, model_config, task.AUTO_MODEL, dtype)
    attention_notes = choose_attention(model, config, precision, env.device)
    attention = model.config.get_text_config()._attn_implementation
    growth_notes = loading.grow_embeddings(model, tokenizer, use_peft=train_config.use_peft)
    weights = find_weights(config, model, task.AUTO_MODEL, dtype, env, num_rows=num_rows_needed(tokenizer))
    print_rank_zero(env, *attention_notes, *growth_notes, weights.note)
    architecture = type(model).__name__  # sharding and adapters rename it
    checkpointing, checkpointing_notes = checkpointing_mode(config, model)
    model = apply_policies(
        model, config, precision=precision, layout=layout, checkpointing=checkpointing, weights=weights, env=env
    )
    load_seconds = time.perf_counter() - load_started
    optimizer = build_optimizer(model, config)
    print_rank_zero(env, *checkpointing_notes, *unit_notes(model, config), *share_out_cores(config, env))
    packing = train_config.batching_strategy == "packing"
    collate = task.Collator(
        packing=packing,
        padding_id=padding_id(tokenizer, vocab_size),
        width=width,
        offsets=attention == BY_OFFSETS,
    )
    if packing:
        check_packing_isolates(
            model,
            lambda rows: task.summed_loss(model, collate(rows).to(env.device)),
            vocab_size=vocab_size,
            row_length=context_length,
        )
    train_loader, eval_loader = make_loaders(data, config, batches, env, collate, lambda line: say(env, line))
    scheduler = build_scheduler(optimizer, config, steps_per_epoch=len(train_loader), num_steps=num_steps)
    seed_everything(train_config.seed, env.rank)
    model.train()

    facts = run_facts(model, architecture, data_facts, env, load_seconds=load_seconds)
    start = start_event(facts, env, steps_per_epoch=len(train_loader), num_steps=num_steps)
    accumulate_unsharded = accumulates_unsharded(config, layout, model, env.device)
    resolved = {
        "precision": precision.name,
        "sharding_strategy": layout.strategy,
        "mesh_shape": list(layout.mesh_shape),
        "num_units": num_units(model),
        "activation_checkpointing": checkpointing,
        "attention": attention,
        "accumulate_unsharded": accumulate_unsharded,
        "context_length": context_length,
        "gradient_accumulation_steps": batches.gradient_accumulation_steps,
        "global_batch_size": batches.global_batch_size,
    }
    folder = on_rank_zero(lambda: create_run_folder(config, env, resolved, facts))
    watchdog.traces = folder / "traces"
    metrics = MetricsFile(None)
    if env.is_rank_zero:
        print_for_people("", start_table(config, env, start, resolved, facts), "")
        print_rank_zero(env, *start_warnings(config, start), f"run folder: {folder}")
        trackers = open_trackers(config, folder, resolved | start, tqdm.write)
        metrics = MetricsFile(folder / "metrics.jsonl", trackers)
    metrics.write("start", **start)
    flops = StepFlops(unwrap(model))
    return Job(
        config=config,
        env=env,
        tokenizer=tokenizer,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        train_loader=train_loader,
        eval_loader=eval_loader,
        num_steps=num_steps,
        accumulate_unsharded=accumulate_unsharded,
        flops=flops,
        ledger=MemoryLedger(model, optimizer, env.device),
        recorder=step_recorder(config, env, folder, flops, lambda line: say(env, line)),
        folder=folder,
        metrics=metrics,
        watchdog=watchdog,
    )


def run(config: RunConfig, env: Environment, watchdog: Watchdog) -> None:
    """One run, from its settings to the table at its end."""
    job = prepare(config, env, watchdog)
    started, end_is_written = time.perf_counter(), threading.Lock()

    def write_end(status: str) -> None:
        if end_is_written.acquire(blocking=False):
            seconds = time.perf_counter() - started
            job.metrics.write("end", **end_facts(job.metrics.read()), status=status, seconds=seconds)

    watchdog.before_leaving = lambda: write_end("failed")
    try:
        train(job)
        write_end("finished")
    finally:
        write_end("failed")  # where it is not written yet
    if env.is_rank_zero:
        events = job.metrics.read()
        if config.tracking_config.save_metrics:
            write_metrics_data(job.folder, events)
        print_for_people(*end_summary(events, job.folder, device_type=env.device.type))
        print(f"finished: {job.folder}", flush=True)


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 finished, 1 failed, 2 refused before it started."""
    env = read_environment()
    quiet_libraries(env)
    watchdog = Watchdog(env)
    try:
        run(parse_flags(argv), env, watchdog)
        watchdog.stop()
        status = 0
    except ConfigError as error:
        status = end_with_error(env, error, REFUSED, watchdog)
    except TrainingError as error:
        status = end_with_error(env, error, FAILED, watchdog)
    except Exception as error:
        # One rank's alone, perhaps: the others may wait in a collective, and leaving the group would wait for them.
        return end_with_error(env, error, FAILED, watchdog)
    stop_process_group()
    return status


if __name__ == "__main__":
    status = main(sys.argv[1:])
    if status:
        leave(status)
