"""Sizes for tiny random models, of whatever family takes these names."""

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
