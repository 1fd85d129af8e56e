"""Random conversations through templates that behave like the families: all that the assistant said is learned once."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.chat_masks import OwnRendering, make_row, wrong
from chat.conversation import read_conversation
from chat.samples import chat_samples
from chat.template import ChatTemplate
from configs.formats import DATASETS
from data.tokens.spans import BadExample, TextSpan
from tests.helpers.chat_templates import FAMILIES, REWRITING

ChatDataset = DATASETS["chat_dataset"]
TAKE_ALL = ("empty thought", "final answer")  # templates that can express thoughts, calls, results and systems
ALL = FAMILIES | REWRITING


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    return {name: family.tokenizer() for name, family in ALL.items()}


@pytest.mark.parametrize("name", ALL)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_nothing_of_the_assistants_is_lost_and_nothing_of_others_is_learned(
    name: str, seed: int, tokenizers: dict[str, Any]
) -> None:
    tokenizer = tokenizers[name]
    template, row = ChatTemplate.of(tokenizer), make_row(random.Random(seed))
    if name in TAKE_ALL:
        row.pop("tools", None)
    conversation = read_conversation(row, ChatDataset(), chat_template=tokenizer.chat_template)
    try:
        samples = chat_samples(conversation, template)
    except BadExample:
        if name in TAKE_ALL:
            raise
        return
    assert not list(wrong(conversation, samples, tokenizer, OwnRendering(tokenizer), is_marked=False))


def test_a_wrong_sample_is_found(tokenizers: dict[str, Any]) -> None:
    """A character more or less that is learned, a text that the template does not write, a turn learned twice."""
    tokenizer = tokenizers["ChatML"]
    template, own = ChatTemplate.of(tokenizer), OwnRendering(tokenizer)
    turns = [{"role": "user", "content": "O1x asks"}, {"role": "assistant", "content": "A2x says"}]
    conversation = read_conversation({"messages": turns}, ChatDataset())
    samples = chat_samples(conversation, template)
    (((before, _), (answer, _), rest),) = samples.spans
    learns_more = [TextSpan(before[:-1], False), TextSpan(before[-1] + answer, True), rest]
    learns_less = [TextSpan(before + answer[:1], False), TextSpan(answer[1:], True), rest]
    has_no_end = [TextSpan(before, False), TextSpan(answer.removesuffix("<|im_end|>"), True), rest]
    is_other_text = [TextSpan(before.replace("helpful", "brief"), False), TextSpan(answer, True), rest]
    for spans in (learns_more, learns_less, has_no_end, is_other_text):
        assert list(wrong(conversation, samples._replace(spans=[spans]), tokenizer, own, is_marked=False))
    twice = samples._replace(spans=[*samples.spans, *samples.spans])
    assert list(wrong(conversation, twice, tokenizer, own, is_marked=False))
    assert not list(wrong(conversation, samples, tokenizer, own, is_marked=False))
