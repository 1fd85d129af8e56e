"""The facts of a run's data that plans are made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from data.batches.counts import ImageTokens
from data.batches.row_counts import row_counts
from data.batches.rows import Rows
from data.pipeline import RunData
from data.processors.tokenizer_loading import added_token_ids, num_rows_needed, tokenizer_of
from data.sequences.token_columns import TEACHER_IDS
from data.sequences.tokenized import Sequences
from data.tokens.labels import IGNORE_INDEX
from resolving.resolved import Resolved
from utils.processor_type import Processor


@dataclass(frozen=True)
class DataFacts:
    """Figures of the data and of the tokenizer; None, or 0 for embeddings, if they are not known."""

    lengths: tuple[np.ndarray, ...] | None = None  # tokens of each training row; of each target, if they are apart
    is_start: bool = False  # the lengths are of the first rows of a stream alone
    eval_lengths: tuple[np.ndarray, ...] | None = None  # of each validation row; None without validation, too
    label_share: float | None = None  # of the training tokens, those that have a loss
    images: ImageTokens | None = None  # of the row with the most of them; None without images, too
    teacher_size: int = 0  # of the training rows, the likeliest tokens of a teacher at each token; 0: they have none
    counts: np.ndarray | None = None  # of each training row (`data.batches.row_counts`); None for a stream, too
    eval_counts: np.ndarray | None = None  # of each validation row; None without validation, too
    num_embeddings: int = 0  # rows that the tokenizer needs
    new_tokens: tuple[int, ...] = ()  # the ids of the tokens of --add_special_tokens
    notes: tuple[str, ...] = ()  # lines to print about unknown facts

    @classmethod
    def of_processor(cls, processor: Processor, resolved: Resolved, **more: Any) -> DataFacts:
        """The facts that follow from the tokenizer alone, and `more` of the fields."""
        tokenizer = tokenizer_of(processor)
        return cls(
            num_embeddings=num_rows_needed(tokenizer),
            new_tokens=tuple(added_token_ids(tokenizer, resolved.config.train_config)),
            **more,
        )


def facts_of_data(data: RunData, processor: Processor, resolved: Resolved) -> DataFacts:
    """The facts of the run's data and its tokenizer. Of a stream the first sequences are known."""
    num_tokens = max(1, len(data.train.input_ids), int(data.train.lengths.sum()))  # captions' images are no ids yet
    label_share = float(np.count_nonzero(data.train.labels != IGNORE_INDEX) / num_tokens)
    if data.train.has_targets:  # labels are a decoder's targets, apart from its inputs: all have a loss
        label_share = 1.0
    return DataFacts.of_processor(
        processor,
        resolved,
        lengths=_lengths(data.train, data.train_rows),
        is_start=data.train_rows is None,
        eval_lengths=None if data.evaluation is None else _lengths(data.evaluation, data.eval_rows),
        label_share=label_share,
        images=_image_tokens(data.train, data.train_rows),
        teacher_size=_teacher_size(data.train),
        counts=None if data.train_rows is None else row_counts(data.train_rows),
        eval_counts=None if data.eval_rows is None else row_counts(data.eval_rows),
    )


def _image_tokens(sequences: Sequences, rows: Rows | None) -> ImageTokens | None:
    images, lengths = sequences.num_image_tokens, sequences.lengths
    if images is None or not len(lengths):
        return None
    sizes = sequences.image_sizes.astype(np.float64)
    if rows is not None:
        images = np.add.reduceat(images[rows.indices], rows.offsets[:-1])
        lengths = rows.lengths
    largest = int(sizes.max(initial=1))
    typical = round(float((sizes**2).sum() / sizes.sum())) if sizes.any() else largest
    return ImageTokens(float(images.max() / lengths.max()), largest, typical)


def _teacher_size(sequences: Sequences) -> int:
    teacher = sequences.of_tokens.get(TEACHER_IDS)
    return 0 if teacher is None else int(teacher.shape[1])


def _lengths(sequences: Sequences, rows: Rows | None) -> tuple[np.ndarray, ...]:
    """Tokens of each row, and of each target if they are apart; without rows, of each sequence."""
    lengths = sequences.lengths if rows is None else rows.lengths
    if len(texts := sequences.text_lengths) > 1 and rows is not None and not rows.packed:
        # Under padding each text has a row to itself, as wide as the longest one.
        lengths = len(texts) * np.max(texts, axis=0)[rows.indices[: len(rows)]]
    if not sequences.has_targets:
        return (lengths,)
    targets = np.diff(sequences.label_offsets)
    return lengths, targets if rows is None else targets[rows.indices[: len(rows)]]  # such a row holds one sequence
