"""Going on from a checkpoint: which one, whether these settings are its own, and its state into this layout."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from checkpointing.folder import COMPLETE, STATE, checkpoints, damage, listed_files
from checkpointing.safe_reader import SafeFileSystemReader
from checkpointing.state import MODEL, OPTIMIZER, TrainState, model_tensors, trained_parameters
from checkpointing.writing import FULL_FILE, rng_file
from configs.errors import ConfigError
from configs.names import flag
from configs.run import DATASETS, RunConfig
from policies.weight_sources import keep_part
from utils.distributed import gather_to_all, on_rank_zero
from utils.environment import Environment, print_rank_zero
from utils.metrics import keep_until
from utils.run_folder import (
    check_unfinished,
    checkpoint_root,
    checkpoint_root_of,
    folder_of_job,
    held_entries,
    latest_run_folder,
    now,
    read_run_yaml,
)
from utils.seeding import seed_everything, set_rng_state

MAY_CHANGE = frozenset(
    f"{section}.{name}"
    for section, names in {
        "train_config": (
            # compared by what they name: config.json, the base's weights, the tokens of the data
            *("model_name", "tokenizer_name", "trust_remote_code"),
            # layout and speed
            *("use_fast_kernels", "compile", "activation_checkpointing", "loss_chunk_size", "enable_fsdp"),
            *("low_cpu_fsdp", "one_gpu", "num_workers_dataloader", "show_sample", "pad_to_multiple_of"),
            *("step_timeout_seconds", "deterministic"),
            # how the global batch, which stays, is cut
            *("batch_size_training", "gradient_accumulation_steps", "global_batch_size"),
            # length: where the learning rate depends on it, the number of steps is compared
            *("num_epochs", "max_train_step"),
            # evaluation and results
            *("run_validation", "val_batch_size", "max_eval_step", "eval_every_steps", "eval_before_training"),
            *("output_dir", "overwrite", "resume", "resume_anyway", "save_every_steps", "save_every_minutes"),
            *("keep_last", "keep_best", "async_save", "save_model", "save_optimizer"),
            *("dist_checkpoint_root_folder", "dist_checkpoint_folder"),
        ),
        "fsdp_config": (
            *("sharding_strategy", "hsdp", "sharding_group_size", "replica_group_size", "accumulate_unsharded"),
            *("fsdp_activation_checkpointing", "wrap", "fsdp_cpu_offload", "optimizer_cpu_offload"),
            "checkpoint_type",
        ),
    }.items()
    for name in names
)
"""Settings that do not change the result; every other one must be the checkpoint's, a new one too."""

_SMALL_BYTES = 2**24


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, and its state.json."""

    folder: Path
    values: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.values["state"]["step"])

    @property
    def global_batch_size(self) -> int:
        return int(self.values["global_batch_size"])

    def summary(self, env: Environment) -> dict[str, Any]:
        """What run.yaml tells of going on from here."""
        return {"from": str(self.folder), "step": self.step, "world_size": env.world_size, "time": now()}


def resolve_resume(config: RunConfig, env: Environment) -> RunConfig:
    """Where a resumed run goes on writing; and a job that its launcher restarted goes on where it was.

    Where it had not come as far as a folder of its own, it does what it did the first time: what it was refused, or was
    to overwrite, is another run.

    Raises:
        ConfigError: where --resume names nothing.
    """
    train, notes = config.train_config, list(config.notes)
    if env.restarted and not config.was_given("train_config.resume") and (own := folder_of_job(config, env)):
        train = replace(train, resume="auto", overwrite=False, output_dir=str(own))
        notes.append("resume: auto, since the launcher has restarted this job")
    elif train.resume == "auto" and train.output_dir is None:
        folder = (env.restarted and folder_of_job(config, env)) or latest_run_folder(config)
        train = replace(train, output_dir=str(folder) if folder else None)
    elif train.resume not in ("auto", "False") and train.output_dir is None:
        folder = run_folder_of(Path(train.resume).expanduser())
        if folder is None:
            raise ConfigError(f"--resume: {train.resume} is in no run folder; give --output_dir for what comes")
        train = replace(train, output_dir=str(folder))
    return replace(config, train_config=train, notes=tuple(notes))


def run_folder_of(path: Path) -> Path | None:
    """The run folder that a path is, or lies in."""
    return next(
        (folder for folder in (path.absolute(), *path.absolute().parents) if (folder / "run.yaml").is_file()), None
    )


def find_checkpoints(config: RunConfig, env: Environment) -> list[Path]:
    """Those that could be resumed from, in the order in which to try; none where a run is to start afresh.

    Raises:
        ConfigError: where --resume names something that is no checkpoint.
    """
    train = config.train_config
    if train.resume == "False":
        return []
    run = None if train.output_dir is None else Path(train.output_dir).expanduser()
    own = [] if run is None else next(filter(None, map(checkpoints, _own_roots(config, run))), [])
    if train.resume == "auto":
        own = own or _begun_from(run)
        if not own:
            check_unfinished(config)
        return own
    if own and env.restarted:
        return own
    path = Path(train.resume).expanduser()
    found = checkpoints(path) or checkpoints(checkpoint_root_of(path))
    if not found and (path / COMPLETE).is_file() and (path / STATE).is_file():
        found = [path]
    if not found:
        what = "is not there" if not path.exists() else f"holds no complete checkpoint (no {COMPLETE} in it)"
        raise ConfigError(
            f"--resume: {path} {what}; give a run folder, a folder like checkpoints/step-00000020, or auto"
        )
    if run is not None:
        _check_holds_no_other_run(run, found, _own_roots(config, run), has_own=bool(own))
    return found


def _own_roots(config: RunConfig, run: Path) -> list[Path]:
    """Where the run in this folder may have checkpoints: where it will write them, and where it did so far."""
    return [checkpoint_root(config, run), checkpoint_root_of(run), run / "checkpoints"]


def _check_holds_no_other_run(run: Path, found: list[Path], own_roots: list[Path], *, has_own: bool) -> None:
    """Refuse to go on from a checkpoint in the folder of a run that it is not of, whose results would be lost.

    A run that began from this very checkpoint, and has none of its own yet, may begin again.
    """
    roots = {root.resolve() for root in own_roots}
    is_own = not roots.isdisjoint({found[0].resolve(), found[0].resolve().parent})
    begins_again = not has_own and [path.resolve() for path in _begun_from(run)] == [found[0].resolve()]
    if not is_own and not begins_again and (held := held_entries(run)):
        raise ConfigError(
            f"--output_dir: {run} already holds a run that {found[0]} is not of ({', '.join(held)}); "
            "give another folder, or --resume auto to go on with that run"
        )


def _begun_from(run: Path | None) -> list[Path]:
    """The checkpoint that a run without any of its own went on from, if it is still there."""
    if run is None or not (run / "run.yaml").is_file():
        return []
    resumed = read_run_yaml(run).get("resumed") or []
    folder = Path(resumed[-1]["from"]) if resumed else None
    return [folder] if folder is not None and (folder / COMPLETE).is_file() else []


def open_checkpoint(folders: list[Path], env: Environment, *, every_file: bool) -> Checkpoint | None:
    """The first that is undamaged; what is wrong with those before it is printed.

    Args:
        every_file: read all of every file, each rank its share, and agree with the other ranks; else only the small
            files, without asking anyone.

    Raises:
        ConfigError: where all are damaged.
    """
    if every_file and len(set(gather_to_all(tuple(folder.name for folder in folders)))) > 1:
        raise ConfigError(
            "--resume: the ranks do not find the same checkpoints; --output_dir must be on a file system that all "
            "nodes share"
        )
    reason = ""
    for folder in folders:
        reason = _shared_damage(folder, env) if every_file else _damage_of_small_files(folder)
        if not reason:
            return Checkpoint(folder, json.loads((folder / STATE).read_bytes()))
        if every_file or folder is folders[-1]:
            print_rank_zero(env, f"checkpoint: {folder} is damaged: {reason}")
    if folders:
        raise ConfigError(
            f"--resume: {folders[-1]} is damaged ({reason}), and there is no other; give another checkpoint, or "
            "--overwrite to start afresh"
        )
    return None


def _damage_of_small_files(folder: Path) -> str:
    try:
        files = listed_files(folder)
    except ValueError as error:
        return str(error)
    return damage(folder, [name for name, facts in files.items() if facts["bytes"] < _SMALL_BYTES])


def _shared_damage(folder: Path, env: Environment) -> str:
    """As `damage`; the contents of each file are read by one rank."""
    reason = ""
    try:
        reason = damage(folder, sorted(listed_files(folder))[env.rank :: env.world_size])
    except ValueError as error:
        reason = str(error)
    return next((found for found in gather_to_all(reason) if found), "")


def check_same(
    checkpoint: Checkpoint, config: RunConfig, facts: Mapping[str, Any], *, num_steps: int | None = None
) -> list[str]:
    """Refuse to go on where the result would be another.

    Args:
        facts: what is known of precision, data or model by now, as the saver is told of it.
        num_steps: of the whole run; where given, the settings are compared, too.

    Returns:
        Lines to print: with --resume_anyway, what has changed.

    Raises:
        ConfigError: which names every difference.
    """
    differences = [] if num_steps is None else _settings_that_differ(checkpoint, config, num_steps)
    differences += [_FACTS[name] for name, value in facts.items() if value != checkpoint.values[name]]
    if differences and not config.train_config.resume_anyway:
        raise ConfigError(
            f"--resume: what differs from {checkpoint.folder} would change the result: {', '.join(differences)}; "
            "give what was given there, or --resume_anyway"
        )
    return [f"resume_anyway: {text}" for text in differences]


_FACTS = {
    "precision": "the precision",
    "data_fingerprint": "the training data: other samples",
    "model_config": "--model_name: another config.json",
    "base_fingerprint": "--model_name: other weights than those under the checkpoint's adapter or frozen layers",
}


def _settings_that_differ(checkpoint: Checkpoint, config: RunConfig, num_steps: int) -> list[str]:
    saved, now = checkpoint.values["settings"], config.to_dict()
    unused = {name for name in DATASETS if name not in config.train_config.datasets}
    differences = [
        f"{flag(f'{section}.{name}')} {_shown(value)} (there {_shown(saved.get(section, {}).get(name))})"
        for section, values in now.items()
        if section not in unused and section != "tracking_config"
        for name, value in values.items()
        if f"{section}.{name}" not in MAY_CHANGE
        and name != "data_path"
        and value != saved.get(section, {}).get(name, value)
    ]
    if config.train_config.scheduler in ("cosine", "linear") and num_steps != checkpoint.values["num_steps"]:
        differences.append(
            f"{num_steps} optimizer steps (there {checkpoint.values['num_steps']}), over which "
            f"--scheduler {config.train_config.scheduler} lowers lr"
        )
    return differences


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def load_checkpoint(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler,
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
        # A state of the parameter's shape is sharded as the parameter; any other is whole on every rank.
        if shape == parameters[name].shape and parameters[name].dim():
            like = parameters[name].detach()
            target = torch.empty_like(like, dtype=dtype, device=optimizer_device or like.device)
        else:
            target = torch.empty(shape, dtype=dtype)
        targets[stored_name] = states[name][key] = target
    if unknown:
        raise ConfigError(f"extra: {', '.join(unknown)}")
    stored.load(targets)
    numbers = checkpoint.values["optimizer_numbers"]
    indices = {name: index for index, name in enumerate(parameters)}
    groups = optimizer.state_dict()["param_groups"]
    full_states = {indices[name]: state | numbers.get(name, {}) for name, state in states.items() if state}
    optimizer.load_state_dict({"state": full_states, "param_groups": groups})


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
        raise ConfigError("; ".join(parts + other))


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
