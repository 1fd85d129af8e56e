"""The data of a run, from its settings to its rows: splits, sequences, rows, or the start of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.datasets import CustomDataset, DataSource
from configs.formats import dataset_of
from configs.training import TrainConfig
from data.batches.layout import BatchLayout
from data.batches.mixing import MixPart, join_sequences, mix, mixed_indices
from data.batches.rows import Rows, make_rows
from data.dataset_functions.importing import accepted_options, find_dataset_function
from data.dataset_functions.user_errors import RAISED, failed, file_of
from data.dataset_functions.watched_settings import refuse_unread, watched
from data.sequences.ends import num_with_learned_padding
from data.sequences.shared import note_on_shared
from data.sequences.tokenized import Sequences, check_token_ids, checksum
from data.splits.reading import first_rows
from data.splits.validation_share import has_validation
from data.streaming.sources import Stream, StreamSource
from data.tokens.encoding import ONE_TEXT, Caption, Encode
from utils.errors import ConfigError
from utils.streams import keep_standard_descriptors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class RunData:
    """Sequences, and the rows they were packed or padded into.

    `train` holds the whole set; for a stream it holds the first sequences, and there are no rows yet. `evaluation` is
    None without validation.
    """

    train: Sequences
    evaluation: Sequences | None
    train_rows: Rows | None
    eval_rows: Rows | None
    stream: Stream | None
    mix: tuple[MixPart, ...]  # what each dataset gives to an epoch; empty for one dataset and for a stream
    epoch_indices: np.ndarray | None  # int64 [n]: the sequences of an epoch of mixed datasets, with repeats
    notes: tuple[str, ...]  # what was kept and what was left out

    def steps_per_epoch(self, layout: BatchLayout) -> int:
        """Optimizer steps of an epoch; a streamed run is one epoch."""
        if self.train_rows is None:
            assert self.stream is not None
            return self.stream.num_steps
        return layout.num_steps(len(self.train_rows))

    def epoch_notes(self, layout: BatchLayout) -> list[str]:
        """A line if an epoch takes only some of the rows."""
        if layout.max_rows_per_epoch is None or self.train_rows is None:
            return []
        num_rows = len(self.train_rows)
        return [f"limit_train_batches: an epoch takes {layout.rows_of_epoch(num_rows):,} of {num_rows:,} rows"]

    def checksum(self) -> int:
        """A checksum of the training sequences; of a stream, of its first ones."""
        return checksum([self.train])

    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of the splits by name; for a stream, of its first sequences and of parts of its files."""
        splits = {"training data": self.train, "validation data": self.evaluation}
        found = {
            name: f"{len(split)} sequences with checksum {checksum([split]):08x}"
            for name, split in splits.items()
            if split is not None
        }
        for source in self.stream.sources if self.stream else ():
            if (places := source.places) is not None:
                found[f"{source.name}, number of files"] = places.fingerprint()
        return found


def load_data(
    train_config: TrainConfig,
    dataset_configs: Mapping[str, DataSource],
    tokenizer: PreTrainedTokenizerBase,
    *,
    build_sequences: Callable[..., Sequences],
    vocab_size: int,
    context_length: int,
    packed_length: int | None = None,
    encode: Encode = ONE_TEXT,
) -> RunData:
    """Read, tokenize and check both splits of every dataset, and place them into rows; read the start of a stream.

    Args:
        dataset_configs: of what is mixed, by its name in messages (`RunConfig.sources`).
        build_sequences, encode: the task's, such as `data.sequences.causal.build_sequences`.
        context_length: the most input tokens of a row.
        packed_length: tokens to fill packed rows with, if fewer.

    Raises:
        ConfigError: if a split cannot be trained on.
    """
    names, row_length = list(dataset_configs), packed_length or context_length
    streams = any(config.streaming for config in dataset_configs.values())
    notes: list[str] = []
    builds = {
        name: partial(
            build_sequences,
            context_length=context_length,
            truncation=train_config.truncation or config.DEFAULT_TRUNCATION,
        )
        for name, config in dataset_configs.items()
    }

    def load(name: str, split: str) -> Sequences:
        config = watched(replace(dataset_configs[name], streaming=False))
        split_name = config.train_split if split == "train" else config.test_split
        sequences = load_sequences(
            find_function(config, encode),
            config,
            tokenizer,
            split_name,
            split_slice=train_config.split_slice,
            build=builds[name],
            encode=encode,
        )
        if split == "train":
            refuse_unread(config)
        label = split if len(names) == 1 else f"{name}, {split}"
        check_token_ids(sequences, vocab_size, label)
        notes.extend([*sequences.describe(label), *_note_on_padding(sequences, tokenizer, label)])
        return sequences

    missing = {} if train_config.run_validation is not None else _missing_validation(dataset_configs, streams)
    if len(missing) == len(names):
        _refuse_evaluations(train_config, missing[names[0]])
    train_rows, stream, epoch_indices = None, None, None
    parts: list[MixPart] = []
    if streams:
        stream = _open_stream(
            train_config,
            dataset_configs,
            tokenizer,
            builds,
            vocab_size=vocab_size,
            context_length=context_length,
            encode=encode,
        )
        heads = stream.head()
        for source in stream.sources:
            refuse_unread(source.dataset_config)
        train = join_sequences(heads)
        notes.extend(stream.describe(heads))
        notes.extend(_note_on_padding(train, tokenizer, "the first training samples"))
    else:
        train_parts = [load(name, "train") for name in names]
        train = join_sequences(train_parts)
        sizes = [len(part) for part in train_parts]
        del train_parts  # a second copy, once joined
        if len(names) > 1:
            parts = mix(names, sizes, train_config.dataset_weights)
            epoch_indices = mixed_indices(sizes, [part.num_samples for part in parts], train_config.seed)
            notes.append("mix: " + "; ".join(map(str, parts)))
        train_rows = make_rows(
            train,
            batching_strategy=train_config.batching_strategy,
            context_length=row_length,
            indices=epoch_indices,
        )
    evaluation, eval_rows = None, None
    if train_config.run_validation is not False:
        notes.extend(f"{name}, {note}" if len(names) > 1 else note for name, note in missing.items())
        if validated := [name for name in names if name not in missing]:
            evaluation = join_sequences([load(name, "validation") for name in validated])
            if not streams and not isinstance(encode, Caption):  # captions may be alike, their pictures are not
                notes.extend(note_on_shared(train, evaluation))
            eval_rows = eval_rows_of(evaluation, train_config, row_length)
    return RunData(train, evaluation, train_rows, eval_rows, stream, tuple(parts), epoch_indices, tuple(notes))


def eval_rows_of(sequences: Sequences, train_config: TrainConfig, row_length: int) -> Rows:
    """The rows of an evaluation: all, or as many as --max_eval_step lets it read."""
    rows = make_rows(sequences, batching_strategy=train_config.batching_strategy, context_length=row_length)
    most = train_config.max_eval_step * train_config.val_batch_size
    return rows.first(most) if most else rows


def _note_on_padding(sequences: Sequences, tokenizer: PreTrainedTokenizerBase, label: str) -> list[str]:
    """A line if padding seems to be learned, or an end token twice."""
    # A dataset function may set `pad_token`; one of a user's needs no tokenizer at all.
    ids = [getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id")]
    if not (number := num_with_learned_padding(sequences, [token for token in ids if token is not None])):
        return []
    return [
        f"{label}: {number:,} of {len(sequences):,} samples learn the padding or end token several times in a row; if "
        "that is padding, give labels of -100 there, or an attention_mask of 0"
    ]


def _open_stream(
    train_config: TrainConfig,
    dataset_configs: Mapping[str, DataSource],
    tokenizer: PreTrainedTokenizerBase,
    builds: Mapping[str, Callable[..., Sequences]],
    *,
    vocab_size: int,
    context_length: int,
    encode: Encode,
) -> Stream:
    sources = [
        StreamSource(
            dataset=name,
            function=find_function(config, encode),
            dataset_config=watched(config),
            tokenizer=tokenizer,
            split=config.train_split,
            build=builds[name],
            vocab_size=vocab_size,
            encode=encode,
            max_rows=int(train_config.split_slice) if train_config.split_slice else None,
        )
        for name, config in dataset_configs.items()
    ]
    return Stream(
        sources=tuple(sources),
        weights=train_config.dataset_weights,
        seed=train_config.seed,
        shuffle_buffer_size=train_config.shuffle_buffer_size,
        packing=train_config.batching_strategy == "packing",
        context_length=context_length,
        num_steps=train_config.max_train_step,
    )


def find_function(dataset_config: DataSource, encode: Encode) -> Callable[..., Any]:
    """The function of a dataset (`data.dataset_functions.importing`), if its examples can be encoded so.

    Raises:
        ConfigError: if they cannot: a function of this project that takes no `encode` writes one text.
    """
    name = dataset_of(dataset_config)
    function = find_dataset_function(name, dataset_config)
    is_of_user = isinstance(dataset_config, CustomDataset)
    if not encode.is_one_text and not is_of_user and not accepted_options(function, encode=encode):
        raise ConfigError(
            f"--dataset: {name} is for causal language models, and this model reads a source and writes a target; give "
            "a dataset that has both, such as instruction_dataset"
        )
    return function


def load_sequences(
    function: Callable[..., Any],
    dataset_config: Any,
    tokenizer: PreTrainedTokenizerBase,
    split: str,
    *,
    split_slice: str | None,
    build: Callable[..., Sequences],
    encode: Encode = ONE_TEXT,
) -> Sequences:
    """Call a dataset function for one split, and check what it returns.

    Args:
        split_slice: passed to a function with a parameter of this name, which then cuts before it tokenizes. Otherwise
            the rows that the function returns are cut.
        build: makes sequences of the rows, such as `build_sequences` with a context length.
        encode: passed to a function with a parameter of this name.

    Raises:
        ConfigError: if the function fails, returns nothing, or returns rows that cannot be trained on.
    """
    name = f"{getattr(function, '__name__', 'function')}, split {split!r}"
    try:
        options = accepted_options(function, split_slice=split_slice, encode=encode)
        rows = function(dataset_config, tokenizer, split, **options)
        if rows is None:
            raise ConfigError(f"dataset ({name}): the function returned nothing; return a list of tokenized rows")
        if not isinstance(rows, Iterable):
            raise ConfigError(f"dataset ({name}): the function returned {type(rows).__name__}; return a list of rows")
        return build(rows if "split_slice" in options else first_rows(rows, split_slice), name=name)
    except ConfigError:
        raise
    except RAISED as error:  # the function's own code runs here; a generator's while it is read
        raise failed(f"dataset ({name})", error, file_of(function)) from error
    finally:
        keep_standard_descriptors()  # which the function may have closed


def _missing_validation(dataset_configs: Mapping[str, DataSource], streams: bool) -> dict[str, str]:
    """The datasets that are not evaluated on, and why."""
    notes = {name: _no_validation_note(config, streams) for name, config in dataset_configs.items()}
    return {name: note for name, note in notes.items() if note is not None}


def _refuse_evaluations(train_config: TrainConfig, note: str) -> None:
    """Refuse what asks for evaluations that no data is there for."""
    asked = ("eval_every_steps", "evals_per_epoch", "eval_before_training", "early_stopping_patience", "keep_best")
    for field in asked:
        if getattr(train_config, field):
            raise ConfigError(f"--{field}: {note}, or leave this out")


def _no_validation_note(dataset_config: DataSource, streams: bool) -> str | None:
    """Why a dataset is not evaluated on; None if it has a validation split, or is a user's, whose function knows."""
    name = dataset_of(dataset_config)
    is_of_user = isinstance(dataset_config, CustomDataset) and dataset_config.file is not None
    if is_of_user or has_validation(name, dataset_config):
        return None
    remedy = f"--{name}.validation_fraction 0.05 keeps some of them for it"
    if streams:
        remedy = "a folder with train.* and validation.* has it"
    return f"validation: none, since {dataset_config.data_path} holds training rows alone; {remedy}"
