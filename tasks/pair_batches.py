"""Micro-batches of pairs of answers: each pair's two texts are sequences of one batch that do not see each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from data.sequences.pairs import AnswerPair
from data.sequences.tokenized import TokenSequence
from data.tokens.labels import IGNORE_INDEX
from tasks.causal_batches import CausalMicroBatch, Collator


@dataclass(frozen=True, kw_only=True)
class PairMicroBatch(CausalMicroBatch):
    """A CausalMicroBatch whose answers are 0, 1, 2, ...: the chosen one of each pair, then its rejected one."""

    answers: torch.Tensor  # int64 [n], the answer of each of `targets`
    answer_lengths: torch.Tensor  # fp32 [2 x pairs], label tokens of each answer
    reference: torch.Tensor  # fp32 [pairs, 2], log-probabilities of the answers before training

    @property
    def num_pairs(self) -> int:
        return len(self.reference)

    @property
    def num_loss_terms(self) -> int:
        """The loss is a mean over pairs."""
        return self.num_pairs


@dataclass(frozen=True)
class PairCollator:
    """Makes a PairMicroBatch of rows of pairs. Under padding each of a pair's two texts has a row to itself.

    A row may also hold sequences that are no pair, of which the loss has no term: trials compute their tokens' losses.
    """

    collate: Collator

    def __call__(self, rows: list[list[Any]]) -> PairMicroBatch:
        parted = [[text for pair in row for text in texts_of(pair)] for row in rows]
        texts = [text for row in parted for text in row]
        batch = self.collate(parted if self.collate.packing else [[text] for text in texts])
        lengths = np.array([_num_labels(text) for text in texts], dtype=np.int64)
        # A batch without labels keeps one position (`data.tokens.labels`).
        answers = np.repeat(np.arange(len(texts)), lengths) if lengths.sum() else np.zeros(1, dtype=np.int64)
        pairs = [pair for row in rows for pair in row if isinstance(pair, AnswerPair)]
        reference = np.array([pair.reference for pair in pairs], dtype=np.float32).reshape(-1, 2)
        return PairMicroBatch(
            **vars(batch),
            answers=torch.from_numpy(answers),
            answer_lengths=torch.from_numpy(lengths.astype(np.float32)),
            reference=torch.from_numpy(reference),
        )


def texts_of(pair: AnswerPair | TokenSequence) -> list[TokenSequence]:
    """The two texts of a pair, the chosen one first; a sequence that is no pair as it is."""
    return pair.texts if isinstance(pair, AnswerPair) else [pair]


def _num_labels(text: TokenSequence) -> int:
    return int((text.labels[1:] != IGNORE_INDEX).sum())  # a first token follows nothing


def rows_of_pairs(rows: int, width: int, *, packed: bool) -> tuple[int, int]:
    """Rows and tokens of a row in a micro-batch of so many rows of the data. A padded one of the data is a pair, whose
    texts have a row each."""
    return (rows, width) if packed else (2 * rows, max(2, -(-width // 2)))
