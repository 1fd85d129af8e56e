"""The loss mask: text is tokenized as a whole; tokens have labels if a character of theirs has a loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from data.tokens import joined_answers, long_texts
from data.tokens.loss_mask import tokenize_spans
from data.tokens.spans import TextSpan
from tests.helpers.tokenizers_of_kinds import KINDS, LINES, byte_level

LETTERS = st.text(alphabet="abAnn Summary:\n\t.?ü🙂é", max_size=12) | st.sampled_from(LINES[0].split(" "))
SPANS = st.lists(st.builds(TextSpan, LETTERS, st.booleans()), max_size=6)


def label_tokens(spans: list[TextSpan], tokenizer: Any, **ends: Any) -> tuple[list[int], list[int]]:
    ((ids,), (labels,), _) = tokenize_spans([spans], tokenizer, **ends)
    assert ids.dtype == labels.dtype == np.int32
    assert len(ids) == len(labels)
    with_label = labels != -100
    assert (labels[with_label] == ids[with_label]).all()
    return ids.tolist(), np.flatnonzero(with_label).tolist()


@pytest.mark.parametrize("kind", KINDS)
@given(spans=SPANS)
@settings(deadline=None)
def test_the_tokens_are_those_of_the_whole_text_between_its_ends(kind: str, spans: list[TextSpan]) -> None:
    tokenizer = KINDS[kind]()
    whole = tokenizer("".join(span.text for span in spans), add_special_tokens=False)["input_ids"]
    ids, with_label = label_tokens(spans, tokenizer, start=[10_007, 10_008], end=[10_009])  # which no text has
    assert ids == [10_007, 10_008, *whole, 10_009]
    assert not {0, 1} & set(with_label)
    assert (len(ids) - 1 in with_label) == bool(spans and spans[-1].has_loss)


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "unigram"])
@given(spans=SPANS)
@settings(deadline=None)
def test_a_token_has_a_label_if_one_of_its_characters_has_a_loss(kind: str, spans: list[TextSpan]) -> None:
    tokenizer = KINDS[kind]()
    text = "".join(span.text for span in spans)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    marks = [span.has_loss for span in spans for _ in span.text]
    expected = [index for index, (first, last) in enumerate(offsets) if any(marks[first:last])]
    _, with_label = label_tokens(spans, tokenizer)
    width = {index for index, (first, last) in enumerate(offsets) if first < last}
    assert [index for index in with_label if index in width] == expected


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "unigram"])
@given(prompt=LETTERS, answer=LETTERS)
@settings(deadline=None)
def test_an_answer_that_changes_the_prompts_tokens_is_counted(kind: str, prompt: str, answer: str) -> None:
    tokenizer = KINDS[kind]()
    spans = [TextSpan(prompt, False), TextSpan(answer, True)]
    encoded = tokenizer(prompt + answer, add_special_tokens=False, return_offsets_mapping=True)
    reaches_across = any(first < len(prompt) < last for first, last in encoded["offset_mapping"])
    alone = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ends = [last for _, last in encoded["offset_mapping"]]
    changes = [token for token, last in zip(encoded["input_ids"], ends, strict=True) if last <= len(prompt)] != alone
    assert tokenize_spans([spans], tokenizer).num_answers_joined == [int(reaches_across and changes)]


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "unigram"])
def test_many_answers_of_a_long_conversation_are_counted_as_by_whole_prompts(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the tokenizer gets few characters more: whole prompts before each answer would be the square of the turns."""
    tokenizer, num_characters, call = KINDS[kind](), [0], long_texts._call

    def counted(texts: list[str], tokenizer: Any) -> Any:
        num_characters[0] += sum(map(len, texts))
        return call(texts, tokenizer)

    monkeypatch.setattr(long_texts, "_call", counted)
    for gap in ("", " ", "\n", "\n\n"):
        spans = [
            TextSpan(f"{LINES[turn % 3]}{turn}{gap}" if not has_loss else f"{gap}{LINES[turn % 2]}", has_loss)
            for turn in range(200)
            for has_loss in (False, True)
        ]
        text = "".join(span.text for span in spans)
        found = tokenize_spans([spans], tokenizer).num_answers_joined
        monkeypatch.setattr(joined_answers, "NEAR_TOKENS", 10**6)  # whole prompts, as if there were no shorter way
        assert tokenize_spans([spans], tokenizer).num_answers_joined == found
        monkeypatch.undo()
        monkeypatch.setattr(long_texts, "_call", counted)
        num_characters[0] = 0
        tokenize_spans([spans], tokenizer)
        assert num_characters[0] < 8 * len(text)


def test_white_space_at_a_prompts_end_joins_its_answer() -> None:
    pairs = [("A: ", "Anna says"), ("A:", " Anna says"), ("A: Anna ", ""), ("", "Anna"), ("A:\n", "Anna")]
    spans = [[TextSpan(prompt, False), TextSpan(answer, True)] for prompt, answer in pairs]
    assert tokenize_spans(spans, byte_level()).num_answers_joined == [1, 0, 0, 0, 0]
    learned = [[span._replace(has_loss=True) for span in example] for example in spans]  # --mask_prompt False
    assert tokenize_spans(learned, byte_level()).num_answers_joined == [0] * 5


@given(spans=SPANS)
@settings(deadline=None)
def test_a_tokenizer_without_offsets_gives_the_same_labels(spans: list[TextSpan]) -> None:
    """One token per byte, so the label tokens are the bytes of the spans with a loss."""
    marks = [span.has_loss for span in spans for _ in span.text.encode()]
    assert label_tokens(spans, KINDS["python"]())[1] == [index for index, mark in enumerate(marks) if mark]


@pytest.mark.parametrize("trimmed", [False, True])
def test_a_token_across_the_seam_has_a_label(trimmed: bool) -> None:
    """ "Summary: " and "Anna" by themselves have a token for the space; together " Anna" is one."""
    tokenizer = byte_level(trim_offsets=trimmed)
    prompt, answer = "Summary: ", "Anna and Bob talk."
    ids, with_label = label_tokens([TextSpan(prompt, False), TextSpan(answer, True)], tokenizer, end=[2])
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert next(tokens[index] for index in with_label) == "ĠAnna"
    assert tokenizer.decode([ids[index] for index in with_label]) == " " + answer + "</s>"
    apart = [*tokenizer.encode(prompt), *tokenizer.encode(answer), 2]
    assert ids != apart
    assert len(ids) < len(apart)


def test_an_answer_that_ends_in_white_space_has_labels_to_its_end() -> None:
    tokenizer = byte_level(trim_offsets=True)
    ids, with_label = label_tokens([TextSpan("a:", False), TextSpan(" Anna \n\n ", True)], tokenizer, end=[2])
    assert tokenizer.decode([ids[index] for index in with_label]) == " Anna \n\n </s>"


@pytest.mark.parametrize(
    ("text", "before", "behind"),
    [("<s>Hi</s>", 0, 0), ("<s>Hi", 0, 1), ("Hi</s>\n", 1, 0), ("Hi </s> you", 1, 1), ("", 1, 1)],
)
def test_text_that_brings_its_own_ends_gets_no_second_ones(text: str, before: int, behind: int) -> None:
    """As text from a chat template does, in whichever dataset it stands."""
    tokenizer = byte_level()
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids, with_label = label_tokens([TextSpan(text, True)], tokenizer, start=[start], end=[end])
    assert ids == [start] * before + whole + [end] * behind
    assert with_label[-1] == len(ids) - 1


def test_no_examples_are_no_rows() -> None:
    assert tokenize_spans([], byte_level()) == ([], [], [])


def test_a_tokenizers_own_truncation_cuts_nothing(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.backend_tokenizer.enable_truncation(3)
    ids, with_label = label_tokens([TextSpan("Anna: " * 50, False), TextSpan("Hi", True)], tokenizer)
    assert len(ids) > 100
    assert with_label[-1] == len(ids) - 1
