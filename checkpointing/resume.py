"""A checkpoint's state into what a run has built, whatever its layout: weights, optimizer, schedule, random states."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from checkpointing.comparison import TRAIN_ON
from checkpointing.finding import Checkpoint, run_folder_of
from checkpointing.safe_reader import SafeFileSystemReader
from checkpointing.state import MODEL, OPTIMIZER, TrainState, model_tensors, trained_parameters
from checkpointing.writing import FULL_FILE, rng_file
from configs.run import RunConfig
from policies.loss_scaling import LossScaler
from policies.optimizers.states import zero_state
from policies.weight_sources import keep_part
from reporting.metrics_file import keep_until
from reporting.run_folder import read_run_yaml
from utils.distributed import gather_to_all, on_rank_zero
from utils.environment import Environment, print_rank_zero
from utils.errors import ConfigError
from utils.seeding import seed_everything, set_rng_state


def load_checkpoint(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    scaler: LossScaler,
    config: RunConfig,
    env: Environment,
) -> TrainState:
    """Put the checkpoint's state into what this run has built, whatever its layout. Every rank must call this.

    Raises:
        ConfigError: on every rank, which names every key that is missing, extra, or of another shape or dtype.
    """
    failure = None
    try:
        host = torch.device("cpu") if config.fsdp_config.optimizer_cpu_offload else None
        _load_tensors(checkpoint, model, optimizer, host)
    except (ConfigError, CheckpointException, OSError, RuntimeError, ValueError) as error:
        failure = str(error)
    failures = [reason for reason in gather_to_all(failure) if reason is not None]
    if failures:
        raise ConfigError(f"--resume: {checkpoint.folder} cannot be loaded: {' '.join(failures[0].split())}")
    _load_schedule(scheduler, optimizer, checkpoint.values["scheduler"])
    scaler.load_state_dict(checkpoint.values.get("loss_scaler"))  # earlier versions wrote none
    print_rank_zero(env, f"resume: from {checkpoint.folder}, after step {checkpoint.step}")
    own = checkpoint.folder / rng_file(env.rank)
    if checkpoint.values["world_size"] == env.world_size and own.is_file():
        set_rng_state(torch.load(own, weights_only=True))
    else:
        seed_everything((config.train_config.seed + 104729 * checkpoint.step) % 2**32, env.rank)
        print_rank_zero(env, "resume: dropout and other random choices go on anew: they are kept per rank")
    return TrainState.from_dict(checkpoint.values["state"])


def take_up_results(checkpoint: Checkpoint, state: TrainState, folder: Path, num_steps: int) -> None:
    """Let the run folder tell of the run up to the checkpoint, and nothing after it. Every rank must call this.

    Where the best evaluation's weights are not in the folder, since a later one that is now given up replaced them,
    someone deleted them, or the run goes on in another folder, the next evaluation counts as the best.
    """

    def on_rank() -> bool:
        before = run_folder_of(checkpoint.folder) or folder
        unfinished = state.epoch if state.step < num_steps or state.epoch_end_due else state.epoch + 1
        if (before / "metrics.jsonl").is_file():
            source, target = before / "metrics.jsonl", folder / "metrics.jsonl"
            keep_until(source, target, step=state.step, epoch=unfinished, eval_due=state.eval_due)
        run_yaml = read_run_yaml(folder)
        if not run_yaml["settings"]["train_config"]["save_model"]:
            return before.resolve() == folder.resolve()
        saved = run_yaml.get("saved", {"step": 0, "folder": "."})
        return saved["step"] == state.best_step and (folder / saved["folder"]).is_dir()

    if not on_rank_zero(on_rank):
        state.best_eval_loss = math.inf


def _load_schedule(scheduler: LRScheduler, optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Take up the schedule at its step, with the learning rate of this run's settings."""
    assert isinstance(scheduler, LambdaLR)  # all of ours are
    scheduler.load_state_dict(saved | {"base_lrs": scheduler.base_lrs})
    rates = [
        base * rate(scheduler.last_epoch) for base, rate in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates


def _load_tensors(
    checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer, optimizer_device: torch.device | None
) -> None:
    stored = _FullFile(checkpoint.folder) if (checkpoint.folder / FULL_FILE).is_file() else _Shards(checkpoint.folder)
    targets, parameters = model_tensors(model), trained_parameters(model)
    second_names = model_tensors(model, every_name=True).keys() - targets.keys()
    _compare({n: f for n, f in stored.facts.items() if n.startswith(MODEL) and n not in second_names}, targets)
    if not any(name.startswith(OPTIMIZER) for name in stored.facts) and checkpoint.values["has_optimizer"] is False:
        raise ConfigError("it holds no optimizer state (a copy made without --save_optimizer); give a step checkpoint")
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in parameters}
    unknown = []
    for stored_name, (shape, dtype) in stored.facts.items():
        if not stored_name.startswith(OPTIMIZER):
            continue
        name, _, key = stored_name.removeprefix(OPTIMIZER).rpartition(".")
        if name not in parameters:
            unknown.append(stored_name)
            continue
        target = zero_state(parameters[name], shape, dtype, optimizer_device)
        targets[stored_name] = states[name][key] = target
    if unknown:
        raise ConfigError(f"extra: {', '.join(unknown)}; {_REMEDY}")
    stored.load(targets)
    numbers = checkpoint.values["optimizer_numbers"]
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


_REMEDY = f"give the settings and the model of the checkpoint, or {TRAIN_ON}"
Facts = dict[str, tuple[torch.Size, torch.dtype]]


def _compare(stored: Facts, targets: Mapping[str, torch.Tensor]) -> None:
    """Raises ConfigError, which names every difference."""
    missing = [name.removeprefix(MODEL) for name in targets if name not in stored]
    extra = [name.removeprefix(MODEL) for name in stored if name not in targets]
    other = [
        f"{name.removeprefix(MODEL)} is {_kind(*stored[name])} there and {_kind(target.shape, target.dtype)} here"
        for name, target in targets.items()
        if name in stored and stored[name] != (target.shape, target.dtype)
    ]
    parts = [f"{what}: {', '.join(names)}" for what, names in (("missing", missing), ("extra", extra)) if names]
    if parts + other:
        raise ConfigError("; ".join([*parts, *other, _REMEDY]))


def _kind(shape: Iterable[int], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


class _Shards:
    """What torch.distributed.checkpoint wrote: each rank reads what it needs, without asking the others."""

    def __init__(self, folder: Path) -> None:
        self._reader = SafeFileSystemReader(folder)
        metadata = self._reader.read_metadata()
        self.facts: Facts = {
            name: (entry.size, entry.properties.dtype)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def load(self, targets: Mapping[str, torch.Tensor]) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # meant: nobody need be asked
            dcp.load(dict(targets), storage_reader=self._reader, no_dist=True)


class _FullFile:
    """One file with everything, of which each rank reads its slices."""

    def __init__(self, folder: Path) -> None:
        self._tensors = torch.load(folder / FULL_FILE, map_location="cpu", weights_only=True, mmap=True)
        self.facts: Facts = {name: (tensor.shape, tensor.dtype) for name, tensor in self._tensors.items()}

    @torch.no_grad()
    def load(self, targets: Mapping[str, torch.Tensor]) -> None:
        for name, target in targets.items():
            keep_part(target, self._tensors[name])
