"""Pairs of answers: both texts are kept, the prompt alone is cut, and rows that are no pairs are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from data.batches.mixing import join_sequences
from data.batches.padding import PaddedWidth
from data.batches.row_counts import row_counts
from data.batches.rows import make_rows
from data.sequences.pairs import AnswerPair, AnswerPairs, build_pairs
from data.sequences.tokenized import checksum
from tasks.causal_batches import Collator
from tasks.pair_batches import PairCollator
from utils.errors import ConfigError


def row(prompt: int, chosen: int, rejected: int, start: int = 10) -> dict[str, Any]:
    """A pair whose texts have so many tokens; those of the prompt count up from `start`."""
    asked = list(range(start, start + prompt))
    answers = [[100] * chosen, [200] * rejected]
    return {
        "input_ids": [token for answer in answers for token in (*asked, *answer)],
        "labels": [token for answer in answers for token in (*[-100] * prompt, *answer)],
        "sample_lengths": [prompt + len(answer) for answer in answers],
    }


def texts(pairs: AnswerPairs, index: int = 0) -> list[list[int]]:
    return [text.input_ids.tolist() for text in pairs[index].texts]


def test_a_long_pair_loses_the_start_of_its_prompt_in_both_texts() -> None:
    pairs = build_pairs([row(6, 3, 2), row(2, 1, 1)], name="x", context_length=14)
    assert texts(pairs) == [[12, 13, 14, 15, 100, 100, 100], [12, 13, 14, 15, 200, 200]]
    assert texts(pairs, 1) == [[10, 11, 100], [10, 11, 200]]
    assert (pairs.num_truncated, pairs.num_tokens_cut) == (1, 4)
    labels = [text.labels.tolist() for text in pairs[0].texts]
    assert labels == [[-100] * 4 + [100] * 3, [-100] * 4 + [200] * 2]


def test_answers_are_never_cut() -> None:
    pairs = build_pairs([row(3, 9, 9), row(2, 1, 1)], name="x", context_length=18)
    assert (len(pairs), pairs.num_too_long) == (1, 1)
    assert pairs.describe("train")[0].endswith("longer than context_length (--truncation; answers are never cut)")
    with pytest.raises(
        ConfigError, match="none of its 1 row has two different answers that fit into --context_length 18"
    ):
        build_pairs([row(3, 9, 9)], name="x", context_length=18)


def test_longer_pairs_are_left_out_or_refused_if_that_is_asked_for() -> None:
    rows = [row(2, 1, 1), row(6, 3, 2)]
    pairs = build_pairs(rows, name="x", context_length=14, truncation="drop")
    assert (pairs.source_rows.tolist(), pairs.num_too_long) == ([0], 1)
    with pytest.raises(
        ConfigError, match=r"dataset \(x\), row 2: the 17 tokens of both answers with their prompts are"
    ):
        build_pairs(rows, name="x", context_length=14, truncation="error")


def test_a_row_without_two_texts_is_refused_with_its_number() -> None:
    single = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}
    with pytest.raises(ConfigError, match=r"dataset \(x\), row 2: it has 1 text, and preferences"):
        build_pairs([row(2, 1, 1), single], name="x", context_length=64)


def test_rows_that_were_left_out_and_ties_are_counted() -> None:
    left_out = {"input_ids": [], "labels": [], "sample_lengths": [0]}
    tie = row(2, 1, 1) | {"labels": [-100] * 6}
    pairs = build_pairs([left_out, row(2, 1, 1), tie], name="x", context_length=64)
    assert (pairs.source_rows.tolist(), pairs.num_empty, pairs.num_without_label) == ([1], 1, 1)
    assert "train: 1 sample left out: both answers are the same, or one is empty" in pairs.describe("train")


def test_attention_stays_inside_of_a_text() -> None:
    pairs = build_pairs([row(2, 1, 3), row(2, 4, 1)], name="x", context_length=64)
    counts = row_counts(make_rows(pairs, batching_strategy="packing", context_length=64))
    assert counts[:, 2].tolist() == [sum(length * (length + 1) // 2 for length in (3, 5, 6, 3))]


def test_pairs_of_several_files_are_joined_and_differ_by_where_their_texts_begin() -> None:
    parts = [
        build_pairs([row(2, 1, 2)], name="x", context_length=64),
        build_pairs([row(3, 2, 2)], name="y", context_length=64),
    ]
    joined = join_sequences(parts)
    assert isinstance(joined, AnswerPairs)
    assert texts(joined, 1) == texts(parts[1])
    moved = AnswerPairs(**{**vars(joined), "chosen_lengths": joined.chosen_lengths - 1})
    assert checksum([moved]) != checksum([joined])


@pytest.mark.parametrize("prompts", [[7, 1, 2], [1, 1], [6, 3]], ids=str)
def test_a_shared_prompt_is_there_once_and_its_last_token_before_each_answer(prompts: list[int]) -> None:
    rows = [row(prompt, 3, 2) for prompt in prompts]
    whole = build_pairs(rows, name="x", context_length=12)
    shared = build_pairs(rows, name="x", context_length=12, shares_prompts=True)
    assert [texts(shared, index) for index in range(len(rows))] == [texts(whole, index) for index in range(len(rows))]
    for index, pair in enumerate(shared):
        assert isinstance(pair, AnswerPair)
        learned = [text.labels.tolist() for text in pair.texts]
        assert learned == [text.labels.tolist() for text in whole[index].texts]
        assert [len(part.input_ids) for part in pair.parts] == [len(pair.texts[0].input_ids), 3]
    assert (shared.lengths + shared.shared_lengths).tolist() == whole.lengths.tolist()
    assert (shared.num_truncated, shared.num_tokens_cut) == (whole.num_truncated, whole.num_tokens_cut)
    saved = int(shared.shared_lengths.sum())
    percent = 100 * saved / whole.lengths.sum()
    assert shared.describe("train")[-1:] == (
        [f"train: the answers of a pair share their prompt: {percent:.0f} % of all tokens less"] if saved else []
    )


def test_no_more_is_shared_than_both_prompts_begin_with() -> None:
    alike, other, longer = row(5, 1, 1), row(5, 1, 1), row(4, 1, 1)
    other["input_ids"][6 + 2] = 77
    longer["input_ids"][9:9] = [88]
    longer["labels"][9:9] = [-100]
    longer["sample_lengths"][1] += 1
    same = row(3, 2, 2)
    same["input_ids"] = [10, 11, 12, 100, 100, 10, 11, 12, 100, 200]  # answers that begin alike are not shared
    pairs = build_pairs([alike, other, longer, same], name="x", context_length=64, shares_prompts=True)
    assert pairs.shared_lengths.tolist() == [4, 1, 3, 2]


def test_queries_of_a_rejected_answer_attend_to_its_whole_prompt() -> None:
    rows = [row(5, 1, 3), row(2, 4, 1)]
    for shares_prompts, wanted in ((False, (6, 8, 6, 3)), (True, (6, 8, 6, 3))):
        pairs = build_pairs(rows, name="x", context_length=64, shares_prompts=shares_prompts)
        packed = make_rows(pairs, batching_strategy="packing", context_length=64)
        batch = PairCollator(Collator(True, 0, offsets="all"), shares_prompts)([packed[0]])
        skipped = (4, 1) if shares_prompts else (0, 0)  # queries of the rejected text that are those of the chosen one
        total = sum(length * (length + 1) // 2 for length in wanted)
        total -= sum(length * (length + 1) // 2 for length in skipped)
        assert row_counts(packed)[:, 2].tolist() == [total]
        assert (batch.num_attended_pairs, batch.num_tokens) == (total, 23 - sum(skipped))


def test_a_batch_names_the_key_of_each_place_and_the_positions_go_on_from_the_prompt() -> None:
    pairs = build_pairs([row(3, 1, 2)], name="x", context_length=64, shares_prompts=True)
    batch = PairCollator(Collator(True, 0, width=PaddedWidth(8, 64), offsets="all", num_rows=2), True)([[pairs[0]]])
    assert batch.input_ids[0].tolist() == [10, 11, 12, 100, 12, 200, 200, 0]
    assert batch.position_ids is not None
    assert batch.position_ids[0].tolist() == [0, 1, 2, 3, 2, 3, 4, 0]
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens_k is not None
    assert batch.key_places is not None
    assert batch.key_copies is not None
    assert (batch.cu_seqlens.tolist(), batch.max_seqlen) == ([0, 4, 7, 8, 16], 8)
    assert (batch.cu_seqlens_k.tolist(), batch.max_seqlen_k) == ([0, 4, 9, 10, 18], 8)
    assert batch.key_places.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6, *range(7, 16)]
    assert batch.key_copies.tolist() == [[0, 1, 2, 3, *range(6, 18)], [4, 5, *[-1] * 14]]
    assert (batch.targets.tolist(), batch.answers.tolist()) == ([100, 200, 200], [0, 1, 1])


@pytest.mark.parametrize("packing", [True, False])
def test_a_micro_batch_says_which_answer_each_target_belongs_to(packing: bool) -> None:
    pairs = build_pairs([row(2, 1, 3), row(4, 2, 1)], name="x", context_length=64)
    scored = AnswerPairs(**{**vars(pairs), "reference": np.array([[-1, -2], [-3, -4]], np.float32)})
    batch = PairCollator(Collator(packing, padding_id=0))(
        [[scored[0], scored[1]]] if packing else [[scored[0]], [scored[1]]]
    )
    assert batch.targets.tolist() == [100, 200, 200, 200, 100, 100, 200]
    assert batch.answers.tolist() == [0, 1, 1, 1, 2, 2, 3]
    assert batch.answer_lengths.tolist() == [1, 3, 2, 1]
    assert batch.reference.tolist() == [[-1, -2], [-3, -4]]
    assert (batch.num_loss_terms, batch.input_ids.shape[0]) == (2, 1 if packing else 4)
    empty = PairCollator(Collator(packing, padding_id=0))([])
    assert (empty.num_loss_terms, empty.answers.tolist()) == (0, [0])
