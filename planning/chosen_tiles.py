"""Whether the MLPs of a run's layers run in tiles, by the plan of its memory (`--tile_tokens auto`).

A run that fits without needs none. Else the largest tiles with which it fits are taken, or, if it fits with none, the
largest of those with the lowest peak: products of few tokens are slower.
"""

from __future__ import annotations

import math
from dataclasses import replace

from planning.machines.cards import Card
from planning.memory.memory_plan import MemoryPlan
from planning.memory.row_lengths import RowLengths
from planning.memory.run_memory import plan_memory
from planning.model.planned_model import PlannedModel, with_checkpointing
from policies.tiling.finding import why_not_tiled

SIZES = (32768, 16384, 8192, 4096)
"""Tokens of a tile, the largest first. Smaller ones would save nothing: a layer's attention holds more."""

ALIKE, WORTH_IT = 1.01, 0.98
"""A peak counts as the same up to the first factor, and as lower from the second on."""


def may_tile(planned: PlannedModel, card: Card, memory: MemoryPlan) -> bool:
    """Whether tiles are to be chosen: nothing was asked for or chosen, and the run does not fit without."""
    is_open = not isinstance(planned.config.train_config.tile_tokens, int)
    is_open = is_open and planned.resolved.policies.checkpointing is None
    if not (card.is_gpu and is_open) or memory.device_verdict == "fits":
        return False
    return why_not_tiled(planned.adapted.layers, planned.adapted.units) is None


def choose_tiles(
    planned: PlannedModel, memory: MemoryPlan, card: Card, rows: RowLengths
) -> tuple[PlannedModel, MemoryPlan, tuple[str, ...]]:
    """The model in tiles if they help, the plan of its memory, and lines to print.

    Args:
        planned: its checkpointing is chosen, and stays. Not to be used afterwards: its layers get tiles.
        memory: its plan without tiles.

    Raises:
        ConfigError: if the inputs of such a model are not known before data is read.
    """
    whole, found = planned.empty.checkpointing, dict[int, MemoryPlan]()
    num_tokens, before = rows.rows * max(rows.widest), math.inf
    for tokens in (size for size in SIZES if size < num_tokens):
        tiled = with_checkpointing(planned, replace(whole, tile_tokens=tokens))
        found[tokens] = plan_memory(tiled, card, rows)
        # Once smaller tiles save nothing, even smaller ones do not.
        if found[tokens].device_verdict == "fits" or found[tokens].peak_gib * ALIKE >= before:
            break
        before = found[tokens].peak_gib
    least = min((plan.peak_gib for plan in found.values()), default=memory.peak_gib)
    if least > WORTH_IT * memory.peak_gib:
        return with_checkpointing(planned, whole), memory, ()
    fitting = [tokens for tokens, plan in found.items() if plan.device_verdict == "fits"]
    tokens = (fitting or [tokens for tokens, plan in found.items() if plan.peak_gib <= ALIKE * least])[0]
    peak = f"a planned peak of {found[tokens].peak_gib:.1f} GiB of {card.memory_gib:.1f}"
    line = f"tile_tokens: auto is {tokens}, with {peak} ({memory.peak_gib:.1f} without tiles)"
    return with_checkpointing(planned, replace(whole, tile_tokens=tokens)), found[tokens], (line,)
