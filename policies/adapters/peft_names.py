"""What peft calls a layer: it moves some names to a mixture's experts, and renames others when it loads an adapter."""

from __future__ import annotations

from collections.abc import Sequence

import peft
import torch
from peft.utils.transformers_weight_conversion import (
    convert_peft_adapter_state_dict_for_transformers,
    convert_peft_config_for_transformers,
)
from torch import nn
from transformers import PreTrainedModel

from configs.peft import ALL_LINEAR
from policies.experts.finding import find_experts
from utils.errors import ConfigError
from utils.wording import plural


def is_named(name: str, target: str) -> bool:
    """Whether peft takes the module or parameter of this name for this target."""
    return name == target or name.endswith(f".{target}")


def last_part(name: str) -> str:
    return name.rpartition(".")[2]


def first_of(names: Sequence[str]) -> str:
    """The first name, and how many others there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {plural(len(names) - 1, 'other')}"


def refuse_names_of_experts(model: PreTrainedModel, targets: Sequence[str]) -> None:
    """Refuse targets that peft would move to the experts, for DoRA, which cannot be told of them by parameters.

    Raises:
        ConfigError: with names that are left.
    """
    if names := names_of_experts(model, targets):
        others = sorted({last_part(target) for target in targets} - names) or ["q_proj", "v_proj"]
        raise ConfigError(
            f"--lora_config.target_modules: peft takes {', '.join(sorted(names))} of {model.config.model_type} models "
            "for the experts, and would leave the linear layers of that name as they are; name some of "
            f"{', '.join(others)}, or leave --use_dora out"
        )


def names_of_experts(model: PreTrainedModel, targets: Sequence[str]) -> set[str]:
    """The last parts of those targets that peft would move to the experts, which a mixture keeps in one tensor.

    In some mixtures (qwen3_moe, deepseek_v3, ...) a dense layer or a shared expert has a name like `down_proj`, which
    peft takes for an older name of the experts. It would leave the layer without its adapter and train the experts. It
    does so by the last part alone, of whole paths and of regular expressions too, and again when an adapter is loaded.
    """
    moved = set()
    for name in {last_part(target) for target in targets}:
        settings = peft.LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(settings, model=model, conversions=None)
        except ValueError:  # one of two names that are one tensor now
            moved.add(name)
        else:
            moved |= {name} if settings.target_parameters else set()
    return moved


def refuse_renamed(model: PreTrainedModel, named: Sequence[str]) -> None:
    """Refuse modules whose adapter peft would not load.

    Raises:
        ConfigError: with another module, if there is one.
    """
    if renamed := renamed_by_peft(model, named):
        others = [name for name in named if name not in renamed]
        remedy = (
            f"name others, as {others[0]}, or {ALL_LINEAR}, which leaves them out"
            if others
            else "train without --use_peft"
        )
        raise ConfigError(
            f"--lora_config.target_modules: peft renames {first_of(renamed)} when it loads an adapter of "
            f"{model.config.model_type} models, and would drop what was trained; {remedy}"
        )


def renamed_by_peft(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Those of these modules whose factors have another name in the model after peft has loaded them.

    peft renames the keys of an adapter as transformers renames those of a checkpoint, by patterns. Some match what is
    named as in the model already: the dots of Laguna's `mlp.shared_expert.` stand for any character, so that
    `mlp.shared_experts.up_proj` becomes `mlp.shared_experts..up_proj`. peft drops such factors with a warning.
    """
    keys: dict[str, list[str]] = {}
    experts = find_experts(model)
    for name in names:
        factors = "lora_embedding_{}" if isinstance(model.get_submodule(name), nn.Embedding) else "lora_{}.weight"
        # Experts have one adapter inside another, if two of their weights have one.
        holders = [name, f"{name}.base_layer"] if name in experts else [name]
        keys[name] = [f"base_model.model.{holder}.{factors.format(factor)}" for holder in holders for factor in "AB"]
    saved = {key: torch.empty(1, 1, device="meta") for both in keys.values() for key in both}
    loaded = convert_peft_adapter_state_dict_for_transformers(model, peft.LoraConfig(), saved)
    return [name for name, both in keys.items() if not loaded.keys() >= set(both)]
