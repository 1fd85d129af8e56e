"""Which layers LoRA adapts: the names that were asked for, checked against the model."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import NamedTuple, NoReturn

import torch
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from configs.peft import ALL_LINEAR, LoraConfig
from policies.adapters.expert_targets import find_expert_weights, holder_of, shortest_names
from policies.adapters.peft_names import (
    is_named,
    last_part,
    names_of_experts,
    refuse_names_of_experts,
    refuse_renamed,
    renamed_by_peft,
)
from policies.experts.finding import ExpertWeight
from policies.text_scores import is_of_head
from policies.uncalled_layers import uncalled_layers
from utils.errors import ConfigError
from utils.model_parts import has_vision, language_part

UNKNOWN_TO_PEFT = {"modernbert": ["Wqkv"]}
"""The layers of attention by types of models for which peft knows none."""

LINEAR = (nn.Linear, Conv1D)  # told by class, since a quantized layer's weight has another shape


def default_targets(model_config: PreTrainedConfig, usual: tuple[str, ...]) -> tuple[str, ...]:
    """The names that LoRA adapts by default: peft's for this type of model, if it has none of the usual names.

    The language part decides. peft's names of BLIP-2 are those of both language models that it comes with.
    """
    model_type = model_config.get_text_config().model_type
    known = UNKNOWN_TO_PEFT.get(model_type) or TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(model_type)
    # A pattern, as for Gemma 4, picks the language part out of others: the usual names do that here (choose_targets).
    return usual if known is None or isinstance(known, str) or set(usual) & set(known) else tuple(known)


class Targets(NamedTuple):
    """What LoRA adapts, in peft's terms."""

    modules: list[str]  # `target_modules`
    parameters: list[str]  # `target_parameters`: experts, and linear layers whose names peft would move to experts
    experts: dict[str, ExpertWeight]  # the weights of experts among them, by name in the model


def choose_targets(model: PreTrainedModel, lora: LoraConfig) -> Targets:
    """The names for peft; its own keyword for all linear layers gives experts another rank, and takes some for others.

    all-linear leaves out linear layers whose adapter would not be trained, or not be loaded by peft
    (`policies.adapters.target_notes` says so).

    In a model of image and text a name means the layers of its language part, if any is called so: vision encoders have
    a `q_proj`, too.

    Raises:
        ConfigError: if a name matches nothing, which peft ignores as long as another name matches, or if it matches
            something that takes no such adapter, or whose adapter peft would not load.
    """
    if lora.target_modules != (ALL_LINEAR,):
        return _in_pefts_terms(model, *_find_named(model, lora), lora)
    found, experts = find_all_linear(model, lora), _experts_of_all_linear(model, lora)
    if found.taken or experts:
        return _in_pefts_terms(model, found.taken, experts, lora)
    refuse_names_of_experts(model, found.of_experts)
    refuse_renamed(model, found.renamed)
    return Targets([], [], {})  # which peft refuses


def _in_pefts_terms(
    model: PreTrainedModel, names: Sequence[str], experts: dict[str, ExpertWeight], lora: LoraConfig
) -> Targets:
    """Linear layers of these names and these experts; layers of an expert's name are told by their parameters."""
    modules = language_modules(model)
    named = [name for name, _ in model.named_modules() if any(is_named(name, target) for target in names)]
    refuse_renamed(model, [*named, *dict.fromkeys(map(holder_of, experts))])
    if lora.use_dora:  # not for parameters
        refuse_names_of_experts(model, names)
    moved = names_of_experts(model, names)
    by_parameter = [f"{name}.weight" for name in named if name in modules and last_part(name) in moved]
    parameters = shortest_names([*by_parameter, *experts], model)
    return Targets([name for name in names if last_part(name) not in moved], parameters, experts)


def _find_named(model: PreTrainedModel, lora: LoraConfig) -> tuple[list[str], dict[str, ExpertWeight]]:
    """The names of linear layers and embeddings that were asked for, and the weights of experts.

    Raises:
        ConfigError: if a name matches nothing, or something that takes no such adapter.
    """
    takes = LINEAR if lora.use_dora else (*LINEAR, nn.Embedding)
    of_language, weights = language_modules(model), find_expert_weights(model, language_modules(model))
    holders = set(map(holder_of, weights))
    inside = tuple(f"{holder}." for holder in holders)  # among these, what packs an expert's weight has that one's name
    modules = {
        name: module
        for name, module in model.named_modules()
        if name and name not in holders and not name.startswith(inside)
    }
    names: dict[str, list[str]] = {}  # of modules, by target
    experts: dict[str, ExpertWeight] = {}
    unknown, other = [], []
    for target in lora.target_modules:
        names[target] = [name for name in modules if is_named(name, target)]
        asked = {n: w for n, w in weights.items() if is_named(n, target) or is_named(holder_of(n), target)}
        unknown += [] if names[target] or asked else [target]
        takes_it = all(_takes_lora(modules[name], takes) for name in names[target])
        other += [] if takes_it and not (lora.use_dora and asked) else [target]
        experts |= asked
    if unknown or other:
        known = {last_part(name) for name, module in modules.items() if _takes_lora(module, takes)}
        _refuse(unknown, other, sorted(known if lora.use_dora else known | set(map(last_part, weights))), lora)
    asked_for = [target for target in lora.target_modules if names[target]]
    if has_vision(model):
        of_part = {target: [name for name in names[target] if name in of_language] for target in asked_for}
        asked_for = [name for target in asked_for for name in of_part[target] or [target]]
    return asked_for, experts


def _refuse(unknown: Sequence[str], other: Sequence[str], known: Sequence[str], lora: LoraConfig) -> NoReturn:
    """Refuse names that match nothing, or something that takes no adapter."""
    if unknown:
        others = [name for name in (*known, ALL_LINEAR) if name not in lora.target_modules]
        near = [match for target in unknown for match in get_close_matches(target, others, n=1)]
        guess = f"did you mean {', '.join(dict.fromkeys(near))}? " if len(near) == len(unknown) else ""
        raise ConfigError(
            f"--lora_config.target_modules: {', '.join(unknown)} match nothing in this model; {guess}name some of "
            f"{', '.join(known)}, or {ALL_LINEAR}"
        )
    kind = "DoRA takes linear layers" if lora.use_dora else "LoRA takes linear layers and embeddings"
    raise ConfigError(f"--lora_config.target_modules: {', '.join(other)}: {kind} only; name some of {', '.join(known)}")


class AllLinear(NamedTuple):
    """The names of the language part's linear layers but the head."""

    taken: list[str]
    of_experts: list[str]  # left out under DoRA: peft would adapt the experts instead (`names_of_experts`)
    renamed: list[str]  # left out: peft would not find them when it loads the adapter (`renamed_by_peft`)
    uncalled: list[str]  # left out: their adapter would not be trained (`uncalled_layers`)


def find_all_linear(model: PreTrainedModel, lora: LoraConfig) -> AllLinear:
    """The linear layers that all-linear means, and those that it leaves out."""
    head, modules = model.get_output_embeddings(), language_modules(model)
    linears = [name for name, module in modules.items() if _takes_lora(module, LINEAR) and module is not head]
    linears = [name for name in linears if not is_of_head(model, name)]  # which is trained whole
    passed_on = uncalled_layers(model)
    uncalled = [name for name in linears if name in passed_on]
    linears = [name for name in linears if name not in passed_on]
    names = names_of_experts(model, linears) if lora.use_dora else set()
    of_experts = [name for name in linears if last_part(name) in names]
    renamed = renamed_by_peft(model, [name for name in linears if name not in of_experts])
    left_out = {*of_experts, *renamed}
    return AllLinear([name for name in linears if name not in left_out], of_experts, renamed, uncalled)


def _experts_of_all_linear(model: PreTrainedModel, lora: LoraConfig) -> dict[str, ExpertWeight]:
    if lora.use_dora:
        return {}
    weights = find_expert_weights(model, language_modules(model))
    renamed = renamed_by_peft(model, list(dict.fromkeys(map(holder_of, weights))))
    return {name: weight for name, weight in weights.items() if holder_of(name) not in renamed}


def _takes_lora(module: nn.Module, takes: tuple[type[nn.Module], ...]) -> bool:
    """Whether LoRA's factors fit: by class, and by the shape of its output if a family wrote its own linear layer.

    Some multiply groups of their input (DeepSeek-V4's o_a_proj), or choose experts with the product (Llama 4's router).
    """
    if not isinstance(module, takes):
        return False
    if not isinstance(module, nn.Linear) or not type(module).__module__.startswith("transformers.models."):
        return True
    # On meta tensors: shapes are computed, and no numbers.
    weights = {name: torch.empty_like(weight, device="meta") for name, weight in module.named_parameters()}
    inputs = torch.empty(1, 1, module.in_features, dtype=module.weight.dtype, device="meta")
    try:
        output = functional_call(module, weights, inputs)
    except RuntimeError:  # other shapes
        return False
    return isinstance(output, torch.Tensor) and output.shape == (1, 1, module.out_features)


def language_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules of the language part by their names in the model; of a model of text alone, all modules."""
    modules = {name: module for name, module in model.named_modules() if name}
    if not has_vision(model):
        return modules
    inside = {id(module) for part in language_part(model) for module in part.modules()}
    return {name: module for name, module in modules.items() if id(module) in inside}
