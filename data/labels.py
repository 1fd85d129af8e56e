"""Labels: which token each position has to predict, and where that is learned."""

from __future__ import annotations

import torch
import torch.nn.functional as F

IGNORE_INDEX = -100


def shift_left(labels: torch.Tensor) -> torch.Tensor:
    """The next token of every position, [batch, seq] -> [batch, seq]; nothing follows the last."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def learned_positions(labels: torch.Tensor) -> torch.Tensor:
    """Where something is learned: indices into the flattened [batch x seq] positions, [n], at least one.

    Meant for the host, where counting waits for no device. A batch without labels keeps its first position, so that the
    loss, zero, still depends on the weights and every rank has gradients to reduce.
    """
    positions = (shift_left(labels).reshape(-1) != IGNORE_INDEX).nonzero().squeeze(1)
    return positions if len(positions) else torch.zeros(1, dtype=torch.int64)
