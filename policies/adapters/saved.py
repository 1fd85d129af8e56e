"""Put a saved adapter on a model, which may be on the meta device. Training and export use it.

Callers say how a refusal begins, or make it themselves: they know the flag and the remedy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import peft
import torch
from torch import nn

from policies.adapters.expert_targets import plain_shapes
from policies.adapters.patterns import try_patterns
from utils.compat import loses_prefix
from utils.errors import ConfigError, in_one_line

# Ways to start an adapter that take something out of the base's weights: the base alone is then another model.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")

_MOST = torch.finfo(torch.float32).max
_FULL_PRECISION = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_PROMPTS = {"prompt_embeddings", "prefix_task_cols", "prefix_task_rows"}  # all of peft's names of them


class AdapterMismatchError(Exception):
    """The adapter's tensors do not fit the model; the message is a clause that names one."""


def read_adapter_config(folder: Path, asked: str) -> peft.PeftConfig:
    """peft's settings of the adapter in this folder.

    Args:
        asked: the flag or path that a refusal begins with.

    Raises:
        ConfigError: if they cannot be read.
    """
    try:
        settings = peft.PeftConfig.from_pretrained(str(folder))
    except Exception as error:
        raise ConfigError(f"{asked}: {folder}/adapter_config.json cannot be read ({in_one_line(error)})") from error
    dropout = getattr(settings, "lora_dropout", 0.0)
    if type(dropout) not in (int, float) or not 0 <= dropout < 1:
        raise ConfigError(
            f"{asked}: {folder}/adapter_config.json says lora_dropout {dropout}, and the probability of dropping must "
            "be at least 0 and less than 1; correct it there"
        )
    for name, alpha in _alphas(settings).items():
        # By type(): to isinstance, true is a number. What is left out here, peft refuses.
        if type(alpha) is bool or (isinstance(alpha, float) and not abs(alpha) < _MOST):
            raise ConfigError(
                f"{asked}: {folder}/adapter_config.json says {name} {str(alpha).lower()}, which is no finite number; "
                "correct it there"
            )
    return settings


def _alphas(settings: peft.PeftConfig) -> dict[str, Any]:
    """What LoRA's factors are multiplied with: its setting for all layers, and those of some."""
    pattern = getattr(settings, "alpha_pattern", None)
    of_layers = pattern if isinstance(pattern, dict) else {}
    return {"lora_alpha": getattr(settings, "lora_alpha", 1), **{f"alpha_pattern.{n}": v for n, v in of_layers.items()}}


def check_base_is_unchanged(settings: peft.PeftConfig, asked: str) -> None:
    """Refuse an adapter that was initialized by changing the base's weights.

    Args:
        asked: the flag or path that a refusal begins with.

    Raises:
        ConfigError: with a way to convert it.
    """
    start = str(getattr(settings, "init_lora_weights", ""))
    if start.lower().startswith(_CHANGES_BASE):
        raise ConfigError(
            f"{asked}: this adapter began as {start}, which changed the base's weights too; convert it to plain LoRA "
            "with peft's save_pretrained(path_initial_model_for_weight_conversion=...)"
        )


def attach_adapter(
    model: nn.Module, settings: peft.PeftConfig, dtype: torch.dtype | None = torch.float32, *, device: str = "cpu"
) -> tuple[peft.PeftModel, list[str]]:
    """Put an adapter on the model. Its parameters are NaN until they get their values.

    Args:
        dtype: of the adapter; None: for each tensor the one that peft chose.

    Returns:
        The PeftModel, and the names of the adapter's parameters.

    Raises:
        ConfigError: if the adapter is a prefix, and texts would be generated without it.
        ValueError: as in `try_patterns`.
        Exception: whatever peft raises for a model that does not take such an adapter.
    """
    if settings.peft_type == "PREFIX_TUNING" and loses_prefix(model):
        raise ConfigError(
            "prefix tuning: peft passes a prefix as `past_key_values`, which this transformers has renamed to `cache`, "
            "and texts would be generated without it; pip install 'transformers<5.24'"
        )
    try_patterns(model, settings)
    of_base = {id(parameter) for parameter in model.parameters()}
    # low_cpu_mem_usage: peft then makes parameters on the meta device, and draws nothing.
    with plain_shapes(model):
        adapted = cast(peft.PeftModel, peft.get_peft_model(model, settings, low_cpu_mem_usage=True))
    own = {name: parameter for name, parameter in adapted.named_parameters() if id(parameter) not in of_base}
    for name, parameter in own.items():
        owner, _, attribute = name.rpartition(".")
        empty = torch.full_like(parameter, torch.nan, device=device, dtype=dtype or parameter.dtype)
        setattr(adapted.get_submodule(owner), attribute, nn.Parameter(empty, parameter.requires_grad))
    return adapted, list(own)


def set_adapter(adapted: peft.PeftModel, own_names: Collection[str], tensors: Mapping[str, torch.Tensor]) -> None:
    """Give the adapter its values.

    Args:
        own_names: as `attach_adapter` returns them.
        tensors: named as in an adapter's folder.

    Raises:
        AdapterMismatchError: if some are missing or too many, or hold numbers that no trained adapter has.
        Exception: whatever peft raises for tensors of another shape.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _FULL_PRECISION:
            raise AdapterMismatchError(f"{name} is stored as {str(tensor.dtype).removeprefix('torch.')}")
        if not tensor.isfinite().all():
            raise AdapterMismatchError(f"{name} holds NaN or infinity")
    report: Any = peft.set_peft_model_state_dict(adapted, {name: tensor.float() for name, tensor in tensors.items()})
    if adapted.active_peft_config.is_prompt_learning:  # peft itself insists on its tensors, and ignores others
        if extra := tensors.keys() - _PROMPTS:
            raise AdapterMismatchError(f"it holds, unlike its kind, {min(extra)}")
        return
    if missing := [name for name in report.missing_keys if name in own_names]:
        raise AdapterMismatchError(f"it lacks {missing[0]}")
    if report.unexpected_keys:
        raise AdapterMismatchError(f"it holds, unlike the model, {report.unexpected_keys[0]}")
