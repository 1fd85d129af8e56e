"""Tiny mixtures of experts, one for each way in which families keep them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_LATENT = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8)

MIXTURES: dict[str, Any] = {
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SIZES, **HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "mixtral": transformers.MixtralConfig(**SIZES, **HEADS, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": transformers.GptOssConfig(  # transposed, with biases, gate and up interleaved
        **SIZES, **HEADS, num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"] * 2
    ),
    # A dense layer, then one with shared experts.
    "deepseek_v3": transformers.DeepseekV3Config(
        **SIZES,
        **_LATENT,
        num_attention_heads=4,
        num_key_value_heads=4,
        moe_intermediate_size=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    # No gate; its layers are of one kind each.
    "nemotron_h": transformers.NemotronHConfig(
        **SIZES | {"num_hidden_layers": 3},
        **HEADS,
        layers_block_type=["moe", "attention", "moe"],
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=16,
        n_group=1,
        topk_group=1,
    ),
}


def mixture(name: str, **more: Any) -> Any:
    """The model with weights far from zero, where gpt-oss and others begin.

    Args:
        more: other values of its config.
    """
    torch.manual_seed(0)
    config = type(MIXTURES[name])(**MIXTURES[name].to_dict() | more)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model
