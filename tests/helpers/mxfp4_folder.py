"""A gpt-oss as OpenAI publishes it: experts in MXFP4, written from the format's definition."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssConfig

from tests.helpers.families import LLAMA_LIKE

PUBLISHED = {
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"],
    "quant_method": "mxfp4",
}


def save_in_mxfp4(folder: Path, tokenizer_folder: Path) -> Path:
    """A tiny one with random weights, in two files: blocks and their scales may be apart."""
    sizes = LLAMA_LIKE | {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16, "max_position_embeddings": 256}
    config = GptOssConfig(
        **sizes, num_local_experts=4, num_experts_per_tok=2, layer_types=["sliding_attention", "full_attention"]
    )
    drawn = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_inputs, num_outputs = tensors.pop(name).shape
        shape = (num_experts, num_outputs, num_inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=drawn)
        tensors[f"{name}_scales"] = torch.randint(119, 125, shape, dtype=torch.uint8, generator=drawn)
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + name.endswith('_scales')}-of-00002.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({n: t for n, t in tensors.items() if files[n] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    settings = json.loads((folder / "config.json").read_text()) | {"quantization_config": PUBLISHED}
    (folder / "config.json").write_text(json.dumps(settings))
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(folder)
    return folder


def dequantized_by_transformers(folder: Path, to: Path) -> Path:
    """The same model in bf16, as transformers reads it where it has no kernels for MXFP4."""
    read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    # By a model that was not read from MXFP4: transformers 5.23 would give bf16 the names of blocks.
    plain = AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(to)
    AutoTokenizer.from_pretrained(folder).save_pretrained(to)
    assert "quantization_config" not in json.loads((to / "config.json").read_text())
    return to
