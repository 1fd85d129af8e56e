"""The gradients that compiled code around a layer's tiles holds until it ends."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from policies.tiling.compiled import AROUND_TILES
from policies.tiling.finding import is_norm
from policies.tiling.tiles import tiled_parts


class HeldGradients:
    """The gradients that the code before a layer's tiles gets in backward, held until that ends.

    This code is one graph. Its backward gets the gradients of the layer's output, which the residual passes on, and of
    the tiles' input. torch 2.11 refers to both until it ends, so they are there while attention has its backward. 2.13
    frees them after their last use (pytorch pull request 177837); for it this is a bound.
    """

    def __init__(self, around_tiles: bool) -> None:
        """
        Args:
            around_tiles: layers are compiled around tiles; else nothing is held.
        """
        self._around_tiles = around_tiles
        self._gradients: list[torch.Tensor] = []

    def watch(self, layer: nn.Module) -> list[RemovableHandle]:
        """Hooks for a forward pass of the layer, by which gradients of its tiles' inputs will be held."""

        def watch_input(part: nn.Module, inputs: tuple[Any, ...]) -> None:
            if inputs[0].requires_grad:
                inputs[0].register_hook(self.hold)

        parts = [part for part in tiled_parts(layer) if not is_norm(part)] if self._around_tiles else []
        return [part.register_forward_pre_hook(watch_input) for part in parts]

    def freed_early(self, layer: nn.Module, of_hidden: int) -> int:
        """The bytes by which this layer's backward is emptier at its fullest moment than the pass counts.

        A layer with adapters on all that is around its tiles is fullest in attention's backward, compiled, and the pass
        finds as many bytes in that of the projections before it, which compiled code has not. They were the same on an
        H100 as long as inductor kept a dead gradient there, as wide as the hidden states, for a later one
        (`policies.tiling.compiled.AROUND_TILES`). inductor's code for layers with fewer adapters, or none, has no such
        gradient.

        Args:
            of_hidden: bytes of the layer's hidden states.
        """
        frees = self._around_tiles and AROUND_TILES.get("allow_buffer_reuse") is False
        return of_hidden if frees and _all_adapted(layer) else 0

    def hold(self, gradient: torch.Tensor) -> None:
        if self._around_tiles:
            self._gradients.append(gradient)

    def release(self) -> None:
        self._gradients.clear()


def _all_adapted(layer: nn.Module) -> bool:
    """Whether all matrices of this layer that are in none of its tiles have adapters."""
    known = {id(inner) for part in tiled_parts(layer) for inner in part.modules()}
    adapted = [module for module in layer.modules() if id(module) not in known and hasattr(module, "lora_A")]
    known |= {id(inner) for module in adapted for inner in module.modules()}
    left = (p for m in layer.modules() if id(m) not in known for p in m.parameters(recurse=False))
    return bool(adapted) and all(parameter.dim() < 2 for parameter in left)
