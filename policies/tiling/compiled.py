"""Compiled layers whose MLP runs in tiles: a tile is one graph, and what is before and after the tiles are others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from policies.tiling.finding import is_norm
from policies.tiling.tiles import run_in_tiles

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""torch.compile with the run's settings."""

AROUND_TILES = {"allow_buffer_reuse": False}
"""Options of inductor for layers whose rows are long enough for tiles: a buffer is freed after its last use.

Otherwise inductor keeps a dead buffer for a later one of its size where its estimate of memory allows that, and the
estimate does not know what attention's backward takes for itself: of an 8B's layer with adapters, one tensor as wide as
the hidden states waited there, 8 KiB per token, at the fullest moment of the step. Buffers only live shorter without
that, so no peak rises; the price is an allocation each.
"""


def compile_around_tiles(layer: Any, tiled: Sequence[nn.Module], compile_function: Compile) -> None:
    """Compile the code of a tile, and, if the layer is recomputed as a whole, that of the layer around the tiles.

    The loop over tiles is no part of a graph: it would be unrolled. A graph can have no checkpoint around what is
    called between two graphs, so a recomputed layer is checkpointed around compiled code instead of inside it.
    """
    # One function for all, or each would be guarded apart.
    call = torch.compiler.disable(run_in_tiles)
    for part in tiled:
        module: Any = part
        if is_norm(part):
            continue  # it is compiled with what surrounds it
        module.compute_tile = compile_function(module.compute_tile)
        module.forward = MethodType(call, module)
    if "forward" in vars(layer):
        layer.compiled_forward = compile_function(_forward_of(type(layer)))
        layer._compiled_call_impl = layer._call_impl  # which calls that


def _forward_of(layer_class: Any) -> Any:
    """The forward of a class of layers, without what transformers 5.23 has around it (`modeling_layers.py`).

    That checkpoints where transformers' own checkpointing is on, which it never is here. torch would trace the layer
    through it, find that it cannot cut a graph in a function called by another, and trace the layer again.
    """
    forward = layer_class.forward
    while getattr(getattr(forward, "__code__", None), "co_name", "") == "forward_with_checkpointing":
        forward = forward.__wrapped__
    return forward
