"""What --resume means: the folder that a run goes on in, and the checkpoints to try."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from configs.run import RunConfig
from ranks.environment import Environment
from run_folder.checkpoint_folder import COMPLETE, STATE, checkpoints, incomplete_checkpoints
from run_folder.default_folders import default_folders, default_name, is_of_job, outputs
from run_folder.entries import held_entries
from run_folder.other_runs import checkpoint_root_of, named_checkpoint, refuse_if_gone, run_folder_of
from run_folder.run_yaml import NAME, read_run_yaml, resumes_in
from utils.errors import ConfigError


def settle_resume(config: RunConfig, env: Environment) -> RunConfig:
    """The config with --resume and --output_dir decided: a resumed run goes on in its folder, and a job that its
    launcher restarted resumes by itself.

    A restarted job that had no folder of its own yet starts as it did the first time: a run that it finds there, and
    that it was refused for or told to overwrite, is not its own.

    Raises:
        ConfigError: if --resume names no run and --output_dir is not given.
    """
    train, notes = config.train_config, list(config.notes)
    own = None
    if env.restarted and train.resume in (None, "auto"):
        own = _folder_of_job(train.output_dir, default_name(train.model_name, train.datasets), env)
    if own is not None and train.resume is None:
        # --overwrite was for what lay there before the job began; by now its own checkpoints do.
        train = replace(train, resume="auto", overwrite=False, output_dir=str(own))
        notes.append("resume: auto, since the launcher has restarted this job")
    elif train.resume == "auto" and train.output_dir is None:
        newest = default_folders(outputs(env), default_name(train.model_name, train.datasets))
        folder = own or next(iter(newest), None)
        train = replace(train, output_dir=str(folder) if folder else None)
    elif train.resume and train.resume != "auto" and train.output_dir is None:
        train = replace(train, output_dir=str(_run_of_checkpoint(Path(train.resume))))
    return replace(config, train_config=train, notes=tuple(notes))


def _folder_of_job(output_dir: str | None, name: str, env: Environment) -> Path | None:
    """The run folder that this job wrote before its launcher restarted it."""
    folders = default_folders(outputs(env), name) if output_dir is None else [Path(output_dir)]
    return next((folder for folder in folders if is_of_job(folder, env)), None)


def _run_of_checkpoint(path: Path) -> Path:
    folder = run_folder_of(path)
    if not path.exists():
        refuse_if_gone(path)
        raise ConfigError(f"--resume: there is no {path}; give a run's folder, or a checkpoint in it")
    if folder is None:
        raise ConfigError(f"--resume: {path} is in no run folder; give --output_dir for what comes")
    return folder


def find_checkpoints(resume: str, run: Path | None, own_roots: Sequence[Path], *, restarted: bool) -> list[Path]:
    """The checkpoints to try to resume from, in this order; none if the run starts afresh.

    Args:
        resume: "auto" or a path.
        run: the run folder, if it was given or found.
        own_roots: where this run may have checkpoints.
        restarted: the job has been restarted, so its own checkpoints come before the one that was given.

    Raises:
        ConfigError: if `resume` names something that is no checkpoint.
    """
    own = next(filter(None, map(checkpoints, own_roots)), [])
    # A run that was resumed from another's checkpoint and killed before its first one begins there again.
    if resume == "auto":
        own = own or _begun_from(run)
        if run is not None and not own:
            _check_can_begin(run)
        return own
    if own and restarted:
        return own
    path = named_checkpoint(Path(resume))
    found = checkpoints(path) or checkpoints(checkpoint_root_of(path))
    if not found and (path / COMPLETE).is_file() and (path / STATE).is_file():
        found = [path]
    if not found:
        refuse_if_gone(path)
        what = "is not there" if not path.exists() else f"holds no complete checkpoint (no {COMPLETE} in it)"
        raise ConfigError(
            f"--resume: {path} {what}; give a run folder, a folder like checkpoints/step-00000020, or auto"
        )
    if run is not None:
        _check_holds_no_other_run(run, found, own_roots, has_own=bool(own))
    return found


def incomplete_after(resume: str, own_roots: Sequence[Path], taken: Path | None, step: int) -> list[Path]:
    """The incomplete checkpoints that are newer than the one taken; empty if that was asked for by its own path.

    Args:
        taken: the checkpoint that the run goes on from, which is that of `step`; None: it starts afresh.
    """
    roots = list(own_roots)
    if taken is not None and resume != "auto":
        if taken.resolve() == Path(resume).resolve():
            return []
        roots.append(taken.parent)
    after = -1 if taken is None else step
    each = {root.resolve(): root for root in roots}.values()
    return [folder for root in each for folder in incomplete_checkpoints(root, after=after)]


def _check_can_begin(run: Path) -> None:
    """Refuse to train a finished run again if --resume auto finds no checkpoint."""
    metrics = run / "metrics.jsonl"
    if metrics.is_file() and b'"status": "finished"' in metrics.read_bytes()[-4096:]:
        raise ConfigError(
            f"--resume: {run} holds a finished run without checkpoints, so there is nothing to go on from; "
            "--overwrite trains it anew"
        )


def _check_holds_no_other_run(run: Path, found: list[Path], own_roots: Sequence[Path], *, has_own: bool) -> None:
    """Refuse to resume from one run's checkpoint in the folder of another run, whose results would be lost.

    A run that began from this very checkpoint, and has none of its own yet, may begin again.
    """
    roots = {root.resolve() for root in own_roots}
    is_own = not roots.isdisjoint({found[0].resolve(), found[0].resolve().parent})
    begins_again = not has_own and [path.resolve() for path in _begun_from(run)] == [found[0].resolve()]
    if not is_own and not begins_again and (held := held_entries(run)):
        raise ConfigError(
            f"--output_dir: {run} already holds another run ({', '.join(held)}); {found[0]} does not belong to it; "
            "give another folder, or --resume auto to go on with that run"
        )


def _begun_from(run: Path | None) -> list[Path]:
    """The checkpoint that this run was resumed from, if it is still there."""
    if run is None or not (run / NAME).is_file():
        return []
    resumed = resumes_in(read_run_yaml(run))
    folder = Path(resumed[-1]["from"]) if resumed else None
    return [folder] if folder is not None and (folder / COMPLETE).is_file() else []
