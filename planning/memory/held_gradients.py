"""The gradients that compiled code around a layer's tiles holds until it ends."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

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

        return [part.register_forward_pre_hook(watch_input) for part in self._parts(layer)]

    def is_cut(self, layer: nn.Module) -> bool:
        """Whether this layer is compiled around tiles."""
        return bool(self._parts(layer))

    def _parts(self, layer: nn.Module) -> list[nn.Module]:
        return [part for part in tiled_parts(layer) if not is_norm(part)] if self._around_tiles else []

    def hold(self, gradient: torch.Tensor) -> None:
        if self._around_tiles:
            self._gradients.append(gradient)

    def release(self) -> None:
        self._gradients.clear()
