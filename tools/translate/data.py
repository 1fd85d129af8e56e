"""Put the datasets of a file together: the formats, their places, and what holds for all of them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from configs.formats import DATASETS
from configs.run import SETTINGS
from configs.setting import settings_of
from tools.translate.source import Source
from tools.translate.translation import DatasetPart, Options, Translation
from utils.small_files import is_there

_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")
HUB_DATA = "hub_data"
"""The folder for datasets of the hub that one run reads together: a list names files alone."""

_PLACES = ("train_split", "hub_config")  # where a dataset is, as its path

HUB_FORMATS: dict[str, str] = {
    "stanfordnlp/imdb": "text_dataset",
    "roneneldan/TinyStories": "text_dataset",
    "tatsu-lab/alpaca": "alpaca_dataset",
    "yahma/alpaca-cleaned": "alpaca_dataset",
    "mhenrichsen/alpaca_2k_test": "alpaca_dataset",
    "garage-bAInd/Open-Platypus": "alpaca_dataset",
    "openai/gsm8k": "instruction_dataset",
    "knkarthick/samsum": "samsum_dataset",
}
"""Formats of datasets that files of other tools name without a format."""


def local_path(source: Source, path: str) -> Path | None:
    """The file or folder that a relative path of the source means; None if there is none.

    The working directory goes first, then the source's own folder and those around it.
    """
    for base in (Path(), source.folder, *source.folder.absolute().parents):
        found = base / os.path.expanduser(path)
        if is_there(found):
            return found
    return None


def shown(path: Path) -> str:
    """A path as the recipe has it: from the working directory, if it is below that."""
    inside = os.path.relpath(path)
    return str(path.absolute()) if inside.startswith("..") else inside


def is_hub_name(path: str) -> bool:
    """Whether it is spelled like OWNER/NAME on the hub, and not like a file."""
    return bool(_HUB.fullmatch(path)) and Path(path).suffix[1:] not in ("json", "jsonl", "csv", "parquet", "txt")


def read_split(translation: Translation, key: str, options: Options) -> None:
    """A split, and perhaps its beginning: `train[:20%]`, `train[:1000]`."""
    text = translation.text(key) or ""
    found = re.fullmatch(r"(\w+)(?:\[:(\d+%?)\])?", text)
    if found is None:
        translation.missing(key, f"{text}: a run reads a whole split, or its beginning (--split_slice)")
        return
    translation.needless(key, "train is the name without a flag")
    if found[1] != "train":
        options["train_split"] = (key, found[1])
    if found[2] and translation.given("split_slice") in (None, found[2]):
        translation.set(key, "split_slice", found[2])
    elif found[2]:
        translation.missing(key, "--split_slice takes one share of all datasets")


def put_together(translation: Translation) -> None:
    """Set --dataset, and the settings of each dataset, from the parts that rules found."""
    by_format: dict[str, list[DatasetPart]] = {}
    for part in translation.parts:
        same = by_format.setdefault(part.dataset, [])
        if same and part.values(without=_PLACES) != same[0].values(without=_PLACES):
            for key in (part.key, *(key for key, _ in part.options.values())):
                translation.missing(
                    key,
                    f"{part.path} is left out: a run reads {part.dataset} with one group of settings, here that of "
                    f"{same[0].path}; write both into files of one form",
                )
        else:
            same.append(part)
    for dataset, parts in by_format.items():
        _set_place(translation, dataset, parts)
    if not by_format and translation.given("dataset") is None:
        translation.default("dataset", "chat_dataset")
        translation.notes.append("no dataset is named; give --dataset NAME and --NAME.data_path (docs/datasets.md)")
    if by_format:
        keys = [part.key for parts in by_format.values() for part in parts]
        for key in keys:
            translation.set(key, "dataset", ",".join(by_format))
    _set_for_all(translation, list(by_format))
    _set_fraction(translation, list(by_format))


def _set_place(translation: Translation, dataset: str, parts: Sequence[DatasetPart]) -> None:
    """Set the place of one format's examples, and its settings."""
    first = parts[0]
    places = {(part.path, str(part.values().get("train_split"))) for part in parts}
    path = first.path if len(places) == 1 else ",".join(dict.fromkeys(_file_of(part) for part in parts))
    if len(places) > 1:
        repositories = dict.fromkeys(part.path for part in parts if is_hub_name(part.path))
        translation.notes += [
            f"fetch it first: hf download {name} --repo-type dataset --local-dir {HUB_DATA}/{name}"
            for name in repositories
        ]
    for part in parts:
        translation.set(part.key, f"{dataset}.data_path", path)
        for name, (key, value) in part.options.items():
            if len(places) == 1 or name not in _PLACES:
                translation.set(key, f"{dataset}.{name}", value)
            else:
                translation.set(key, f"{dataset}.data_path", path)


def _file_of(part: DatasetPart) -> str:
    """Files that a list may name: a dataset of the hub is fetched into a folder."""
    if not is_hub_name(part.path):
        return part.path
    split = part.values().get("train_split", "train")
    return f"{HUB_DATA}/{part.path}/**/{split}-*.parquet"


def _set_for_all(translation: Translation, datasets: Sequence[str]) -> None:
    for key, name, value in translation.dataset_wide:
        having = [dataset for dataset in datasets if name in settings_of(DATASETS[dataset])]
        for dataset in having:
            translation.set(key, f"{dataset}.{name}", value)
        if not having:
            _say_no_dataset_has_it(translation, key, name, value, datasets)


def _say_no_dataset_has_it(translation: Translation, key: str, name: str, value: str, datasets: Sequence[str]) -> None:
    if name == "mask_prompt" and datasets:
        if value == "False" and "text_dataset" not in datasets:
            translation.missing(key, f"of {' and '.join(datasets)} the answers alone are learned")
        else:
            translation.needless(key, f"{' and '.join(datasets)} does so")
    else:
        translation.missing(key, f"{' and '.join(datasets) or 'no dataset'} has no such setting")


def _set_fraction(translation: Translation, datasets: Sequence[str]) -> None:
    """Set the share of training rows for validation. Without one a dataset's own default does not apply."""
    key, share = translation.fraction or ("", "0")
    number = float(share)
    for dataset in datasets:
        default = SETTINGS[f"{dataset}.validation_fraction"].default
        has_split = f"{dataset}.test_split" in translation.settings
        if 0 < number < 1:
            translation.set(key, f"{dataset}.validation_fraction", share)
        elif default and not has_split:
            translation.default(f"{dataset}.validation_fraction", "0.0")
    if key and number >= 1:
        name = datasets[0] if datasets else "NAME"
        translation.missing(
            key, f"it counts rows; give --{name}.validation_fraction {share} / ALL_ROWS, and --eval_every_steps"
        )
    if key and number == 0:
        translation.needless(key, "no row is held out")
    if not 0 < number < 1 and not any(f"{dataset}.test_split" in translation.settings for dataset in datasets):
        _leave_out_evaluations(translation)


def _leave_out_evaluations(translation: Translation) -> None:
    for setting in ("eval_every_steps", "evals_per_epoch", "eval_before_training", "val_batch_size", "max_eval_step"):
        translation.take_back(setting, "needless", "no validation data is named, so nothing is evaluated")
