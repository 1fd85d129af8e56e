"""Tiny encoder-decoders with random weights, with tokenizers of their families' kinds trained on the samples."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

from tools.make_tiny_model import DEFAULT_DATA, read_texts

VOCAB = 600
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
BART_SIZES = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 512,
    "init_std": 0.1,
    **NO_DROPOUT,
}
BART_IDS = {
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
PEGASUS_IDS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "forced_eos_token_id": 1}
T5_SIZES = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}


def make_config(family: str, **sizes: Any) -> Any:
    """A tiny config of `bart`, `pegasus`, `t5`, `flan-t5` (T5 1.1: a gated MLP, and a head of its own) or `mt5`."""
    if family == "bart":
        return transformers.BartConfig(**{**BART_SIZES, **BART_IDS, **sizes})
    if family == "pegasus":
        return transformers.PegasusConfig(**{**BART_SIZES, **PEGASUS_IDS, "scale_embedding": True, **sizes})
    if family == "t5":
        return transformers.T5Config(**{**T5_SIZES, **sizes})
    gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    return (transformers.MT5Config if family == "mt5" else transformers.T5Config)(**{**T5_SIZES, **gated, **sizes})


def make_model(family: str, seed: int = 0, **sizes: Any) -> Any:
    """Random weights. The head of `flan-t5` and `mt5` differs from the embeddings, as in their files."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSeq2SeqLM.from_config(make_config(family, **sizes), dtype=torch.float32)
        if family in ("flan-t5", "mt5"):
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight) * 0.2)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
    return model


@cache
def make_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE and `<s> A </s>` for `bart`; Unigram and `A </s>` for the others."""
    texts = list(read_texts(DEFAULT_DATA))
    if family == "bart":
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        bpe = trainers.BpeTrainer(
            vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(texts, bpe)
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 0), ("</s>", 2)])
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="<s>",
            pad_token="<pad>",
            eos_token="</s>",
            unk_token="<unk>",
            mask_token="<mask>",
        )
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    unigram = trainers.UnigramTrainer(
        vocab_size=VOCAB, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(texts, unigram)
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", None, [("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def save_seq2seq(family: str, folder: Path, **sizes: Any) -> Path:
    """The model with its tokenizer, as `save_pretrained` writes them."""
    make_model(family, **sizes).save_pretrained(folder)
    make_tokenizer(family).save_pretrained(folder)
    return folder
