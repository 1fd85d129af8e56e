"""Weights and a teacher stay with their tokens, however sequences are cut, split, packed, mixed and shared."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pytest
import torch

from data.batches.mixing import join_sequences
from data.batches.packing import pack_best_fit
from data.sequences.causal import build_sequences
from data.sequences.source_target import Affixes, SourceTargetBuilder
from data.sequences.tokenized import check_token_ids, checksum
from ranks.context_group import ContextGroup
from tasks.causal_batches import CausalMicroBatch, Collator
from tasks.row_shares import share_of
from utils.errors import ConfigError

K = 2


def documents() -> list[dict[str, Any]]:
    """Of each token the weight is its id / 10, and the teacher's tokens are its id and the next, below a half each."""
    generator, rows = np.random.default_rng(0), []
    for length in (3, 9, 5, 14, 2, 7):
        ids = generator.integers(5, 90, size=length)
        rows.append(
            {
                "input_ids": ids.tolist(),
                "labels": np.where(generator.random(length) < 0.3, -100, ids).tolist(),
                "token_weights": (ids / 10).tolist(),
                "teacher_ids": np.stack([ids, ids + 1], axis=1).tolist(),
                "teacher_logprobs": np.stack([-1 - ids / 100, -1 - ids / 50], axis=1).tolist(),
            }
        )
    return rows


def check(batch: CausalMicroBatch) -> None:
    ids = batch.targets[batch.targets != -100]
    for found in (batch.target_weights, batch.teacher_ids, batch.teacher_logprobs):
        assert found is not None
        assert len(found) == len(batch.targets)
    if len(ids):
        torch.testing.assert_close(batch.target_weights, ids / 10)
        assert torch.equal(batch.teacher_ids, torch.stack([ids, ids + 1], dim=1))
        torch.testing.assert_close(batch.teacher_logprobs, torch.stack([-1 - ids / 100, -1 - ids / 50], dim=1))


@pytest.mark.parametrize("truncation", ["right", "left", "split", "drop"])
@pytest.mark.parametrize("as_table", [False, True])
def test_they_stay_with_their_tokens(truncation: Any, as_table: bool) -> None:
    rows = datasets.Dataset.from_list(documents()) if as_table else documents()
    sequences = build_sequences(rows, name="train", context_length=8, truncation=truncation)
    packed = [[sequences[index] for index in row] for row in pack_best_fit(sequences.lengths, 16)]
    check(Collator(packing=True, padding_id=0)(packed))
    check(Collator(packing=False, padding_id=0)([[sequence] for sequence in sequences]))
    group = [ContextGroup(2, rank) for rank in range(2)]
    whole = Collator(packing=True, padding_id=0, num_rows=9, offsets="all")([[*row] for row in packed])
    whole = whole if whole.input_ids.shape[1] % 2 == 0 else Collator(True, 0, offsets="all")(packed[:1])
    if whole.input_ids.shape[1] % 2 == 0:
        for one in group:
            check(share_of(whole, one))


def test_a_weight_of_a_row_is_one_of_all_its_tokens_and_multiplies_theirs() -> None:
    row = documents()[1] | {"sample_weight": 3.0}
    (sequence,) = build_sequences([row], name="train", context_length=20)
    np.testing.assert_allclose(sequence.of_tokens["token_weights"], 3 * np.array(row["token_weights"]), rtol=1e-6)
    plain = {name: row[name] for name in ("input_ids", "labels", "sample_weight")}
    for rows in ([plain], datasets.Dataset.from_list([plain])):
        (sequence,) = build_sequences(rows, name="train", context_length=20)
        assert sequence.of_tokens["token_weights"].tolist() == [3.0] * len(row["input_ids"])


def test_rows_without_weights_count_once_in_a_mix_and_a_teacher_must_be_everywhere() -> None:
    rows = documents()
    weighed, plain = (
        [{n: row[n] for n in names} for row in rows]
        for names in (("input_ids", "labels", "token_weights"), ("input_ids", "labels"))
    )
    parts = [build_sequences(part, name="train", context_length=20) for part in (weighed, plain)]
    joined = join_sequences(parts)
    assert joined.of_tokens["token_weights"][len(parts[0].input_ids) :].tolist() == [1.0] * len(parts[1].input_ids)
    assert checksum([parts[0]]) != checksum([parts[1]])
    taught = build_sequences(rows, name="train", context_length=20)
    with pytest.raises(ConfigError, match="column teacher_ids is missing"):
        join_sequences([taught, parts[1]])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"token_weights": [1.0]}, "column token_weights needs a number for each of the 9 tokens"),
        ({"token_weights": [-1.0] * 9}, "a weight is a number of at least 0"),
        ({"token_weights": [1e39] * 9}, "column token_weights needs a number for each of the 9 tokens"),
        ({"sample_weight": "much"}, "column sample_weight holds 'much'"),
        ({"sample_weight": 1e39}, "column sample_weight holds 1e"),
        ({"teacher_ids": None}, "belong together"),
        ({"teacher_ids": [[1]] * 9}, "as many ids as logarithms"),
        ({"teacher_logprobs": [[0.5, 0.5]] * 9}, "logarithms of probabilities"),
        ({"teacher_ids": [[2**40, 1]] * 9}, "as many ids as logarithms"),
        ({"teacher_ids": [[]] * 9, "teacher_logprobs": [[]] * 9}, "as many ids as logarithms"),
        ({"teacher_logprobs": [[-0.1, -0.2]] * 9}, "probabilities that add up to 1.72 at a token; give .* not logits"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_with_its_row(change: dict[str, Any], told: str) -> None:
    rows = documents()
    rows[1] |= change
    with pytest.raises(ConfigError, match=f"row 2: .*{told}"):
        build_sequences(rows, name="train", context_length=20)


def test_whole_numbers_that_are_larger_than_any_float_are_refused_with_their_row() -> None:
    for change, told in (
        ({"token_weights": [10**400] * 9}, "column token_weights is not a list of numbers"),
        ({"sample_weight": 10**400}, "column sample_weight holds 1000"),
    ):
        with pytest.raises(ConfigError, match=f"row 1: {told}"):
            build_sequences([documents()[1] | change], name="train", context_length=20)


def test_a_teacher_may_say_anything_where_nothing_is_read() -> None:
    row = documents()[1]
    row |= {"labels": [7, -100, 7, -100, 7, 7, -100, -100, -100], "sample_lengths": [4, 5]}
    said = [[0.0, 0.0] if place in (0, 1, 3, 4, 6, 7, 8) else [-1.0, -1.0] for place in range(9)]
    sequences = build_sequences([row | {"teacher_logprobs": said}], name="train", context_length=20)
    assert sequences.of_tokens["teacher_logprobs"].tolist() == said
    with pytest.raises(ConfigError, match=r"row 1: .* add up to 2 at a token"):
        build_sequences([row | {"teacher_logprobs": said, "sample_lengths": [9]}], name="train", context_length=20)


def test_a_teacher_with_other_tokens_and_an_encoder_decoder_are_refused() -> None:
    sequences = build_sequences(documents(), name="train", context_length=20)
    with pytest.raises(ConfigError, match="teacher and student need one tokenizer"):
        check_token_ids(sequences, int(sequences.input_ids.max()) + 1, "train")
    with pytest.raises(ConfigError, match="column token_weights is for causal language models"):
        SourceTargetBuilder(9, Affixes(), Affixes())(documents(), name="train", context_length=20)
