"""A dataset function for exact comparisons of encoder-decoders: random sources and targets of unequal lengths."""

from __future__ import annotations

from typing import Any

import numpy as np


def get_custom_dataset(dataset_config: Any, tokenizer: Any, split: str) -> list[dict[str, list[int]]]:
    generator = np.random.default_rng(7 if split == "train" else 8)
    rows = []
    for _ in range(120 if split == "train" else 13):
        source, target = int(generator.integers(3, 40)), int(generator.integers(2, 20))
        labels = generator.integers(3, 500, size=target)
        labels[: int(generator.integers(0, target - 1))] = -100
        rows.append({"input_ids": generator.integers(3, 500, size=source).tolist(), "labels": labels.tolist()})
    return rows
