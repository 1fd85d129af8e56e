"""What of a sample is generated."""

from __future__ import annotations

import numpy as np
import pytest

from data.sequences.tokenized import TokenSequence
from tasks.causal_lm import CausalLM


@pytest.mark.parametrize(
    ("has_loss", "prompt", "answer"),
    [
        ("..xx", "ab", "cd"),
        ("..xx.", "ab", "cd"),
        (".xx..x.", "abcde", "f"),  # two turns: the last one
        ("xxx", "", "abc"),
    ],
)
def test_the_last_answer_is_what_the_model_must_say_after_all_before_it(
    has_loss: str, prompt: str, answer: str
) -> None:
    ids = np.array([ord("a") + place for place in range(len(has_loss))], dtype=np.int32)
    labels = np.where(np.array(list(has_loss)) == "x", ids, -100).astype(np.int32)
    sample = CausalLM().prompted_answer(TokenSequence(ids, labels, 0))
    assert "".join(map(chr, sample.prompt)) == prompt
    assert "".join(map(chr, sample.answer)) == answer
    assert sample.num_positions == len(prompt)
