"""The trial of packed rows before training: no document of a row may see another one.

A few models take no note of position ids, and leak without an error: those that are known
(`utils.compat.LEAKS_WHEN_PACKED`) were not packed in the first place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from data.sequences.tokenized import TokenSequence
from data.tokens.labels import IGNORE_INDEX
from policies.sharding import reshard
from utils.errors import ConfigError
from utils.parameters import count_weights

# Tokens of the trial's row. Half of the long one is the first document, longer than a window of 128 tokens. The second
# one begins inside a chunk of 64 tokens, as delta nets compute them, and goes on through the next chunks.
LONG, SHORT = 400, 60
SMALL = 2_000_000  # weights of a model that a CPU tries on the long row, too, in a fraction of a second
NUM_TRIES = 2  # changes of the first document, which must all move a loss of the second
LEAKS = (
    "--batching_strategy: with this model the documents of a packed row would see each other; give --batching_strategy "
    "padding"
)


class TriedRow(NamedTuple):
    """What a trial puts into a packed row."""

    first: Sequence[Any]  # a sequence, and `NUM_TRIES` others of its length to put in its place; without labels
    second: Any  # the only one with labels, so its losses may depend on the first by a leak alone
    third: Sequence[Any]  # as the first


def check_packing_isolates(
    model: nn.Module,
    token_losses_of: Callable[[list[list[Any]]], torch.Tensor],
    *,
    vocab_size: int,
    row_length: int,
    device_type: str = "cpu",
) -> None:
    """`check_row_isolates` with random documents.

    Args:
        token_losses_of: as of `check_row_isolates`.
        row_length: the most tokens of a row of the run.
        device_type: of the device that computes: "cuda", "cpu".

    Raises:
        ConfigError: if packing would leak.
    """
    generator = np.random.default_rng(0)
    lengths = _document_lengths(min(row_length, _trial_length(model, device_type)))
    first, second, third = (documents(generator, vocab_size, length) for length in lengths)
    tried = TriedRow(
        [without_labels(ids, 0) for ids in first],
        TokenSequence(second[0], second[0], 1),
        [without_labels(ids, 2) for ids in third],
    )
    check_row_isolates(model, token_losses_of, tried)


@torch.no_grad()
def check_row_isolates(
    model: nn.Module, token_losses_of: Callable[[list[list[Any]]], torch.Tensor], tried: TriedRow
) -> None:
    """Pack three sequences into a row, change the first, and refuse if that changes a loss of the second.

    A change of the third one, which causal models cannot see, shows how far losses move by rounding alone: kernels of
    experts, for one, round by how many tokens they get. Every rank must call this.

    Args:
        token_losses_of: the losses of rows' label tokens, by the collation and the forward pass that training uses.

    Raises:
        ConfigError: if packing would leak.
    """

    def losses(before: Any, after: Any) -> torch.Tensor:
        return token_losses_of([[before, tried.second, after]]).double().cpu()

    first, third, training = tried.first, tried.third, model.training
    model.eval()
    # Eager: compiled layers would specialize for the trial's shape, and after a second shape compile dynamic ones.
    with torch.compiler.set_stance("force_eager"):
        plain = losses(first[0], third[0])
        rounding = float((losses(first[0], third[1]) - plain).abs().max())
        moved = min(float((losses(other, third[0]) - plain).abs().max()) for other in first[1:])
    model.train(training)
    reshard(model)
    if moved > max(1e-5 * float(plain.abs().max()), 10 * rounding):
        raise ConfigError(LEAKS)


@torch.no_grad()
def check_same_alone(
    model: nn.Module,
    token_losses_of: Callable[[list[list[Any]]], torch.Tensor],
    padded_losses_of: Callable[[list[list[Any]]], torch.Tensor],
    tried: TriedRow,
    *,
    tolerance: float,
) -> None:
    """Refuse if a sample's losses in a packed row are others than alone in a padded one. Every rank must call this.

    The model itself counts the positions of a padded row, and knows which of its tokens see each other.

    Args:
        token_losses_of, padded_losses_of: the losses of rows' label tokens, packed and padded.
        tolerance: by how much they may differ, relative: kernels round otherwise.

    Raises:
        ConfigError: if so.
    """
    training = model.training
    model.eval()
    with torch.compiler.set_stance("force_eager"):
        packed = token_losses_of([[tried.first[0], tried.second, tried.third[0]]]).double().cpu()
        alone = padded_losses_of([[tried.second]]).double().cpu()
    model.train(training)
    reshard(model)
    # Of losses that are not finite, the difference is none, and training stops.
    if float((packed - alone).abs().mean()) > tolerance * max(1.0, float(alone.mean())):
        raise ConfigError(
            "--batching_strategy: with this model the losses of a sample are others in a packed row than alone; give "
            "--batching_strategy padding"
        )


def _trial_length(model: nn.Module, device_type: str) -> int:
    is_quick = device_type != "cpu" or sum(counted.num_weights for counted in count_weights(model)) <= SMALL
    return LONG if is_quick else SHORT


def _document_lengths(row_length: int) -> tuple[int, int, int]:
    second, third = max(2, 2 * row_length // 5), max(1, row_length // 10)
    return max(1, row_length - second - third), second, third


def documents(generator: np.random.Generator, vocab_size: int, length: int) -> np.ndarray:
    """A document, and others to put in its place that differ from it in every token: int32 [1 + NUM_TRIES, length]."""
    drawn = generator.integers(0, vocab_size, (1, length))
    shifts = generator.integers(1, max(2, vocab_size), (NUM_TRIES, length))
    return np.concatenate([drawn, (drawn + shifts) % vocab_size]).astype(np.int32)


def without_labels(ids: np.ndarray, source_row: int) -> TokenSequence:
    return TokenSequence(ids, np.full_like(ids, IGNORE_INDEX), source_row)
