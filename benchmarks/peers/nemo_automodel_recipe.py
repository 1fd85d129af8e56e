"""Training by NeMo AutoModel's own recipe; benchmarks compare finetuning.py with it.

    python -m benchmarks.peers.nemo_automodel_recipe MODEL_FOLDER --method=lora --micro_batch=2 --length=4096 --steps=30

Needs nemo_automodel 0.7, the transformers 5.18.0 that it pins, torchao and torchdata; one GPU, and rows of one document
each. The config is that of its published LoRA benchmark (llama3_1_8b_peft_benchmark.yaml of its examples) without
Transformer Engine, which is no wheel; other methods use the same. The seconds are those that the recipe logs.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction
from torch.utils.data import IterableDataset
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import is_flash_attn_4_available

from benchmarks.peers.peer_work import LEARNING_RATE, LORA_ALPHA, PeerWork, parse_work, report

HERE = "benchmarks.peers.nemo_automodel_recipe"
MIXTURES = {"qwen3_moe"}
"""Kinds of models that run by NeMo's own classes: transformers' have no grouped experts there."""


class Batches(IterableDataset[dict[str, torch.Tensor]]):
    """The micro-batches of the run, their labels shifted as the recipe wants them; int64 [batch, seq]."""

    def __init__(self, folder: str, micro_batch: int, length: int, steps: int) -> None:
        rows = PeerWork(folder, micro_batch=micro_batch, length=length).rows(AutoTokenizer.from_pretrained(folder))
        self.rows, self.micro_batch = torch.tensor(rows[: micro_batch * steps]), micro_batch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for ids in self.rows.split(self.micro_batch):
            labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)
            yield {"input_ids": ids, "labels": labels, "position_ids": torch.arange(ids.shape[1]).expand_as(ids)}

    def __len__(self) -> int:
        return len(self.rows) // self.micro_batch


def model_section(work: PeerWork, attention: str) -> dict[str, Any]:
    """The part `model` of the recipe's config."""
    section = {
        "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
        "pretrained_model_name_or_path": work.model,
        "torch_dtype": "bfloat16",
        "use_liger_kernel": torch.cuda.is_available(),
    }
    if AutoConfig.from_pretrained(work.model).model_type not in MIXTURES:
        return section | {"force_hf": True, "attn_implementation": attention}
    backend = {"_target_": "nemo_automodel.components.models.common.BackendConfig", "attn": "sdpa", "linear": "torch"}
    return section | {"backend": backend | {"experts": "torch_mm", "dispatcher": "torch"}}


def config_of(work: PeerWork, folder: str, attention: str) -> dict[str, Any]:
    """The recipe's config, as its YAML files say it."""
    config: dict[str, Any] = {
        "step_scheduler": {
            "global_batch_size": work.micro_batch,
            "local_batch_size": work.micro_batch,
            "max_steps": work.steps,
            "num_epochs": 1,
            "ckpt_every_steps": 10**6,
        },
        "dist_env": {"backend": "nccl" if torch.cuda.is_available() else "gloo", "timeout_minutes": 5},
        "model": model_section(work, attention),
        "distributed": {"strategy": "fsdp2", "activation_checkpointing": work.activation_checkpointing},
        "checkpoint": {"enabled": False, "checkpoint_dir": folder},
        "clip_grad_norm": {"max_norm": 1.0},
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        "dataset": {
            "_target_": f"{HERE}.Batches",
            "folder": work.model,
            "micro_batch": work.micro_batch,
            "length": work.length,
            "steps": work.steps,
        },
        "dataloader": {"_target_": "torch.utils.data.DataLoader", "batch_size": None},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": LEARNING_RATE, "weight_decay": 0.0, "fused": True},
    }
    if work.method != "full":
        config["peft"] = {
            "_target_": "nemo_automodel.components._peft.lora.PeftConfig",
            "target_modules": [f"*.{name}" for name in work.modules.split(",")],
            "dim": work.rank,
            "alpha": LORA_ALPHA,
            "dropout": 0.0,
            "use_memory_efficient_lora": False,
            "use_triton": torch.cuda.is_available(),
        }
    if work.method == "qlora":
        config["quantization"] = {
            "load_in_4bit": True,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": work.double_quant,
            "bnb_4bit_quant_storage": "bfloat16",
        }
    return config


def main() -> None:
    work = parse_work()
    if work.batching != "rows":
        raise SystemExit("this runner has rows of one document each")
    has_kernel = torch.cuda.is_available() and is_flash_attn_4_available()
    attention = "flash_attention_4" if has_kernel else "sdpa"
    with tempfile.TemporaryDirectory() as folder:
        recipe = TrainFinetuneRecipeForNextTokenPrediction(ConfigNode(config_of(work, folder, attention)))
        recipe.setup()
        recipe.run_train_validation_loop()
        lines = [json.loads(line) for line in (Path(folder) / "training.jsonl").read_text().splitlines()]
    tokens = float(work.micro_batch * work.length)
    seconds = [line["num_tokens_per_step"] / line["tps"] for line in lines]
    losses = [line["loss"] for line in lines]
    report(seconds, [tokens] * len(lines), losses, f"{attention}, NeMo's Triton LoRA, no Transformer Engine")


if __name__ == "__main__":
    main()
