"""The routers of a mixture of experts: where they are, and which families train them with a loss of their own."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

_LOSS = "load_balancing_loss_func"  # in the module of each family whose loss transformers adds
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")  # JetMoE has the second name
_OTHER_LOSSES = ("dbrx", "doge")
"""Families of another config, or of another formula: Doge chooses by two halves of a key."""


@dataclass(frozen=True)
class Router:
    """The module that chooses a token's experts in one layer."""

    module: nn.Module
    layer: int  # the number in the name of the layer
    num_experts: int
    num_chosen: int  # experts of a token
    logits_index: int  # the place of the logits in its output, if that is a tuple

    def read(self, output: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits in an output, [tokens, experts], and the experts that it chose, int64 [tokens, chosen].

        Routers that do not return their choice take the largest logits.
        """
        outputs = output if isinstance(output, tuple) else (output,)
        logits: torch.Tensor = outputs[self.logits_index if isinstance(output, tuple) else 0]
        logits = logits.reshape(-1, logits.shape[-1])
        for other in outputs:
            if torch.is_tensor(other) and not other.is_floating_point() and other.dim() > 1:
                return logits, other.reshape(len(logits), -1)
        return logits, logits.detach().topk(self.num_chosen, dim=-1).indices


def find_routers(model: PreTrainedModel) -> list[Router]:
    """The routers of a model that nothing has wrapped yet, in the order of its layers.

    transformers names their classes for its own output `router_logits` (transformers/utils/output_capturing.py). One
    whose logits are not of the experts alone, as where a token may skip them all, is left out.
    """
    config = model.config.get_text_config()
    num_experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    num_chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None)
    if not (num_experts and num_chosen) or config.model_type in _OTHER_LOSSES:
        return []
    found = {
        name: Router(module, _layer_in(name), num_experts, num_chosen, index)
        for kind, index, place in _kinds(model)
        for name, module in model.named_modules()
        if isinstance(module, kind) and place in f".{name}."
        if any(len(p) == num_experts for p in module.parameters() if p.dim() == 2)
    }
    # JetMoE names a router, and the attention around it.
    inner = {name: router for name, router in found.items() if not any(o.startswith(f"{name}.") for o in found)}
    return [inner[name] for name, _ in model.named_modules() if name in inner]


def has_routers_loss(model_config: PreTrainedConfig, auto_model: Any) -> bool:
    """Whether transformers adds a loss for the routers of this family, if config.json says `output_router_logits`."""
    model_class = auto_model._model_mapping.get(type(model_config), None)
    return model_class is not None and hasattr(sys.modules[model_class.__module__], _LOSS)


def has_balancing_loss(model_config: PreTrainedConfig, auto_model: Any) -> bool:
    """Whether it is the loss of `policies.routing.balancing`."""
    is_another = model_config.get_text_config().model_type in _OTHER_LOSSES
    return not is_another and has_routers_loss(model_config, auto_model) and coefficient_in(model_config) is not None


def coefficient_in(model_config: PreTrainedConfig) -> float | None:
    """The coefficient of the routers' loss that config.json has, or its family's default; None if it has none."""
    config = model_config.get_text_config()
    return next((value for name in _COEFFICIENTS if (value := getattr(config, name, None)) is not None), None)


def _kinds(model: nn.Module) -> Iterator[tuple[type[nn.Module], int, str]]:
    """The classes of routers, the place of the logits in their outputs, and a part of the modules' names or ""."""
    for model_class in {type(module) for module in model.modules() if isinstance(module, PreTrainedModel)}:
        recorded = getattr(model_class, "_can_record_outputs", None)
        named = recorded.get("router_logits", ()) if isinstance(recorded, Mapping) else ()
        for kind in named if isinstance(named, Sequence) else (named,):
            target = getattr(kind, "target_class", kind)
            if isinstance(target, type):
                place = getattr(kind, "layer_name", None)
                yield target, getattr(kind, "index", 1), f".{place.strip('.')}." if place else ""


def _layer_in(name: str) -> int:
    """The first number in a module's name."""
    number = re.search(r"\.(\d+)\.", name)
    return int(number[1]) if number else 0
