"""The weights of experts that LoRA adapts, and how peft is told of weights that are no module of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from policies.experts.finding import ExpertWeight, expert_weights, find_experts
from utils.parameters import packed_weights


def find_expert_weights(model: PreTrainedModel, inside: Mapping[str, nn.Module]) -> dict[str, ExpertWeight]:
    """The weights of experts that can have an adapter, by the parameters' names.

    Args:
        inside: the modules that count, by name.
    """
    return {
        f"{name}.{weight.name}": weight
        for name, experts in find_experts(model).items()
        if name in inside
        for weight in expert_weights(experts)
    }


def holder_of(name: str) -> str:
    """The name of the module that has the parameter of this name."""
    return name.rpartition(".")[0]


def other_experts(model: PreTrainedModel, inside: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """The weights of experts that only their family's own code multiplies (Llama 4's meet all tokens), by name."""
    known = {id(experts) for experts in find_experts(model).values()}
    return {
        f"{name}.{weight}": parameter
        for name, module in inside.items()
        if name.rpartition(".")[2] == "experts" and id(module) not in known
        for weight, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3
    }


def shortest_names(chosen: Sequence[str], model: nn.Module) -> list[str]:
    """Names that stand for these parameters of the model and no others, in peft's `target_parameters`.

    As many of a name's last parts as tell it from others: `experts.down_proj` for the experts of all layers.
    """
    others = [name for name, _ in model.named_parameters() if name not in set(chosen)]
    return list(dict.fromkeys(_shortest(name, others) for name in chosen))


def _shortest(name: str, others: Sequence[str]) -> str:
    parts = name.split(".")
    # From two parts on: one alone would be `weight`, or what people call linear layers.
    ends = (".".join(parts[-count:]) for count in range(2, len(parts)))
    return next((end for end in ends if not any(other.endswith(f".{end}") for other in others)), name)


@contextmanager
def plain_shapes(model: nn.Module) -> Iterator[None]:
    """Inside this context packed weights are replaced by tensors of their plain shapes, without values.

    peft takes the sizes of an adapter from the shape of the parameter in `target_parameters`.
    """
    packed = [(module, name) for module in model.modules() for name in packed_weights(module)]
    stored = [module.get_parameter(name) for module, name in packed]
    for module, name in packed:
        shape = packed_weights(module)[name].plain_shape
        module.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False))
    try:
        yield
    finally:
        for (module, name), parameter in zip(packed, stored, strict=True):
            module.register_parameter(name, parameter)
