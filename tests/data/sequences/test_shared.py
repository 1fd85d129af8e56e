"""Validation samples that are training samples, too, are counted at the start."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from configs.datasets import CustomDataset
from configs.training import TrainConfig
from data.pipeline import load_data
from data.sequences.causal import build_sequences
from data.sequences.shared import note_on_shared, num_shared
from tests.helpers.token_documents import DOCUMENTS, to_rows


def notes_of(tmp_path: Path, train: list[list[int]], validation: list[list[int]]) -> list[str]:
    for name, rows in (("train", train), ("validation", validation)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in rows))
    config: Any = CustomDataset(data_path=str(tmp_path))
    options: dict[str, Any] = {"build_sequences": build_sequences, "vocab_size": 100, "context_length": 64}
    data = load_data(TrainConfig(model_name="m"), {"custom_dataset": config}, SimpleNamespace(), **options)  # type: ignore[arg-type]
    return [note for note in data.notes if note.startswith("validation: ")]


def test_a_line_counts_validation_samples_that_are_trained_on(tmp_path: Path) -> None:
    train = [[5, 6, 7], [5, 6, 8], [9, *range(40)]]
    remedy = "their loss does not tell how the model does on new data"
    assert notes_of(tmp_path, train, [[5, 6, 9], [9, *range(39)]]) == []
    some = notes_of(tmp_path, train, [[5, 6, 8], [9, *range(40)], [5, 6, 9]])
    assert some == [f"validation: 2 of 3 samples are training samples, too; {remedy}"]
    assert notes_of(tmp_path, train, train) == [f"validation: all samples are training samples, too; {remedy}"]


def test_a_token_between_those_of_the_fingerprint_tells_samples_apart() -> None:
    def sequences(ids: list[int]) -> Any:
        return build_sequences([{"input_ids": ids, "labels": ids}], name="test", context_length=64)

    ids = [*range(60)]
    other = [*ids[:21], 99, *ids[22:]]
    assert num_shared(sequences(ids), sequences(ids)) == 1
    assert num_shared(sequences(ids), sequences(other)) == 0
    assert note_on_shared(sequences(ids), sequences(other)) == []


@given(train=DOCUMENTS, evaluation=DOCUMENTS)
@settings(max_examples=50, deadline=None)
def test_shared_samples_are_those_of_plain_lists(train: list[Any], evaluation: list[Any]) -> None:
    built = [build_sequences(to_rows(d), name="t", context_length=8, is_part=True) for d in (train, evaluation)]
    lists = [[(*map(np.ndarray.tolist, s[:2]),) for s in sequences] for sequences in built]
    expected = sum(any(one == other for other in lists[0]) for one in lists[1])
    assert num_shared(*built) == expected


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17])
def test_samples_of_few_tokens_are_compared(num_tokens: int) -> None:
    ids = [7] * num_tokens + [8, 9]
    (sequences,) = [build_sequences([{"input_ids": ids, "labels": ids}], name="t", context_length=64)]
    assert num_shared(sequences, sequences) == 1
