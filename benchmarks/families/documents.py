"""A dataset function: random documents of very unequal lengths, whose first tokens are no labels."""

from __future__ import annotations

from typing import Any

import numpy as np

CONTEXT_LENGTH, LONGEST = 96, 90
NUM_DOCUMENTS, NUM_TO_EVALUATE = 24, 7
FIRST_ID, LAST_ID = 3, 500  # of words: after the special tokens, and before those that some tokenizers add


def get_documents(dataset_config: Any, tokenizer: Any, split: str) -> list[dict[str, list[int]]]:
    """The same documents in every process, and others for validation.

    The longest cross the windows and chunks of benchmarks/families/published.yaml several times.
    """
    is_train = split == "train"
    generator = np.random.default_rng(7 if is_train else 8)
    rows = []
    for _ in range(NUM_DOCUMENTS if is_train else NUM_TO_EVALUATE):
        length = int(generator.integers(6, LONGEST + 1))
        ids = generator.integers(FIRST_ID, LAST_ID, size=length)
        labels = ids.copy()
        labels[: int(generator.integers(0, length // 2))] = -100
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return rows
