"""Whether a run compiles its layers, if --compile auto leaves that open."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.adaptation import CANNOT_TRACE_DORA, why_not_compiled
from configs.run import RunConfig
from policies.saved_adapters import read_adapter_config
from utils.device import DeviceFacts

COMPILED_FAMILIES = frozenset(
    ("gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "stablelm")
)
"""The model types that --compile auto compiles: in each, packed and padded runs have the loss of uncompiled ones, and
training batches compile nothing after the first step."""


def decide_compilation(config: RunConfig, model_config: Any, device: DeviceFacts, world_size: int) -> RunConfig:
    """The settings with what --compile auto comes to, and a note of why if that is False.

    Args:
        model_config: of transformers.
        device: that the run computes on.
        world_size: ranks of the run.

    Raises:
        ConfigError: if the settings of the adapter that is trained on cannot be read.
    """
    train = config.train_config
    if train.compile is not None:
        return config
    obstacle = _what_hinders(config, model_config.model_type, device, world_size)
    note = () if obstacle is None else (f"--compile auto is False: {obstacle}",)
    return replace(config, train_config=replace(train, compile=obstacle is None), notes=(*config.notes, *note))


def _what_hinders(config: RunConfig, model_type: str, device: DeviceFacts, world_size: int) -> str | None:
    """Why this run is not compiled, as a clause."""
    if device.type == "cpu":
        return "it is for GPUs"
    if world_size > 1:  # of two ranks under FSDP, one that fell back alone entered other collectives than the other
        return "it is for one GPU; give --compile to compile on several"
    if (reason := why_not_compiled(config)) is not None:
        return reason
    if path := config.train_config.from_peft_checkpoint:
        settings = read_adapter_config(Path(path).expanduser(), "--from_peft_checkpoint")
        if getattr(settings, "use_dora", False):
            return CANNOT_TRACE_DORA
    if model_type not in COMPILED_FAMILIES:
        return f"{model_type} models have not been compared compiled and uncompiled; give --compile to compile this one"
    return None
