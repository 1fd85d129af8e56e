"""The loss: summed cross-entropy, computed in chunks of tokens so that whole logits are never held.

Logits of a long batch are often the largest tensor of a run ([batch x seq, vocab] in fp32: 8 x 2048 tokens of a
128k vocabulary are 8 GiB, and their gradient as much again).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPast

from data.labels import IGNORE_INDEX


def summed_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """The sum of the cross-entropy over label tokens: fp32 scalar; 0, with zero gradients, if there is none.

    Args:
        logits: [tokens, vocab], any floating dtype.
        targets: [tokens], the token that each position predicts; -100 = no label.
        label_smoothing: the share of each target that is spread evenly over the vocabulary (Szegedy et al., "Rethinking
            the Inception Architecture", 2016), as transformers' LabelSmoother does.
    """
    return F.cross_entropy(
        logits.float(), targets, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=label_smoothing
    )


def use_summed_loss(
    model: Any,
    stacks: Sequence[nn.Module],
    chunk_size: int,
    compute_logits: Callable[[Any, torch.Tensor], torch.Tensor],
    *,
    label_smoothing: float = 0.0,
) -> None:
    """Make `model(..., targets=targets)` return the summed loss alone; a call without targets is as before.

    `targets` ([n]) holds the token to predict at each of `target_positions` ([n], indices into the flattened
    [batch x seq] of the last stack's output; unset: at every position). Other positions never reach the head: of a
    dialogue with its summary, nine tenths.

    The forward of this one instance is replaced, inside whatever later wraps it, because sharded weights are whole
    only while their module's own forward runs. All code is the model's own. Its forward is called once with the
    inputs, up to the last stack's output, and then for each chunk with that output given. So what a model does between
    encoder and decoder, and logit scaling or soft-capping behind them, are never forgotten.

    Args:
        model: a transformers model whose head runs on the last stack's output alone.
        stacks: the submodules that compute the head's input (`tasks.task.Task.stacks`).
        chunk_size: tokens whose logits are held at a time; 0 computes all at once.
        compute_logits: the logits of this output of the last stack (`tasks.task.Task`).
        label_smoothing: see `summed_cross_entropy`; in training only, so that evaluations can be compared.
    """
    own_forward, last = model.forward, stacks[-1]

    @functools.wraps(own_forward)
    def forward(
        *args: Any,
        targets: torch.Tensor | None = None,
        target_positions: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,  # peft hands it on, None where it was not given
        **kwargs: Any,
    ) -> Any:
        if targets is None:
            given = {} if labels is None else {"labels": labels}
            return own_forward(*args, **given, **kwargs)
        hidden = _output_of(last, lambda: own_forward(*args, **kwargs))
        hidden = hidden.reshape(1, -1, hidden.shape[-1])
        if target_positions is not None:
            hidden = hidden[:, target_positions]
        smoothing = label_smoothing if model.training else 0.0

        def chunk_loss(hidden_chunk: torch.Tensor, target_chunk: torch.Tensor) -> torch.Tensor:
            with _forward_replaced(last, lambda *args, **kwargs: _Hidden(last_hidden_state=hidden_chunk)):
                logits = compute_logits(model, hidden_chunk)
            return summed_cross_entropy(logits[0], target_chunk, smoothing)

        size = chunk_size or max(1, targets.numel())
        chunks = list(zip(hidden.split(size, dim=1), targets.split(size), strict=True))
        # fp16 gradients need the loss scale, which is not known before backward.
        head_trains = any(p.requires_grad for p in _parameters_beside(stacks, model))
        if hidden.requires_grad and hidden.dtype != torch.float16 and not head_trains:
            return _LossOfFrozenHead.apply(hidden, chunks, chunk_loss)
        if len(chunks) == 1:
            return chunk_loss(hidden, targets)
        # Recomputing a chunk's logits in backward is what keeps only one chunk's in memory.
        return torch.stack([checkpoint(chunk_loss, *chunk, use_reentrant=False) for chunk in chunks]).sum()

    model.forward = forward


def _parameters_beside(stacks: Sequence[nn.Module], module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of the module outside the stacks: the head's, which may be shared with the embedding."""
    if not any(module is stack for stack in stacks):
        yield from module.parameters(recurse=False)
        for child in module.children():
            yield from _parameters_beside(stacks, child)


class _LossOfFrozenHead(torch.autograd.Function):
    """The loss of all chunks if only the last stack's output takes a gradient.

    The gradient is computed together with the loss, chunk by chunk, so no logits are computed again in backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        chunks: list[tuple[torch.Tensor, torch.Tensor]],
        chunk_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        gradients: list[Any] = []
        for hidden_chunk, target_chunk in chunks:
            inputs = hidden_chunk.detach().requires_grad_()
            with torch.enable_grad():
                loss = chunk_loss(inputs, target_chunk)
            loss.backward()
            gradients.append(inputs.grad)
            losses.append(loss.detach())
        ctx.save_for_backward(torch.cat(gradients, dim=1))
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad, None, None


class _Hidden(BaseModelOutputWithPast):
    """A stack's output whose other fields are None, whichever of them the head's code asks for."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _output_of(stack: nn.Module, run: Callable[[], Any]) -> torch.Tensor:
    """What `stack` computes while `run` runs: [batch, seq, hidden_size]. The head behind it gets no position at all."""
    found: list[torch.Tensor] = []
    compute = stack.forward

    def keep(*args: Any, **kwargs: Any) -> _Hidden:
        found.append(compute(*args, **kwargs)[0])
        return _Hidden(last_hidden_state=found[0][:, :0].detach())

    with _forward_replaced(stack, keep):
        run()
    (hidden,) = found
    return hidden


@contextmanager
def _forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside this context the module computes this instead."""
    had_own = "forward" in module.__dict__
    before = module.forward
    module.forward = forward
    try:
        yield
    finally:
        if had_own:
            module.forward = before
        else:
            del module.forward
