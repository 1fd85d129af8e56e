"""The forward of experts beside transformers' own loop over them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from policies.experts.finding import expert_weights, find_experts
from policies.experts.forward import compute_by_products

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
FAMILIES: dict[str, Any] = {
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SIZES, **HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "mixtral": transformers.MixtralConfig(**SIZES, **HEADS, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": transformers.GptOssConfig(  # transposed, with biases, gate and up interleaved
        **SIZES, **HEADS, num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"] * 2
    ),
}


def outcome(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits, and every gradient of a loss on them."""
    model.zero_grad()
    logits = model(input_ids=ids).logits
    logits.float().logsumexp(-1).square().mean().backward()
    return {"logits": logits.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", FAMILIES)
def test_values_and_gradients_are_those_of_a_loop_over_the_experts(name: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[name], experts_implementation="eager")
    for parameter in model.parameters():  # gpt-oss begins with zeros
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(0, 64, (2, 3))  # so few tokens that some experts get none
    expected = outcome(model, ids)
    compute_by_products(model)
    found = outcome(model, ids)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5 * float(value.abs().max()), msg=key)


def test_the_weights_of_experts_are_found_whichever_way_they_lie() -> None:
    for name, inner in (("qwen3_moe", 24), ("gpt_oss", 48)):
        model = AutoModelForCausalLM.from_config(FAMILIES[name])
        found = find_experts(model)
        assert len(found) == 2
        for experts in found.values():
            first, second = expert_weights(experts)
            assert (first.num_experts, first.in_features, first.out_features) == (4, 32, 2 * inner)
            assert (second.num_experts, second.in_features, second.out_features) == (4, inner, 32)
