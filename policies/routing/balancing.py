"""The loss that evens out the experts of a mixture: its gradient enters where a router's weights leave it.

For each layer it is E * sum over experts e of f_e * P_e (Fedus et al., "Switch Transformers", 2021, equations 4 to 6):
E experts, f_e the tokens that chose e per token (they add up to the experts of a token, as in transformers' formula),
P_e the mean probability of e over tokens. Here f_e is that of the previous step. So the loss is a sum over tokens, and
its gradient for a token's logits needs no other token: no number has to leave a layer, which may be recomputed,
compiled or sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn

from policies.routing.routers import Router


@dataclass
class RouterInputs:
    """What all routers of a model need to know of the micro-batch."""

    is_token: torch.Tensor  # bool [at least batch x seq]; False: padding
    mode: Literal["off", "training", "evaluation"] = "off"


@dataclass(eq=False)
class WatchedRouter:
    """A router, and the numbers of its experts on the device that computes."""

    router: Router
    inputs: RouterInputs  # one object for all routers
    pull: torch.Tensor  # fp32 [experts], the gradient of a token's probabilities
    trained: torch.Tensor  # fp64 [experts], a leaf: its gradient is the number of tokens that chose each expert
    evaluated: torch.Tensor  # fp64 [experts], tokens of this evaluation that chose each expert


def watch(watched: WatchedRouter) -> None:
    """Count a router's choices, and add the gradient of the loss, in the modes of its inputs.

    Its forward is replaced, as a layer's is for checkpointing: one function for all, so that one compiled graph serves
    them. A hook has a key of its own in each module, and graphs are guarded by it.
    """
    module: Any = watched.router.module
    module.watched = watched
    module.forward = MethodType(_forward, module)


@contextmanager
def of_tokens(routers: Sequence[WatchedRouter], tokens: slice) -> Iterator[None]:
    """Inside this context these routers get the logits of these tokens alone, a tile of the flattened [batch x seq]."""
    every = [(inputs, inputs.is_token) for inputs in {id(r.inputs): r.inputs for r in routers}.values()]
    for inputs, is_token in every:
        inputs.is_token = is_token[tokens]
    try:
        yield
    finally:
        for inputs, is_token in every:
            inputs.is_token = is_token


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    output = type(module).forward(module, *args, **kwargs)
    watched: Any = module.watched
    inputs: RouterInputs = watched.inputs
    if inputs.mode == "off":
        return output
    logits, chosen = watched.router.read(output)
    is_token = inputs.is_token[: len(logits)]
    if inputs.mode == "evaluation":
        watched.evaluated.add_(_count(chosen, is_token, logits.shape[-1]))
        return output
    # A frozen router without a gradient to pass on: the leaf would make all that follows need one.
    if not logits.requires_grad:
        return output
    outputs = output if isinstance(output, tuple) else (output,)
    places = [i for i, other in enumerate(outputs) if torch.is_tensor(other) and other.requires_grad]
    passed = _Balanced.apply(
        logits, chosen, is_token, watched.pull, watched.trained, *(outputs[place] for place in places)
    )
    replaced = list(outputs)
    for place, tensor in zip(places, passed, strict=True):
        replaced[place] = tensor
    return tuple(replaced) if isinstance(output, tuple) else replaced[0]


class _Balanced(torch.autograd.Function):
    """A router's output as it is. Backward adds the loss's gradient for its logits, and counts its choices.

    The count is the gradient of a leaf: backward runs once for each micro-batch, while a forward that is recomputed
    runs twice. And autograd adds it up outside of compiled code, which then changes no tensor in place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        chosen: torch.Tensor,
        is_token: torch.Tensor,
        pull: torch.Tensor,
        trained: torch.Tensor,
        *outputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(logits, chosen, is_token, pull)
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, chosen, is_token, pull = ctx.saved_tensors
        probabilities = logits.softmax(-1, dtype=torch.float32)
        gradient = probabilities * (pull - (probabilities @ pull).unsqueeze(-1))
        gradient = torch.where(is_token.unsqueeze(-1), gradient, 0)
        counts = _count(chosen, is_token, logits.shape[-1])
        return gradient.to(logits.dtype), None, None, None, counts, *grads


def _count(chosen: torch.Tensor, is_token: torch.Tensor, num_experts: int) -> torch.Tensor:
    """The tokens that chose each expert, fp64 [experts].

    Exact for up to 2^24 of a layer's tokens. `bincount` would wait for the device, and sums with atomic additions are
    slow for so few experts.
    """
    numbers = torch.where(is_token.unsqueeze(-1), chosen, -1).flatten()  # -1 is in no bin
    # A GPU counts whole numbers in any order alike, a CPU counts floating ones alone.
    numbers = numbers.to(torch.float32 if numbers.device.type == "cpu" else torch.int32)
    return torch.histc(numbers, bins=num_experts, min=0, max=num_experts).double()
