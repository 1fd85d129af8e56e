"""Random conversations through templates that behave like the families: all that the assistant said is learned once."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.chat_masks import OwnRendering, make_row, wrong
from configs.datasets import ChatDataset
from data.chat import chat_samples
from data.chat_template import ChatTemplate
from data.conversation import read_conversation
from data.loss_mask import BadExample
from tests.helpers.chat_templates import FAMILIES, REWRITING

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
