"""Labels: the token that each position has to predict, and the positions that count in the loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F

IGNORE_INDEX = -100


def shift_left(labels: torch.Tensor) -> torch.Tensor:
    """The label of each position's next token, [batch, seq] -> [batch, seq]; the last position gets IGNORE_INDEX."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def shift_right(labels: torch.Tensor, start_id: int, padding_id: int) -> torch.Tensor:
    """What a decoder reads to predict these labels, [batch, seq] -> [batch, seq]: each one place later.

    Args:
        start_id: the token before the first label.
        padding_id: the token in place of IGNORE_INDEX.
    """
    shifted = F.pad(labels[:, :-1], (1, 0), value=start_id)
    return shifted.masked_fill(shifted == IGNORE_INDEX, padding_id)


def next_tokens_to_predict(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions of a causal model that predict a label token, and these tokens: int64 [n] each, n at least 1.

    Args:
        labels: int64 [batch, seq], not shifted; see `labels_to_predict`.
    """
    return labels_to_predict(shift_left(labels))


def labels_to_predict(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions that have a label, and these labels: int64 [n] each, n at least 1.

    Positions are indices into the flattened [batch x seq]. Call it on the host: counting on a device would wait for it.
    A batch without labels keeps its first position, so that the loss, zero, still depends on the weights and every rank
    has gradients to reduce.

    Args:
        labels: int64 [batch, seq], each at the position whose logits predict it.
    """
    flat = labels.reshape(-1)
    positions = (flat != IGNORE_INDEX).nonzero().squeeze(1)
    if not len(positions):
        positions = torch.zeros(1, dtype=torch.int64)
    return positions, flat[positions]
