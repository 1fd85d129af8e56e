"""Models by the names of their shapes, with random weights or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from tools.make_tiny_model import make_tiny_model

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    # the same with few words: its layers weigh more than its embeddings
    "tiny-words": {"vocab_size": 600, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    | {"num_attention_heads": 4},
    # TinyLlama-1.1B (Zhang et al., 2024), from its published config.json
    "tinyllama": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
    # Llama-3.1-8B (Meta, 2024), from its published config.json
    "llama8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
    },
    # Llama-2-13B (Meta, 2023), from its published config.json
    "llama13b": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "vocab_size": 32000,
    },
    # Llama-3.1-70B (Meta, 2024), from its published config.json
    "llama70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
    },
}
# SmolLM2-135M (Hugging Face, 2024), from its published config.json, with 12 of its 30 layers
SHAPES["smollm2-12layers"] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
SHAPES["smollm2-12layers-all-heads"] = SHAPES["smollm2-12layers"] | {"num_key_value_heads": 9}
SHAPES["llama8b-long"] = SHAPES["llama8b"] | {"max_position_embeddings": 2**20}  # for rows longer than it was made for
SHAPES["llama8b-8layers"] = SHAPES["llama8b-long"] | {"num_hidden_layers": 8}
SHAPES["llama70b-60layers"] = SHAPES["llama70b"] | {"num_hidden_layers": 60}

# t5-small (Raffel et al., 2020) and bart-base (Lewis et al., 2020), from their published config.json
SEQ2SEQ: dict[str, dict[str, Any]] = {
    "t5-small": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "decoder_start_token_id": 0},
    "bart-base": {
        "model_type": "bart",
        "architectures": ["BartForConditionalGeneration"],
        "d_model": 768,
        "encoder_layers": 6,
        "decoder_layers": 6,
        "encoder_attention_heads": 12,
        "decoder_attention_heads": 12,
        "encoder_ffn_dim": 3072,
        "decoder_ffn_dim": 3072,
        "vocab_size": 50265,
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "activation_dropout": 0.1,
    },
}


_MIXTURE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
# Qwen3-8B, Qwen3-30B-A3B (Qwen team, 2025), gpt-oss-20b (OpenAI, 2025) and Qwen3.5-4B (Qwen team, 2026), from their
# published config.json
TODAY: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
    "qwen3-30b-a3b": {
        **_MIXTURE,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "dtype": "bfloat16",
    },
    "qwen3.5-4b": {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 248320,
        "tie_word_embeddings": True,
    },
}
# Gemma 3 4B without its tower (Google, 2025), from its published config.json
TODAY["gemma3-4b"] = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 1024,
    "query_pre_attn_scalar": 256,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
# Qwen2.5-0.5B (Qwen team, 2024), from its published config.json
TODAY["qwen2.5-0.5b"] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
TODAY["qwen3-30b-a3b-16layers"] = TODAY["qwen3-30b-a3b"] | {"num_hidden_layers": 16}
TODAY["gpt-oss-20b-12layers"] = TODAY["gpt-oss-20b"] | {"num_hidden_layers": 12}

# TinyLlama's sizes with windows as Mistral 7B has them, narrower than a row of 4,096.
TODAY["tinyllama-windows"] = SHAPES["tinyllama"] | {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "max_position_embeddings": 8192,
    "sliding_window": 1024,
}


def make_shape(folder: Path, shape: str) -> None:
    """Write a model folder with the shape's config.json and some tokenizer, but no weights."""
    make_tiny_model(folder, vocab_size=600, hidden_size=32, num_layers=1)
    (folder / "model.safetensors").unlink()
    llama: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 8192,
    }
    own = SEQ2SEQ | TODAY
    sizes: dict[str, Any] = own[shape] if shape in own else llama | SHAPES[shape]
    CONFIG_MAPPING[sizes["model_type"]](
        **{name: value for name, value in sizes.items() if name != "model_type"}
    ).save_pretrained(folder)


def make_random_weights(folder: Path, shape: str) -> float:
    """Write a model folder with random bf16 weights; returns their size in GB."""
    make_shape(folder, shape)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="5GB")
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e9
