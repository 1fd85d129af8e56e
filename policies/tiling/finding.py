"""Which parts of a layer work on each token alone: its MLP, or a mixture's whole block of router and experts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

from torch import nn

MIXES_TOKENS = (nn.modules.conv._ConvNd, nn.RNNBase, nn.MultiheadAttention)
"""Torch's modules of which one token's output needs others."""


def find_token_parts(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The parts of these layers that compute each token from its own hidden state alone.

    Found by what they take: an attention or a state-space mixer is given masks, positions or a cache besides hidden
    states, an MLP is not. Layers that multiply by the weights of their MLP themselves (BART, OPT) have no such part.

    Args:
        layers: as `policies.wrapping.find_layers` returns them, before adapters are added.
    """
    found = {id(part): part for layer in layers for part in _children(layer) if _is_of_tokens(part)}
    return list(found.values())


def find_norms(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The norms of several operators in these layers and in their attention, whose inner values are fp32 copies.

    Their weights are vectors, so the axes before the last may come in any order: heads first, or tokens.
    """
    of_tokens = {id(part) for part in find_token_parts(layers)}
    own = [child for layer in layers for child in _children(layer)]
    inner = [module for child in own if id(child) not in of_tokens for module in child.children()]
    return [module for module in (*own, *inner) if _is_norm_of_several_operators(module)]


def is_norm(part: nn.Module) -> bool:
    """Whether a part that runs in tiles is one of `find_norms`; those of `find_token_parts` have inner modules."""
    return not list(part.children())


def why_not_tiled(layers: Sequence[nn.Module], units: Sequence[nn.Module]) -> str | None:
    """Why these layers cannot run in tiles, as a clause with a remedy; None if they can.

    Args:
        units: the modules that are gathered one at a time.
    """
    parts = find_token_parts(layers)
    if not parts:
        return "its layers have no MLP in a module of its own, so nothing can be computed in tiles; leave it out"
    inside = {id(inner) for part in parts for inner in part.modules() if inner is not part}
    for unit in units:
        if id(unit) in inside:
            wrapped = type(unit).__name__
            return f"--wrap {wrapped} would gather weights anew for each tile; give --wrap layer, or leave this out"
    return None


def _children(layer: nn.Module) -> Iterator[nn.Module]:
    """A layer's own modules; T5 keeps them in a list."""
    for child in layer.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield child


def _is_of_tokens(module: nn.Module) -> bool:
    """Whether it has matrices in modules of its own, and takes hidden states and nothing else."""
    if not list(module.children()) or not any(parameter.dim() > 1 for parameter in module.parameters()):
        return False
    is_mixing = any(isinstance(inner, MIXES_TOKENS) for inner in module.modules())
    return _takes_states_alone(module) and not is_mixing


def _is_norm_of_several_operators(module: nn.Module) -> bool:
    kind = type(module)
    if not kind.__name__.endswith("Norm") or kind.__module__.startswith("torch.") or list(module.children()):
        return False
    return all(parameter.dim() == 1 for parameter in module.parameters()) and _takes_states_alone(module)


def _takes_states_alone(module: nn.Module) -> bool:
    takes = [p.kind for p in inspect.signature(type(module).forward).parameters.values()][1:]
    return takes == [inspect.Parameter.POSITIONAL_OR_KEYWORD]
