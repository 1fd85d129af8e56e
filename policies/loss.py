"""The loss: summed cross-entropy, computed in chunks of tokens so that whole logits are never held.

Logits of a long batch are often the largest tensor of a run ([batch x seq, vocab] in fp32: 8 x 2048 tokens of a
128k vocabulary are 8 GiB, and their gradient as much again).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPast

from utils.labels import IGNORE_INDEX, shift_left


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


def use_summed_loss(model: Any, chunk_size: int) -> None:
    """From here on `model(..., labels=labels)` returns the summed loss alone; without labels it is as before.

    `label_positions` ([n], see `utils.labels`) spares the head all other positions: of a dialogue and its summary,
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

        num_tokens = targets.numel()
        if chunk_size == 0 or num_tokens <= chunk_size:
            return chunk_loss(hidden, targets)
        loss = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, num_tokens, chunk_size):
            part = slice(start, start + chunk_size)
            # Recomputing a chunk's logits in backward is what keeps only one chunk's in memory.
            loss = loss + checkpoint(chunk_loss, hidden[:, part], targets[part], use_reentrant=False)
        return loss

    model.forward = forward


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
