"""A model whose gradients overflow in fp16 if a document begins with one token, and documents with that token.

An embedding of zeros stays zero through all layers, and there the gradient of every norm is a thousand times larger.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SILENT = 599


def make_overflowing_model(base: Path, folder: Path, *, last_norm: float = 1.0) -> Path:
    """The base with such a token; gradients are larger by what its last norm's weight is multiplied by."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.get_input_embeddings().weight.data[SILENT] = 0
    model.get_decoder().norm.weight.data *= last_norm
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def write_dataset_function(path: Path, condition: str) -> str:
    """Twelve rows, of which those that meet the condition on `i` begin with the token; for --dataset."""
    ids = f"[{SILENT} if {condition} else 6, *((7 * i + 3 * place) % 500 + 7 for place in range(23))]"
    rows = f"[{{'input_ids': ids, 'labels': ids}} for ids in ({ids} for i in range(12))]"
    path.write_text(f"def get_custom_dataset(config, tokenizer, split):\n    return {rows}\n")
    return f"{path}:get_custom_dataset"
