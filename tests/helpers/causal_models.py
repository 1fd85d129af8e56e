"""Tiny causal models of all kinds of heads, a batch for them, and the loss on full logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM

from data.sequences.tokenized import TokenSequence
from tasks.causal_batches import CausalMicroBatch, Collator
from tests.helpers.small_configs import GPT2, GPT_NEOX, OPT, SMALL, VOCAB

CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SMALL, tie_word_embeddings=False),
    "llama-tied": transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "gemma2": transformers.Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=2.0),
    "gpt2": transformers.GPT2Config(**GPT2, vocab_size=VOCAB),
    "opt": transformers.OPTConfig(**OPT, vocab_size=VOCAB, word_embed_proj_dim=32),
    "opt-projected": transformers.OPTConfig(**OPT, vocab_size=VOCAB, word_embed_proj_dim=16),
    "cohere": transformers.CohereConfig(**SMALL, logit_scale=0.3),
    "granite": transformers.GraniteConfig(**SMALL, logits_scaling=0.25),
    "gpt-neox": transformers.GPTNeoXConfig(**GPT_NEOX, vocab_size=VOCAB),
    # Its positions begin behind the padding id.
    "roberta": transformers.RobertaConfig(
        **SMALL | {"pad_token_id": 2}, is_decoder=True, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    ),
    # The model itself asks how many tokens the head reads.
    "gemma4": transformers.Gemma4TextConfig(
        **SMALL, head_dim=8, num_kv_shared_layers=0, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB
    ),
    "mixtral": transformers.MixtralConfig(**SMALL, num_local_experts=2),
    "starcoder": transformers.GPTBigCodeConfig(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
    ),
}


def make_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model.train()


def make_batch(seed: int = 0, *, learned: bool = True) -> CausalMicroBatch:
    generator = np.random.default_rng(seed)
    rows = []
    for source, length in enumerate(generator.integers(2, 24, 6)):
        ids = generator.integers(3, VOCAB, length).astype(np.int32)
        masked = generator.random(length) < (0.4 if learned else 2.0)
        rows.append([TokenSequence(ids, np.where(masked, -100, ids).astype(np.int32), source)])
    return Collator(packing=False, padding_id=2)(rows)


def reference_loss(model: Any, batch: CausalMicroBatch) -> torch.Tensor:
    logits = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        use_cache=False,
    ).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), reduction="sum")
