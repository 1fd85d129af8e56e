"""The loss: summed cross-entropy, computed in chunks of tokens so that whole logits are never held.

Logits of a long batch are often the largest tensor of a run ([batch x seq, vocab] in fp32: 8 x 2048 tokens of a
128k vocabulary are 8 GiB, and their gradient as much again).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPast

from data.labels import IGNORE_INDEX


def summed_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum of the cross-entropy over label tokens: fp32 scalar; 0, with zero gradients, if there is none.

    Args:
        logits: [tokens, vocab], any floating dtype.
        targets: [tokens], the token that each position predicts; -100 = no label.
    """
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORE_INDEX, reduction="sum")


def use_summed_loss(model: Any, backbone: nn.Module, chunk_size: int) -> None:
    """Make `model(..., targets=targets)` return the summed loss alone; a call without targets is as before.

    `targets` ([n]) holds the token to predict at each of `target_positions` ([n], indices into the flattened
    [batch x seq] of the backbone's output; unset: at every position). Other positions never reach the head: of a
    dialogue with its summary, nine tenths.

    The forward of this one instance is replaced, inside whatever later wraps it, because sharded weights are whole
    only while their module's own forward runs. The head of each chunk is the model's own code: its forward is
    called with the backbone's output given, so logit scaling or soft-capping are never forgotten.

    Args:
        model: a transformers model whose head runs on the backbone's output alone.
        backbone: the submodule that computes the head's input.
        chunk_size: tokens whose logits are held at a time; 0 computes all at once.
    """
    own_forward = model.forward

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
        hidden = backbone(*args, **kwargs)[0]
        hidden = hidden.reshape(1, -1, hidden.shape[-1])
        if target_positions is not None:
            hidden = hidden[:, target_positions]

        def chunk_loss(hidden_chunk: torch.Tensor, target_chunk: torch.Tensor) -> torch.Tensor:
            with _backbone_returns(backbone, hidden_chunk):
                logits = own_forward(input_ids=None, use_cache=False).logits
            return summed_cross_entropy(logits[0], target_chunk)

        size = chunk_size or max(1, targets.numel())
        chunks = list(zip(hidden.split(size, dim=1), targets.split(size), strict=True))
        # fp16 gradients need the loss scale, which is not known before backward.
        head_trains = any(p.requires_grad for p in _parameters_beside(backbone, model))
        if hidden.requires_grad and hidden.dtype != torch.float16 and not head_trains:
            return _LossOfFrozenHead.apply(hidden, chunks, chunk_loss)
        if len(chunks) == 1:
            return chunk_loss(hidden, targets)
        # Recomputing a chunk's logits in backward is what keeps only one chunk's in memory.
        return torch.stack([checkpoint(chunk_loss, *chunk, use_reentrant=False) for chunk in chunks]).sum()

    model.forward = forward


def _parameters_beside(backbone: nn.Module, module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of the module outside the backbone: the head's, which may be shared with the embedding."""
    if module is not backbone:
        yield from module.parameters(recurse=False)
        for child in module.children():
            yield from _parameters_beside(backbone, child)


class _LossOfFrozenHead(torch.autograd.Function):
    """The loss of all chunks if only the backbone's output takes a gradient.

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
    """A backbone's output whose other fields are None, whichever of them the head's code asks for."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def _backbone_returns(backbone: nn.Module, hidden: torch.Tensor) -> Iterator[None]:
    """Inside this context `backbone` returns `hidden` ([1, tokens, hidden_size]) and computes nothing."""
    had_own = "forward" in backbone.__dict__
    before = backbone.forward
    backbone.forward = lambda *args, **kwargs: _Hidden(last_hidden_state=hidden)
    try:
        yield
    finally:
        if had_own:
            backbone.forward = before
        else:
            del backbone.forward
