"""NEFTune: noise on the embeddings while a model trains (Jain et al., 2023, arXiv 2310.05914).

Each number of a sequence's embeddings gets a number drawn evenly from (-1, 1), times alpha / sqrt(tokens x size).

The noise is no generator's, whose numbers would depend on the batch. It is a hash of the seed, the optimizer step, the
sequence's tokens, the place in the sequence and the place in the embedding. So a sequence gets the same noise however
the global batch is cut or packed, and a resumed run repeats it. Equal sequences of one step get the same noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

_AT_A_TIME = 1 << 24  # numbers: bounds the memory of whole numbers, which are freed again


class NoisyRows(NamedTuple):
    """What the noise of a batch depends on; all [batch x seq], flattened."""

    keys: torch.Tensor  # int32, a random number of each token
    scales: torch.Tensor  # fp32, the largest noise of a token, without the embedding's size


class EmbeddingNoise:
    """Adds noise to the output of an embedding, inside `adding` alone."""

    def __init__(self, embedding: nn.Module, alpha: float, *, seed: int, steps_taken: Callable[[], int]) -> None:
        """
        Args:
            embedding: of the input tokens; it may be sharded.
            alpha: the scale of the noise; 0: none.
            steps_taken: the optimizer steps before this one.
        """
        self._embedding, self._alpha, self._seed, self._steps_taken = embedding, alpha, seed, steps_taken

    def adding(self, summed_loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The loss of a task; a training model's embeddings are noisy while it is computed.

        Its batches are `tasks.causal_batches.CausalMicroBatch`.
        """
        if not self._alpha:
            return summed_loss

        def loss(model: nn.Module, batch: Any, *loss_grad: float | None) -> torch.Tensor:
            if not model.training:
                return summed_loss(model, batch, *loss_grad)
            with self._on(batch):
                return summed_loss(model, batch, *loss_grad)

        return loss

    @contextmanager
    def _on(self, batch: Any) -> Iterator[None]:
        draw = draw_of(self._seed, self._steps_taken())
        rows = rows_of(batch.input_ids, batch.position_ids, batch.row_lengths, self._alpha, draw)

        def add(embedding: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            return output + noise_of(rows, output.shape[-1], output.dtype).view(output.shape)

        with self._embedding.register_forward_hook(add):
            yield


def noise_of(rows: NoisyRows, size: int, dtype: torch.dtype) -> torch.Tensor:
    """The noise of each token: [batch x seq, size]."""
    keys, scales = rows
    noise = torch.empty(len(keys), size, dtype=dtype, device=keys.device)
    columns = _mix32(torch.arange(1, size + 1, dtype=torch.int32, device=keys.device))
    step = max(1, _AT_A_TIME // size)
    for some, their_scales, part in zip(keys.split(step), scales.split(step), noise.split(step), strict=True):
        numbers = _mix32(some.unsqueeze(1) ^ columns) >> 8  # 24 bits with a sign
        part.copy_((numbers.float() + 0.5) * (their_scales.unsqueeze(1) / (2**23 * size**0.5)))
    return noise


def rows_of(
    ids: torch.Tensor, positions: torch.Tensor | None, row_lengths: torch.Tensor | None, alpha: float, draw: int
) -> NoisyRows:
    """The key of each token of a batch, and the scale of its noise; the device need not wait.

    Args:
        ids: int64 [batch, seq].
        positions: int64 [batch, seq], 0 where a sequence begins; None: rows are sequences with padding on their right.
        row_lengths: int64 [batch]; None: rows have no padding.
        draw: of `draw_of`.
    """
    places = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    is_token = torch.ones_like(ids)
    if positions is None and row_lengths is not None:
        is_token = (places < row_lengths.unsqueeze(1)).long()
    places = (places if positions is None else positions).flatten()
    is_token, sequence = is_token.flatten(), (places == 0).cumsum(0) - 1
    sums = torch.zeros(2, ids.numel(), dtype=torch.int64, device=ids.device)  # of each sequence; sums may wrap
    sums[0].index_add_(0, sequence, _mix64(ids.flatten() * _P1 + places * _P2) * is_token)
    sums[1].index_add_(0, sequence, is_token)
    contents, lengths = sums[0][sequence], sums[1][sequence]
    keys = _mix64(contents + places * _P1 + draw)
    return NoisyRows((keys >> 32).int(), is_token * alpha / lengths.clamp(min=1).float().sqrt())


def draw_of(seed: int, steps_taken: int) -> int:
    """A number for the noise of each optimizer step of each seed."""
    return (seed << 31) + steps_taken


_P1, _P2 = 0x9E3779B97F4A7C15 - 2**64, 0x5851F42D4C957F2D  # odd numbers without a pattern


def _mix64(numbers: torch.Tensor) -> torch.Tensor:
    """splitmix64's finalizer (Steele et al., 2014): int64, whose products wrap."""
    numbers = (numbers ^ ((numbers >> 30) & (2**34 - 1))) * (0xBF58476D1CE4E5B9 - 2**64)
    numbers = (numbers ^ ((numbers >> 27) & (2**37 - 1))) * (0x94D049BB133111EB - 2**64)
    return numbers ^ ((numbers >> 31) & (2**33 - 1))


def _mix32(numbers: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's finalizer: int32, whose products wrap. In place."""
    numbers.bitwise_xor_((numbers >> 16) & 0xFFFF).mul_(0x85EBCA6B - 2**32)
    numbers.bitwise_xor_((numbers >> 13) & 0x7FFFF).mul_(0xC2B2AE35 - 2**32)
    return numbers.bitwise_xor_((numbers >> 16) & 0xFFFF)
