"""Rows that several ranks share: each collates whole rows, and keeps its part of their tokens.

Labels are matched with the positions that predict them in the whole row, so a label after a border is not lost. The
offsets of packed documents stay whole, for attention computes whole rows (policies/context_parallel/).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from data.sequences.token_columns import OF_TARGETS
from data.tokens.labels import IGNORE_INDEX
from ranks.context_group import ContextGroup
from tasks.causal_batches import CausalMicroBatch


@dataclass(frozen=True)
class SharedRows:
    """Collates rows, and keeps this rank's part. It runs in the loader's processes."""

    collate: Callable[[list[Any]], Any]
    group: ContextGroup

    def __call__(self, rows: list[Any]) -> CausalMicroBatch:
        whole: CausalMicroBatch = self.collate(rows)
        return share_of(whole, self.group)


def share_of(batch: CausalMicroBatch, group: ContextGroup) -> CausalMicroBatch:
    """One rank's part of a batch: as many tokens of each row as the others have. The counts of all parts add up to the
    batch's. A part without labels keeps one position, as a batch without them does (`data.tokens.labels`).

    Args:
        batch: without a mask; its width is a multiple of the group's size.
    """
    width = batch.input_ids.shape[1]
    length, rest = divmod(width, group.size)
    if rest or batch.attention_mask is not None or batch.row_lengths is None:
        raise ValueError(f"rows of {width} tokens cannot be shared by {group.size} ranks")
    start = group.rank * length
    part = slice(start, start + length)
    positions = batch.position_ids
    if positions is None:  # the model would count from the start of this part
        positions = torch.arange(width).expand(batch.input_ids.shape)
    is_mine = (batch.target_positions % width // length == group.rank) & (batch.targets != IGNORE_INDEX)
    row, place = batch.target_positions[is_mine] // width, batch.target_positions[is_mine] % width
    target_positions, targets = row * length + place - start, batch.targets[is_mine]
    num_label_tokens = targets.numel()
    chosen = is_mine if num_label_tokens else torch.arange(len(is_mine)) < 1
    of_targets: dict[str, Any] = {
        name: None if (value := getattr(batch, name)) is None else value[chosen] for name in OF_TARGETS
    }
    if not num_label_tokens:
        target_positions, targets = torch.zeros(1, dtype=torch.int64), torch.full((1,), IGNORE_INDEX)
    row_lengths = (batch.row_lengths - start).clamp(0, length)
    pairs, rest = divmod(batch.num_attended_pairs, group.size)  # each rank computes whole rows, and some of the heads
    return replace(
        batch,
        input_ids=batch.input_ids[:, part].contiguous(),
        labels=batch.labels[:, part].contiguous(),
        position_ids=positions[:, part].contiguous(),
        target_positions=target_positions,
        targets=targets,
        num_tokens=int(row_lengths.sum()),
        num_label_tokens=num_label_tokens,
        num_attended_pairs=pairs + (group.rank < rest),
        row_lengths=row_lengths,
        **of_targets,
    )
