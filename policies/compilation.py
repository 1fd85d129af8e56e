"""torch.compile, one decoder layer at a time: the layers are alike, so one graph serves all of them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def compile_layers(layers: Iterable[nn.Module]) -> None:
    for layer in layers:
        layer.compile()
