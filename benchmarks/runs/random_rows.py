"""Dataset functions for benchmarks: `NUM_ROWS` x `ROW_LENGTH` random tokens, all of them labels.

finetuning.py ... --dataset benchmarks/runs/random_rows.py:get_rows         (ROW_LENGTH=2048 NUM_ROWS=512 by default)
finetuning.py ... --dataset benchmarks/runs/random_rows.py:get_documents
finetuning.py ... --dataset benchmarks/runs/random_rows.py:get_pairs --loss_type dpo
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


def get_pairs(dataset_config: Any, tokenizer: Any, split: str) -> list[dict[str, Any]]:
    """Two pairs of answers for each row, of texts of a quarter of its length, half of them prompt."""
    length, count = _size()
    generator = np.random.default_rng(0)
    return [_pair(generator, len(tokenizer), length // 8, [length // 8] * 2) for _ in range(2 * count)]


def get_uneven_pairs(dataset_config: Any, tokenizer: Any, split: str) -> list[dict[str, Any]]:
    """As many pairs, their prompts and answers each an eighth of a row at most, and evenly spread from a sixteenth of
    that on."""
    length, count = _size()
    generator, most = np.random.default_rng(0), length // 8
    lengths = generator.integers(max(1, most // 16), most + 1, size=(2 * count, 3)).tolist()
    return [_pair(generator, len(tokenizer), prompt, answers) for prompt, *answers in lengths]


def _pair(generator: np.random.Generator, num_tokens: int, prompt: int, answers: list[int]) -> dict[str, Any]:
    """Both texts of a pair end to end, with their lengths."""
    asked = generator.integers(3, num_tokens, size=prompt)
    texts = [np.concatenate([asked, generator.integers(3, num_tokens, size=length)]) for length in answers]
    labels = [np.where(np.arange(len(text)) < prompt, -100, text) for text in texts]
    return {
        "input_ids": np.concatenate(texts),
        "labels": np.concatenate(labels),
        "sample_lengths": [len(text) for text in texts],
    }


def samsum_like_lengths(generator: np.random.Generator, count: int, *, longest: int) -> np.ndarray:
    """Random lengths: half of them below 150 tokens, one in a hundred above 1,000; int64 [count]."""
    return np.clip(generator.lognormal(np.log(150), 0.8, count), 4, longest).astype(np.int64)


def _size() -> tuple[int, int]:
    return int(os.environ.get("ROW_LENGTH", "2048")), int(os.environ.get("NUM_ROWS", "512"))
