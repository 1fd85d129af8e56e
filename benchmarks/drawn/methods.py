"""Tiny models of three kinds, data, and ways of training drawn at random: for command lines of runs and plans.

Every flag here is valid by itself. Together some are refused; a run or a plan must say so in one line.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from transformers import T5Config

from benchmarks.blip2 import draw_pictures, make_folder
from benchmarks.runs.launch import ROOT
from tools.make_tiny_model import make_tiny_model

KINDS = ("causal", "seq2seq", "image")
TINY: dict[str, Any] = {"vocab_size": 600, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 4}
NEW_TOKENS = "<alpha>,<beta>"
LORA = {"--use_peft": "True"}
ADAPTERS: tuple[dict[str, str], ...] = (
    {},
    LORA,
    LORA | {"--lora_config.target_modules": "all-linear", "--lora_config.r": "4"},
    LORA | {"--lora_config.target_modules": "all-linear", "--use_dora": "True"},
    LORA | {"--use_rslora": "True", "--lora_config.lora_dropout": "0"},
    LORA | {"--add_special_tokens": NEW_TOKENS},
    LORA | {"--peft_method": "llama_adapter", "--adapter_len": "4"},
    LORA | {"--peft_method": "prefix", "--num_virtual_tokens": "5", "--batching_strategy": "padding"},
    {"--add_special_tokens": NEW_TOKENS},
    {"--freeze_layers": "True", "--num_freeze_layers": "1"},
)
QUANTIZATIONS: tuple[dict[str, str], ...] = (
    {"--quantization": "4bit"},
    {"--quantization": "4bit", "--quant_type": "fp4", "--use_double_quant": "True"},
    {"--quantization": "8bit"},
)
OTHERS: tuple[tuple[dict[str, str], ...], ...] = (
    ({"--pure_bf16": "True"}, {"--mixed_precision": "False"}, {"--use_fp16": "True"}),
    tuple({"--activation_checkpointing": mode} for mode in ("off", "selective", "full", "auto")),
    (
        {"--optimizer": "SGD"},
        {"--optimizer": "AdamW8bit"},
        {"--optimizer": "anyprecision", "--use_kahan_summation": "True"},
        {"--optimizer": "adafactor"},
        {"--optimizer": "muon"},
        {"--optimizer_cpu_offload": "True"},
    ),
    (
        {"--enable_fsdp": "True"},
        {"--enable_fsdp": "True", "--sharding_strategy": "SHARD_GRAD_OP"},
        {"--enable_fsdp": "True", "--fsdp_cpu_offload": "True"},
        {"--enable_fsdp": "True", "--hsdp": "True"},
    ),
    (
        {"--batching_strategy": "padding"},
        {"--batching_strategy": "packing"},
        {"--loss_chunk_size": "16"},
        {"--gradient_accumulation_steps": "2"},
        {"--activation_offloading": "True"},
        {"--use_fast_kernels": "False"},
        {"--label_smoothing": "0.1"},
        {"--loss_type": "dft"},
        {"--neftune_noise_alpha": "5"},
        {"--lr_ratio": "4"},
        {"--init_lora_weights": "pissa"},
        {"--init_lora_weights": "olora"},
        {"--init_lora_weights": "orthogonal"},
        {"--run_validation": "False"},
        {"--eval_generate": "True", "--max_new_tokens": "4"},
        {"--eval_generate": "True", "--max_new_tokens": "4", "--num_beams": "2"},
    ),
)
LOSSES: tuple[tuple[str, dict[str, str]], ...] = (
    ("preference_dataset", {"--loss_type": "dpo"}),
    ("preference_dataset", {"--loss_type": "simpo"}),
    ("preference_dataset", {"--loss_type": "orpo"}),
    ("preference_dataset", {"--task": "reward_model"}),
    ("classification_dataset", {"--task": "text_classification"}),
    ("custom_dataset", {"--teacher_weight": "0.3"}),
)
"""Losses of other data than texts that are learned token by token: the dataset, and flags."""
CUSTOM = """def rows(config, tokenizer, split):
    vars(config)  # or what it does not read is refused
    return [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 9


def taught(config, tokenizer, split):
    more = {"sample_weight": 0.5, "token_weights": [0.0, 1.0, 2.0]}
    teacher = {"teacher_ids": [[5, 6]] * 3, "teacher_logprobs": [[-0.5, -2.0]] * 3}
    return [row | more | teacher for row in rows(config, tokenizer, split)]
"""
HARDWARE = ("", "", "4xV100-32GB", "2xH100-80GB", "1x24GB", "RTX 5090", "T4")


def make_models(folder: Path) -> None:
    """A folder for each of KINDS: config.json, tokenizer or processor, and no weights."""
    for kind in ("causal", "seq2seq"):
        make_tiny_model(folder / kind, **TINY)
    (folder / "seq2seq/model.safetensors").unlink()
    sizes: dict[str, Any] = {"vocab_size": 600, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    sizes |= {"decoder_start_token_id": 0}
    T5Config(**sizes).save_pretrained(folder / "seq2seq")
    make_folder(folder / "image", "tiny")


def write_data(folder: Path) -> None:
    """Rows of every kind that a dataset here reads: dialogues, files of other tools' formats, functions, pictures."""
    rows = [{"dialogue": f"Ann: Is it {i}?\nBob: Yes, {i}.", "summary": f"Bob says {i}."} for i in range(9)]
    (folder / "dialogues.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rows.py").write_text(CUSTOM)
    draw_pictures(folder / "pictures", 9)
    shutil.copytree(ROOT / "datasets/samples/formats", folder / "formats")


def draw_method(draw: random.Random) -> dict[str, str]:
    """Flags of one way of training, with an adapter or none, quantized or not, and up to three other settings."""
    flags = dict(draw.choice(ADAPTERS))
    if "--use_peft" in flags and draw.random() < 0.4:
        flags |= draw.choice(QUANTIZATIONS)
    for group in draw.sample(OTHERS, draw.randint(0, 3)):
        flags |= draw.choice(group)
    return flags


def draw_plan(draw: random.Random) -> dict[str, str]:
    """Flags of a dry run, for this machine or for others."""
    hardware = draw.choice(HARDWARE)
    flags = {"--dry_run": "True"} | ({"--dry_run_hardware": hardware} if hardware else {})
    return flags | ({"--host_memory_gib": "64"} if draw.random() < 0.2 else {})
