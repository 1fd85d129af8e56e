"""Which modules are sharding units: found in the model, not in a list of names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from utils.errors import ConfigError
from utils.model_parts import vision_part

_SMALL, _MOST = 3, 10**9
"""A vision encoder is gathered at once if its layers have less than a third of the parameters of the language model's,
and it has at most a billion. Each unit costs the host 3 to 5 ms a step; a layer of 13 million arrives in 0.1 ms."""


def find_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks: members of a ModuleList whose class is in the model's `_no_split_modules`.

    A member that holds such a module, and no block, is one too: some models name the attention of a layer instead of
    the layer (BLIP-2's Q-Former, Idefics3's vision encoder). Nested blocks come before the blocks that hold them, as
    `fully_shard` needs. Empty if the model names none.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    listed = {id(child) for module in model.modules() if isinstance(module, nn.ModuleList) for child in module}
    found: dict[int, nn.Module] = {}
    # modules() lists a module before those inside it, so in reverse inner blocks come first.
    for module in reversed(list(model.modules())):
        if id(module) not in listed:
            continue
        inside = list(module.modules())[1:]
        holds_named = any(type(m).__name__ in names for m in inside) and not any(id(m) in found for m in inside)
        if type(module).__name__ in names or holds_named:
            found[id(module)] = module
    return list(found.values())


def outermost(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The layers that are in no other."""
    inside = {id(module) for layer in layers for module in layer.modules() if module is not layer}
    return [layer for layer in layers if id(layer) not in inside]


def find_outer_norms(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The normalizations outside of layers, mostly one after the last layer, that consist of several operators.

    Torch's own have one kernel each.
    """
    inside = {id(module) for layer in layers for module in layer.modules()}
    norms = (m for m in model.modules() if type(m).__name__.endswith("Norm") and not list(m.children()))
    return [norm for norm in norms if id(norm) not in inside and not type(norm).__module__.startswith("torch.")]


def has_tied_embeddings(model: PreTrainedModel) -> bool:
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and head.weight is embeddings.weight


def num_known_ids(model: PreTrainedModel) -> int:
    """The token ids that the model has embeddings for; Idefics has a second table for the last ones."""
    embedding: Any = model.get_input_embeddings()
    return embedding.num_embeddings + getattr(embedding, "num_additional_embeddings", 0)


def find_units(
    model: PreTrainedModel, wrap: Sequence[str] = ("layer",), *, vision_at_once: bool = True
) -> list[nn.Module]:
    """The modules that are gathered one at a time. All other parameters belong to the root unit.

    Empty if `wrap` is "root" or the model names no layers: the root unit is then the whole model. The input embedding
    is a unit unless another module has the same weight: the head, or the embeddings of encoder and decoder. Shared
    parameters must be in one unit, so layers that share weights (Zamba 2's attention) are in the root unit. So is the
    head, because the loss needs it there. A vision encoder of small layers is one unit.

    Args:
        wrap: "layer", "root", or the names of the units' classes.
        vision_at_once: a vision encoder of small layers may be one unit. Not if its outputs are kept from before, as
            nothing should gather it then, nor if weights are cast as they are gathered: some models (SmolVLM) convert
            images to the dtype of their first parameter, which would still be the one that is stored.

    Raises:
        ConfigError: if the model has no module of such a class, or one that must be gathered with others.
    """
    if wrap == ("root",):
        return []
    if wrap == ("layer",):
        layers = find_layers(model)
        whole = _small_encoders(model, layers) if vision_at_once else []
        inside = {module for encoder in whole for module in encoder.modules()}
        apart = [layer for layer in layers if layer not in inside] + whole
        sharing = _that_share_weights(model, apart)
        units = [unit for unit in apart if unit not in sharing]
    else:
        units = modules_of_classes(model, wrap)
    embedding = model.get_input_embeddings()
    # With duplicates: a tied weight has a name for each module that uses it.
    num_names = sum(p is embedding.weight for _, p in model.named_parameters(remove_duplicate=False))
    if units and num_names == 1 and embedding not in units:
        units.insert(0, embedding)
    return units


def _small_encoders(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The vision encoder, if its layers are so small that one by one they would cost the host more than they save."""
    sizes = {layer: _num_parameters(layer) for layer in outermost(layers)}
    found = []
    for encoder in vision_part(model):
        inside = set(encoder.modules())
        own = [size for layer, size in sizes.items() if layer in inside]
        others = [size for layer, size in sizes.items() if layer not in inside]
        if own and others and _SMALL * max(own) < max(others) and _num_parameters(encoder) <= _MOST:
            found.append(encoder)
    return found


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def modules_of_classes(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The modules of these classes, inner ones before the outer ones.

    Raises:
        ConfigError: if there is none of a name.
    """
    modules = list(model.modules())
    there = {type(module).__name__ for module in modules}
    if missing := [name for name in names if name not in there]:
        layers = sorted({type(layer).__name__ for layer in find_layers(model)})
        raise ConfigError(
            f"--wrap: {type(model).__name__} has no module of class {', '.join(missing)}; name some of "
            f"{', '.join(layers) or ', '.join(sorted(there))}, or leave it out"
        )
    found = [module for module in reversed(modules) if type(module).__name__ in names]
    for unit in _that_share_weights(model, found):
        raise ConfigError(
            f"--wrap: {type(unit).__name__} shares a weight with modules outside it (embeddings and head), and a "
            "shared weight must be gathered once; name the layers inside it"
        )
    return found


def _that_share_weights(model: nn.Module, parts: Sequence[nn.Module]) -> list[nn.Module]:
    """The parts that have a parameter in common with a module outside of them."""
    uses = _uses_of_parameters(model)
    return [part for part in parts if any(uses[own] > count for own, count in _uses_of_parameters(part).items())]


def _uses_of_parameters(module: nn.Module) -> Counter[int]:
    """How many names each parameter has, by its id: one for each module that uses it."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
