"""Micro-batches of an encoder-decoder: sources, targets, and the decoder's inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from data.batches.counts import EncoderDecoderPairs
from data.batches.padding import EXACT, PaddedWidth, pad_right
from data.sequences.tokenized import Row
from data.tokens.labels import IGNORE_INDEX, labels_to_predict, shift_right
from tasks.micro_batch import TensorBatch, meta_ids


@dataclass(frozen=True)
class Seq2SeqMicroBatch(TensorBatch):
    """One rank's share of one forward pass (`tasks.micro_batch.MicroBatch`)."""

    input_ids: torch.Tensor  # int64 [batch, source]
    attention_mask: torch.Tensor | None  # int64 [batch, source], 1 = token; None if there is no padding
    decoder_input_ids: torch.Tensor  # int64 [batch, target]: the labels, one place later
    labels: torch.Tensor  # int64 [batch, target], -100 = no label; stays on the host
    target_positions: torch.Tensor  # int64 [n], positions of the flattened [batch x target] that have a label
    targets: torch.Tensor  # int64 [n], those labels
    num_tokens: int  # of sources and targets, without padding
    num_label_tokens: int
    num_attended_pairs: int  # (query, key) pairs of the encoder
    source_rows: tuple[int, ...]  # of its examples, their rows in the data file
    num_decoder_tokens: int = 0
    num_decoder_pairs: int = 0
    num_cross_pairs: int = 0

    @property
    def text_ids(self) -> torch.Tensor:
        return self.decoder_input_ids

    def with_text_ids(self, ids: torch.Tensor) -> Self:
        return replace(self, decoder_input_ids=ids)


@dataclass(frozen=True)
class Seq2SeqCollator:
    """Makes a Seq2SeqMicroBatch of rows of one sequence each, padded on the right.

    The decoder needs no mask: it looks back only, so what follows a target changes nothing before.
    """

    padding_id: int
    decoder_start_id: int
    decoder_padding_id: int
    width: PaddedWidth = EXACT
    target_width: PaddedWidth = EXACT
    num_rows: int = 0  # of every batch, filled up with padding; 0: as many as are given

    def __call__(self, rows: list[Row]) -> Seq2SeqMicroBatch:
        sequences = [sequence for row in rows for sequence in row]
        texts, answers = [s.input_ids for s in sequences], [s.labels for s in sequences]
        input_ids, is_token, lengths = pad_right(texts, self.width, self.padding_id, self.num_rows)
        label_array, _, target_lengths = pad_right(answers, self.target_width, IGNORE_INDEX, self.num_rows)
        labels = torch.from_numpy(label_array)
        target_positions, targets = labels_to_predict(labels)
        pairs = EncoderDecoderPairs.of(lengths, target_lengths)
        return Seq2SeqMicroBatch(
            input_ids=torch.from_numpy(input_ids),
            attention_mask=None if is_token.all() else torch.from_numpy(is_token.astype(np.int64)),
            decoder_input_ids=shift_right(labels, self.decoder_start_id, self.decoder_padding_id),
            labels=labels,
            target_positions=target_positions,
            targets=targets,
            num_tokens=int(lengths.sum() + target_lengths.sum()),
            num_label_tokens=int((label_array != IGNORE_INDEX).sum()),
            num_attended_pairs=pairs.encoder,
            source_rows=tuple(sequence.source_row for sequence in sequences),
            num_decoder_tokens=int(target_lengths.sum()),
            num_decoder_pairs=pairs.decoder,
            num_cross_pairs=pairs.cross,
        )


def seq2seq_meta_batch(rows: int, width: int, target_width: int) -> Seq2SeqMicroBatch:
    """A batch without values (`tasks.task.Task.meta_batch`)."""
    num_labels = rows * target_width
    return Seq2SeqMicroBatch(
        input_ids=meta_ids(rows, width),
        attention_mask=meta_ids(rows, width),
        decoder_input_ids=meta_ids(rows, target_width),
        labels=meta_ids(rows, target_width),
        target_positions=meta_ids(num_labels),
        targets=meta_ids(num_labels),
        num_tokens=rows * (width + target_width),
        num_label_tokens=num_labels,
        num_attended_pairs=0,
        source_rows=(),
        num_decoder_tokens=0,
        num_decoder_pairs=0,
        num_cross_pairs=0,
    )
