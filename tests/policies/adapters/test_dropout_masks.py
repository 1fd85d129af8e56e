"""Masks that follow from keys are as random as those that torch draws."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from policies.adapters.dropout_masks import BLOCKS, PLACES, draw_dropout, mask_from_keys, mask_like


@pytest.mark.parametrize("p", [0.05, 0.3])
def test_masks_of_keys_are_as_random_as_drawn_ones(p: float) -> None:
    """Their share, and that no element follows from another: beside it, of another row or column, or of other keys."""
    generator = torch.Generator().manual_seed(0)
    shape = torch.Size((4, 768, 512))
    size = (BLOCKS + PLACES + 512,)
    first, second = (
        mask_from_keys(torch.randint(-(2**31), 2**31, size, generator=generator, dtype=torch.int32), shape, p)
        for _ in range(2)
    )
    spread = math.sqrt(p * (1 - p))

    def standardized(mask: torch.Tensor) -> torch.Tensor:
        return (mask.double() - (1 - p)) / spread

    values = standardized(first).flatten(0, 1)
    bound = 5 / math.sqrt(values.numel())  # five standard deviations of a mean of independent elements
    others = [values.roll(by, dims) for by in (1, 7, 64, 256) for dims in (0, 1)] + [values.roll(PLACES, 0)]
    for other in (torch.ones_like(values), standardized(second).flatten(0, 1), *others):
        assert abs((values * other).mean().item()) < bound
    for dim in (0, 1):  # no row, and no column, has more or less than its share
        sums = values.mean(dim) * math.sqrt(values.shape[dim])
        assert sums.abs().max() < 6
        assert sums.var().item() == pytest.approx(1, abs=0.3)
    for by in (1, PLACES):
        rectangles = values[:-by, :-1] * values[by:, :-1] * values[:-by, 1:] * values[by:, 1:]
        # an element is not what its row's and its column's others imply
        assert abs(rectangles.mean().item()) < 5 / math.sqrt(rectangles.numel())


def test_compiled_code_draws_as_many_keys_for_every_batch() -> None:
    """Torch 2.11 cannot compile random tensors of a varying size in layers that are recomputed."""
    sizes: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        sizes.extend(node.args for node in graph.graph.nodes if node.target is torch.rand)
        return graph.forward

    @partial(torch.compile, backend=backend, fullgraph=True)
    def masked(inputs: torch.Tensor) -> torch.Tensor:
        p, keys = draw_dropout(inputs, 0.5)
        return mask_like(inputs, keys, p)

    torch._dynamo.reset()
    for num_rows in (7, 2000):
        inputs = torch.zeros(3, num_rows, 48)
        torch._dynamo.mark_dynamic(inputs, 1)
        mask = masked(inputs)
        assert mask.shape == inputs.shape
        assert mask.double().mean().item() == pytest.approx(0.5, abs=0.1)
    assert sizes == [(2, BLOCKS + PLACES + 48)]
