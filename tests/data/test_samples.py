"""The sample dialogues: in SAMSum's format, with lengths spread like SAMSum's."""

from __future__ import annotations

import json
import statistics

from tests.helpers.processes import ROOT

SAMPLES = ROOT / "datasets/samples"


def read(split: str) -> list[dict[str, str]]:
    lines = (SAMPLES / f"dialogue_summary/{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_there_are_enough_samples_and_none_is_in_both_splits() -> None:
    train, validation = read("train"), read("validation")
    assert len(train) >= 2000
    assert len(validation) >= 200
    for sample in train + validation:
        assert set(sample) == {"id", "dialogue", "summary"}
        assert all(isinstance(value, str) and value for value in sample.values())
    assert len({sample["id"] for sample in train + validation}) == len(train) + len(validation)
    assert not {sample["dialogue"] for sample in train} & {sample["dialogue"] for sample in validation}


def test_lengths_are_spread_like_samsums() -> None:
    """SAMSum (Gliwa et al., 2019): about 11 turns and 94 words a dialogue with a long tail, 20 words a summary."""
    train = read("train")
    turns = [sample["dialogue"].count("\n") + 1 for sample in train]
    words = [len(sample["dialogue"].split()) for sample in train]
    assert 9 <= statistics.mean(turns) <= 13
    assert 3 <= min(turns) <= max(turns) <= 32
    assert 80 <= statistics.mean(words) <= 110
    assert statistics.median(words) < 0.9 * statistics.mean(words)
    assert max(words) > 250
    assert 14 <= statistics.mean(len(sample["summary"].split()) for sample in train) <= 24
