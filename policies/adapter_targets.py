"""Which layers LoRA stands beside: the names that were asked for, checked against the model."""

from __future__ import annotations

from difflib import get_close_matches

from torch import nn
from transformers.pytorch_utils import Conv1D

from configs.errors import ConfigError
from configs.peft import ALL_LINEAR, LoraConfig

LINEAR = (nn.Linear, Conv1D)  # by their class: the weight of a quantized one has another shape


def choose_targets(model: nn.Module, lora: LoraConfig) -> str | list[str]:
    """What peft is told: its keyword for all linear layers, or the names.

    Raises:
        ConfigError: where a name matches nothing, which peft would leave out in silence beside one that does, or
            something that takes no such adapter.
    """
    if lora.target_modules == (ALL_LINEAR,):
        return ALL_LINEAR
    takes = LINEAR if lora.use_dora else (*LINEAR, nn.Embedding)
    modules = {name: module for name, module in model.named_modules() if name}
    known = sorted({name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, takes)})
    matched = {
        target: [module for name, module in modules.items() if name == target or name.endswith(f".{target}")]
        for target in lora.target_modules
    }
    unknown = [target for target, found in matched.items() if not found]
    if unknown:
        near = [match for target in unknown for match in get_close_matches(target, [*known, ALL_LINEAR], n=1)]
        remedy = f"did you mean {', '.join(near)}?" if len(near) == len(unknown) else f"name some of {', '.join(known)}"
        raise ConfigError(f"--lora_config.target_modules: {', '.join(unknown)} match nothing in this model; {remedy}")
    other = [target for target, found in matched.items() if not all(isinstance(module, takes) for module in found)]
    if other:
        kind = "DoRA takes linear layers" if lora.use_dora else "LoRA takes linear layers and embeddings"
        raise ConfigError(
            f"--lora_config.target_modules: {', '.join(other)}: {kind} only; name some of {', '.join(known)}"
        )
    return list(lora.target_modules)
