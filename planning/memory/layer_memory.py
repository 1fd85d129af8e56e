"""The memory of each layer: bytes kept for backward, and temporaries, counted in one pass on meta tensors.

Only the first of equal layers runs, and the others are replaced by their output: a model of eighty layers costs as much
as one of two. Nothing is assumed of a family of models: the model's own code runs, with our loss, adapters,
checkpointing and packed weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from planning.memory.compiled_layers import CompiledLayer, SelectiveKept
from planning.memory.held_gradients import HeldGradients
from planning.memory.layer_bytes import LayerBytes, PassBytes, SelectiveBytes
from planning.memory.live_bytes import LiveBytes, Window
from planning.memory.repeated_layers import kind_of, shapes_of, stand_in
from policies.activations.offloading import MIN_BYTES, is_movable, key_of, own_input, shared_inputs


@dataclass
class _Measured:
    """The windows of a layer that was run."""

    start: int
    forward: Window
    outputs: Any
    backward: Window | None = None
    end: int = 0
    released: int = 0  # bytes of its input, if backward does not need it
    compiled: int | None = None  # bytes that it keeps if it is compiled
    movable: tuple[int, ...] = ()  # bytes of each storage that offloading would move
    fused: int = 0  # bytes more in backward if that computes it again, compiled
    selective: SelectiveKept | None = None
    end_written: int = 0  # as `end`, of what compiled code writes
    around_tiles: bool = False  # compiled so: in backward what it writes counts, and nothing else

    def use(self) -> LayerBytes:
        kept_to_end = self.end - self.start
        kept = kept_to_end - self.released
        forward = self.forward.peak - self.start
        parts = self.backward.parts() if self.backward else []
        if self.around_tiles:
            peaks = [(part.written - self.end_written, part.written_with_grads - self.end_written) for part in parts]
        else:
            peaks = [(part.peak - self.end, part.peak_with_grads - self.end) for part in parts]
        backward = kept_to_end + max((peak for peak, _ in peaks), default=0)
        with_grads = kept_to_end + max((peak for _, peak in peaks), default=0)
        if self.compiled is None:
            use = LayerBytes(kept, forward, backward, with_grads)
        else:
            # Backward begins with fewer bytes, so its peaks are lower by as much.
            less = kept - self.compiled
            use = LayerBytes(self.compiled, self.compiled + self.forward.unpacked, backward - less, with_grads - less)
            use = replace(use, selective=self._selective())
        return replace(use, movable=self.movable, fused=self.fused)

    def _selective(self) -> SelectiveBytes | None:
        """The layer if it is selective."""
        if self.selective is None or self.backward is None:
            return None
        # Nothing that forward made is freed meanwhile, so what is alive beyond that is gradients and temporaries.
        parts = [*zip(self.backward.parts(), self.selective.there, strict=False)]
        backward = max(part.written - self.end_written + there for part, there in parts)
        with_grads = max(part.written_with_grads - self.end_written + there for part, there in parts)
        return SelectiveBytes(self.selective.kept, backward, with_grads)


@dataclass
class _Pass:
    """The state of a pass."""

    live: LiveBytes
    compiled: Callable[[nn.Module], bool]
    moves: Literal["all", "input", "nothing"]
    held: HeldGradients
    kinds: dict[Any, _Measured] = field(default_factory=dict)
    order: list[tuple[nn.Module, Any]] = field(default_factory=list)
    last: int = 0  # alive when the last layer ended, less an input that only its caller holds
    loss: Window | None = None
    embedding: Window | None = None  # after the backward of the first layer
    has_backward: bool = False  # whether a layer so far will have one


def measure_pass(
    model: nn.Module,
    layers: Sequence[nn.Module],
    run: Callable[[], torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    trains: bool = True,
    compiled: Callable[[nn.Module], bool] = lambda layer: False,
    moves: Literal["all", "input", "nothing"] = "nothing",
    around_tiles: bool = False,
) -> PassBytes:
    """Run one pass on meta tensors and count.

    Args:
        model: with its parameters on the meta device, in the dtype in which they are computed.
        layers: the repeated ones (`policies.wrapping.find_layers`), none inside another.
        run: computes the loss.
        inputs: the tensors of the micro-batch.
        trains: False: the forward pass of an evaluation, which keeps nothing.
        compiled: whether to count the tensors that this layer keeps compiled (compiled_layers.py); it runs uncompiled.
        moves: what offloading would move of a layer's saved tensors (policies/activations/offloading.py).
        around_tiles: layers are compiled around the tiles of their MLPs (policies/tiling/compiled.py).
    """
    parameters = list(model.parameters())
    live = LiveBytes([*parameters, *model.buffers(), *inputs])
    state = _Pass(live, compiled, moves, HeldGradients(around_tiles))
    with ExitStack() as stack:
        for parameter in parameters:
            if parameter.requires_grad:
                stack.callback(parameter.register_post_accumulate_grad_hook(live.take_grad).remove)
        stack.enter_context(_replaced_layers(layers, state))
        stack.enter_context(torch.set_grad_enabled(trains))
        stack.enter_context(live)
        loss = run()
        kept_at_loss = live.live
        forward = state.loss or live.window  # a model without layers is all loss
        backward = live.enter()
        if trains:
            loss.backward()
        state.held.release()
        live.enter()
    return _collect(state, forward, backward, kept_at_loss)


def _collect(state: _Pass, forward: Window, backward: Window, kept_at_loss: int) -> PassBytes:
    uses = {kind: measured.use() for kind, measured in state.kinds.items()}
    # Only the first layer of each kind ran, and kept something.
    between = state.last - sum(found.end - found.start - found.released for found in state.kinds.values())
    loss = LayerBytes(
        kept=kept_at_loss - state.last,
        forward=forward.peak - state.last,
        backward=backward.peak - state.last,
        backward_with_grads=backward.peak_with_grads - state.last,
    )
    return PassBytes(
        layers=tuple((layer, uses[kind]) for layer, kind in state.order),
        between=max(0, between),
        loss=loss,
        embedding_backward=state.embedding.peak_with_grads if state.embedding else 0,
    )


@contextmanager
def _replaced_layers(layers: Sequence[nn.Module], state: _Pass) -> Iterator[None]:
    """Inside this context each layer is run if it is the first of its kind, else replaced; windows open and close."""
    before: list[tuple[nn.Module, bool, Any, Any]] = []
    for layer in layers:
        before.append((layer, "forward" in layer.__dict__, layer.forward, layer._compiled_call_impl))
        layer._compiled_call_impl = None  # else a compiled layer would compile for the meta device
        layer.forward = MethodType(_forward(layer.forward, state), layer)
    try:
        yield
    finally:
        for layer, had_own, forward, compiled in before:
            layer._compiled_call_impl = compiled
            if had_own:
                layer.forward = forward
            else:
                del layer.forward


def _forward(own: Callable[..., Any], state: _Pass) -> Callable[..., Any]:
    def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        live, kind = state.live, kind_of(layer, args, kwargs)
        state.order.append((layer, kind))
        hidden = own_input(args, kwargs)
        if kind in state.kinds:
            outputs = stand_in(args, kwargs, state.kinds[kind].outputs)
            state.last = live.live - (0 if hidden is None else live.size_of(hidden))
            # Whatever follows is the loss, unless another layer is called.
            state.loss = live.enter()
            return outputs
        window = live.enter()
        measured = state.kinds[kind] = _Measured(live.live, window, None)
        # The first layer whose input gets a gradient is the last one in backward; embeddings come after it.
        if hidden is not None and hidden.requires_grad and not state.has_backward:
            hidden.register_hook(lambda grad: _leave_backward(state))
        watched = state.held.watch(layer)
        measured.around_tiles = state.held.is_cut(layer)
        run = _run_as_if_compiled if state.compiled(layer) else _run
        outputs = run(layer, own, args, kwargs, state, measured)
        for handle in watched:
            handle.remove()
        measured.end, measured.end_written = live.live, live.written
        state.last = live.live - measured.released
        measured.outputs = shapes_of(outputs)
        output = next(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
        if output.requires_grad:
            output.register_hook(lambda grad: _enter_backward(state, measured, grad))
            state.has_backward = True
        state.loss = live.enter()
        return outputs

    return forward


def _run_as_if_compiled(
    layer: nn.Module, own: Callable[..., Any], args: Any, kwargs: Any, state: _Pass, measured: _Measured
) -> Any:
    """Run a layer. Measures the bytes of each storage that it would keep if it were compiled. Returns its outputs."""
    followed = CompiledLayer((args, kwargs, [*layer.parameters()], [*layer.buffers()]))
    with followed.following(at_attention=state.live.divide):
        outputs = own(*args, **kwargs)
    kept = followed.kept_bytes(outputs)
    measured.compiled = sum(kept.values())
    states = own_input(args, kwargs)
    if states is not None:
        measured.fused = followed.fused_bytes(states.shape[-1])
        measured.selective = followed.selective(outputs, states.shape[-1])
    if state.moves != "nothing":
        # A layer moves its input. Its output is the next layer's input, and moves with that.
        for leaf in tree_leaves(outputs):
            kept.pop(key_of(leaf) if isinstance(leaf, torch.Tensor) else 0, None)
        of_input = 0 if states is None else state.live.size_of(states)
        measured.movable = tuple(size for size in (*kept.values(), of_input) if size >= MIN_BYTES)
    return outputs


def _run(layer: nn.Module, own: Callable[..., Any], args: Any, kwargs: Any, state: _Pass, measured: _Measured) -> Any:
    """Run a layer. Measures what autograd saves of it. Returns its outputs."""
    hidden, saved = own_input(args, kwargs), _Saved()
    with torch.autograd.graph.saved_tensors_hooks(saved.add, lambda tensor: tensor):
        outputs = own(*args, **kwargs)
    if state.moves != "nothing":
        shared = {key_of(tensor) for tensor in shared_inputs(args, kwargs)}
        moved = [t for t in saved.tensors if is_movable(t, t.device) and key_of(t) not in shared]
        if state.moves == "input":
            own_key = None if hidden is None else key_of(hidden)
            moved = [t for t in moved if key_of(t) == own_key]
        measured.movable = tuple({key_of(t): size for t in moved if (size := state.live.size_of(t))}.values())
    measured.released = 0 if hidden is None or saved.has(hidden) else state.live.size_of(hidden)
    saved.tensors.clear()  # autograd holds the hook, which would keep them alive
    return outputs


class _Saved:
    """The tensors that autograd saved in a layer's forward."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        self.tensors.append(tensor)
        return tensor

    def has(self, tensor: torch.Tensor) -> bool:
        return key_of(tensor) in map(key_of, self.tensors)


def _enter_backward(state: _Pass, measured: _Measured, grad: torch.Tensor) -> None:
    state.held.release()  # of the layer after this one
    measured.backward = state.live.enter()
    state.held.hold(grad)


def _leave_backward(state: _Pass) -> None:
    state.held.release()
    state.embedding = state.live.enter()
