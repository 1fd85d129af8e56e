"""Turns that are learned in part: the characters that the data names have no labels, whatever the template does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat.conversation import read_conversation
from chat.samples import chat_samples
from chat.template import ChatTemplate
from configs.formats import DATASETS
from data.tokens.spans import BadExample
from tests.helpers.chat_templates import FAMILIES, REWRITING

ChatDataset = DATASETS["chat_dataset"]
QUESTION = {"role": "user", "content": "Hi"}
TEMPLATES = {**FAMILIES, **REWRITING}


@pytest.fixture(scope="module")
def templates() -> dict[str, ChatTemplate]:
    return {name: ChatTemplate.of(family.tokenizer()) for name, family in TEMPLATES.items()}


def part(text: str, is_learned: bool | None) -> dict[str, Any]:
    return {"type": "text", "text": text} | ({} if is_learned is None else {"train": is_learned})


def learned(answer: dict[str, Any], template: ChatTemplate) -> list[str]:
    """What is learned of the answer, in a conversation of two, in the places that stand apart."""
    turns = [QUESTION, {"role": "assistant", **answer}, QUESTION, {"role": "assistant", "content": "Last."}]
    samples = chat_samples(read_conversation({"messages": turns}, ChatDataset()), template).spans
    texts = ["".join(f"\0{span.text}\0" if span.has_loss else "·" for span in spans) for spans in samples]
    places = [place for text in texts for place in text.split("\0") if place not in ("", "·") and "·" not in place]
    return [place for place in places if "Last." not in place]


@pytest.mark.parametrize("name", TEMPLATES)
@given(
    parts=st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from([True, False, None])), min_size=2, max_size=5)
)
@settings(max_examples=30, deadline=None)
def test_of_the_parts_exactly_those_are_learned_that_the_data_does_not_leave_out(
    name: str, parts: list[tuple[str, bool | None]], templates: dict[str, ChatTemplate]
) -> None:
    numbered = [(f" {letter}{number}word", learns) for number, (letter, learns) in enumerate(parts)]
    answer = {"content": [part(text, learns) for text, learns in numbered]}
    found = "".join(learned(answer, templates[name]))
    for text, learns in numbered:
        wanted = learns is not False
        assert (text.strip() in found) == wanted, (numbered, found)


@given(learns=st.lists(st.booleans(), min_size=12, max_size=12).filter(any))
@settings(max_examples=50, deadline=None)
def test_spans_of_characters_are_learned_to_the_last_one(
    learns: list[bool], templates: dict[str, ChatTemplate]
) -> None:
    text = "abcdefghijkl"
    spans = [{"begin_offset": n, "end_offset": n, "train": is_on} for n, is_on in enumerate(learns)]
    found = "".join(learned({"content": text, "train_detail": spans}, templates["ChatML"]))
    assert found == "".join(letter for letter, is_on in zip(text, learns, strict=True) if is_on) + "<|im_end|>"


def test_thoughts_may_be_learned_in_part_and_an_answer_that_repeats_them_too(
    templates: dict[str, ChatTemplate],
) -> None:
    answer = {
        "reasoning_content": [part("It is 5.", False), part(" No, it is 4.", True)],
        "content": [part("it is", False), part(" 4.", True)],
    }
    assert learned(answer, templates["empty thought"]) == ["<think>\n", " No, it is 4.\n</think>\n\n", " 4.<|im_end|>"]


def test_a_turn_of_which_all_is_left_out_or_that_weighs_nothing_is_not_learned(
    templates: dict[str, ChatTemplate],
) -> None:
    parts = [part("one", False), part(" two", False)]
    for answer in ({"content": parts}, {"content": [parts[0], part(" two", True)], "train": False}):
        assert learned(answer, templates["ChatML"]) == []


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"train_detail": [{"begin_offset": 0, "end_offset": 6, "train": True}]}, "characters 0 to 6, .* has 6"),
        ({"train_detail": [{"begin_offset": 2, "end_offset": 1, "train": True}]}, "characters 2 to 1"),
        ({"train_detail": [{"begin": 0, "end": 1, "train": True}]}, "no list of begin_offset, end_offset and train"),
        ({"train_detail": [{"begin_offset": 0, "end_offset": 1}]}, "train_detail is None"),
        (
            {
                "train_detail": [
                    {"begin_offset": 0, "end_offset": 3, "train": True},
                    {"begin_offset": 3, "end_offset": 5, "train": False},
                ]
            },
            "both learns and leaves out characters from 3 to 5",
        ),
        ({"train_detail": [{}], "content": [part("Hello.", True)]}, "train_detail and its parts both say"),
        ({"train": True, "weight": 0}, "its weights differ"),
        ({"content": [part("a", False), part("b", 0.5)]}, "train is 0.5; give 1"),
        ({"reasoning_content": 5}, "thoughts are neither text nor a list of parts but int"),
    ],
)
def test_what_names_no_part_is_refused(answer: dict[str, Any], reason: str, templates: dict[str, ChatTemplate]) -> None:
    with pytest.raises(BadExample, match=rf"turn 2 \(assistant\): .*{reason}"):
        learned({"content": "Hello."} | answer, templates["ChatML"])


def test_a_template_that_writes_the_text_twice_is_refused(templates: dict[str, ChatTemplate]) -> None:
    source = FAMILIES["ChatML"].template.replace("{{ '<|im_end|>\\n' }}", "{{ message.content + '<|im_end|>\\n' }}")
    template = ChatTemplate.of(FAMILIES["ChatML"].tokenizer(source))
    with pytest.raises(BadExample, match=r"turn 2: parts of its text .*writes its text 2 times"):
        learned({"content": [part("one", False), part(" two", True)]}, template)
