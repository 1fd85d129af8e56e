"""The kinds of adapter that runs train, as the project and as peft are told of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft

from configs.flags import parse_flags
from configs.run import RunConfig
from policies.adapters.apply import adapter_notes, apply_adapters
from utils.device import DeviceFacts

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = ["--lora_config.r", "4", "--lora_config.lora_dropout", "0"]
# What the project is told of each adapter, and what peft is.
ADAPTERS: dict[str, tuple[list[str], Callable[[], Any]]] = {
    "rslora": (
        [*LORA, "--use_rslora", "--lora_config.target_modules", "all-linear"],
        lambda: peft.LoraConfig(r=4, lora_alpha=32, use_rslora=True, target_modules=LINEAR),
    ),
    "dora": (
        [*LORA, "--use_dora", "--lora_config.target_modules", "q_proj,down_proj"],
        lambda: peft.LoraConfig(r=4, lora_alpha=32, use_dora=True, target_modules=["q_proj", "down_proj"]),
    ),
    "llama_adapter": (
        ["--peft_method", "llama_adapter", "--adapter_len", "5", "--adapter_layers", "2"],
        lambda: peft.AdaptionPromptConfig(adapter_len=5, adapter_layers=2, task_type="CAUSAL_LM"),
    ),
    "prefix": (
        ["--peft_method", "prefix", "--num_virtual_tokens", "7"],
        lambda: peft.PrefixTuningConfig(num_virtual_tokens=7, task_type="CAUSAL_LM"),
    ),
}


def config_of(*flags: str) -> Any:
    return parse_flags(["--model_name", "M", "--use_peft", *flags])


def batching_of(adapter: str) -> str:
    return "padding" if adapter == "prefix" else "packing"


def adapt(model: Any, config: RunConfig) -> Any:
    """The model with the adapter that these settings ask for."""
    return apply_adapters(model, config, "CAUSAL_LM")


def notes_on(model: Any, config: RunConfig) -> list[str]:
    cpu = DeviceFacts("cpu", 2**36, has_bf16=False)
    return adapter_notes(model, config.train_config, config.lora_config, config.llama_adapter_config, cpu)
