"""Tiled modules: what works on each token alone runs over the tokens of a batch in tiles, and keeps its input alone.

| pass     | of each tile                                    | in memory at a time      |
|----------|-------------------------------------------------|--------------------------|
| forward  | its outputs; what backward would need is let go | inner values of one tile |
| backward | the same again, then its gradients              | inner values of one tile |

A tile is [1, tokens, hidden] out of the flattened [batch x seq], so all tiles of a batch, but the last, have one shape.
Both passes run the same graph: the loss is that of the second pass, bit for bit, and dropout draws the same masks.

A trained weight gets one gradient, the sum over tiles, when the whole module's backward is done. So sharding reduces it
once, and DistributedDataParallel sees it once. Sums of half-precision gradients are taken in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from configs.adaptation import FLOAT8_MULTIPLE
from policies.only_some import only_some
from policies.routing.balancing import WatchedRouter, of_tokens
from policies.tiling.finding import find_norms, find_token_parts, is_norm
from utils.errors import RunError

MULTIPLE = FLOAT8_MULTIPLE
"""Tiles have a multiple of so many tokens, but for the last one: products in float8 take no others."""


@dataclass(eq=False)
class Tiles:
    """How the parts of a model are tiled: one object for all of them, so that a plan can try others."""

    tokens: int  # of a tile, at most; 0: no tiles
    only_some: bool = False  # see `some_tiles`


def tile_parts(parts: Sequence[nn.Module], tiles: Tiles) -> None:
    """Let these modules run in tiles (`policies.tiling.finding`). Their forwards are replaced."""
    for part in parts:
        module: Any = part
        module.tiles = tiles
        module.compute_tile = getattr(module.forward, "__func__", type(module).forward)
        module.forward = MethodType(run_in_tiles, module)


def set_tiles(layers: Sequence[nn.Module], tokens: int) -> None:
    """Let what works on each token alone in these layers run in tiles of so many tokens; 0: as it is."""
    parts = [part for layer in layers for part in _parts_with_tiles(layer)]
    if tokens and not parts:
        tile_parts([*find_token_parts(layers), *find_norms(layers)], Tiles(tokens))
    tiles: list[Any] = [part.tiles for part in parts]
    for one in tiles:
        one.tokens = tokens


def some_tiles(model: nn.Module) -> AbstractContextManager[None]:
    """Inside this context three tiles of a batch are computed, the first two and the last, and all are allocated."""
    return only_some([part.tiles for part in _parts_with_tiles(model)])


def tiled_parts(layer: nn.Module) -> list[nn.Module]:
    """The parts of a layer that run in tiles."""
    return [part for part in _parts_with_tiles(layer) if part.tiles.tokens]


def _parts_with_tiles(module: nn.Module) -> list[Any]:
    return [part for part in module.modules() if hasattr(part, "tiles")]


def run_in_tiles(module: Any, hidden: torch.Tensor) -> Any:
    """The forward of a tiled module: [batch, seq, hidden] -> the module's outputs.

    A token may have several hidden states, as in hyper-connections: [batch, seq, streams, hidden]. Modules that see the
    tokens in one row get [tokens, hidden]. A batch of one tile at most runs as it is, and keeps what it would without
    tiles.
    """
    # Code that is compiled around a norm holds none of its inner values, so it is not cut there.
    if torch.compiler.is_compiling() or not module.tiles.tokens:
        return module.compute_tile(module, hidden)
    if _has_heads_first(module, hidden):
        return run_in_tiles(module, hidden.transpose(1, 2)).transpose(1, 2)
    axes = max(1, min(2, hidden.dim() - 1))  # of tokens
    flat = hidden.reshape(1, -1, *hidden.shape[axes:])
    call = _TiledCall(module, flat.shape[1])
    if call.num_tiles <= 1:
        outputs, structure = tree_flatten(module.compute_tile(module, flat))
    elif torch.is_grad_enabled() and (flat.requires_grad or call.trained):
        # A leaf to hang the node on: the hidden states of a first layer may need no gradient.
        kept = _KeptInput.apply(flat.new_empty(0).requires_grad_(), flat)
        outputs = list(_Tiled.apply(call, kept, flat, *call.trained))
        structure = call.structure
    else:
        outputs, structure = call.forward(flat), call.structure
    shaped = [_unflattened(output, flat, hidden.shape[:axes]) for output in outputs]
    return tree_unflatten(shaped, structure)


def _has_heads_first(module: nn.Module, hidden: torch.Tensor) -> bool:
    """Whether these are [batch, heads, seq, width], as Gemma 3's attention gives its norms, and not [batch, seq, ...].

    Where rows are shorter than heads are many it may be the other way round. Norms give the same in any order.
    """
    return is_norm(module) and hidden.dim() == 4 and hidden.shape[1] < hidden.shape[2]


def _unflattened(output: Any, flat: torch.Tensor, tokens: torch.Size) -> Any:
    """[1, tokens, ...] as [batch, seq, ...]; anything else, such as a router's [tokens, experts], as it is."""
    if isinstance(output, torch.Tensor) and output.dim() > 2 and output.shape[:2] == flat.shape[:2]:
        return output.view(*tokens, *output.shape[2:])
    return output


class _TiledCall:
    """One call of a tiled module."""

    def __init__(self, module: Any, num_tokens: int) -> None:
        self._module, self._num_tokens = module, num_tokens
        most = module.tiles.tokens
        if num_tokens > most >= MULTIPLE:
            most = most // MULTIPLE * MULTIPLE
        self.num_tiles = max(1, -(-num_tokens // most))
        # As even as can be, so that no kernel gets a handful of tokens.
        even = -(-num_tokens // self.num_tiles)
        self._size = max(1, min(most, -(-even // MULTIPLE) * MULTIPLE))
        self._routers = _routers_of(module)
        self.trained = trained_tensors(module)
        self.structure: Any = None

    def __iter__(self) -> Iterator[slice]:
        starts: Sequence[int] = range(0, self._num_tokens, self._size)
        if self._module.tiles.only_some and len(starts) > 3:
            starts = [*starts[:2], starts[-1]]
        for start in starts:
            yield slice(start, min(start + self._size, self._num_tokens))

    def forward(self, flat: torch.Tensor, *, needs_gradient: bool = False) -> list[Any]:
        """The module's outputs for [1, tokens, hidden], each in one piece, without a graph."""
        whole: list[Any] = []
        for tokens in self:
            # The graph of a tile is dropped with it. Without one, compiled code would be another graph than backward's.
            tile = flat[:, tokens].detach().requires_grad_(needs_gradient and flat.requires_grad)
            with torch.set_grad_enabled(needs_gradient):
                outputs = self.of_tile(tile, tokens)
            whole = whole or [_room_for(output, tokens, self._num_tokens) for output in outputs]
            for room, output in zip(whole, outputs, strict=True):
                if isinstance(room, torch.Tensor):
                    _tokens_in(room, output, tokens).copy_(output.detach())
        return whole

    def of_tile(self, tile: torch.Tensor, tokens: slice) -> list[Any]:
        """The module's outputs for one tile, [1, tokens, hidden]."""
        # Hooks of the layer, which checkpoint or offload what it keeps, are to see nothing of a tile. detach, since a
        # graph that held the tensor as it is would wait for Python's garbage collector.
        with of_tokens(self._routers, tokens), saved_tensors_hooks(torch.Tensor.detach, _as_it_is):
            # A view, since hooks on the inputs of modules (torch's flop counter has some) take no leaves in backward.
            outputs, self.structure = tree_flatten(self._module.compute_tile(self._module, tile.view_as(tile)))
        return outputs

    def gradients(
        self, flat: torch.Tensor, grads: Sequence[torch.Tensor | None], *, of_hidden: bool
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """The gradients of the hidden states, and of what is trained.

        Args:
            grads: of the module's outputs.
            of_hidden: whether the first is asked for.
        """
        grad_hidden = torch.empty_like(flat) if of_hidden else None
        sums = _GradientsOfTiles(self.trained)
        for tokens in self:
            with torch.enable_grad():
                leaf = flat[:, tokens].detach().requires_grad_(of_hidden)
                outputs = self.of_tile(leaf, tokens)
            pairs = [
                (output, _tokens_in(grad, output, tokens))
                for output, grad in zip(outputs, grads, strict=True)
                if grad is not None and isinstance(output, torch.Tensor) and output.requires_grad
            ]
            wanted = [leaf, *self.trained] if of_hidden else self.trained
            del outputs  # the graph alone holds them now, and frees what it has used
            found = list(torch.autograd.grad([p[0] for p in pairs], wanted, [p[1] for p in pairs], allow_unused=True))
            del pairs
            if grad_hidden is not None:
                of_tile = found.pop(0)
                grad_hidden[:, tokens].copy_(torch.zeros_like(leaf) if of_tile is None else of_tile)
            sums.add(found)
            del found  # else they would be there while the next tile is computed
        return grad_hidden, sums.taken()


class _GradientsOfTiles:
    """The sums of gradients over tiles, for half precision in fp32."""

    def __init__(self, trained: Sequence[torch.Tensor]) -> None:
        self._trained = trained
        self._sums: list[torch.Tensor | None] = [None] * len(trained)

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for place, gradient in enumerate(gradients):
            total = self._sums[place]
            if gradient is None:
                continue
            if total is None:
                # A copy, since one tensor may be the gradient of two parameters.
                dtype = torch.promote_types(gradient.dtype, torch.float32)
                self._sums[place] = gradient.to(dtype, copy=True, memory_format=torch.contiguous_format)
            else:
                total.add_(gradient)

    def taken(self) -> list[torch.Tensor | None]:
        """In the dtypes of what is trained; the sums are given up one by one."""
        found: list[torch.Tensor | None] = []
        for place, trained in enumerate(self._trained):
            total, self._sums[place] = self._sums[place], None
            found.append(None if total is None else total.to(trained.dtype))
        return found


class _KeptInput(torch.autograd.Function):
    """A node that keeps the hidden states for `_Tiled`, before that computes anything.

    When a checkpointed layer runs again, it stops as soon as the last tensor that it kept is there. That is this one in
    most layers: so their tiles are not computed a third time.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(flat)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None]:
        return None, None


class _Tiled(torch.autograd.Function):
    """A tiled module as one node of the graph: its inputs are the hidden states and all that it trains."""

    @staticmethod
    def forward(ctx: Any, call: _TiledCall, kept: torch.Tensor, flat: torch.Tensor, *trained: torch.Tensor) -> Any:
        ctx.call, ctx.kept = call, kept.grad_fn
        ctx.random = _random_state(flat.device)
        outputs = call.forward(flat, needs_gradient=True)
        ctx.mark_non_differentiable(*(o for o in outputs if isinstance(o, torch.Tensor) and not o.is_floating_point()))
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (flat,) = ctx.kept.saved_tensors
        with _replayed(ctx.random, flat.device):
            of_hidden, of_trained = ctx.call.gradients(flat, grads, of_hidden=ctx.needs_input_grad[2])
        return None, None, of_hidden, *of_trained


def trained_tensors(module: nn.Module) -> list[torch.Tensor]:
    """The leaves that get a gradient in this module: parameters, and what counts its routers' choices."""
    counts = [watched.trained for watched in _routers_of(module)]
    return [*(parameter for parameter in module.parameters() if parameter.requires_grad), *counts]


def _routers_of(module: nn.Module) -> list[WatchedRouter]:
    inner: list[Any] = [inner for inner in module.modules() if hasattr(inner, "watched")]
    return [router.watched for router in inner]


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _room_for(output: Any, tokens: slice, num_tokens: int) -> Any:
    """An empty tensor for the outputs of all tokens; what is no tensor, as it is."""
    if not isinstance(output, torch.Tensor):
        return output
    shape, axis = list(output.shape), _axis_of_tokens(output)
    if not shape or shape[axis] != tokens.stop - tokens.start:
        raise RunError(
            f"--tile_tokens: for {tokens.stop - tokens.start} tokens a part of this model's layers gives a tensor of "
            f"shape {shape}, which is not of tokens alone; give --tile_tokens 0"
        )
    shape[axis] = num_tokens
    return output.new_empty(shape)


def _axis_of_tokens(output: torch.Tensor) -> int:
    """[1, tokens, ...] or, of routers, [tokens, experts]."""
    return 1 if output.dim() > 2 else 0


def _tokens_in(whole: torch.Tensor, like: torch.Tensor, tokens: slice) -> torch.Tensor:
    return whole.narrow(_axis_of_tokens(like), tokens.start, tokens.stop - tokens.start)


def _random_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The state of the generators that dropout draws from."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextmanager
def _replayed(state: tuple[torch.Tensor, torch.Tensor | None], device: torch.device) -> Iterator[None]:
    """Inside this context generators draw again what they drew from this state on."""
    of_host, of_device = state
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device] if of_device is not None else []))
        torch.set_rng_state(of_host)
        if of_device is not None:
            torch.cuda.set_rng_state(of_device, device)
        yield
