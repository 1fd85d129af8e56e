"""LoRA adapters through peft: made fresh, or taken up again from a saved adapter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import nn

from configs.errors import ConfigError
from configs.run import RunConfig


def apply_adapters(model: nn.Module, config: RunConfig) -> Any:
    """Freeze the model, which may be on the meta device, and put trainable fp32 adapters beside its weights.

    Every rank gets the same adapters, whole and in host memory: drawn from the run's seed, or read from their files.

    Raises:
        ConfigError: where no module matches, or the saved adapter cannot be read.
    """
    train, lora = config.train_config, config.lora_config
    if train.from_peft_checkpoint:
        return _load_adapter(model, train.from_peft_checkpoint, train.seed)
    _check_targets(model, lora.target_modules)
    settings = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=list(lora.target_modules),
        task_type="CAUSAL_LM",
    )
    return _draw_adapters(peft.get_peft_model(model, settings), train.seed)


def store_adapters(model: Any, dtype: torch.dtype) -> None:
    """Round the adapters, which were drawn or read in fp32: a seed gives the same ones in either dtype."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _draw_adapters(model: Any, seed: int) -> Any:
    """Draw adapters that peft had put on the meta device, beside the weights that are there; peft draws them."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        for layer in model.modules():
            if not isinstance(layer, LoraLayer):
                continue
            for container in (getattr(layer, name) for name in layer.adapter_layer_names):
                for module in container.modules():
                    for name, parameter in module.named_parameters(recurse=False):
                        empty = torch.empty_like(parameter, device="cpu", dtype=torch.float32)
                        setattr(module, name, nn.Parameter(empty, parameter.requires_grad))
            for adapter in layer.active_adapters:
                layer.reset_lora_parameters(adapter, init_lora_weights=True)
    return model


def _check_targets(model: nn.Module, targets: Sequence[str]) -> None:
    """Every name must match a module; peft itself is content with one of them."""
    names = [name for name, _ in model.named_modules()]
    unknown = [t for t in targets if not any(name == t or name.endswith(f".{t}") for name in names)]
    if unknown:
        matrices = [name for name, parameter in model.named_parameters() if parameter.dim() == 2]
        known = {name.removesuffix(".weight").rpartition(".")[2] for name in matrices}
        raise ConfigError(
            f"--lora_config.target_modules: {', '.join(unknown)} match nothing in this model; "
            f"name some of {', '.join(sorted(known))}"
        )


def _load_adapter(model: nn.Module, path: str, seed: int) -> Any:
    folder = Path(path).expanduser()
    if not (folder / "adapter_config.json").is_file():
        raise ConfigError(f"--from_peft_checkpoint: {path} holds no adapter_config.json; give a saved adapter's folder")
    if not (folder / "adapter_model.safetensors").is_file():
        raise ConfigError(
            f"--from_peft_checkpoint: {path} holds no adapter_model.safetensors; "
            "load the adapter with peft and save it again with save_pretrained"
        )
    try:
        settings = peft.PeftConfig.from_pretrained(str(folder))
        settings.inference_mode = False
        adapted = _draw_adapters(peft.get_peft_model(model, settings), seed)
        report: Any = peft.set_peft_model_state_dict(adapted, load_file(folder / "adapter_model.safetensors"))
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"--from_peft_checkpoint: {path} does not fit this model ({reason})") from error
    unread = [name for name in report.missing_keys if ".lora_" in name]
    if unread or report.unexpected_keys:
        name, what = (unread[0], "lacks") if unread else (report.unexpected_keys[0], "holds, unlike this model,")
        raise ConfigError(f"--from_peft_checkpoint: {path} does not fit this model (it {what} {name})")
    return adapted
