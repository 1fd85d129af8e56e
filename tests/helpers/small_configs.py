"""Sizes for tiny random models: of whatever family takes these names, and of those that have names of their own."""

VOCAB = 97
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
COMMON = {name: SMALL[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
COMMON["max_position_embeddings"] = SMALL["max_position_embeddings"]
GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPT = COMMON | {"ffn_dim": 48, "dropout": 0.0}
GPT_NEOX = COMMON | {"intermediate_size": 48, "bos_token_id": 1, "eos_token_id": 2}
