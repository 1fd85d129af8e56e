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
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPast

from data.labels import IGNORE_INDEX, shift_left
from utils.errors import ConfigError


def summed_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum over learned tokens, in fp32.

    Args:
        logits: [tokens, vocab], any floating dtype.
        targets: [tokens], already shifted, -100 = not learned.

    Returns:
        fp32 scalar; 0, with zero gradients, where no token is learned.
    """
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORE_INDEX, reduction="sum")


def loss_notes(model_config: Any) -> list[str]:
    """A line for a mixture of experts whose config asks for a loss of its router too: that is not trained here."""
    if getattr(model_config.get_text_config(), "output_router_logits", False):
        return ["output_router_logits: the router's auxiliary loss is not added; cross-entropy alone is trained"]
    return []


def check_head_alone(model: Any, model_name: str) -> None:
    """That the head of this model can be called on what its decoder gave, as `use_summed_loss` does.

    Raises:
        ConfigError: where it cannot.
    """
    if model.config.get_text_config() is not model.config:
        raise ConfigError(
            f"--model_name: {model_name} is a {type(model).__name__}, a language model inside a larger one (of images, "
            "say), and only plain language models are trained; save its language model alone and give that"
        )
    if model.get_decoder() is model:
        raise ConfigError(
            f"--model_name: transformers {transformers.__version__} does not say where the decoder of "
            f"{type(model).__name__} is, and the loss is computed after it; give a model of another family"
        )


def use_summed_loss(model: Any, chunk_size: int) -> None:
    """From here on `model(..., labels=labels)` returns the summed loss alone; without labels it is as before.

    `label_positions` ([n], see `data.labels`) spares the head all other positions: of a dialogue and its summary,
    nine tenths.

    The forward of this one instance is replaced, inside whatever later wraps it, because sharded weights are whole
    only while their module's own forward runs. The head of each chunk is the model's own code: its forward is
    called with the decoder's output given, so logit scaling or soft-capping are never forgotten.

    Args:
        model: a transformers causal language model.
        chunk_size: tokens whose logits are held at a time; 0 computes all at once.
    """
    own_forward = model.forward
    decoder = model.get_decoder()

    @functools.wraps(own_forward)
    def forward(
        *args: Any, labels: torch.Tensor | None = None, label_positions: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        if labels is None:
            return own_forward(*args, **kwargs)
        hidden = decoder(*args, **kwargs)[0]
        hidden = hidden.reshape(1, -1, hidden.shape[-1])
        targets = shift_left(labels).reshape(-1)
        if label_positions is not None:
            hidden, targets = hidden[:, label_positions], targets[label_positions]

        def chunk_loss(hidden_chunk: torch.Tensor, target_chunk: torch.Tensor) -> torch.Tensor:
            with _decoder_returns(decoder, hidden_chunk):
                logits = own_forward(input_ids=None, use_cache=False).logits
            return summed_cross_entropy(logits[0], target_chunk)

        size = chunk_size or max(1, targets.numel())
        chunks = list(zip(hidden.split(size, dim=1), targets.split(size), strict=True))
        # fp16 gradients need the loss scale, which is not known before backward.
        head_trains = any(p.requires_grad for p in _parameters_beside(decoder, model))
        if hidden.requires_grad and hidden.dtype != torch.float16 and not head_trains:
            return _LossOfFrozenHead.apply(hidden, chunks, chunk_loss)
        if len(chunks) == 1:
            return chunk_loss(hidden, targets)
        # Recomputing a chunk's logits in backward is what keeps only one chunk's in memory.
        return torch.stack([checkpoint(chunk_loss, *chunk, use_reentrant=False) for chunk in chunks]).sum()

    model.forward = forward


def _parameters_beside(decoder: nn.Module, module: nn.Module) -> Iterator[nn.Parameter]:
    """What the module computes with beside the decoder: its head's, which may be the embedding's too."""
    if module is not decoder:
        yield from module.parameters(recurse=False)
        for child in module.children():
            yield from _parameters_beside(decoder, child)


class _LossOfFrozenHead(torch.autograd.Function):
    """The loss of all chunks, where nothing but the decoder's output takes a gradient: that is computed with the loss,
    chunk by chunk, so that no logits need be computed again.
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
    """A decoder's output whose other fields are None, whichever of them the head's code asks for."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def _decoder_returns(decoder: nn.Module, hidden: torch.Tensor) -> Iterator[None]:
    """While this lasts, calling `decoder` returns `hidden` ([1, tokens, hidden_size]) without computing anything."""
    had_own = "forward" in decoder.__dict__
    before = decoder.forward
    decoder.forward = lambda *args, **kwargs: _Hidden(last_hidden_state=hidden)
    try:
        yield
    finally:
        if had_own:
            decoder.forward = before
        else:
            del decoder.forward
