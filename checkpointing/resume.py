"""Load a checkpoint into what a run has built, in any layout: weights, optimizer, schedule, random states."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from checkpointing.comparison import TRAIN_ON
from checkpointing.finding import Checkpoint
from checkpointing.random_states import find_rng_file, parse_rng_file
from checkpointing.stored_state import open_state
from checkpointing.train_state import TrainState
from checkpointing.trained import MODEL, OPTIMIZER, Trained, model_tensors, trained_parameters
from policies.optimizers.states import zero_state
from policies.weights.stored import Entry
from ranks.collectives import gather_to_all, on_rank_zero
from ranks.environment import Environment, print_rank_zero
from reporting.metrics_file import keep_until
from run_folder.checkpoint_folder import STATE
from run_folder.other_runs import refuse_if_gone, run_folder_of
from run_folder.run_yaml import read_run_yaml, saved_in
from utils.disk_errors import refused_by_disk
from utils.errors import ConfigError
from utils.printing import print_line
from utils.seeding import seed_everything, set_rng_state
from utils.wording import plural


def load_checkpoint(
    checkpoint: Checkpoint, trained: Trained, env: Environment, *, seed: int, optimizer_cpu_offload: bool
) -> TrainState:
    """Load the checkpoint's state into this run's model and optimizer, in any layout. Every rank must call this.

    Args:
        seed: the run's, used if the checkpoint has no random states for this rank.
        optimizer_cpu_offload: whether the optimizer's states belong in host memory.

    Raises:
        ConfigError: on every rank; it names every tensor that is missing, extra, or of another shape or dtype.
    """
    failure, own_rng = None, None
    try:
        _load_tensors(checkpoint, trained, torch.device("cpu") if optimizer_cpu_offload else None)
        own_rng = _read_rng_state(checkpoint, env)
    except (ConfigError, OSError, RuntimeError, ValueError, SafetensorError) as error:
        failure = str(error) or type(error).__name__
    # A rank that raised alone would leave the others waiting in their next collective.
    failures = [reason for reason in gather_to_all(failure) if reason is not None]
    if failures:
        on_rank_zero(partial(refuse_if_gone, checkpoint.folder))
        raise ConfigError(f"--resume: {checkpoint.folder} cannot be loaded: {' '.join(failures[0].split())}")
    _load_schedule(trained.scheduler, trained.optimizer, checkpoint.step)
    trained.scaler.load_state_dict(checkpoint.values.get("loss_scaler"))  # earlier versions wrote none
    print_rank_zero(env, f"resume: from {checkpoint.folder}, after step {checkpoint.step}")
    if own_rng is not None:
        set_rng_state(own_rng)
    else:
        # The seed alone would draw again what the run drew at its start.
        seed_everything((seed + 104729 * checkpoint.step) % 2**32, env.rank)
        print_rank_zero(env, "resume: dropout and other random choices go on anew: they are kept per rank")
    return TrainState.from_dict(checkpoint.values["state"])


def restore_results(checkpoint: Checkpoint, state: TrainState, folder: Path, num_steps: int) -> None:
    """Cut the run folder's records back to the checkpoint. Every rank must call this.

    The next evaluation counts as the best if the folder does not hold the best evaluation's weights: a later one, now
    given up, replaced them, or someone deleted them, or the run goes on in another folder.
    """

    @refused_by_disk("--resume", checkpoint.folder)
    def on_rank() -> bool:
        # A run that goes on in another folder begins its files with the earlier run's.
        before = run_folder_of(checkpoint.folder) or folder
        # Once all steps are made, no session will write the last epoch's event again.
        unfinished = state.epoch if state.step < num_steps or state.epoch_end_due else state.epoch + 1
        run_yaml = read_run_yaml(folder)
        for name in ("metrics.jsonl", "samples.jsonl"):
            if name in run_yaml["entries"] and (before / name).is_file():
                source, target = before / name, folder / name
                num_others = keep_until(source, target, step=state.step, epoch=unfinished, eval_due=state.eval_due)
                if num_others:
                    print_line(f"resume: left out {plural(num_others, 'line')} of {source} without an event of a run")
        if not run_yaml["settings"]["train_config"]["save_model"]:
            return before.resolve() == folder.resolve()
        saved = saved_in(run_yaml)
        if saved is None:
            return state.best_step == 0
        return saved["step"] == state.best_step and (folder / saved["folder"]).is_dir()

    if not on_rank_zero(on_rank):
        state.forget_best()


def _read_rng_state(checkpoint: Checkpoint, env: Environment) -> dict[str, Any] | None:
    """This rank's random states, checked; None if the checkpoint has none, or was written by more or fewer ranks.

    Raises:
        ConfigError: if the file is not what a run writes.
    """
    folder = checkpoint.folder
    if checkpoint.values["world_size"] != env.world_size:
        return None
    if checkpoint.blind:
        file = on_rank_zero(lambda: [find_rng_file(folder, rank) for rank in range(env.world_size)])[env.rank]
    else:
        file = find_rng_file(folder, env.rank)
    return None if file is None else parse_rng_file(file)


def _load_schedule(scheduler: LambdaLR, optimizer: Optimizer, step: int) -> None:
    """Continue the schedule at its step, with the learning rate of this run's settings.

    Nothing else of its saved state is taken: torch would set any attribute that a file names.
    """
    scheduler.last_epoch, scheduler._step_count = step, step + 1  # torch's own constructor calls step() once
    rates = [
        base * rate(scheduler.last_epoch) for base, rate in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates


def _load_tensors(checkpoint: Checkpoint, trained: Trained, optimizer_device: torch.device | None) -> None:
    model, optimizer = trained.model, trained.optimizer
    stored = open_state(checkpoint.folder, sent=bool(checkpoint.blind))
    targets, parameters = model_tensors(model), trained_parameters(model)
    # The copy of the final state lists a tied weight under each of its names (CheckpointSaver.save_copy).
    second_names = model_tensors(model, every_name=True).keys() - targets.keys()
    _compare({n: k for n, k in stored.kinds.items() if n.startswith(MODEL) and n not in second_names}, targets)
    if not any(name.startswith(OPTIMIZER) for name in stored.kinds) and checkpoint.values["has_optimizer"] is False:
        raise ConfigError("it holds no optimizer state (a copy made without --save_optimizer); give a step checkpoint")
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in parameters}
    unknown = []
    for stored_name, (shape, dtype) in stored.kinds.items():
        if not stored_name.startswith(OPTIMIZER):
            continue
        name, _, key = stored_name.removeprefix(OPTIMIZER).rpartition(".")
        if name not in parameters:
            unknown.append(stored_name)
            continue
        # Before memory is allocated for it: the shape stands in a file that may be forged.
        if math.prod(shape) > parameters[name].numel():
            raise ConfigError(f"{stored_name} is {_shown(shape, dtype)}, larger than its weight; {_REMEDY}")
        target = zero_state(parameters[name], shape, dtype, optimizer_device)
        targets[stored_name] = states[name][key] = target
    if unknown:
        raise ConfigError(f"extra: {', '.join(unknown)}; {_REMEDY}")
    # A run that had no such state, whose coefficient --resume_anyway has changed, begins with equal shares.
    routing = {name: target for name, target in trained.routing.tensors().items() if name in stored.kinds}
    _compare({name: stored.kinds[name] for name in routing}, routing)
    targets |= routing
    numbers = checkpoint.values["optimizer_numbers"]
    _check_numbers(numbers, states)
    stored.load(targets)
    # An optimizer's state_dict numbers the parameters in the order of its groups, a checkpoint names them.
    groups = optimizer.state_dict()["param_groups"]
    numbered = zip(
        (parameter for group in optimizer.param_groups for parameter in group["params"]),
        (index for group in groups for index in group["params"]),
        strict=True,
    )
    index_of = dict(numbered)
    indices = {name: index_of[parameter] for name, parameter in parameters.items()}
    full_states = {indices[name]: state | numbers.get(name, {}) for name, state in states.items() if state}
    optimizer.load_state_dict({"state": full_states, "param_groups": groups})


def _check_numbers(numbers: Mapping[str, Mapping[str, float]], states: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse numbers of an optimizer's state that belong to no weight, or would replace a tensor.

    Raises:
        ConfigError: it names one.
    """
    for name, of_parameter in numbers.items():
        wrong = [key for key in of_parameter if key in states.get(name, of_parameter)]
        if wrong:
            raise ConfigError(f"{STATE}: optimizer_numbers.{name}.{wrong[0]} is of no weight, or a tensor; {_REMEDY}")


_REMEDY = f"give the settings and the model of the checkpoint, or {TRAIN_ON}"


def _compare(stored: Mapping[str, Entry], targets: Mapping[str, torch.Tensor]) -> None:
    """Raise ConfigError, naming every difference, if there is one."""
    missing = [name.removeprefix(MODEL) for name in targets if name not in stored]
    extra = [name.removeprefix(MODEL) for name in stored if name not in targets]
    other = [
        f"{name.removeprefix(MODEL)} is {_shown(*stored[name])} there and {_shown(target.shape, target.dtype)} here"
        for name, target in targets.items()
        if name in stored and stored[name] != (target.shape, target.dtype)
    ]
    parts = [f"{what}: {', '.join(names)}" for what, names in (("missing", missing), ("extra", extra)) if names]
    if parts + other:
        raise ConfigError("; ".join([*parts, *other, _REMEDY]))


def _shown(shape: Iterable[int], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
