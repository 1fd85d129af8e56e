"""A model in the context `generating` answers as plain transformers does, and trains on as it was."""

from __future__ import annotations

import pytest
import torch
from transformers import AttentionInterface

from policies.apply_policies import Policies
from policies.attention.choice import BY_OFFSETS
from policies.attention.functions import attention_by_offsets
from policies.generating import generating
from policies.mixed_precision import Precision
from policies.sharding import Layout
from ranks.environment import read_environment
from tests.helpers.families import make_model

FP32 = Precision("fp32", torch.float32, torch.float32)
PLAIN = Policies(FP32, None, Layout("plain", "SINGLE", (1, 1), reshard_after_forward=False))


@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_a_prompt_beyond_the_window_is_answered_by_a_model_that_takes_offsets(name: str) -> None:
    """On GPUs packed rows have offsets; a lone prompt has neither these nor a mask that would tell of the window."""
    model, prompt = make_model(name).train(), torch.arange(3, 40)[None]
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.eval().generate(prompt, **settings)
    AttentionInterface.register(BY_OFFSETS, attention_by_offsets)
    model.set_attn_implementation(BY_OFFSETS)
    with pytest.raises(ValueError, match="takes no cache"):
        model.generate(prompt, **settings)
    model.train()
    with generating(model, PLAIN, read_environment()) as in_step:
        assert not in_step
        assert not model.training
        assert torch.equal(model.generate(prompt, **settings), expected)
    assert model.training
    assert model.config._attn_implementation == BY_OFFSETS
