"""The data that a run or checkpoint was trained on, by run.yaml or state.json: how its prompts are written."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from chat.conversation import ChatSettings
from configs.formats import DATASETS
from run_folder.checkpoint_folder import LATEST, STATE
from run_folder.other_runs import run_folder_of
from run_folder.run_yaml import is_of_a_run, read_run_yaml
from utils.small_files import read_json

_CHAT = "chat_dataset"
_OF_ROWS = ("messages_column", "tools_column", "roles")  # settings that say how a row's turns are read


@dataclass(frozen=True)
class TrainedOn:
    """The datasets of a run, by their names for --dataset, and their settings as run.yaml has them."""

    sections: Mapping[str, Mapping[str, Any]]

    @property
    def chats(self) -> str | None:
        """The first dataset that the chat template wrote; None if the run had none."""
        return next((name for name, values in self.sections.items() if name == _CHAT or values.get("as_chat")), None)

    @property
    def splits_special_tokens(self) -> bool:
        """Whether special tokens that chats spell stay text (--split_special_tokens)."""
        return bool(self.sections.get(self.chats or "", {}).get("split_special_tokens", True))

    def row_settings(self) -> ChatSettings:
        """How the turns of a row are found: as in the run's own chats."""
        settings: Any = DATASETS[_CHAT]
        values = self.sections.get(_CHAT, {})
        known = {field.name for field in fields(settings)}.intersection(_OF_ROWS, values)
        return settings(**{name: _frozen(values[name]) for name in known})


NOTHING_KNOWN = TrainedOn({})


def trained_on(path: Path) -> TrainedOn:
    """The data of the run that a path is or lies in; NOTHING_KNOWN if nobody says, as of an exported folder."""
    for settings in (_of_checkpoint(path), _of_run(path)):
        with suppress(TypeError, KeyError, AttributeError):  # of another version, or by hand
            names = settings["train_config"]["dataset"].split(",")
            sections = {name: settings[name] for name in names if isinstance(settings.get(name), dict)}
            return TrainedOn(sections)
    return NOTHING_KNOWN


def _of_checkpoint(path: Path) -> Any:
    folder = path.parent if path.is_file() and path.name != LATEST else path
    with suppress(OSError, ValueError):
        return read_json(folder / STATE)["settings"]
    return None


def _of_run(path: Path) -> Any:
    run = run_folder_of(path)
    values = read_run_yaml(run) if run is not None else {}
    return values["settings"] if is_of_a_run(values) else None


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
