"""Labeled texts as tokens: those that the tokenizer makes for inference, pairs and cuts included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from data.sequences.labeled import LabeledBuilder
from data.sequences.tokenized import COUNT_COLUMNS
from data.tokens.encoding import LabeledTexts
from data.tokens.labeled_texts import PairAffixes
from data.tokens.spans import TextSpan
from utils.errors import ConfigError

FIRSTS = ["They met", "A long evening in the house by the river, with rain and tea", "no"]
SECONDS = ["late that night in an old house by the lake, and talked", "yes", "Sam"]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    """As those of BERT: special tokens around a text, and between two."""
    words = AutoTokenizer.from_pretrained(tiny_model)
    start, end = words.convert_ids_to_tokens([words.bos_token_id, words.eos_token_id])
    words._tokenizer.post_processor = TemplateProcessing(
        single=f"{start} $A {end}",
        pair=f"{start} $A {end} {end} $B:1 {end}:1",
        special_tokens=[(start, words.bos_token_id), (end, words.eos_token_id)],
    )
    words.pad_token = end
    return words


def encoded(tokenizer: Any, examples: list[tuple[str, ...]], limit: int, truncation: Any = "right") -> Any:
    spans = [[*(TextSpan(text, False) for text in texts), TextSpan(json.dumps("x"), True)] for texts in examples]
    columns = LabeledTexts()(spans, tokenizer)
    counts = {name: [0] * len(spans) for name in COUNT_COLUMNS}
    rows = datasets.Dataset.from_dict({"input_ids": columns.input_ids, "labels": columns.labels, **counts})
    return LabeledBuilder(PairAffixes.of(tokenizer))(rows, name="d", context_length=limit, truncation=truncation)


@pytest.mark.parametrize("limit", [100, 14, 9])
def test_pairs_are_tokenized_and_cut_as_by_the_tokenizer(tokenizer: Any, limit: int) -> None:
    found = encoded(tokenizer, list(zip(FIRSTS, SECONDS, strict=True)), limit)
    wanted = tokenizer(FIRSTS, SECONDS, truncation="longest_first", max_length=limit, return_token_type_ids=True)
    for text, ids, types in zip(found, wanted["input_ids"], wanted["token_type_ids"], strict=True):
        assert text.input_ids.tolist() == ids
        assert int(text.labels[0]) == types.count(0), "tokens of the first text"
        assert bytes(text.labels[1:].tolist()) == b'"x"'


@pytest.mark.parametrize(("truncation", "side"), [("right", "right"), ("left", "left")])
def test_texts_are_tokenized_and_cut_as_by_the_tokenizer(tokenizer: Any, truncation: str, side: str) -> None:
    tokenizer.truncation_side = side
    found = encoded(tokenizer, [(text,) for text in FIRSTS], 8, truncation)
    wanted = tokenizer(FIRSTS, truncation=True, max_length=8)["input_ids"]
    tokenizer.truncation_side = "right"
    assert [text.input_ids.tolist() for text in found] == wanted
    assert [int(text.labels[0]) for text in found] == [len(ids) for ids in wanted]
    assert found.num_truncated == 1


def test_rows_of_a_function_have_a_label() -> None:
    for row in ({"input_ids": [1]}, {"input_ids": [1], "labels": [1]}):
        with pytest.raises(ConfigError, match=r"\(d\), row 1: it has no label; give input_ids and label"):
            LabeledBuilder(PairAffixes())([row], name="d", context_length=8)
