"""Dataset functions for benchmarks: `NUM_ROWS` x `ROW_LENGTH` random tokens, all of them labels.

finetuning.py ... --dataset benchmarks/runs/random_rows.py:get_rows         (ROW_LENGTH=2048 NUM_ROWS=512 by default)
finetuning.py ... --dataset benchmarks/runs/random_rows.py:get_documents
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np


def get_rows(dataset_config: Any, tokenizer: Any, split: str) -> list[dict[str, np.ndarray]]:
    """Sequences of one exact length, the same in every process."""
    length, count = _size()
    rows = np.random.default_rng(0).integers(3, len(tokenizer), size=(count, length))
    return [{"input_ids": row, "labels": row} for row in rows]


def get_documents(dataset_config: Any, tokenizer: Any, split: str) -> list[dict[str, np.ndarray]]:
    """The same number of tokens in sequences as long as SAMSum's."""
    length, count = _size()
    generator = np.random.default_rng(0)
    lengths = samsum_like_lengths(generator, count * length // 150, longest=length)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), count * length)) + 1]
    drawn = (generator.integers(3, len(tokenizer), size=length) for length in lengths)
    return [{"input_ids": document, "labels": document} for document in drawn]


def samsum_like_lengths(generator: np.random.Generator, count: int, *, longest: int) -> np.ndarray:
    """Random lengths: half of them below 150 tokens, one in a hundred above 1,000; int64 [count]."""
    return np.clip(generator.lognormal(np.log(150), 0.8, count), 4, longest).astype(np.int64)


def _size() -> tuple[int, int]:
    return int(os.environ.get("ROW_LENGTH", "2048")), int(os.environ.get("NUM_ROWS", "512"))
