"""Conflicts between settings of the data: datasets, slices, tokens, mixes and streams."""

import re
from datetime import date
from difflib import get_close_matches
from pathlib import PurePath

from configs.datasets import CustomDataset, split_paths
from configs.formats import DATASETS
from configs.run import SETTINGS, RunConfig
from utils.errors import ConfigError
from utils.urls import is_url

_CUSTOM_FILE = re.compile(r"[^:]+\.py(:[^\W\d]\w*)?")


def check_data(config: RunConfig) -> None:
    """Check that the settings of the data fit together.

    Raises:
        ConfigError: for the first conflict.
    """
    _check_datasets(config)
    _check_images(config)
    for name, dataset in config.dataset_configs.items():
        dataset.check(f"--{name}")
        if dataset.weight_column is not None and (dataset.HAS_IMAGES or dataset.HAS_LABELS or dataset.HAS_PAIRS):
            raise ConfigError(
                f"--{name}.weight_column: rows whose tokens are learned have weights, not these; leave it out"
            )
    _check_tokens(config)
    _check_template(config)
    _check_mix(config)
    _check_streaming(config)


def _check_datasets(config: RunConfig) -> None:
    train = config.train_config
    for name in train.datasets:
        if name not in DATASETS:
            near = get_close_matches(name, DATASETS, n=1)
            hint = f"did you mean {near[0]}?" if near else "or give your own as FILE.py:FUNCTION"
            if "/" in name or PurePath(name).suffix:
                hint = f"name the format here and the place with --NAME.data_path {name}, {hint}"
            raise ConfigError(f"--dataset: {name!r} is not one of {', '.join(DATASETS)}; {hint}")
        if train.datasets.count(name) > 1:
            raise ConfigError(
                f"--dataset: {name} is named twice; name it once, and give its share with --dataset_weights"
            )
    for name in sorted(config.given):
        section, field = name.split(".")
        # A bare flag, --streaming say, sets the field in every dataset that has it, chosen or not.
        if section in DATASETS and section not in train.datasets and not _is_set_in_all(config, field):
            raise ConfigError(f"--{name}: the chosen dataset is {train.dataset}; add --dataset {section}")
        if section in DATASETS and not any(f"{chosen}.{field}" in SETTINGS for chosen in train.datasets):
            raise ConfigError(f"--{field}: {train.dataset} has no such setting; leave this out")
    for name, place in config.dataset_configs.items():
        for field in ("train_split", "test_split"):
            split = getattr(place, field)
            if (name != "custom_dataset" or config.custom_dataset.file is None) and (
                split.strip() in ("", ".", "..") or "/" in split
            ):
                raise ConfigError(
                    f"--{name}.{field}: {split!r} names no split; give one like train, whose files are train.*"
                )
        if (name != "custom_dataset" or config.custom_dataset.file is None) and is_url(place.data_path or ""):
            raise ConfigError(
                f"--{name}.data_path: {place.data_path} is a URL, and only files and datasets on the hub are read; "
                "download it and give the file, or give OWNER/NAME"
            )
    custom = config.custom_dataset
    if "custom_dataset" in train.datasets and custom.file is None and custom.data_path is None:
        raise ConfigError(
            "--custom_dataset.file: is required; give FILE.py:FUNCTION, or a file of tokenized rows with "
            "--custom_dataset.data_path"
        )
    if custom.file is not None and not _CUSTOM_FILE.fullmatch(custom.file):
        raise ConfigError(
            f"--custom_dataset.file: {config.custom_dataset.file!r} is not FILE.py or FILE.py:FUNCTION; name one"
        )
    if train.split_slice is not None and not _is_slice(train.split_slice):
        raise ConfigError(
            f"--split_slice: {train.split_slice!r} is neither a percentage nor a number of examples; "
            "give one like 1%, up to 100%, or one like 10"
        )


def _check_images(config: RunConfig) -> None:
    train = config.train_config
    with_images = [name for name in train.datasets if DATASETS[name].HAS_IMAGES]
    if not with_images:
        if config.was_given("train_config.max_text_length"):
            raise ConfigError("--max_text_length: cuts captions; add --dataset caption_dataset, or leave this out")
        return
    if len(train.datasets) > 1:
        raise ConfigError(f"--dataset: {with_images[0]} cannot be mixed with others; give it alone")
    if config.was_given("train_config.truncation"):
        raise ConfigError(
            "--truncation: captions are cut to --max_text_length, and the tokens of an image never; leave this out"
        )


def _check_tokens(config: RunConfig) -> None:
    tokens = config.train_config.add_special_tokens
    for token in tokens:
        if tokens.count(token) > 1:
            raise ConfigError(f"--add_special_tokens: {token} is named twice; name it once")


def _check_template(config: RunConfig) -> None:
    """Refuse a day that is none, and two templates: a run's samples, and what it saves, are written by one."""
    day = config.train_config.template_date
    try:
        date.fromisoformat(day or "2026-11-26")
    except ValueError as error:
        raise ConfigError(f"--template_date: {day} is no date ({error}); write it like 2026-11-26") from error
    sections = [section for section in config.dataset_configs.values() if getattr(section, "as_chat", True)]
    files = {getattr(section, "chat_template", "") for section in sections if hasattr(section, "chat_template")}
    if len(files) > 1:
        raise ConfigError(
            "--chat_dataset.chat_template and --instruction_dataset.chat_template differ, and the saved model has one "
            "template; give both the same file, or none"
        )


def _is_set_in_all(config: RunConfig, field: str) -> bool:
    """Whether the field was given for every dataset that has it, as with a bare flag."""
    names = [name for section in DATASETS if (name := f"{section}.{field}") in SETTINGS]
    return len(names) > 1 and all(config.was_given(name) for name in names)


def _check_mix(config: RunConfig) -> None:
    train = config.train_config
    if not train.dataset_weights:
        return
    what, named = "datasets", [*train.datasets]
    if len(named) == 1:
        (name, source), *_ = config.dataset_configs.items()
        is_function = isinstance(source, CustomDataset) and source.file is not None
        what, named = "files", split_paths(source.data_path) if source.data_path and not is_function else []
        if len(named) < 2:
            raise ConfigError(
                "--dataset_weights: there is one dataset; name several with --dataset a,b, or several files of it with "
                f"--{name}.data_path a.jsonl,b.jsonl, or leave this out"
            )
        if len(set(named)) < len(named):
            raise ConfigError(f"--{name}.data_path: names a file twice, and each has one weight; name it once")
    if len(train.dataset_weights) != len(named):
        raise ConfigError(
            f"--dataset_weights: {len(train.dataset_weights)} weights for {len(named)} {what} ({','.join(named)}); "
            "give one for each"
        )


def _check_streaming(config: RunConfig) -> None:
    train = config.train_config
    if not config.streams:
        if config.was_given("train_config.shuffle_buffer_size"):
            raise ConfigError("--shuffle_buffer_size: only a stream has a buffer; add --streaming, or leave this out")
        return
    whole = [name for name in train.datasets if not config.datasets[name].streaming]
    if whole:
        raise ConfigError(
            f"--streaming: {', '.join(whole)} would not be streamed, and a run streams all of its datasets or none; "
            "give --streaming for all, or for none"
        )
    if not train.max_train_step:
        raise ConfigError(
            "--streaming: needs --max_train_step, because the length of a stream is unknown; give the optimizer steps "
            "after which the run ends"
        )
    for field in ("num_epochs", "gamma", "limit_train_batches"):
        if config.was_given(f"train_config.{field}"):
            raise ConfigError(
                f"--{field}: a stream has no epochs, so only --max_train_step ends the run; leave this out"
            )
    if train.split_slice is not None and train.split_slice.endswith("%"):
        raise ConfigError(
            f"--split_slice: {train.split_slice} of a stream is unknown, because its length is; give a number instead"
        )


def _is_slice(text: str) -> bool:
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?%", text):
        return 0 < float(text[:-1]) <= 100
    return bool(re.fullmatch(r"0*[1-9][0-9]*", text))
