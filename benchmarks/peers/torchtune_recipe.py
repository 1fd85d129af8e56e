"""Training by torchtune's own recipe, compiled; benchmarks/peer_speed.py compares finetuning.py with it.

    python -m benchmarks.peers.torchtune_recipe MODEL_FOLDER --method lora --micro_batch 2 --length 4096 --steps 30

Needs torchtune 0.6.1 and torchao 0.11 to 0.14; runs on one GPU, a Llama alone. The recipe's published config is changed
where the comparison needs it: rows, weights, clipping at 1.0, one learning rate, torch's fused AdamW for every method,
and nothing is saved.
"""

from __future__ import annotations

import runpy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torchtune.datasets import PackedDataset
from torchtune.models.convert_weights import hf_to_tune
from transformers import AutoConfig, AutoTokenizer

from benchmarks.peers.peer_work import LEARNING_RATE, LORA_ALPHA, PeerWork, parse_work, report

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
    """A checkpointer that reads the weights of a folder of transformers."""

    def __init__(self, model_type: str, should_load_recipe_state: bool, folder: str) -> None:
        self.folder = folder

    def load_checkpoint(self) -> dict[str, Any]:
        config = AutoConfig.from_pretrained(self.folder)
        weights: dict[str, torch.Tensor] = {}
        for path in sorted(Path(self.folder).glob("*.safetensors")):
            weights |= load_file(path)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        return {"model": hf_to_tune(weights, num_heads=heads, num_kv_heads=kv_heads, dim=config.hidden_size)}


def rows(tokenizer: Tokenizer, length: int, micro_batch: int, packed: bool) -> Any:
    """The rows of the run, as a recipe's dataset."""
    work = PeerWork(tokenizer.folder, micro_batch=micro_batch, length=length, batching="packed" if packed else "rows")
    found = work.rows(AutoTokenizer.from_pretrained(tokenizer.folder))
    samples = [{"tokens": ids, "labels": ids} for ids in found]
    return PackedDataset(samples, max_seq_len=length) if packed else samples


def constant_rate(optimizer: torch.optim.Optimizer, num_training_steps: int, last_epoch: int) -> Any:
    """A scheduler that changes nothing, called as the recipe of adapters calls its own."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0, last_epoch)


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


def main() -> None:
    work = parse_work()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, here = shape_of(work.model, work.length), "benchmarks.peers.torchtune_recipe"
    places = find_spec("recipes")  # installed with torchtune, and not to be imported
    if places is None or not places.submodule_search_locations:
        raise SystemExit("torchtune's recipes are not installed")
    recipes = Path(next(iter(places.submodule_search_locations)))
    config = OmegaConf.load(recipes / "configs" / "llama3_1" / f"{CONFIGS[work.method]}.yaml")
    modules = work.modules.split(",")
    attention = [name for name in modules if name in {"q_proj", "k_proj", "v_proj", "o_proj"}]
    adapted = {
        "_component_": "torchtune.models.llama3_1.lora_llama3_1",
        "lora_attn_modules": [name.replace("o_proj", "output_proj") for name in attention],
        "apply_lora_to_mlp": "up_proj" in modules,
        "apply_lora_to_output": False,
        "lora_rank": work.rank,
        "lora_alpha": LORA_ALPHA,
        "lora_dropout": 0.0,
        "quantize_base": work.method == "qlora",
    }
    whole = {"_component_": "torchtune.models.llama3_1.llama3_1"}
    config.merge_with(
        {
            "device": device,
            "batch_size": work.micro_batch,
            "gradient_accumulation_steps": 1,
            "max_steps_per_epoch": work.steps,
            "clip_grad_norm": 1.0,
            "compile": True,
            "optimizer_in_bwd": False,
            "enable_activation_checkpointing": work.activation_checkpointing,
            "shuffle": False,
        }
    )
    config.model = {**(whole if work.method == "full" else adapted), **shape}
    config.checkpointer = {"_component_": f"{here}.PeerWeights", "model_type": "LLAMA3", "folder": work.model}
    config.tokenizer = {"_component_": f"{here}.Tokenizer", "folder": work.model}
    config.dataset = {"_component_": f"{here}.rows", "length": work.length, "micro_batch": work.micro_batch}
    config.dataset["packed"] = work.batching == "packed"
    config.metric_logger = {"_component_": f"{here}.Figures"}
    config.optimizer = {"_component_": "torch.optim.AdamW", "fused": True, "lr": LEARNING_RATE, "weight_decay": 0.0}
    if work.method != "full":
        config.lr_scheduler = {"_component_": f"{here}.constant_rate"}
    module, name = RECIPES["full" if work.method == "full" else "lora"]
    recipe = runpy.run_path(str(recipes / f"{module}.py"))[name](config)
    recipe.setup(config)
    recipe.save_checkpoint = lambda epoch: None
    recipe.train()
    logged = recipe._metric_logger.logged
    speeds = [float(figures["tokens_per_second_per_gpu"]) for figures in logged]
    losses = [float(figures["loss"]) for figures in logged]
    report([1.0] * len(speeds), speeds, losses, "torch's attention, compiled")


if __name__ == "__main__":
    main()
