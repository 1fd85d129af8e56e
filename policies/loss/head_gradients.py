"""The loss of a head together with its gradients, chunk by chunk: logits are neither kept nor computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode


def loss_with_gradients(
    hidden: torch.Tensor,
    chunks: Sequence[tuple[torch.Tensor, Any]],
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    loss_of: Callable[[torch.Tensor, Any], torch.Tensor],
    loss_grad: float | None,
    left_out: range = range(0),
) -> torch.Tensor:
    """The summed loss of all chunks. Its gradients are computed here, for `hidden` and for all that the head trains.

    That takes three matrix products with the head; computing the logits again in backward would take a fourth.
    `backward` only hands the gradients on, so whatever waits for a gradient of a parameter is called then.

    Args:
        hidden: the head's input, [1, tokens, hidden_size].
        chunks: parts of `hidden` along its tokens, and their targets, which `loss_of` takes.
        logits_of: the head: hidden -> [tokens, vocab]. It may train any parameters.
        loss_of: logits, targets -> fp32 scalar.
        loss_grad: the gradient of the loss that `backward` will bring. If it brings another one, one of the gradients
            becomes NaN. None: not known; `backward` multiplies gradients by it, which rounds them once more.
        left_out: places of chunks, not of the first, whose gradients get room but no values.

    Returns:
        fp32 scalar. It has one backward pass; another one, or a second derivative, raises RuntimeError.
    """
    sums, losses, leaves = _GradientSums(), list[torch.Tensor](), list[torch.Tensor]()
    hidden_grads: list[torch.Tensor] = []
    for place, (part, targets) in enumerate(chunks):
        if place in left_out:
            hidden_grads += [torch.empty_like(part)] if hidden.requires_grad else []
            continue
        inputs = part.detach().requires_grad_(hidden.requires_grad)
        with sums:
            # A view, since hooks on the inputs of modules (torch's flop counter has some) do not take leaves here.
            logits = logits_of(inputs.view_as(inputs))
        loss = loss_of(logits, targets)
        # The graph alone holds them now, and frees them as soon as their gradient is there.
        del logits
        losses.append(loss.detach())
        # The first chunk's graph tells what the head trains; it is the same for all chunks.
        leaves = leaves or [leaf for leaf in leaves_of(loss) if leaf is not inputs]
        wanted = [inputs, *leaves] if hidden.requires_grad else leaves
        if not wanted:
            continue
        brought = torch.full_like(loss, 1.0 if loss_grad is None else loss_grad)
        found = list(torch.autograd.grad(loss, wanted, brought, allow_unused=True))
        if hidden.requires_grad:
            gradient = found.pop(0)
            hidden_grads.append(torch.zeros_like(inputs) if gradient is None else gradient)
        for leaf, gradient in zip(leaves, found, strict=True):
            sums.add(leaf, gradient)
    trained = [leaf for leaf in leaves if leaf in sums.of]
    gradients = [sums.of[leaf] for leaf in trained]
    if hidden.requires_grad:
        trained, gradients = [hidden, *trained], [torch.cat(hidden_grads, dim=1), *gradients]
        hidden_grads.clear()
    return given_gradients(torch.stack(losses).sum(), loss_grad, gradients, *trained)


def given_gradients(
    loss: torch.Tensor, loss_grad: float | None, gradients: list[torch.Tensor], *trained: torch.Tensor
) -> torch.Tensor:
    """The loss, whose backward hands on these gradients of these tensors.

    Args: as of `loss_with_gradients`.
    """
    total: torch.Tensor = _WithGradients.apply(loss, loss_grad, gradients, *trained)
    return total


class _WithGradients(torch.autograd.Function):
    """The loss as it is; its backward hands on gradients that are there already."""

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, loss_grad: float | None, gradients: list[torch.Tensor], *trained: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(*gradients)
        ctx.loss_grad = None if loss_grad is None else torch.full_like(loss, loss_grad)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("the loss has no second derivative here: its gradients are constants (create_graph)")
        # In place, so that the gradient of a large head is not there twice. A second backward pass raises an error:
        # autograd sees that a tensor was changed since it was saved.
        gradients = ctx.saved_tensors
        if ctx.loss_grad is None:
            for gradient in gradients:
                gradient.mul_(grad)
        else:  # one number is multiplied, so that nothing else is read and written
            gradients[0].view(-1)[:1].mul_(torch.where(grad == ctx.loss_grad, 1.0, torch.nan))
        return None, None, None, *gradients


class _GradientSums(TorchFunctionMode):
    """The gradients of the head's trained parameters, summed over chunks, each in its parameter's dtype.

    Inside this context the gradient of a linear layer's weight is added to the sum by the matrix product that computes
    it, which accumulates in fp32 and rounds once per chunk. Autograd would round the chunk's gradient, add it and round
    the sum. It would also need room for one more gradient of the head. All other gradients are added as autograd does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[torch.Tensor, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._linear if func is F.linear else func)(*args, **(kwargs or {}))

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """F.linear, under the names of its arguments."""
        if weight.requires_grad and weight.is_leaf and weight.dtype == input.dtype and torch.is_grad_enabled():
            outputs: torch.Tensor = _Linear.apply(input, weight, bias, self)
            return outputs
        return F.linear(input, weight, bias)

    def add(self, leaf: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Add a chunk's gradient, which may share its memory with another parameter's."""
        if gradient is None:
            return
        if leaf in self.of:
            self.of[leaf].add_(gradient)
        else:
            # A copy, since later chunks are added in place.
            self.of[leaf] = gradient.clone(memory_format=torch.contiguous_format)

    def add_product(self, weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add the product of two matrices."""
        if weight in self.of:
            total = self.of[weight]
            torch.addmm(total, left, right, out=total)  # torch's flop counter does not know addmm_
        else:
            self.of[weight] = left @ right


class _Linear(torch.autograd.Function):
    """F.linear whose backward adds the weight's gradient to the sums."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sums: _GradientSums
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.sums = sums
        return F.linear(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        needs_inputs, _, needs_bias, _ = ctx.needs_input_grad
        flat = grad.reshape(-1, grad.shape[-1])
        ctx.sums.add_product(weight, flat.t(), inputs.reshape(-1, inputs.shape[-1]))
        return grad @ weight if needs_inputs else None, None, flat.sum(0) if needs_bias else None, None


def leaves_of(output: torch.Tensor) -> Iterator[torch.Tensor]:
    """The leaves of the autograd graph that computed a tensor."""
    nodes, seen = [output.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # AccumulateGrad
            yield node.variable
        nodes += [following for following, _ in node.next_functions]
