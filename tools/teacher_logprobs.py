"""Write what a teacher holds most likely at each label token, so that a student learns from it without the teacher.

    python -m tools.teacher_logprobs TEACHER --to rows --dataset chat_dataset --chat_dataset.data_path my_chats.jsonl
    python finetuning.py --model_name STUDENT --dataset custom_dataset --custom_dataset.data_path rows

TEACHER is a model's folder, an adapter, a run or a checkpoint. The flags of the data are those of a run, and so are
--tokenizer_name, --context_length and --truncation: the student is trained on these tokens. Teacher and student need
one vocabulary. `rows` gets train.parquet and validation.parquet. It runs on a GPU if there is one, in bf16.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.answering.teacher_flags import teacher_flags

# Before the imports below: they take seconds, and some of them print.
if __name__ == "__main__":
    from tools.beginning import begin_importing

    imports_ended = begin_importing(lambda: teacher_flags(None, __doc__))

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from configs.flags import parse_flags
from configs.run import RunConfig
from configs.train_settings.data import DEFAULT_CONTEXT_LENGTH
from data.batches.padding import EXACT
from data.pipeline import load_data
from data.processors.tokenizer_loading import load_tokenizer, num_rows_needed
from data.sequences.token_columns import TEACHER_IDS, TEACHER_LOGPROBS, WEIGHTS
from data.sequences.tokenized import Sequences, TokenSequence
from policies.loss.summed_loss import use_summed_loss
from tasks.task import BatchForm
from tools.answering.loading import LoadedModel, load
from tools.ending import status_of
from utils.errors import ConfigError
from utils.positions import positions_of
from utils.printing import print_line
from utils.progress import progress_bar
from utils.quiet import quiet_tool

_CHUNK = 1024  # tokens whose logits are held at a time
_AT_ONCE = 64  # batches whose sequences are sorted by length, so that few tokens are padding
_UNREAD = -30.0  # at tokens without a label, where nothing is learned


class LikelyTokens(NamedTuple):
    """A teacher's most likely tokens at each token of a sequence, [tokens, k]."""

    ids: np.ndarray  # int32
    logprobs: np.ndarray  # fp32


def write_rows(given: argparse.Namespace, flags: Sequence[str]) -> None:
    """Write the rows of both splits.

    Raises:
        ConfigError: for a flag, or data or a model that cannot be read.
    """
    for name in ("top_k", "batch_size"):
        if getattr(given, name) < 1:
            raise ConfigError(f"--{name}: {getattr(given, name)} is less than 1; give a larger number")
    if given.to.exists() and any(given.to.iterdir()):
        raise ConfigError(f"--to: {given.to} holds files already; give another folder")
    config = parse_flags(["--model_name", str(given.teacher), "--batching_strategy", "padding", *flags])
    loaded = load(given.teacher, given.base)
    if loaded.task.NAME != "causal_lm":
        raise ConfigError(f"{given.teacher}: a student learns from causal language models alone; give one")
    use_summed_loss(loaded.model, loaded.task.backbone(loaded.model), _CHUNK, loaded.task.compute_logits)
    tokenizer = loaded.processor if config.train_config.tokenizer_name is None else load_tokenizer(config.train_config)
    data = _read(config, loaded, tokenizer)
    vocab_size = loaded.model.config.get_text_config().vocab_size
    if given.top_k >= vocab_size:
        raise ConfigError(f"--top_k: {given.top_k} is not less than the vocabulary of {vocab_size}; give fewer")
    given.to.mkdir(parents=True, exist_ok=True)
    for name, sequences in (("train", data.train), ("validation", data.evaluation)):
        if sequences is not None:
            file = given.to / f"{name}.parquet"
            _write(file, sequences, _windows(sequences, loaded, tokenizer, given))
            print_line(f"{file}: {len(sequences):,} rows, {given.top_k} tokens of the teacher at each label token")


def _read(config: RunConfig, loaded: LoadedModel, tokenizer: Any) -> Any:
    train, model_config = config.train_config, loaded.model.config
    length = train.context_length or min(DEFAULT_CONTEXT_LENGTH, positions_of(model_config) or DEFAULT_CONTEXT_LENGTH)
    reading = loaded.task.make_reading(tokenizer, model_config, train, (length,))
    data = load_data(
        train,
        config.sources,
        tokenizer,
        build_sequences=reading.build_sequences,
        vocab_size=max(model_config.get_text_config().vocab_size, num_rows_needed(tokenizer)),
        context_length=length,
        encode=reading.encode,
    )
    for note in data.notes:
        print_line(note)
    return data


def _windows(
    sequences: Sequences, loaded: LoadedModel, tokenizer: Any, given: argparse.Namespace
) -> Iterator[list[tuple[TokenSequence, LikelyTokens]]]:
    """The sequences in their order, some at a time, each with what the teacher holds likely."""
    vocab_size = loaded.model.config.get_text_config().vocab_size
    form = BatchForm(vocab_size, (EXACT,), packing=False, offsets="none")
    collate = loaded.task.make_collator(tokenizer, loaded.model.config, form)
    size = given.batch_size
    with progress_bar("teacher", None, total=len(sequences), leave=False) as bar:
        for first in range(0, len(sequences), _AT_ONCE * size):
            window = [sequences[index] for index in range(first, min(first + _AT_ONCE * size, len(sequences)))]
            order = sorted(range(len(window)), key=lambda index: len(window[index].input_ids))
            found: dict[int, LikelyTokens] = {}
            for start in range(0, len(order), size):
                some = order[start : start + size]
                of_batch = _of_batch([window[index] for index in some], collate, loaded, given.top_k)
                found |= dict(zip(some, of_batch, strict=True))
                bar.update(len(some))
            yield [(sequence, found[index]) for index, sequence in enumerate(window)]


@torch.no_grad()
def _of_batch(some: list[TokenSequence], collate: Any, loaded: LoadedModel, top_k: int) -> list[LikelyTokens]:
    batch = collate([[sequence] for sequence in some]).to(loaded.model.device)
    targets = {"targets": batch.targets, "target_positions": batch.target_positions, "top_k": top_k}
    logprobs, ids = loaded.model(**loaded.task.model_inputs(batch), **targets, use_cache=False)
    rows, places = np.divmod(batch.target_positions.cpu().numpy() + 1, batch.input_ids.shape[1])  # of the label tokens
    found = []
    for row, sequence in enumerate(some):
        shape = (len(sequence.input_ids), top_k)
        one = LikelyTokens(np.zeros(shape, dtype=np.int32), np.full(shape, _UNREAD, dtype=np.float32))
        mine = rows == row
        one.ids[places[mine]] = ids.cpu().numpy()[mine]
        one.logprobs[places[mine]] = logprobs.cpu().numpy()[mine]
        found.append(one)
    return found


def _write(file: Path, sequences: Sequences, windows: Iterator[list[tuple[TokenSequence, LikelyTokens]]]) -> None:
    """Write a parquet file, which gets its name once it is whole."""
    types = {"input_ids": pa.list_(pa.int32()), "labels": pa.list_(pa.int32())}
    types |= {TEACHER_IDS: pa.list_(pa.list_(pa.int32())), TEACHER_LOGPROBS: pa.list_(pa.list_(pa.float32()))}
    types |= {WEIGHTS: pa.list_(pa.float32())} if WEIGHTS in sequences.of_tokens else {}
    schema, incomplete = pa.schema(types), file.with_suffix(".incomplete")
    with pq.ParquetWriter(incomplete, schema) as writer:
        for window in windows:
            columns: dict[str, list[Any]] = {name: [] for name in types}
            for sequence, found in window:
                columns["input_ids"].append(sequence.input_ids)
                columns["labels"].append(sequence.labels)
                columns[TEACHER_IDS].append(list(found.ids))
                columns[TEACHER_LOGPROBS].append(list(found.logprobs))
                if WEIGHTS in types:
                    columns[WEIGHTS].append(sequence.of_tokens[WEIGHTS])
            writer.write_table(pa.table({name: pa.array(values, types[name]) for name, values in columns.items()}))
    incomplete.rename(file)


def main(argv: Sequence[str] | None = None) -> int:
    quiet_tool()
    return status_of(lambda: write_rows(*teacher_flags(argv, __doc__)))


if __name__ == "__main__":
    imports_ended()
    sys.exit(main())
