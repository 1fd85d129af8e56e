"""A dataset function for exact comparisons: random token ids, very unequal lengths, some tokens without a label."""

from __future__ import annotations

from typing import Any

import numpy as np

NUM_DOCUMENTS = 240


def get_custom_dataset(dataset_config: Any, tokenizer: Any, split: str) -> list[dict[str, list[int]]]:
    generator = np.random.default_rng(7 if split == "train" else 8)
    rows = []
    for _ in range(NUM_DOCUMENTS if split == "train" else 13):
        length = int(generator.integers(4, 60))
        ids = generator.integers(3, 500, size=length)
        labels = ids.copy()
        labels[: int(generator.integers(0, length - 1))] = -100
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return rows


def get_few_documents(dataset_config: Any, tokenizer: Any, split: str) -> list[dict[str, list[int]]]:
    """Eight of them over and over, which can be learned."""
    documents = get_custom_dataset(dataset_config, tokenizer, "train")[:8]
    return documents * 30 if split == "train" else documents


def get_more_to_evaluate(dataset_config: Any, tokenizer: Any, split: str) -> list[dict[str, list[int]]]:
    """As many in an evaluation as two ranks need for batches of 16."""
    return get_custom_dataset(dataset_config, tokenizer, split) * (1 if split == "train" else 3)


def get_taught_documents(dataset_config: Any, tokenizer: Any, split: str) -> list[dict[str, Any]]:
    """The documents with weights of rows and tokens, and a teacher's three most likely tokens at each place."""
    generator = np.random.default_rng(9)
    documents: list[dict[str, Any]] = [dict(document) for document in get_custom_dataset(None, None, split)]
    for document in documents:
        length = len(document["input_ids"])
        document["sample_weight"] = float(generator.uniform(0, 2))
        document["token_weights"] = generator.uniform(0, 2, size=length).tolist()
        document["teacher_ids"] = [generator.choice(600, size=3, replace=False).tolist() for _ in range(length)]
        shares = generator.dirichlet([1, 1, 1, 1], size=length)  # the last is that of all other tokens
        document["teacher_logprobs"] = np.log(shares[:, :3]).tolist()
    return documents
