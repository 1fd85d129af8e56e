"""Tiny random models of the families that people fine-tune, and what differs between them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.small_configs import COMMON, GPT2, GPT_NEOX, OPT, SMALL

VOCAB = 600
LLAMA_LIKE = SMALL | {"vocab_size": VOCAB}
ATTENTION = ("q_proj", "v_proj")
MIXTURE_WITH_ROUTER_LOSS = transformers.Qwen3MoeConfig(
    **LLAMA_LIKE,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    head_dim=8,
    output_router_logits=True,
    router_aux_loss_coef=2.0,
)


@dataclass(frozen=True)
class Family:
    """A model's config and what the tests need to know of it; everything else they find out."""

    config: Any
    layers: str  # where the decoder layers are, as `named_modules` spells it
    lora_targets: tuple[str, ...]
    packs: bool = True  # whether its attention keeps the documents of a packed row apart
    layers_are_units: bool = True  # whether the model names them itself (`_no_split_modules`)


FAMILIES: dict[str, Family] = {
    "llama": Family(
        transformers.LlamaConfig(**LLAMA_LIKE, tie_word_embeddings=False), "model.layers", (*ATTENTION, "down_proj")
    ),
    # Windows are shorter than most documents, so that they cut.
    "mistral": Family(transformers.MistralConfig(**LLAMA_LIKE, sliding_window=16), "model.layers", ATTENTION),
    "qwen2": Family(transformers.Qwen2Config(**LLAMA_LIKE, tie_word_embeddings=True), "model.layers", ATTENTION),
    "qwen3": Family(transformers.Qwen3Config(**LLAMA_LIKE, head_dim=16), "model.layers", ATTENTION),
    # Sliding and full attention take turns.
    "gemma2": Family(
        transformers.Gemma2Config(**LLAMA_LIKE, head_dim=8, query_pre_attn_scalar=8, sliding_window=16),
        "model.layers",
        ATTENTION,
    ),
    "gemma3": Family(
        transformers.Gemma3TextConfig(
            **LLAMA_LIKE, head_dim=8, query_pre_attn_scalar=8, sliding_window=16, sliding_window_pattern=2
        ),
        "model.layers",
        ATTENTION,
    ),
    "phi3": Family(transformers.Phi3Config(**LLAMA_LIKE), "model.layers", ("qkv_proj", "gate_up_proj")),
    "gpt2": Family(
        transformers.GPT2Config(**GPT2, vocab_size=VOCAB),
        "transformer.h",
        ("c_attn", "c_fc"),
    ),
    "opt": Family(
        transformers.OPTConfig(**OPT, vocab_size=VOCAB, word_embed_proj_dim=16),
        "model.decoder.layers",
        (*ATTENTION, "fc1"),
        packs=False,
    ),
    "gpt_neox": Family(
        transformers.GPTNeoXConfig(**GPT_NEOX, vocab_size=VOCAB),
        "gpt_neox.layers",
        ("query_key_value", "dense_h_to_4h"),
    ),
    "falcon": Family(
        transformers.FalconConfig(**COMMON, vocab_size=VOCAB, bos_token_id=1, eos_token_id=2),
        "transformer.h",
        ("query_key_value", "dense_h_to_4h"),
        packs=False,
    ),
    "mixtral": Family(
        transformers.MixtralConfig(**LLAMA_LIKE, num_local_experts=4, sliding_window=None), "model.layers", ATTENTION
    ),
    # Attention with sinks, which keeps the documents of a packed row apart by their offsets alone.
    "gpt_oss": Family(
        transformers.GptOssConfig(
            **LLAMA_LIKE,
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"],
        ),
        "model.layers",
        ATTENTION,
    ),
    # It names no module that must not be split: one unit.
    "biogpt": Family(
        transformers.BioGptConfig(
            **COMMON,
            vocab_size=VOCAB,
            intermediate_size=48,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        "biogpt.layers",
        ATTENTION,
        packs=False,
        layers_are_units=False,
    ),
}


def make_model(name: str, seed: int = 0) -> Any:
    """Random weights, large enough that attention is far from uniform: who sees whom then changes the loss."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(FAMILIES[name].config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return model


def save_family(name: str, folder: Path, tokenizer_folder: Path) -> Path:
    """The model in its own format with the given tokenizer beside it."""
    make_model(name).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(folder)
    return folder
