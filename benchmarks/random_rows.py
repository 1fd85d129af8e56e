"""A recipe for speed and memory runs: rows of random tokens, every one learned, all exactly `ROW_LENGTH` long.

finetuning.py ... --dataset benchmarks/random_rows.py:get_rows       (ROW_LENGTH=2048 NUM_ROWS=512 by default)
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np


def get_rows(dataset_config: Any, tokenizer: Any, split: str) -> list[dict[str, np.ndarray]]:
    """Rows drawn from the tokenizer's vocabulary, the same in every process."""
    length, count = int(os.environ.get("ROW_LENGTH", "2048")), int(os.environ.get("NUM_ROWS", "512"))
    generator = np.random.default_rng(0)
    rows = generator.integers(3, len(tokenizer), size=(count, length))
    return [{"input_ids": row, "labels": row} for row in rows]
