"""Rows of a source as rows of token ids: done once per machine, kept, and found again by what they were made from."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import tokenizers
import transformers
from datasets.fingerprint import Hasher
from filelock import FileLock, Timeout

from data import chat, prompts
from data import loss_mask as marked_text
from data.files import Source
from data.loss_mask import BadRow, Piece, tokenize_marked
from utils.errors import ConfigError
from utils.progress import phase, shows_progress

ToPieces = Callable[[Mapping[str, Any]], Sequence[Piece]]

BATCH_SIZE = 1000  # rows per call of the tokenizer, which then works on all cores
STREAM_BATCH_SIZE = 256  # rows of a stream are held in host memory beside it: 1000 cost 60 MiB more
_HEAD_START_SECONDS = 1.0  # for the process that shows progress
_QUIET_WAIT_SECONDS = 5.0
_MADE_BY = (marked_text, chat, prompts)  # the code that decides, beside the recipe's own, what the tokens are


def tokenize_rows(source: Source, tokenizer: Any, to_pieces: ToPieces, *, by_template: bool = False) -> Any:
    """`input_ids` and `labels` of every row, in the order of the rows.

    Args:
        source: what `load_split` returned; a stream stays one and is tokenised as it is read.
        to_pieces: a row's text, in parts that are learned and parts that are not.
        by_template: the text holds its start and end tokens already. Else it is begun with the tokenizer's start token,
            where it has one, and ended with its end token.

    Returns:
        A Hugging Face Dataset, or IterableDataset where the source streams, with int32 lists.

    Raises:
        ConfigError: for a row that cannot be used, naming it; while it is read, where the source streams.
    """
    start = [] if by_template or tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    end = [] if by_template else [tokenizer.eos_token_id]

    tokenize = _Tokenize(replace(source, rows=None), to_pieces, tokenizer, start, end)
    options: dict[str, Any] = {"batched": True, "with_indices": True, "remove_columns": list(source.columns)}
    if isinstance(source.rows, datasets.IterableDataset):
        return source.rows.map(tokenize, batch_size=STREAM_BATCH_SIZE, **options)
    fingerprint = _fingerprint(source, tokenizer, to_pieces, [start, end])
    int32_lists = datasets.List(datasets.Value("int32"))
    description = f"tokenizing {source.place}"
    with (
        _held_by_one_process(source, fingerprint) as cache_file,
        nullcontext() if cache_file.exists() else phase(description),
    ):
        return source.rows.map(
            tokenize,
            batch_size=BATCH_SIZE,
            **options,
            features=datasets.Features({"input_ids": int32_lists, "labels": int32_lists}),
            new_fingerprint=fingerprint,
            cache_file_name=str(cache_file),
            load_from_cache_file=True,
            desc=description,
        )


@dataclass(frozen=True)
class _Tokenize:
    """What `map` calls with a batch of columns. A class, so that a stream can be sent to a worker process."""

    source: Source  # without its rows
    to_pieces: ToPieces
    tokenizer: Any
    start: list[int]
    end: list[int]

    def __call__(self, batch: Mapping[str, Sequence[Any]], indices: Sequence[int]) -> dict[str, list[Any]]:
        samples = list(self._pieces(batch, indices))
        tokenized = tokenize_marked(samples, self.tokenizer, start=self.start, end=self.end)
        return {"input_ids": [row.input_ids for row in tokenized], "labels": [row.labels for row in tokenized]}

    def _pieces(self, batch: Mapping[str, Sequence[Any]], indices: Sequence[int]) -> Iterator[Sequence[Piece]]:
        source = self.source
        for index, values in zip(indices, zip(*(batch[name] for name in source.columns), strict=True), strict=True):
            row = dict(zip(source.columns, values, strict=True))
            try:
                for name in source.text_columns:
                    if not isinstance(row[name], str):
                        raise BadRow(f"column {name} is not text but {_kind(row[name])}")
                yield self.to_pieces(row)
            except BadRow as error:
                raise ConfigError(f"{source.name}, row {source.row_number(index)}: {error}") from error


def _kind(value: Any) -> str:
    return "empty (null)" if value is None else type(value).__name__


def _fingerprint(source: Source, tokenizer: Any, to_pieces: ToPieces, ends: list[list[int]]) -> str:
    """What the result depends on: the rows, the tokenizer, the recipe's settings and code, the libraries.

    Hugging Face would hash the function itself; a recipe that was imported from a file would then be known by its name
    alone, and a tokenizer looks changed once it was used.
    """
    recipe = inspect.unwrap(getattr(to_pieces, "func", to_pieces))
    code = [inspect.getsource(module) for module in _MADE_BY] + [inspect.getsource(inspect.getmodule(recipe) or recipe)]
    versions = [transformers.__version__, tokenizers.__version__]
    parts = [source.rows._fingerprint, source.settings, _tokenizer_state(tokenizer), ends, code, versions]
    return Hasher.hash(parts)


def _tokenizer_state(tokenizer: Any) -> str:
    if not tokenizer.is_fast:
        return Hasher.hash(tokenizer)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # what the last call left there; the next call sets its own
    backend.no_padding()
    return Hasher.hash([backend.to_str(), tokenizer.special_tokens_map, tokenizer.chat_template])


@contextmanager
def _held_by_one_process(source: Source, fingerprint: str) -> Iterator[Path]:
    """The file that keeps the tokenised rows, held until they are in it. Who waits says for what, if it takes long.

    A lock of the file system and no collective: nothing runs into a time limit, however long tokenising takes.
    """
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "finetuning-tokenized"
    cache_file = folder / f"{fingerprint}.arrow"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{cache_file}.lock")
        if not shows_progress() and not cache_file.exists():
            time.sleep(_HEAD_START_SECONDS)
        try:
            lock.acquire(timeout=_QUIET_WAIT_SECONDS)
        except Timeout:
            print(f"waiting for another process, which tokenizes {source.place} ({lock.lock_file})", flush=True)
            lock.acquire()
    except OSError as error:
        raise ConfigError(
            f"tokenised rows cannot be kept in {folder} ({error}); name another place with HF_DATASETS_CACHE"
        ) from error
    try:
        yield cache_file
    finally:
        lock.release()
