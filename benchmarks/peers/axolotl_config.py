"""Training by Axolotl's own command; benchmarks compare finetuning.py with it.

    python -m benchmarks.peers.axolotl_config MODEL_FOLDER --method=qlora --micro_batch=2 --length=4096 --steps=30

Needs axolotl 0.19, axolotl-contribs-lgpl and -mit, trl 1.9.0, and small packages that they import; one GPU. Its Triton
kernels for adapters are on, and Liger's for layers and loss. Attention is flash-attn-4's if that is installed.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("AXOLOTL_DO_NOT_TRACK", "1")

import torch
import yaml
from axolotl.cli.args import TrainerCliArgs
from axolotl.cli.config import load_cfg
from axolotl.cli.train import do_train
from axolotl.integrations.base import BasePlugin
from transformers import AutoTokenizer
from transformers.utils import is_flash_attn_4_available

from benchmarks.peers.peer_work import COMPARED_LOSSES, LEARNING_RATE, LORA_ALPHA, PeerWork, parse_work, report
from benchmarks.peers.step_times import StepTimes

TIMES = StepTimes(COMPARED_LOSSES)


class Timing(BasePlugin):
    """Gives Axolotl's trainer the callback that measures its steps."""

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        return [TIMES]


def write_rows(work: PeerWork, path: Path) -> list[int]:
    """Write the rows as Axolotl reads tokenized ones; returns their lengths."""
    rows = work.rows(AutoTokenizer.from_pretrained(work.model))
    with path.open("w") as file:
        for ids in rows:
            file.write(json.dumps({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}) + "\n")
    return [len(ids) for ids in rows]


def config_of(work: PeerWork, folder: Path, attention: str) -> dict[str, Any]:
    """A config file of Axolotl."""
    has_gpu = torch.cuda.is_available()
    every_linear = {"q_proj", "o_proj", "up_proj"} <= set(work.modules.split(","))
    config: dict[str, Any] = {
        "base_model": work.model,
        "output_dir": str(folder / "out"),
        "dataset_prepared_path": str(folder / "rows"),
        "datasets": [{"path": str(folder / "rows.jsonl"), "ds_type": "json", "type": None}],
        "val_set_size": 0,
        "sequence_len": work.length,
        "sample_packing": work.batching == "packed",
        "pad_to_sequence_len": False,
        "curriculum_sampling": True,
        "shuffle_merged_datasets": False,
        "dataset_num_proc": 1,
        "micro_batch_size": work.micro_batch,
        "gradient_accumulation_steps": 1,
        "max_steps": work.steps,
        "optimizer": "adamw_torch_fused",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "bf16": has_gpu,
        "tf32": False,
        "seed": 42,
        "gradient_checkpointing": work.activation_checkpointing,
        "attn_implementation": attention,
        "logging_steps": work.steps + 1,
        "save_strategy": "no",
        "saves_per_epoch": 0,
        "use_wandb": False,
        "plugins": ["__main__.Timing"],  # of this program
    }
    if has_gpu:
        config["plugins"].append("axolotl.integrations.liger.LigerPlugin")
        config |= {"liger_rope": True, "liger_rms_norm": True, "liger_fused_linear_cross_entropy": True}
        config["liger_glu_activation"] = not every_linear  # the adapters' kernel holds the activation, too
    if work.method != "full":
        config |= {"adapter": work.method, "lora_r": work.rank, "lora_alpha": LORA_ALPHA, "lora_dropout": 0.0}
        config |= {"lora_target_modules": work.modules.split(","), "load_in_4bit": work.method == "qlora"}
        kernels = ("lora_qkv_kernel", "lora_o_kernel", "lora_mlp_kernel")
        config |= dict.fromkeys(kernels, has_gpu and every_linear)
    return config


def main() -> None:
    work = parse_work()
    has_kernel = torch.cuda.is_available() and is_flash_attn_4_available()
    attention = "flash_attention_4" if has_kernel else "sdpa"
    kernels = "Axolotl's kernels and Liger's" if torch.cuda.is_available() else "transformers' layers"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lengths = write_rows(work, folder / "rows.jsonl")
        (folder / "config.yaml").write_text(yaml.safe_dump(config_of(work, folder, attention)))
        do_train(load_cfg(str(folder / "config.yaml")), TrainerCliArgs())
    report(TIMES.seconds, work.tokens_of_steps(lengths), TIMES.losses, f"{attention}, {kernels}")


if __name__ == "__main__":
    main()
