"""The model or adapter that a path holds: a run, a checkpoint, one of llama-recipes, or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from transformers.utils import GENERATION_CONFIG_NAME

from checkpointing.exporting.stored_tensors import CheckpointTensors, StoredTensors
from checkpointing.marks import foreign_file
from checkpointing.state_json import check_state
from policies.adapters.adapted_model import OWN_NAMES
from policies.config_overrides import read_config_overrides
from policies.weights.stored import SafetensorsTensors, weight_files
from run_folder.checkpoint_folder import (
    COMPLETE,
    OLD_FULL_FILE,
    STATE,
    checkpoints,
    checksum,
    damage,
    is_step_folder,
    listed_files,
    old_tensor_files,
    tensor_files,
)
from run_folder.checkpoint_folder import HUGGINGFACE as SETTINGS
from run_folder.other_runs import checkpoint_root_of, named_checkpoint
from utils.errors import ConfigError, in_one_line
from utils.small_files import parse_yaml, read_json, read_text


@dataclass(frozen=True)
class ModelSource:
    """A model's or adapter's tensors, and the folders (or hub names) of the settings that go with them."""

    path: Path  # the checkpoint's folder or file
    tensors: StoredTensors
    settings: str  # folder or hub name of config.json and the tokenizer
    base: str | None = None  # folder or hub name of the model that training started from
    adapter_config: Path | None = None  # the folder of adapter_config.json
    in_peft_format: bool = False  # tensors are named as in an adapter's folder, not as in the model
    checksums: tuple[tuple[Path, str], ...] = ()  # of the files that hold the tensors, CRC-32 in hex

    @property
    def is_adapter(self) -> bool:
        return self.adapter_config is not None

    @property
    def rope(self) -> dict[str, Any]:
        """The values of config.json that an adapter was trained with and its base does not have.

        Raises:
            ConfigError: if the file that says them cannot be read.
        """
        return read_config_overrides(self.adapter_config) if self.adapter_config else {}

    @property
    def new_parts(self) -> tuple[str, ...]:
        """The modules that an adapter has whole, such as a classifier's head: its base need not have them."""
        return tuple(self._adapter_settings().get("modules_to_save") or ())

    @property
    def task_type(self) -> str | None:
        """peft's name of an adapter's task."""
        return self._adapter_settings().get("task_type")

    def _adapter_settings(self) -> dict[str, Any]:
        try:
            return read_json(self.adapter_config / "adapter_config.json") if self.adapter_config else {}
        except (OSError, ValueError):
            return {}  # it is refused when it is put on a model

    @property
    def tokenizer(self) -> str:
        """Folder or hub name of the tokenizer: the adapter's folder if it was saved there."""
        adapter = self.adapter_config
        return str(adapter) if adapter and (adapter / "tokenizer_config.json").is_file() else self.settings

    @property
    def generation(self) -> str:
        """Folder or hub name of generation_config.json: the adapter's folder if it was saved there."""
        beside = self.adapter_config
        return str(beside) if beside and (beside / GENERATION_CONFIG_NAME).is_file() else self.settings

    def check(self, advance: Callable[[int], object]) -> None:
        """Read the files that hold the tensors and compare their CRC-32 with what COMPLETE says.

        Raises:
            ConfigError: if one is damaged.
        """
        for path, expected in self.checksums:
            found = checksum(path, advance)["crc32"]
            if found != expected:
                raise ConfigError(
                    f"{path} is damaged (CRC-32 {found}, {COMPLETE} says {expected}); copy it again, or take an older "
                    "checkpoint"
                )


def open_source(path: Path, base: str | None = None) -> ModelSource:
    """Find out what a path holds; no tensor is read yet.

    Args:
        path: a run's folder (its newest complete checkpoint is taken, else its adapter or model), a folder of
            checkpoints, a checkpoint's folder or what names it (checkpoints/latest), a `.pt` file, or a folder with an
            adapter or a model in Hugging Face format.
        base: folder or hub name of the model that training started from, if the checkpoint does not say it or says it
            wrongly.

    Raises:
        ConfigError: if there is nothing of the kind, or it is not whole.
    """
    path = named_checkpoint(path.expanduser())
    if not path.exists():
        raise ConfigError(f"{path} does not exist; give a run's folder, a checkpoint, or an adapter's folder")
    if path.is_file():
        return _checkpoint(path.parent, base, file=path)
    if (path / "checkpoints").is_dir() or (path / "run.yaml").is_file():
        path = _of_run(path)
    elif complete := checkpoints(path):
        path = complete[0]
    if any((path / name).is_file() for name in (STATE, OLD_FULL_FILE, ".metadata")):
        return _checkpoint(path, base)
    if is_step_folder(path) or tensor_files(path) or old_tensor_files(path):
        raise _incomplete(path)
    if (path / "adapter_config.json").is_file():
        return _adapter(path, base)
    if (path / "config.json").is_file():
        try:
            files = weight_files(str(path))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read ({in_one_line(error)})") from error
        if not files:
            raise ConfigError(f"{path} holds no model.safetensors; give a checkpoint, or what save_pretrained wrote")
        return ModelSource(path, SafetensorsTensors(files), settings=str(path))
    raise ConfigError(
        f"{path} is not a checkpoint: it has neither {STATE}, adapter_config.json nor config.json; "
        "give a run's folder, a checkpoint, or an adapter's folder"
    )


def _of_run(run: Path) -> Path:
    """The run's newest complete checkpoint; if it has none, what it saved in Hugging Face format."""
    root = checkpoint_root_of(run)
    if complete := checkpoints(root):
        return complete[0]
    for name in ("adapter", "model"):
        if (run / name).is_dir():
            return run / name
    if begun := sorted(path for path in root.glob("step-*") if is_step_folder(path)):
        raise _incomplete(begun[-1])
    raise ConfigError(f"{run} holds a run that has saved nothing; if it goes on, wait for its first checkpoint")


def _incomplete(folder: Path) -> ConfigError:
    return ConfigError(
        f"{folder} is an incomplete checkpoint: it has no {COMPLETE}, so saving it was interrupted; take an older one"
    )


def _checkpoint(folder: Path, base: str | None, file: Path | None = None) -> ModelSource:
    """A checkpoint's folder, ours or of llama-recipes, or a loose file anywhere."""
    is_ours = file is None or file.name == OLD_FULL_FILE or file in tensor_files(folder)
    # llama-recipes writes such folders without COMPLETE; only our own are refused for lacking it.
    may_be_foreign = (folder / "train_params.yaml").is_file() or base is not None
    looks_like_ours = (folder / STATE).is_file() or is_step_folder(folder)
    if is_ours and not (folder / COMPLETE).is_file() and (looks_like_ours or not may_be_foreign):
        raise _incomplete(folder)
    checksums = _check_sizes(folder) if is_ours else {}
    tensors = _open_tensors(folder, file, is_ours=is_ours)
    settings = folder / SETTINGS
    adapter_config = settings if (settings / "adapter_config.json").is_file() else None
    if adapter_config is None and any(
        own in name for name in tensors.index for names in OWN_NAMES.values() for own in names
    ):
        raise ConfigError(
            f"{folder} holds an adapter and no {SETTINGS}/adapter_config.json, which says how to apply it; "
            "take the run's adapter/ folder"
        )
    started_from = base or _model_name(folder) or (_base_of(adapter_config) if adapter_config else None)
    if not settings.is_dir() and started_from is None:
        raise ConfigError(f"{file or folder} does not say which model it is of; give that model with --base")
    return ModelSource(
        path=file or folder,
        tensors=tensors,
        settings=str(settings) if settings.is_dir() else str(started_from),
        base=started_from,
        adapter_config=adapter_config,
        checksums=tuple((path, checksums[path]) for path in tensors.files if path in checksums),
    )


def _open_tensors(folder: Path, file: Path | None, *, is_ours: bool) -> StoredTensors:
    """The tensors of a checkpoint's folder, or of one loose file."""
    if is_ours and (tensor_files(folder) or (folder / ".metadata").is_file()):
        return CheckpointTensors(folder)
    if file is None and not (folder / OLD_FULL_FILE).is_file():
        raise ConfigError(f"{folder} has no tensors (rank-*.safetensors); copy the whole folder again")
    from checkpointing.exporting.pickled_tensors import PickledTensors

    return PickledTensors(file or folder / OLD_FULL_FILE, "model." if is_ours else "")


def _check_sizes(folder: Path) -> dict[Path, str]:
    """Check the files' sizes. Returns their CRC-32 by COMPLETE; none without COMPLETE, as in llama-recipes' folders."""
    if not (folder / COMPLETE).is_file():
        return {}
    reason, listed = damage(folder, names=[]) or _foreign_file(folder), {}
    if not reason:
        try:
            listed = listed_files(folder)
        except ValueError as error:
            reason = str(error)
    if reason:
        raise ConfigError(f"{folder} is damaged: {reason}; copy the whole folder again, or take an older checkpoint")
    return {folder / name: file["crc32"] for name, file in listed.items()}


def _foreign_file(folder: Path) -> str:
    """A clause on a file that is of another checkpoint. Earlier versions' files do not say which they are of."""
    try:
        values = read_json(folder / STATE)
        if not isinstance(values, dict) or "format" not in values:
            return ""
        check_state(values)
        return foreign_file(folder, values, listed_files(folder))
    except OSError:
        return ""  # a copy may hold the weights alone
    except ValueError as error:
        return str(error)


def _model_name(folder: Path) -> str | None:
    """The model that training started from, by our state.json or by llama-recipes' train_params.yaml."""
    try:
        if (folder / STATE).is_file():
            name = read_json(folder / STATE)["settings"]["train_config"]["model_name"]
            if not isinstance(name, str):
                raise TypeError("model_name is no text")
            return name
        if (folder / "train_params.yaml").is_file():
            return str(parse_yaml(read_text(folder / "train_params.yaml"), yaml.SafeLoader)["model_name"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder}: {STATE} or train_params.yaml does not say which model this is of "
            f"({type(error).__name__}: {error}); give it with --base"
        ) from error
    return None


def _adapter(folder: Path, base: str | None) -> ModelSource:
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise ConfigError(
            f"{folder} holds no adapter_model.safetensors; load the adapter with peft and save it again with "
            "save_pretrained"
        )
    base = base or _base_of(folder)
    if not base:
        raise ConfigError(f"{folder} does not say which model its adapter is for; give that model with --base")
    tensors = SafetensorsTensors([file])
    return ModelSource(folder, tensors, settings=base, base=base, adapter_config=folder, in_peft_format=True)


def _base_of(adapter: Path) -> str | None:
    """The base model that an adapter's folder names."""
    try:
        name = read_json(adapter / "adapter_config.json").get("base_model_name_or_path")
        if name is not None and not isinstance(name, str):
            raise ValueError("base_model_name_or_path is no text")
        return name
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{adapter}/adapter_config.json cannot be read ({error}); copy the folder again") from error
