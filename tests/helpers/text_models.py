"""Tiny models with a head for whole texts, of families that read texts in their own ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForSequenceClassification, AutoTokenizer

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
CAUSAL = ("llama", "qwen3", "gpt2")
FAMILIES = (*CAUSAL, "roberta", "bert", "deberta", "modernbert")


def make_config(family: str, vocab_size: int, **more: Any) -> Any:
    given = {"vocab_size": vocab_size, **IDS, **more}
    if family == "llama":
        return transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **given)
    if family == "qwen3":
        return transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8, **given)
    if family == "gpt2":
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **dropouts, **given)
    if family == "roberta":
        return transformers.RobertaConfig(**SIZES, **NO_DROPOUT, **given)
    if family == "bert":
        return transformers.BertConfig(**SIZES, **NO_DROPOUT, **given)
    if family == "deberta":
        relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16}
        return transformers.DebertaV2Config(**SIZES, **NO_DROPOUT, **relative, type_vocab_size=0, **given)
    local = {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 0, "sep_token_id": 1}
    return transformers.ModernBertConfig(**SIZES, **local, **given)


def save_text_model(folder: Path, family: str, tokenizer: Path, *, num_labels: int = 3) -> Path:
    """A classifier with random weights, and this tokenizer, to which a pad token is added."""
    words = AutoTokenizer.from_pretrained(tokenizer)
    words.pad_token = words.convert_ids_to_tokens(IDS["pad_token_id"])
    torch.manual_seed(0)
    config = make_config(family, len(words), num_labels=num_labels)
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder
