"""Tokenizes the examples of a split once per machine; the result is cached under a key made from all its inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import jinja2
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tokenizers
import transformers
from datasets.fingerprint import Hasher
from filelock import FileLock, Timeout

from data.cache_folder import cache_folder, not_kept
from data.dataset_functions.function_key import function_key, tokenizer_key
from data.dataset_functions.user_sources import project_sources
from data.files.contents import contents_of
from data.files.row_stream import RowStream
from data.files.table_rows import Batch, read_rows
from data.forked_work import in_processes, num_processes
from data.sequences.token_columns import SAMPLE_WEIGHT
from data.sequences.tokenized import COUNT_COLUMNS
from data.splits.examples import SplitExamples
from data.streaming.tokenized_stream import UNREAD_KEYS, TokenizedStream
from data.tokens.encoding import ONE_TEXT, Encode, check_takes_templates
from data.tokens.loss_mask import without_empty_answers
from data.tokens.spans import BadExample, ChatSamples, MaskWay, TextSpan
from data.tokens.special_text import SpecialTokens
from utils.errors import ConfigError, in_one_line
from utils.printing import print_line
from utils.progress import phase, shows_progress
from utils.template_date import asks_for_date, date_of
from utils.wording import plural

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ToSpans = Callable[[Mapping[str, Any]], Sequence[TextSpan] | ChatSamples]

BATCH_SIZE = 1000  # examples per call of the tokenizer, which then works on all cores
_SMALLEST_PART = 100  # of conversations
STREAM_BATCH_SIZE = 256  # for a stream, whose batches stay in host memory: 1000 cost 60 MiB more
IMAGES_OF_SAMPLES, TOKENS_OF_IMAGES = "images_of_samples", "tokens_of_images"
"""Columns of conversations with images: how many each sample has, and the tokens of each of them, sample by sample."""
IMAGE_SOURCES, IMAGE_ROW = "image_sources", "image_row"
"""Columns of a stream's, which cannot be read again: where a conversation's images are, and what messages call it."""

_LISTS = ("input_ids", "labels", "sample_lengths", IMAGES_OF_SAMPLES, TOKENS_OF_IMAGES)
_HEAD_START_SECONDS = 1.0  # for the process that shows progress
_QUIET_WAIT_SECONDS = 5.0


def tokenize_split(
    examples: SplitExamples,
    tokenizer: PreTrainedTokenizerBase,
    to_spans: ToSpans,
    *,
    by_template: bool = False,
    with_images: bool = False,
    encode: Encode = ONE_TEXT,
) -> Any:
    """`input_ids` and `labels` of every example, in their order.

    Args:
        examples: what `load_split` returned; a stream is tokenized as it is read.
        to_spans: makes an example's text, as spans with and without a loss.
        by_template: `to_spans` returns samples whose text holds its start and end tokens, as that of chat templates
            does. It marks special tokens that the data spells itself (`SpecialTokens.as_text`); elsewhere the columns
            come to it marked.
        with_images: of samples by template, say where their images are, too (`IMAGES_OF_SAMPLES` and more).
        encode: makes token ids of the spans; the task's (`data.tokens.encoding`).

    Returns:
        A Hugging Face Dataset with int32 lists; a TokenizedStream for a stream. A row is an example; the samples of a
        conversation are end to end, with their lengths in `sample_lengths`.

    Raises:
        ConfigError: naming the row of an example that cannot be used; for a stream, when it is read. Conversations, if
            source and target are encoded apart.
    """
    if by_template:
        check_takes_templates(encode, examples.flag)
    if with_images and examples.weight_column is not None:
        flag = f"{examples.flag.rpartition('.')[0]}.weight_column"
        raise ConfigError(f"{flag}: rows of texts alone have weights, not those with images; leave it out")
    special = SpecialTokens.of(tokenizer)
    tokenize = _Tokenize(replace(examples, data=None), to_spans, tokenizer, encode, by_template, special, with_images)
    examples.refuse_absent(examples.text_columns)
    examples.say_unread()
    if isinstance(examples.data, datasets.IterableDataset | RowStream):
        return TokenizedStream(examples.data, replace(tokenize, is_stream=True), STREAM_BATCH_SIZE)
    options: dict[str, Any] = {"batched": True, "with_indices": True, "remove_columns": examples.data.column_names}
    cache_key = _cache_key(examples, tokenizer, to_spans, encode, by_template=by_template)
    int32_lists = datasets.List(datasets.Value("int32"))
    counts = dict.fromkeys(COUNT_COLUMNS, datasets.Value("int32"))
    columns = dict.fromkeys(_LISTS[: 5 if with_images else 3 if by_template else 2], int32_lists) | counts
    columns |= {} if examples.weight_column is None else {SAMPLE_WEIGHT: datasets.Value("float32")}
    columns |= {UNREAD_KEYS: datasets.List(datasets.Value("string"))} if by_template else {}
    work = f"tokenizing {plural(len(examples.data), 'example')} of {examples.place}"
    parts = _parts(len(examples.data), by_template=by_template)
    with (
        _held_by_one_process(examples.place, cache_key) as cache_file,
        nullcontext() if _is_sound(cache_file, len(examples.data)) else phase(work),
        closing(_tables(examples.data, tokenize, parts)) as tables,
    ):
        rows = examples.data.map(
            lambda indices: next(tables),
            input_columns=[],
            batch_size=len(parts[0]) if parts else BATCH_SIZE,
            **options,
            features=datasets.Features(columns),
            new_fingerprint=cache_key,
            cache_file_name=str(cache_file),
            load_from_cache_file=True,
            desc=f"tokenizing {examples.place}",
        )
    if by_template:
        found = pc.unique(pc.list_flatten(rows.data.column(UNREAD_KEYS))).to_pylist()
        if examples.is_training and shows_progress():
            examples.say_unread_keys(sorted(found))
        rows = rows.remove_columns(UNREAD_KEYS)
    return rows


@dataclass(frozen=True)
class _Tokenize:
    """Called with a batch of columns. A class, so that a stream can be pickled for a worker process."""

    examples: SplitExamples  # without their data
    to_spans: ToSpans
    tokenizer: PreTrainedTokenizerBase
    encode: Encode
    by_template: bool
    special: SpecialTokens
    with_images: bool = False
    is_stream: bool = False
    speaks: bool = False  # also if other processes show progress: of a stream that they share

    def __call__(self, batch: Batch, indices: Sequence[int]) -> dict[str, list[Any]]:
        weights: list[float] = []
        examples = list(self._spans(batch, indices, weights))
        columns = self._conversations(examples) if self.by_template else self._texts(examples)
        columns |= self._images(examples, indices) if self.with_images else {}
        return columns if self.examples.weight_column is None else columns | {SAMPLE_WEIGHT: weights}

    def _texts(self, examples: list[Any]) -> dict[str, list[Any]]:
        num_empty_answers = [0] * len(examples)
        if not self.examples.learns_empty_answers:
            kept = [without_empty_answers(spans) if spans is not None else (None, 0) for spans in examples]
            examples, num_empty_answers = [spans for spans, _ in kept], [num_empty for _, num_empty in kept]
        texts = [self._learned(spans or [], count) for spans, count in zip(examples, num_empty_answers, strict=True)]
        # Without spans, and so without tokens, it is counted and left out later; the other rows keep their numbers.
        columns = self.encode(texts, self.tokenizer, special=self.special)
        spelled = [self._spells(spans) for spans in texts]
        return columns._asdict() | self._counts(num_empty_answers, spelled, [None] * len(examples))

    def _conversations(self, examples: list[ChatSamples | None]) -> dict[str, list[Any]]:
        of_each: list[Sequence[Sequence[TextSpan]]] = [
            [self._learned(spans, samples.num_empty_answers) for spans in samples.spans] if samples else [[]]
            for samples in examples
        ]
        spans_of_each = [spans for samples in of_each for spans in samples]
        tokenized = self.encode(spans_of_each, self.tokenizer, by_template=True, special=self.special)
        ends = np.cumsum([0, *map(len, of_each)]).tolist()
        parts = [slice(first, last) for first, last in pairwise(ends)]
        columns: dict[str, list[Any]] = {
            "input_ids": [np.concatenate(tokenized.input_ids[part]) for part in parts],
            "labels": [np.concatenate(tokenized.labels[part]) for part in parts],
            "sample_lengths": [[len(ids) for ids in tokenized.input_ids[part]] for part in parts],
            "num_answers_joined": [max(tokenized.num_answers_joined[part], default=0) for part in parts],
            UNREAD_KEYS: [list(samples.unread_keys) if samples else [] for samples in examples],
        }
        num_empty_answers = [samples.num_empty_answers if samples else 0 for samples in examples]
        spelled = [any(map(self._spells, samples)) for samples in of_each]
        ways = [samples.way if samples else None for samples in examples]
        return columns | self._counts(num_empty_answers, spelled, ways)

    def _images(self, examples: list[ChatSamples | None], indices: Sequence[int]) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {
            IMAGES_OF_SAMPLES: [list(samples.num_images) if samples else [0] for samples in examples],
            TOKENS_OF_IMAGES: [list(samples.image_tokens) if samples else [] for samples in examples],
        }
        if not self.is_stream:
            return columns
        sources = [tuple(samples.images) if samples else () for samples in examples]
        return columns | {IMAGE_SOURCES: sources, IMAGE_ROW: [self._name_of(index) for index in indices]}

    def _name_of(self, index: int) -> str:
        return f"{self.examples.flag}: {self.examples.where(index)}"

    def _learned(self, spans: Sequence[TextSpan], num_empty_answers: int) -> Sequence[TextSpan]:
        """The spans, prompts with a loss too if that was asked for. An example whose answer is empty stays as it is."""
        if self.examples.masks_prompts or num_empty_answers:
            return spans
        return [span._replace(has_loss=True) for span in spans]

    def _spells(self, spans: Sequence[TextSpan]) -> bool:
        """Whether the data spells special tokens in the text of an example."""
        return any(self.special.spells(span.text) for span in spans)

    @staticmethod
    def _counts(
        num_empty_answers: list[int], spelled: list[bool], ways: Sequence[MaskWay | None]
    ) -> dict[str, list[int]]:
        counts = {"num_empty_answers": num_empty_answers, "num_special_as_text": [int(found) for found in spelled]}
        return counts | {way: [int(way == used) for used in ways] for way in MaskWay}

    def _spans(self, batch: Batch, indices: Sequence[int], weights: list[float]) -> Iterator[Any]:
        """The text of each example; None for one that is left out. Their weights are added to `weights`."""
        refusals, marks = [], self.examples.splits_special_tokens and not self.by_template
        for index, example in zip(indices, self.examples.rows_of(batch), strict=True):
            try:
                if isinstance(example, BadExample):
                    raise example
                example = self.examples.with_text(example)
                weight = self.examples.take_weight(example)
                spans = self.to_spans(self.special.as_text(example) if marks else example)
            except BadExample as error:
                refusals.append(self.examples.refusal(index, error))
                weight, spans = 1.0, None
            weights.append(weight)
            yield spans
        if refusals and (self.speaks or shows_progress()):
            more = f" (and {len(refusals) - 1} more of {len(indices):,} rows)" if len(refusals) > 1 else ""
            print_line(f"left out: {refusals[0]}{more}")


def _parts(num_rows: int, *, by_template: bool) -> list[range]:
    """The rows in parts of equal size, each the work of one process at a time."""
    size = min(BATCH_SIZE, max(_SMALLEST_PART, num_rows // (8 * num_processes()))) if by_template else BATCH_SIZE
    return [range(first, min(first + size, num_rows)) for first in range(0, num_rows, size)]


def _tables(data: Any, tokenize: _Tokenize, parts: Sequence[range]) -> Generator[pa.Table]:
    """The tokens of each part. Several processes work on them if that pays: templates run in Python, on one core."""

    def table(part: range) -> pa.Table:
        return _as_table(tokenize(read_rows(data, part.start, part.stop), part))

    few = 2 if tokenize.by_template else 20  # a tokenizer's own threads are about as fast for texts
    if len(parts) < few or num_processes() == 1:
        yield from map(table, parts)
    else:
        yield from in_processes(table, parts, num_processes())


def _as_table(columns: Mapping[str, list[Any]]) -> pa.Table:
    """The columns, of integers or of their lists, as Arrow has them. `datasets` would convert every row by itself."""
    arrays = {}
    for name, values in columns.items():
        if name in _LISTS:
            ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
            numbers = np.concatenate([*values, np.empty(0, np.int32)], dtype=np.int32, casting="unsafe")
            arrays[name] = pa.ListArray.from_arrays(pa.array(ends), pa.array(numbers))
        elif name == UNREAD_KEYS:
            arrays[name] = pa.array(values, pa.list_(pa.string()))
        else:
            arrays[name] = pa.array(values, pa.float32() if name == SAMPLE_WEIGHT else pa.int32())
    return pa.table(arrays)


def _cache_key(
    examples: SplitExamples,
    tokenizer: PreTrainedTokenizerBase,
    to_spans: ToSpans,
    encode: Encode,
    *,
    by_template: bool,
) -> str:
    """A hash of all that the tokens depend on: rows, tokenizer, the dataset's function and its values, our code."""
    parts = [
        examples.data._fingerprint,
        repr(examples.data.features),
        [examples.columns, examples.text_columns, examples.learned_columns, examples.skips_bad_rows],
        [examples.learns_empty_answers, examples.splits_special_tokens, examples.masks_prompts, examples.weight_column],
        tokenizer_key(tokenizer),
        repr([encode, by_template]),
        _date_in_template(tokenizer) if by_template else None,
        function_key(to_spans, tokenizer),
        contents_of(project_sources()),
        [library.__version__ for library in (transformers, tokenizers, datasets, jinja2)],
    ]
    return Hasher.hash(parts)


def _date_in_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The date that the chat template writes; None if it writes none."""
    if not asks_for_date(tokenizer.chat_template):
        return None
    return date_of(tokenizer) or date.today().isoformat()


def _is_sound(cache_file: Path, num_rows: int) -> bool:
    """Whether the file holds a split's tokens. A damaged one is deleted, and a line says so."""
    if not cache_file.exists():
        return False
    try:
        rows = datasets.Dataset.from_file(str(cache_file))
        rows.data.validate(full=True)  # offsets that lead outside would end the process
        damage = "" if len(rows) == num_rows else f"{plural(len(rows), 'row')} instead of {num_rows}"
    except Exception as error:  # whatever the bytes make Arrow stumble over
        damage = in_one_line(error)
    if damage:
        print_line(f"the tokens kept in {cache_file} are damaged ({damage}); tokenizing again")
        cache_file.unlink()
    return not damage


@contextmanager
def _held_by_one_process(place: str, cache_key: str) -> Iterator[Path]:
    """The cache file, locked until the tokenized examples are in it. A process that waits long prints for what.

    A file lock, not a collective: however long tokenizing takes, no time limit is hit.
    """
    folder = cache_folder() / "finetuning-tokenized"
    cache_file = folder / f"{cache_key}.arrow"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{cache_file}.lock")
        if not shows_progress() and not cache_file.exists():
            time.sleep(_HEAD_START_SECONDS)
        try:
            lock.acquire(timeout=_QUIET_WAIT_SECONDS)
        except Timeout:
            print_line(f"waiting for another process, which tokenizes {place} ({lock.lock_file})")
            lock.acquire()
        try:
            yield cache_file
        finally:
            lock.release()
    except OSError as error:
        if refusal := not_kept(error):
            raise refusal from error
        raise
