"""A trial before training: rows that ranks share have the losses of the same rows on one rank.

Attention is what ranks exchange. A model that mixes tokens anywhere else, or counts positions by itself, would train
without an error, on other losses. So the run's own model decides, in its precision and layout, not a list of families.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from policies.adapters.adapted_model import base_model
from policies.context_parallel.attention import whole_rows
from policies.sharding import reshard, unwrap
from ranks.context_group import ContextGroup


@torch.no_grad()
def find_other_losses(
    model: nn.Module,
    token_losses: Callable[[nn.Module, Any], torch.Tensor],
    whole: Any,
    part: Any,
    group: ContextGroup,
    device: torch.device,
    *,
    tolerance: float,
) -> str | None:
    """By how much losses differ, in words; None if they do not. Every rank must call this.

    Args:
        token_losses: the loss of each label token of a batch (`tasks.task.Task.token_losses`).
        whole: a batch; the same on all ranks of the group.
        part: this rank's part of it (`tasks.row_shares.share_of`).
        tolerance: of the mean difference, relative.
    """
    training, width = model.training, whole.text_ids.shape[1]
    model.eval()
    # Eager: compiled layers would specialize for the trial's shapes.
    with torch.compiler.set_stance("force_eager"):
        with whole_rows(base_model(unwrap(model))):
            wanted = token_losses(model, whole.to(device)).double()
        found = token_losses(model, part.to(device)).double()[: part.num_label_tokens]  # no label: one loss, of none
    model.train(training)
    reshard(model)
    is_mine = (whole.target_positions % width * group.size // width == group.rank).to(device)
    difference, size = (found - wanted[is_mine]).abs().sum(), wanted[is_mine].abs().sum()
    # A loss that is not finite has no difference, and training stops at it.
    if not float(difference) > tolerance * max(len(found), float(size)):
        return None
    mean = float(difference) / len(found)
    return f"losses of rows that ranks share differ by {mean:.2g} on average from those of whole rows"
