"""Which layers LoRA adapts: the names that were asked for, checked against the model."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import NamedTuple

import peft
import torch
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from peft.utils.transformers_weight_conversion import (
    convert_peft_adapter_state_dict_for_transformers,
    convert_peft_config_for_transformers,
)
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from configs.peft import ALL_LINEAR, LoraConfig
from policies.parts import has_vision, language_part
from policies.state_space import passed_to_kernels
from policies.wrapping import has_tied_embeddings
from utils.errors import ConfigError
from utils.wording import plural

LINEAR = (nn.Linear, Conv1D)  # told by class, since a quantized layer's weight has another shape


def default_targets(model_config: PreTrainedConfig, usual: tuple[str, ...]) -> tuple[str, ...]:
    """The names that LoRA adapts by default: peft's for this type of model, if it has none of the usual names.

    The language part decides. peft's names of BLIP-2 are those of both language models that it comes with.
    """
    known = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(model_config.get_text_config().model_type)
    # A pattern, as for Gemma 4, picks the language part out of others: the usual names do that here (choose_targets).
    return usual if known is None or isinstance(known, str) or set(usual) & set(known) else tuple(known)


def choose_targets(model: PreTrainedModel, lora: LoraConfig) -> list[str]:
    """The names for peft's `target_modules`; peft's own keyword for all linear layers includes a mixture's experts.

    all-linear leaves out linear layers whose adapter would not be trained, or not be loaded by peft (`left_out_notes`
    says so).

    In a model of image and text a name means the layers of its language part, if any is called so: vision encoders have
    a `q_proj`, too.

    Raises:
        ConfigError: if a name matches nothing, which peft ignores as long as another name matches, or if it matches
            something that takes no such adapter, or whose adapter peft would not load.
    """
    if lora.target_modules == (ALL_LINEAR,):
        found = _all_linear(model)
        return found.taken or _refuse_renamed(
            model, _refuse_names_of_experts(model, [*found.of_experts, *found.renamed])
        )
    takes = LINEAR if lora.use_dora else (*LINEAR, nn.Embedding)
    modules = {name: module for name, module in model.named_modules() if name}
    known = sorted({_last_part(name) for name, module in modules.items() if _takes_lora(module, takes)})
    matched = {
        target: [module for name, module in modules.items() if _is_named(name, target)]
        for target in lora.target_modules
    }
    unknown = [target for target, found in matched.items() if not found]
    if unknown:
        near = [match for target in unknown for match in get_close_matches(target, [*known, ALL_LINEAR], n=1)]
        guess = f"did you mean {', '.join(dict.fromkeys(near))}? " if len(near) == len(unknown) else ""
        raise ConfigError(
            f"--lora_config.target_modules: {', '.join(unknown)} match nothing in this model; {guess}name some of "
            f"{', '.join(known)}, or {ALL_LINEAR}"
        )
    other = [target for target, found in matched.items() if not all(_takes_lora(module, takes) for module in found)]
    if other:
        kind = "DoRA takes linear layers" if lora.use_dora else "LoRA takes linear layers and embeddings"
        raise ConfigError(
            f"--lora_config.target_modules: {', '.join(other)}: {kind} only; name some of {', '.join(known)}"
        )
    targets = list(lora.target_modules)
    if has_vision(model):
        of_language = _language_modules(model)
        named = {t: [name for name in of_language if _is_named(name, t)] or [t] for t in targets}
        targets = [name for names in named.values() for name in names]
    return _refuse_renamed(model, _refuse_names_of_experts(model, targets))


class _AllLinear(NamedTuple):
    """The names of the language part's linear layers but the head."""

    taken: list[str]
    of_experts: list[str]  # left out: peft would adapt the experts instead (`_names_of_experts`)
    renamed: list[str]  # left out: peft would not find them when it loads the adapter (`_renamed_by_peft`)
    uncalled: list[str]  # left out: their adapter would not be trained (`passed_to_kernels`)


def _all_linear(model: PreTrainedModel) -> _AllLinear:
    head, modules = model.get_output_embeddings(), _language_modules(model)
    linears = [name for name, module in modules.items() if _takes_lora(module, LINEAR) and module is not head]
    passed_on = passed_to_kernels(model)
    uncalled = [name for name in linears if name in passed_on]
    linears = [name for name in linears if name not in passed_on]
    names = _names_of_experts(model, linears)
    of_experts = [name for name in linears if _last_part(name) in names]
    renamed = _renamed_by_peft(model, [name for name in linears if name not in of_experts])
    left_out = {*of_experts, *renamed}
    return _AllLinear([name for name in linears if name not in left_out], of_experts, renamed, uncalled)


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


def _language_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules of the language part by their names in the model; of a model of text alone, all modules."""
    modules = {name: module for name, module in model.named_modules() if name}
    if not has_vision(model):
        return modules
    inside = {id(module) for part in language_part(model) for module in part.modules()}
    return {name: module for name, module in modules.items() if id(module) in inside}


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def tied_notes(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """A line for an adapter on an embedding or a head that share a weight."""
    if not has_tied_embeddings(model):
        return []
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    return [
        f"LoRA on {names[adapted]}: {names[other]} shares its weight and gets no adapter; merged, the model stores two "
        "weights"
        for adapted, other in ((embedding, head), (head, embedding))
        if any(_is_named(names[adapted], target) for target in targets)
    ]


def left_out_notes(model: PreTrainedModel, lora: LoraConfig) -> list[str]:
    """A line for linear layers that all-linear leaves out, for each of three reasons."""
    if lora.target_modules != (ALL_LINEAR,):
        return []
    taken, of_experts, renamed, uncalled = found = _all_linear(model)
    start, total, kind = f"target_modules {ALL_LINEAR}: leaves out", sum(map(len, found)), model.config.model_type
    notes = []
    if of_experts:
        names = ", ".join(sorted(set(map(_last_part, of_experts))))
        notes.append(
            f"{start} {len(of_experts)} of {total} linear layers, those called {names}, since peft takes these names "
            f"of {kind} models for the experts"
        )
    if renamed and taken:  # else the run is refused
        notes.append(
            f"{start} {len(renamed)} of {total} linear layers, {_first_of(renamed)}, since peft renames them when it "
            f"loads an adapter of {kind} models, and would not find them"
        )
    if uncalled:
        names = ", ".join(sorted(set(map(_last_part, uncalled))))
        notes.append(
            f"{start} {len(uncalled)} of {total} linear layers, those called {names}, since Mamba layers pass their "
            "weights to a kernel, past an adapter"
        )
    return notes


def _refuse_names_of_experts(model: PreTrainedModel, targets: list[str]) -> list[str]:
    """The targets, refused if peft would move one to the experts."""
    if names := _names_of_experts(model, targets):
        others = sorted({_last_part(target) for target in targets} - names) or ["q_proj", "v_proj"]
        raise ConfigError(
            f"--lora_config.target_modules: peft takes {', '.join(sorted(names))} of {model.config.model_type} models "
            "for the experts, and would leave the linear layers of that name as they are; name some of "
            f"{', '.join(others)}"
        )
    return targets


def _names_of_experts(model: PreTrainedModel, targets: Sequence[str]) -> set[str]:
    """The last parts of those targets that peft would move to the experts, which a mixture keeps in one tensor.

    In some mixtures (qwen3_moe, deepseek_v3, ...) a dense layer or a shared expert has a name like `down_proj`, which
    peft takes for an older name of the experts. It would leave the layer without its adapter and train the experts. It
    does so by the last part alone, of whole paths and of regular expressions too, and again when an adapter is loaded.
    """
    moved = set()
    for name in {_last_part(target) for target in targets}:
        settings = peft.LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(settings, model=model, conversions=None)
        except ValueError:  # one of two names that are one tensor now
            moved.add(name)
        else:
            moved |= {name} if settings.target_parameters else set()
    return moved


def _refuse_renamed(model: PreTrainedModel, targets: list[str]) -> list[str]:
    """The targets, refused if peft would not load the adapter of a layer that they name."""
    named = [name for name, _ in model.named_modules() if any(_is_named(name, target) for target in targets)]
    if renamed := _renamed_by_peft(model, named):
        others = [name for name in named if name not in renamed]
        remedy = (
            f"name others, as {others[0]}, or {ALL_LINEAR}, which leaves them out"
            if others
            else "train without --use_peft"
        )
        raise ConfigError(
            f"--lora_config.target_modules: peft renames {_first_of(renamed)} when it loads an adapter of "
            f"{model.config.model_type} models, and would drop what was trained; {remedy}"
        )
    return targets


def _renamed_by_peft(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Those of these modules whose factors have another name in the model after peft has loaded them.

    peft renames the keys of an adapter as transformers renames those of a checkpoint, by patterns. Some match what is
    named as in the model already: the dots of Laguna's `mlp.shared_expert.` stand for any character, so that
    `mlp.shared_experts.up_proj` becomes `mlp.shared_experts..up_proj`. peft drops such factors with a warning.
    """
    keys: dict[str, list[str]] = {}
    for name in names:
        factors = "lora_embedding_{}" if isinstance(model.get_submodule(name), nn.Embedding) else "lora_{}.weight"
        keys[name] = [f"base_model.model.{name}.{factors.format(factor)}" for factor in "AB"]
    saved = {key: torch.empty(1, 1, device="meta") for both in keys.values() for key in both}
    loaded = convert_peft_adapter_state_dict_for_transformers(model, peft.LoraConfig(), saved)
    return [name for name, both in keys.items() if not loaded.keys() >= set(both)]


def _first_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {plural(len(names) - 1, 'other')}"


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]
