"""Tiny configs of every family of language models that transformers has: its own config class with small sizes."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from transformers import CONFIG_MAPPING

from benchmarks.families.published import read_published

VOCAB = 97
_DROPOUTS = ("dropout", "dropout_prob", "dropout_rate", "pdrop", "layerdrop")
_WIDTH = ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "dim", "dim_model", "model_dim")
_INNER = ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim")
_EXPERT = ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size")
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_HEAD = ("head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "hidden_size_per_layer_input")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")
_WINDOWS = ("sliding_window", "attention_window")  # shorter than documents, so that they cut
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SIZES: dict[str, Any] = (
    dict.fromkeys(_WIDTH, 32)
    | dict.fromkeys(_INNER, 48)
    | dict.fromkeys(_EXPERT, 24)
    | dict.fromkeys(_LAYERS, 2)
    | dict.fromkeys((*_HEADS, *_EXPERTS), 4)
    | dict.fromkeys(_HEAD, 8)
    | dict.fromkeys(_POSITIONS, 128)
    | dict.fromkeys(_WINDOWS, 6)
    | dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB)
    | dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16)
    | dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "moe_k", "moe_topk"), 2)
    | dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1)
    | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 0}
)
_OF_FAMILIES: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "t5": {"decoder_start_token_id": 0},
    "mt5": {"decoder_start_token_id": 0},
    "zaya": {"num_experts_per_tok": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]},
    "dots3_note_text": {"num_key_value_heads": 4},
    "zamba": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_hidden_layers": 4},
    # Encoders that are decoders if they are told so.
    **{
        name: {"is_decoder": True}
        for name in (
            *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
            *("megatron-bert", "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
            *("xlm-roberta", "xlm-roberta-xl", "xmod"),
        )
    },
    "xlm": {"causal": True},
}


def tiny_config(family: str) -> Any:
    """The config of a model with a layer of each kind that the family has, or two layers.

    Families of published.yaml have the structure of a published model instead.

    Raises:
        Exception: whatever the config's class raises for such sizes.
    """
    if published := read_published().get(family):
        return published.tiny_config(VOCAB)
    return _with_each_kind_of_layer(CONFIG_MAPPING[family], _OF_FAMILIES.get(family, {}))


def _with_each_kind_of_layer(config_class: Any, more: dict[str, Any]) -> Any:
    small = _small(config_class, more)
    kinds = list(dict.fromkeys(getattr(config_class(), "layer_types", None) or ()))
    if "layer_types" in more or set(kinds) <= set(getattr(small, "layer_types", None) or kinds):
        return small
    try:
        return _small(config_class, more | {"layer_types": kinds, "num_hidden_layers": len(kinds)})
    except Exception:  # a family that derives them from other settings
        return small


def _small(config_class: Any, more: dict[str, Any]) -> Any:
    of_class = (
        {field.name for field in dataclasses.fields(config_class)} if dataclasses.is_dataclass(config_class) else set()
    )
    names = of_class | set(inspect.signature(config_class.__init__).parameters)
    given = {name: size for name, size in _SIZES.items() if name in names}
    for usual, own in (getattr(config_class, "attribute_map", None) or {}).items():
        if usual in _SIZES and own in names:
            given.setdefault(own, _SIZES[usual])
    if "kv_lora_rank" in names:  # keys and values are made for each head
        given["num_key_value_heads"] = given["num_attention_heads"]
    for name in names:  # without dropout, losses can be compared
        if name.endswith(_DROPOUTS) and name != "classifier_dropout":
            default = getattr(config_class, name, 0.0)
            given[name] = 0 if type(default) is int else 0.0
    for name, inner in (getattr(config_class, "sub_configs", None) or {}).items():
        if hasattr(inner, "model_type") and name in names:
            given[name] = _small(inner, {})
    return config_class(**given | more)
