"""Experts that a mixture keeps in three-dimensional parameters: where they are, and how their matrices lie."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn


class ExpertWeight(NamedTuple):
    """A parameter that holds one matrix for each expert."""

    name: str  # on its module
    num_experts: int
    in_features: int
    out_features: int
    is_transposed: bool  # [experts, in, out]; else [experts, out, in], as nn.Linear has it

    @property
    def num_weights(self) -> int:
        return self.num_experts * self.in_features * self.out_features


def find_experts(model: nn.Module) -> dict[str, Any]:
    """The modules of experts, by name, whose products transformers lets others compute.

    Its decorator `use_experts_implementation` gives a class these attributes.
    """
    attributes = ("has_gate", "has_bias", "is_transposed", "num_experts")
    return {name: m for name, m in model.named_modules() if all(hasattr(m, attribute) for attribute in attributes)}


def weight_names(experts: Any) -> tuple[str, str]:
    """The names of a module's two parameters: the first is multiplied with its inputs, the second gives its outputs."""
    return ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")


def expert_weights(experts: Any) -> list[ExpertWeight]:
    """The two, by their plain shapes. Packed ones have others, so `compute_by_products` notes these before."""
    if hasattr(experts, "plain_weights"):
        noted: list[ExpertWeight] = experts.plain_weights
        return noted
    found = []
    for name in weight_names(experts):
        num_experts, *matrix = getattr(experts, name).shape
        in_features, out_features = matrix if experts.is_transposed else reversed(matrix)
        found.append(ExpertWeight(name, num_experts, in_features, out_features, experts.is_transposed))
    return found
