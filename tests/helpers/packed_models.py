"""Tiny causal models whose attention is told where documents begin, documents for them, and their gradients."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AttentionInterface, AutoModelForCausalLM

from data.sequences.tokenized import TokenSequence
from policies.attention.choice import BY_OFFSETS
from policies.attention.functions import attention_by_offsets
from tasks.causal_batches import CausalMicroBatch
from tasks.causal_lm import CausalLM
from tests.helpers.small_configs import SMALL, VOCAB

TASK = CausalLM()

CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SMALL),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=8),
    "mistral": transformers.MistralConfig(**SMALL, sliding_window=6),
    "gemma3": transformers.Gemma3TextConfig(
        **SMALL, head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
    ),
}

_SINKS: dict[str, Any] = SMALL | {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1}
WITH_SINKS: dict[str, Any] = {
    "gpt_oss": transformers.GptOssConfig(**_SINKS, **_EXPERTS, head_dim=8),
    "granite_swa": transformers.GraniteSWAConfig(**_SINKS),
    "granitemoe_swa": transformers.GraniteMoeSWAConfig(**_SINKS, **_EXPERTS),
}
if hasattr(transformers, "FlintConfig"):  # since transformers 5.23
    WITH_SINKS["flint"] = transformers.FlintConfig(**_SINKS, head_dim=8)


def make_model(name: str, attention: str, dtype: torch.dtype = torch.float32) -> Any:
    """Weights large enough that attention is far from uniform: a leak then shows in the first digit."""
    AttentionInterface.register(BY_OFFSETS, attention_by_offsets)
    torch.manual_seed(0)
    config = copy.deepcopy((CONFIGS | WITH_SINKS)[name])  # each model's own: the choice of attention is in it
    plain = "eager" if name in WITH_SINKS else "sdpa"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=plain)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
            if parameter_name.endswith("sinks"):
                parameter.normal_(mean=1)
    model.set_attn_implementation(attention)
    return model.to(dtype).eval()


def make_documents(lengths: list[int]) -> list[TokenSequence]:
    generator = np.random.default_rng(0)
    drawn = [generator.integers(3, VOCAB, length).astype(np.int32) for length in lengths]
    return [TokenSequence(ids, ids.copy(), source) for source, ids in enumerate(drawn)]


def loss_and_gradients(model: Any, batch: CausalMicroBatch, device: str = "cpu") -> tuple[float, torch.Tensor]:
    loss = TASK.summed_loss(model, batch.to(torch.device(device)))
    loss.backward()
    gradients = torch.cat([parameter.grad.float().flatten() for parameter in model.parameters()])
    model.zero_grad()
    return loss.item(), gradients
