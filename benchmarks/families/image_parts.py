"""What tiny models of images and text have in common: sizes, a tokenizer of words with more special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import transformers
from transformers import PreTrainedTokenizerFast

from tools.make_tiny_model import DEFAULT_DATA, make_tokenizer, read_texts

hf: Any = transformers  # its annotations leave out the names that configs of older models have
VOCAB, SIDE, PATCH = 400, 32, 8
TEXT: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": 1, "eos_token_id": 2}
TEXT |= {"pad_token_id": None}
TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TOWER |= {"image_size": SIDE, "patch_size": PATCH}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MROPE: dict[str, Any] = {"rope_type": "default", "mrope_section": [1, 1, 2]}


def tokenizer_with(*more: str, **named: str) -> PreTrainedTokenizerFast:
    plain = make_tokenizer(read_texts(DEFAULT_DATA), VOCAB)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain._tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        extra_special_tokens=named,
    )
    tokenizer.add_tokens([hf.AddedToken(token, special=True, normalized=False) for token in more])
    return tokenizer


def ids_of(tokenizer: Any, tokens: Sequence[str]) -> list[int]:
    ids: list[int] = tokenizer.convert_tokens_to_ids(list(tokens))
    return ids


def square(**more: Any) -> dict[str, Any]:
    return {"size": {"height": SIDE, "width": SIDE}} | more


_ROLES = (
    "{%% for m in messages %%}{{ '<s>' + m['role'] + '\n' }}{%% if m['content'] is string %%}{{ m['content'] }}"
    "{%% else %%}{%% for c in m['content'] %%}{%% if c['type'] == 'image' %%}%s{%% elif 'text' in c %%}{{ c['text'] }}"
    "{%% endif %%}{%% endfor %%}{%% endif %%}{{ '</s>\n' }}{%% endfor %%}"
    "{%% if add_generation_prompt %%}{{ '<s>assistant\n' }}{%% endif %%}"
)


def chat_template(placeholder: str) -> str:
    """Turns of `<s>ROLE`, text and `</s>`.

    Args:
        placeholder: what stands for an image.
    """
    return _ROLES % placeholder
