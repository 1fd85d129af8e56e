"""Training by torchtune's own recipe, compiled; benchmarks/peer_speed.py compares finetuning.py with it.

    python -m benchmarks.peers.torchtune_recipe MODEL_FOLDER --method lora --micro_batch 2 --length 4096 --steps 30

Needs torchtune 0.6.1 and torchao 0.11 to 0.14; runs on one GPU. The shape is that of a Llama's config.json, with random
weights. The recipe's published config is changed where the comparison needs it: rows, clipping at 1.0, torch's fused
AdamW for every method, and nothing is saved. Prints one JSON object, as benchmarks/peers/trl_trainer.py does.
"""

from __future__ import annotations

import json
import math
import runpy
import statistics
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fire
import torch
from omegaconf import OmegaConf
from torchtune.datasets import PackedDataset
from torchtune.models.llama3_1 import llama3_1
from transformers import AutoConfig, AutoTokenizer

from benchmarks.runs.measurements import WARMUP_STEPS
from benchmarks.runs.random_rows import get_documents, get_rows

RECIPES = {
    "full": ("full_finetune_single_device", "FullFinetuneRecipeSingleDevice"),
    "lora": ("lora_finetune_single_device", "LoRAFinetuneRecipeSingleDevice"),
}
CONFIGS = {"full": "8B_full_single_device", "lora": "8B_lora_single_device", "qlora": "8B_qlora_single_device"}


class Tokenizer:
    """What a recipe asks its tokenizer for."""

    def __init__(self, folder: str) -> None:
        self.folder, self.pad_id = folder, 0


class Figures:
    """A metric logger that keeps what the recipe logs."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []

    def log_config(self, config: Any) -> None: ...

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        self.logged.append(dict(payload))

    def close(self) -> None: ...


class PeerWeights:
    """A checkpointer with random weights."""

    def __init__(self, model_type: str, should_load_recipe_state: bool, **shape: Any) -> None:
        self.shape = shape

    def load_checkpoint(self) -> dict[str, Any]:
        with torch.device("meta"):
            model = llama3_1(**self.shape)
        device = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU takes a minute for 8 billion random numbers
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        empty = {name: torch.empty(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}
        return {"model": {n: torch.ones_like(t) if t.ndim == 1 else t.normal_(std=0.02) for n, t in empty.items()}}


def rows(tokenizer: Tokenizer, length: int, packed: bool) -> Any:
    """The rows of benchmarks/runs/random_rows.py, as a recipe's dataset."""
    get = get_documents if packed else get_rows
    found = get(None, AutoTokenizer.from_pretrained(tokenizer.folder), "train")
    samples = [{"tokens": row["input_ids"].tolist(), "labels": row["labels"].tolist()} for row in found]
    return PackedDataset(samples, max_seq_len=length) if packed else samples


def shape_of(folder: str, length: int) -> dict[str, Any]:
    """Arguments of torchtune's builders for the shape in config.json."""
    config = AutoConfig.from_pretrained(folder)
    return {
        "vocab_size": config.vocab_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "embed_dim": config.hidden_size,
        "intermediate_dim": config.intermediate_size,
        "max_seq_len": length,
    }


def main(
    model: str,
    method: str = "full",
    micro_batch: int = 2,
    length: int = 4096,
    steps: int = 30,
    activation_checkpointing: bool = False,
    documents: bool = False,
) -> None:
    """Train for some steps.

    Args:
        model: folder with config.json and a tokenizer.
        method: full, lora or qlora.
        documents: rows are packed from documents as long as SAMSum's, instead of one document each.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, here = shape_of(model, length), "benchmarks.peers.torchtune_recipe"
    places = find_spec("recipes")  # installed with torchtune, and not to be imported
    if places is None or not places.submodule_search_locations:
        raise SystemExit("torchtune's recipes are not installed")
    recipes = Path(next(iter(places.submodule_search_locations)))
    config = OmegaConf.load(recipes / "configs" / "llama3_1" / f"{CONFIGS[method]}.yaml")
    adapted = {
        "_component_": "torchtune.models.llama3_1.lora_llama3_1",
        "lora_attn_modules": ["q_proj", "v_proj"],
        "apply_lora_to_mlp": False,
        "apply_lora_to_output": False,
        "lora_rank": 8,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "quantize_base": method == "qlora",
    }
    whole = {"_component_": "torchtune.models.llama3_1.llama3_1"}
    config.merge_with(
        {
            "device": device,
            "batch_size": micro_batch,
            "gradient_accumulation_steps": 1,
            "max_steps_per_epoch": steps,
            "clip_grad_norm": 1.0,
            "compile": True,
            "optimizer_in_bwd": False,
            "enable_activation_checkpointing": activation_checkpointing,
            "shuffle": False,
        }
    )
    config.model = {**(whole if method == "full" else adapted), **shape}
    config.checkpointer = {"_component_": f"{here}.PeerWeights", "model_type": "LLAMA3", **shape}
    config.tokenizer = {"_component_": f"{here}.Tokenizer", "folder": model}
    config.dataset = {"_component_": f"{here}.rows", "length": length, "packed": documents}
    config.metric_logger = {"_component_": f"{here}.Figures"}
    config.optimizer = {"_component_": "torch.optim.AdamW", "fused": True, "lr": 2e-5}
    module, name = RECIPES["full" if method == "full" else "lora"]
    recipe = runpy.run_path(str(recipes / f"{module}.py"))[name](config)
    recipe.setup(config)
    recipe.save_checkpoint = lambda epoch: None
    recipe.train()
    logged = recipe._metric_logger.logged
    peaks = [figures.get("peak_memory_alloc", math.nan) for figures in logged]
    speeds = [float(figures["tokens_per_second_per_gpu"]) for figures in logged]
    figures = {"tokens_per_second": statistics.median(speeds[WARMUP_STEPS:]), "peak_gib": max(peaks)}
    print(json.dumps(figures | {"first_loss": float(logged[0]["loss"])}), flush=True)


if __name__ == "__main__":
    fire.Fire(main)
