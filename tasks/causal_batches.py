"""Micro-batches of a causal language model: rows of tokens, packed or padded, with positions, masks or offsets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from data.batches.counts import causal_pairs
from data.batches.packing import Offsets
from data.batches.padding import EXACT, PaddedWidth, batch_lengths, batch_width
from data.sequences.token_columns import TEACHER_IDS, TEACHER_LOGPROBS, WEIGHTS, end_to_end
from data.sequences.tokenized import Row, TokenSequence
from data.tokens.labels import IGNORE_INDEX, next_tokens_to_predict
from tasks.micro_batch import BatchShape, TensorBatch, meta_ids


@dataclass(frozen=True)
class CausalMicroBatch(TensorBatch):
    """One rank's share of one forward pass (`tasks.micro_batch.MicroBatch`)."""

    input_ids: torch.Tensor  # int64 [batch, seq]
    labels: torch.Tensor  # int64 [batch, seq], not shifted, -100 = no label; stays on the host
    position_ids: torch.Tensor | None  # int64 [batch, seq], restarting at 0 with every sequence; None: the model counts
    target_positions: torch.Tensor  # int64 [n], positions of the flattened [batch x seq] that predict a label token
    targets: torch.Tensor  # int64 [n], those label tokens
    attention_mask: torch.Tensor | None  # int64 [batch, seq], 1 = token; None if the model takes none
    num_tokens: int  # without padding
    num_label_tokens: int
    num_attended_pairs: int  # (query, key) pairs that causal attention inside sequences visits
    source_rows: tuple[int, ...]  # of its examples, their rows in the data file
    cu_seqlens: torch.Tensor | None = None  # int32 [sequences + 1] in the flattened [batch x seq]
    max_seqlen: int = 0  # tokens of the longest sequence; 0 without offsets
    row_lengths: torch.Tensor | None = None  # int64 [batch], tokens of each row, without padding; None: all of it
    target_weights: torch.Tensor | None = None  # fp32 [n]; None: all are 1
    teacher_ids: torch.Tensor | None = None  # int64 [n, k]; None: no teacher
    teacher_logprobs: torch.Tensor | None = None  # fp32 [n, k]

    @property
    def text_ids(self) -> torch.Tensor:
        return self.input_ids

    def with_text_ids(self, ids: torch.Tensor) -> Self:
        return replace(self, input_ids=ids)


@dataclass(frozen=True)
class Collator:
    """Makes a CausalMicroBatch of rows, padded on the right to the width that the longest row asks for.

    Under packing the model gets position ids that restart with every sequence and no attention mask: that is how
    transformers tells the sequences of a row apart (with a mask, or with a KV cache, attention would cross them). The
    padding at a row's end is one more sequence, without labels. Under padding the mask says where the tokens are, if
    the model takes one, and the model counts positions itself: those of RoBERTa do not begin at 0.
    """

    packing: bool
    padding_id: int
    width: PaddedWidth = EXACT
    offsets: Offsets = "none"  # which rows need `cu_seqlens`
    num_rows: int = 0  # of every batch, filled up with padding; 0: as many as are given

    def __call__(self, rows: list[Row]) -> CausalMicroBatch:
        sequences = [sequence for row in rows for sequence in row]
        lengths = np.array([len(sequence.input_ids) for sequence in sequences], dtype=np.int64)
        row_lengths = batch_lengths([sum(len(sequence.input_ids) for sequence in row) for row in rows], self.num_rows)
        shape = (len(row_lengths), batch_width(row_lengths, self.width))
        places = np.arange(shape[1])
        is_token = places < row_lengths[:, None]
        input_ids = np.full(shape, self.padding_id, dtype=np.int64)
        labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        # Packed, padding is one more sequence: its positions begin at 0, too.
        position_ids = places - self.packing * row_lengths[:, None]
        if sequences:
            starts = np.cumsum(lengths) - lengths
            targets = np.concatenate([sequence.labels for sequence in sequences])
            targets[starts] = IGNORE_INDEX  # a first token follows nothing
            # The boolean index runs through the rows in order, as the concatenated sequences do.
            input_ids[is_token] = np.concatenate([sequence.input_ids for sequence in sequences])
            labels[is_token] = targets
            position_ids[is_token] = np.arange(len(targets)) - np.repeat(starts, lengths)
        is_token[len(rows) :] = True  # a row without any visible token would be all NaN in some attention kernels
        # A row of one sequence needs no offsets: causal attention never looks at the padding after it.
        needs_offsets = self.offsets == "all" or (self.offsets == "shared" and len(sequences) > len(rows))
        offsets = _cu_seqlens(position_ids) if needs_offsets else None
        target_positions, predicted = next_tokens_to_predict(torch.from_numpy(labels))
        of_targets = _of_targets(sequences, is_token[: len(rows)], target_positions.numpy())
        return CausalMicroBatch(
            input_ids=torch.from_numpy(input_ids),
            labels=torch.from_numpy(labels),
            position_ids=torch.from_numpy(position_ids) if self.packing else None,
            target_positions=target_positions,
            targets=predicted,
            attention_mask=torch.from_numpy(is_token.astype(np.int64)) if self._has_mask else None,
            num_tokens=int(lengths.sum()),
            num_label_tokens=int((labels != IGNORE_INDEX).sum()),
            num_attended_pairs=int(causal_pairs(lengths).sum()),
            source_rows=tuple(sequence.source_row for sequence in sequences),
            cu_seqlens=None if offsets is None else torch.from_numpy(offsets),
            max_seqlen=0 if offsets is None else int(np.diff(offsets).max()),
            row_lengths=torch.from_numpy(row_lengths),
            target_weights=of_targets.get(WEIGHTS),
            teacher_ids=of_targets.get(TEACHER_IDS),
            teacher_logprobs=of_targets.get(TEACHER_LOGPROBS),
        )

    @property
    def _has_mask(self) -> bool:
        # Attention by offsets needs none for padded rows either (docs/decisions.md, Compute).
        return not self.packing and self.offsets == "none"


def _of_targets(
    sequences: list[TokenSequence], is_token: np.ndarray, target_positions: np.ndarray
) -> dict[str, torch.Tensor]:
    """The arrays of the sequences at the label tokens, which stand one place behind the positions that predict them."""
    if not any(sequence.of_tokens for sequence in sequences):
        return {}
    found = end_to_end([sequence.of_tokens for sequence in sequences], [len(s.input_ids) for s in sequences])
    places = np.cumsum(is_token.reshape(-1)) - 1  # of each position of the batch among the tokens
    wanted = np.minimum(target_positions + 1, len(places) - 1)
    return {
        name: torch.from_numpy(values[places[wanted]].astype(np.int64 if name == TEACHER_IDS else np.float32))
        for name, values in found.items()
    }


def _cu_seqlens(position_ids: np.ndarray) -> np.ndarray:
    """Where sequences begin in the flattened [batch x seq], and where the last ends: int32 [sequences + 1]."""
    return np.append(np.flatnonzero(position_ids == 0), position_ids.size).astype(np.int32)


def causal_meta_batch(shape: BatchShape) -> CausalMicroBatch:
    """A batch without values (`tasks.task.Task.meta_batch`)."""
    rows, width, packed = shape.rows, shape.width, shape.packed
    num_labels = max(1, round(shape.label_share * rows * (width - 1)))
    mask = None if packed or shape.by_offsets else meta_ids(rows, width)
    if packed and not shape.by_offsets:  # the mask that transformers makes of restarting position ids
        mask = torch.empty(rows, 1, width, width, dtype=torch.bool, device="meta")
    return CausalMicroBatch(
        input_ids=meta_ids(rows, width),
        labels=meta_ids(rows, width),
        position_ids=meta_ids(rows, width) if packed else None,
        target_positions=meta_ids(num_labels),
        targets=meta_ids(num_labels),
        attention_mask=mask,
        num_tokens=rows * width,
        num_label_tokens=num_labels,
        num_attended_pairs=0,
        source_rows=(),
    )
