"""Small models and files that stand in for those that a plan names and that are not here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

NUM_ROWS = 60

MODEL_TYPES = {
    "phi-3|phi3|phi-4|phi4": "phi3",
    "phi-2|phi-1": "phi",
    "gemma-4": "gemma4_text",
    "llama-4": "llama4_text",
    "gemma-3|gemma3": "gemma3_text",
    "gemma-2-|gemma2": "gemma2",
    "gemma": "gemma",
    r"qwen3.*a\d+b": "qwen3_moe",
    "qwen3": "qwen3",
    "qwen": "qwen2",
    "mixtral": "mixtral",
    "mistral|devstral|magistral": "mistral",
    "falcon-h1": "falcon_h1",
    "falcon": "falcon",
    "stablelm-base|pythia|redpajama": "gpt_neox",
    "starcoder2": "starcoder2",
    "smollm3": "smollm3",
    "gpt-oss": "gpt_oss",
    "nemotron-3": "nemotron_h",
    "jamba": "jamba",
    "olmo-3": "olmo3",
    "granite": "granite",
    "cohere|command-r": "cohere",
    "glm": "glm4",
    "lfm2": "lfm2",
    "trinity": "afmoe",
    "llama|yi-|xgen|smollm|deepcogito|hermes|vicuna": "llama",
}
"""Architectures by a pattern of the model's name; the first that fits counts."""

_SIZES = {
    "hidden_size": 4096,  # only shapes are read; float8 needs large ones
    "intermediate_size": 11008,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "pad_token_id": None,  # some families' own are beyond the tiny vocabulary
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_NO_SIZES = {"falcon": ("head_dim", "num_key_value_heads", "intermediate_size")}

_CHATML_TOKENS = ["<|im_start|>", "<|im_end|>"]

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def stand_in_model(name: str, folder: Path) -> Path | None:
    """A folder with a small config.json of the architecture of the model of this name; None if it is not known."""
    kind = next((kind for pattern, kind in MODEL_TYPES.items() if re.search(pattern, name.lower())), None)
    if kind is None:
        return None
    made = folder / "models" / kind
    tokens = folder / "models" / "tokenizer"
    if not (tokens / "config.json").exists():
        command = [sys.executable, "-m", "tools.make_tiny_model", "--out", str(tokens)]
        subprocess.run(command, check=True, capture_output=True)
    if not (made / "config.json").exists():
        made.mkdir(parents=True, exist_ok=True)
        vocab_size = json.loads((tokens / "config.json").read_text())["vocab_size"]
        sizes = {name: size for name, size in _SIZES.items() if name not in _NO_SIZES.get(kind, ())}
        AutoConfig.for_model(kind, **sizes, vocab_size=vocab_size + len(_CHATML_TOKENS)).save_pretrained(made)
        tokenizer = AutoTokenizer.from_pretrained(tokens)
        tokenizer.add_special_tokens({"additional_special_tokens": _CHATML_TOKENS})
        tokenizer.chat_template = _CHATML
        tokenizer.save_pretrained(made)
    return made


def stand_in_data(dataset: str, settings: dict[str, str], folder: Path) -> Path:
    """A folder with splits in the format of `dataset`, with the columns that a recipe names."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in (settings.get("train_split", "train"), settings.get("test_split")):
        if split is not None:
            rows = [json.dumps(_row(dataset, settings, number)) for number in range(NUM_ROWS)]
            (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def _row(dataset: str, settings: dict[str, str], number: int) -> dict[str, Any]:
    question, answer = f"What is {number} and one?", f"It is {number + 1}."
    if dataset == "chat_dataset":
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if settings.get("messages_column") == "conversations":
            turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        return {settings.get("messages_column", "messages"): turns}
    if dataset == "text_dataset":
        return {settings.get("text_column", "text"): f"{question} {answer}"}
    if dataset == "segments_dataset":
        return {"segments": [{"text": question, "label": False}, {"text": answer, "label": True}]}
    if dataset == "instruction_dataset":
        columns = (settings.get("prompt_column", "prompt"), settings.get("completion_column", "completion"))
        more = {settings["input_column"]: ""} if "input_column" in settings else {}
        return {columns[0]: question, columns[1]: answer, **more}
    return {"instruction": question, "input": "", "output": answer}
