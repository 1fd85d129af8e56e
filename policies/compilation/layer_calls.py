"""One layer of each kind that a model has, and how a forward pass calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only


class LayerCall(NamedTuple):
    """A layer, and its arguments in a forward pass."""

    name: str
    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    needs_gradient: bool  # of its hidden states, in training

    def __str__(self) -> str:
        return f"{self.name} ({type(self.layer).__name__.removeprefix('FSDP')})"

    def states(self) -> list[torch.Tensor]:
        """Its hidden states, [..., tokens, size]: its first floating argument, and those like it (an encoder's)."""
        tensors = [leaf for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, torch.Tensor)]
        floating = [tensor for tensor in tensors if tensor.is_floating_point()]
        return [tensor for tensor in floating if _is_like(tensor, floating[0])]

    def with_states(self, states: Sequence[torch.Tensor]) -> LayerCall:
        """The same call with other hidden states."""
        others = {id(before): state for before, state in zip(self.states(), states, strict=True)}
        args, kwargs = tree_map_only(torch.Tensor, lambda t: others.get(id(t), t), (self.args, dict(self.kwargs)))
        return self._replace(args=args, kwargs=kwargs)

    def outputs(self) -> list[torch.Tensor]:
        """The floating tensors that the layer returns."""
        returned = tree_leaves(self.layer(*self.args, **self.kwargs))
        return [leaf for leaf in returned if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _is_like(tensor: torch.Tensor, states: torch.Tensor) -> bool:
    return tensor.dim() == states.dim() and tensor.shape[-1] == states.shape[-1]


def one_of_each_kind(layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The last layer of each kind: layers of a kind consist of the same modules, with the same shapes and settings.

    Not the first one, whose hidden states may need no gradient, as those of no other layer.

    Args:
        layers: by their names, in their order in the model.
    """
    return dict({_structure(layer): (name, layer) for name, layer in layers.items()}.values())


def _structure(layer: nn.Module) -> tuple[Any, ...]:
    forward = getattr(vars(layer).get("forward"), "__func__", None)  # of layers that are recomputed for backward
    return (forward, *((name, type(module), *_settings(module)) for name, module in layer.named_modules()))


def _settings(module: nn.Module) -> Iterator[Any]:
    """Shapes of parameters, and plain attributes such as a window, apart from the layer's own number."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter.shape, parameter.dtype, parameter.requires_grad
    for name, value in sorted(vars(module).items()):
        is_number = type(value) is int and any(word in name for word in ("layer", "idx", "index"))
        if not (name.startswith("_") or is_number) and type(value) in (bool, int, float, str, type(None)):
            yield name, value


@torch.no_grad()
def calls_of(layers: Mapping[str, nn.Module], run: Callable[[], Any]) -> list[LayerCall]:
    """How `run`, a forward pass of the model, calls these layers, which are set to be compiled; here they are not.

    A layer that it does not call is left out. In training, whatever follows a module with trained parameters needs a
    gradient.
    """
    calls: dict[str, LayerCall] = {}
    is_trained = False

    def noted(name: str, layer: nn.Module, compute: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found = LayerCall(name, layer, args, kwargs, is_trained)
            calls[name] = found.with_states([state.clone() for state in found.states()])  # the model may change them
            return compute(*args, **kwargs)

        return call

    def look(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal is_trained
        is_trained = is_trained or any(parameter.requires_grad for parameter in module.parameters())

    compiled: dict[str, Any] = {name: layer._compiled_call_impl for name, layer in layers.items()}
    hook = nn.modules.module.register_module_forward_hook(look)
    try:
        for name, layer in layers.items():
            layer._compiled_call_impl = noted(name, layer, compiled[name])
        with torch.compiler.set_stance("force_eager"):
            run()
    finally:
        hook.remove()
        for name, layer in layers.items():
            layer._compiled_call_impl = compiled[name]
    return list(calls.values())
