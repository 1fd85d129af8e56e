"""Micro-batches of whole texts with labels: rows of tokens, and for each text where it is read and what it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from data.sequences.tokenized import Row, TokenSequence
from data.tokens.labels import IGNORE_INDEX
from tasks.causal_batches import CausalMicroBatch, Collator, causal_meta_batch
from tasks.labels import ProblemType
from tasks.micro_batch import BatchShape, meta_ids


@dataclass(frozen=True, kw_only=True)
class TextMicroBatch(CausalMicroBatch):
    """A CausalMicroBatch whose texts have labels, and not its tokens. Rows of padding come after those of texts."""

    num_samples: int
    wanted: torch.Tensor  # int64 [samples], the class; fp32 [samples, classes], 1 = of it; fp32 [samples], the number
    read_positions: torch.Tensor | None  # int64 [texts], in the flattened [batch x seq]; None: the model's head knows
    token_type_ids: torch.Tensor | None  # int64 [batch, seq], 1 = of the second text of a pair

    @property
    def num_loss_terms(self) -> int:
        """The loss is a mean over samples."""
        return self.num_samples


@dataclass(frozen=True)
class TextCollator:
    """Makes a TextMicroBatch of rows of labeled texts.

    A causal model is read at each text's last token that is not the padding id, which is what transformers does with
    padded rows. So a text whose end token is the padding id, too, is read in front of it.
    """

    collate: Collator
    problem_type: ProblemType
    num_classes: int
    reads_last: bool
    attends_both_ways: bool
    has_token_types: bool

    def __call__(self, rows: list[Row]) -> TextMicroBatch:
        samples = [sample for row in rows for sample in row]
        whole = self.collate([[_without_labels(sample) for sample in row] for row in rows])
        lengths = np.array([len(sample.input_ids) for sample in samples], dtype=np.int64)
        values = {field.name: getattr(whole, field.name) for field in fields(whole)}
        if self.attends_both_ways:
            values["num_attended_pairs"] = int((lengths**2).sum())
        return TextMicroBatch(
            **values,
            num_samples=len(samples),
            wanted=self._wanted(samples),
            read_positions=self._read_positions(rows, whole.input_ids.shape[1]) if self.reads_last else None,
            token_type_ids=_token_types(samples, whole.input_ids) if self.has_token_types else None,
        )

    def _wanted(self, samples: Sequence[TokenSequence]) -> torch.Tensor:
        numbers = [sample.labels[1:] for sample in samples]
        if self.problem_type == "single_label_classification":
            return torch.tensor([int(number[0]) for number in numbers], dtype=torch.int64)
        if self.problem_type == "regression":
            return torch.tensor([float(number.view(np.float32)[0]) for number in numbers], dtype=torch.float32)
        wanted = torch.zeros(len(samples), self.num_classes)
        for place, classes in enumerate(numbers):
            wanted[place, torch.from_numpy(classes.astype(np.int64))] = 1
        return wanted

    def _read_positions(self, rows: list[Row], width: int) -> torch.Tensor:
        places = []
        for number, row in enumerate(rows):
            start = number * width
            for sample in row:
                places.append(start + last_token(sample.input_ids, self.collate.padding_id))
                start += len(sample.input_ids)
        # A batch without texts reads one position, so that every rank takes part in the same backward.
        return torch.tensor(places or [0], dtype=torch.int64)


def last_token(ids: np.ndarray, padding_id: int) -> int:
    """The place of the last token that is no padding, as transformers finds it: the first one if all are."""
    return int(np.flatnonzero(ids != padding_id).max(initial=0))


def _without_labels(sample: TokenSequence) -> TokenSequence:
    return sample._replace(labels=np.full(len(sample.input_ids), IGNORE_INDEX, dtype=np.int32))


def _token_types(samples: Sequence[TokenSequence], input_ids: torch.Tensor) -> torch.Tensor:
    """Of rows of one text, or pair, each."""
    types = torch.zeros_like(input_ids)
    for row, sample in enumerate(samples):
        types[row, int(sample.labels[0]) : len(sample.input_ids)] = 1
    return types


def text_meta_batch(shape: BatchShape, wanted: torch.Tensor, *, reads_last: bool) -> TextMicroBatch:
    """A batch without values (`tasks.task.Task.meta_batch`), of one text per row."""
    whole = causal_meta_batch(replace(shape, label_share=0.0))
    return TextMicroBatch(
        **{field.name: getattr(whole, field.name) for field in fields(whole)},
        num_samples=shape.rows,
        wanted=wanted,
        read_positions=meta_ids(shape.rows) if reads_last else None,
        token_type_ids=None,
    )
