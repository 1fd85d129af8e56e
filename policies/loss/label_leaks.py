"""A trial before training: no position sees the label tokens that follow it, and no row sees padding or other rows.

A family whose mask is not what its collator expects trains without an error, on losses that mean nothing. So the run's
own batches, in its own precision and layout, decide, not a list of families.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self

import torch
from torch import nn

from data.batches.step_loader import Unreadable
from policies.sharding import reshard
from utils.errors import in_one_line
from utils.memory_errors import what_ran_out
from utils.seeding import rng_state, seed_everything, set_rng_state

# The most tokens of a trial's row. For more of a large model a CPU takes seconds.
LENGTH_ON_GPU, LENGTH_ON_CPU = 320, 24
NUM_TRIES = 3  # changes of a row, of which one that moves nothing is enough


class TriedBatch(Protocol):
    """A micro-batch; `tasks.micro_batch.MicroBatch` says what each property holds."""

    @property
    def targets(self) -> torch.Tensor: ...
    @property
    def target_positions(self) -> torch.Tensor: ...
    @property
    def text_ids(self) -> torch.Tensor: ...
    def with_text_ids(self, ids: torch.Tensor) -> Self: ...
    def to(self, device: torch.device) -> Self: ...


@torch.no_grad()
def find_label_leak(
    model: nn.Module,
    token_losses: Callable[[nn.Module, Any], torch.Tensor],
    collate: Callable[[list[Any]], Any],
    rows: list[Any],
    device: torch.device,
    *,
    tolerance: float,
) -> str | None:
    """What is wrong with this model's losses, in words; None if nothing was found. Every rank must call this.

    Args:
        token_losses: the loss of each label token of a batch (`tasks.task.Task.token_losses`).
        collate: makes a batch of rows, as the run does.
        rows: two, the shorter one first.
        tolerance: by how much a row's losses may differ in a wider batch, whose kernels round otherwise; relative.
    """
    state, training = rng_state(), model.training
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def losses_of(batch: TriedBatch) -> torch.Tensor:
        seed_everything(0)  # the same dropout masks, and the same choices of routers that draw theirs
        return token_losses(model, batch.to(device)).double().cpu()

    try:
        # Eager: compiled layers would specialize for the trial's shapes.
        with torch.compiler.set_stance("force_eager"):
            # With padding and without: transformers may make a mask for one and none for the other.
            padded, unpadded = collate(rows), collate([rows[0], rows[0]])
            if isinstance(padded, Unreadable) or isinstance(unpadded, Unreadable):
                return None  # training meets it, too, and names its row
            model.train()  # some masks differ between training and evaluation
            found = _sees_what_follows(padded, losses_of) or _sees_what_follows(unpadded, losses_of)
            model.eval()
            return found or _sees_other_rows(padded, unpadded, losses_of, tolerance)
    except Exception as error:
        if what_ran_out(error):
            return None  # the first step runs out, too, and reports what it held
        return f"the first rows of these data cannot be computed ({type(error).__name__}: {in_one_line(error)})"
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)
        model.train(training)
        set_rng_state(state)
        reshard(model)


def _sees_what_follows(batch: TriedBatch, losses_of: Callable[[Any], torch.Tensor]) -> str | None:
    """Change the first row from its last but one label token on, padding included: no loss before that may move.

    The other rows are the measure of noise: experts that get other tokens round otherwise.
    """
    positions, width = batch.target_positions.cpu(), batch.text_ids.shape[1]
    is_first = positions < width
    if int(is_first.sum()) < 2:
        return None
    place = int(positions[is_first][-1])
    is_earlier = is_first & (positions < place)
    before = losses_of(batch)
    if not bool(before.isfinite().all()):
        return None  # training stops at such losses, and says so
    least = 1e-6 * float(before.abs().max())
    moved = 0.0
    for number in range(NUM_TRIES):
        ids = batch.text_ids.clone()
        ids[0, place:] = _others(ids[0, place:], batch.targets, number)
        differences = (losses_of(batch.with_text_ids(ids)) - before).abs()
        moved = float(differences[is_earlier].max())
        noise = float(differences[~is_first].max()) if bool((~is_first).any()) else 0.0
        if moved <= max(least, 10 * noise):
            return None
    return (
        f"positions see the tokens that follow them: the loss of earlier tokens moves by up to {moved:.2g} if a row's "
        "last label tokens change, so it would learn to copy them"
    )


def _sees_other_rows(
    padded: TriedBatch, unpadded: TriedBatch, losses_of: Callable[[Any], torch.Tensor], tolerance: float
) -> str | None:
    """The first row of both batches is the same one."""
    wide, narrow = (
        losses_of(batch)[batch.target_positions.cpu() < batch.text_ids.shape[1]] for batch in (padded, unpadded)
    )
    difference = float((wide - narrow).abs().mean())
    # Of losses that are not finite, the differences are none, and training stops.
    if not difference > tolerance * max(1.0, float(narrow.mean())):
        return None
    return (
        f"a row's losses depend on the rows next to it: in a wider batch they differ by {difference:.2g} on average, "
        "so it sees padding or other rows"
    )


def _others(ids: torch.Tensor, pool: torch.Tensor, number: int) -> torch.Tensor:
    """Another id for each, out of label tokens: no token that stands for something else, such as an image."""
    pool = pool.unique().to(ids.device)
    if len(pool) <= NUM_TRIES:
        pool = torch.cat([pool, (pool - 1).abs(), pool // 2, pool * 0]).unique()
    places = (torch.searchsorted(pool, ids) + 1 + number) % len(pool)
    return torch.where(pool[places] == ids, pool[(places + 1) % len(pool)], pool[places])
