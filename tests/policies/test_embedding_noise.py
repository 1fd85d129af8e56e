"""NEFTune's noise: even, of the paper's size, of the sequence and the step alone, and in training alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from policies.embedding_noise import EmbeddingNoise, draw_of, noise_of, rows_of
from tasks.causal_lm import CausalLM
from tests.helpers.causal_models import make_batch, make_model

SIZE, ALPHA = 64, 5.0


def noise(ids: list[int], *, draw: int = 0, alpha: float = ALPHA) -> torch.Tensor:
    return noise_of(rows_of(torch.tensor([ids]), None, None, alpha, draw), SIZE, torch.float32)


def test_it_is_even_and_as_large_as_the_paper_says() -> None:
    ids = torch.randint(0, 1000, (400,)).tolist()
    found = noise(ids) * (400 * SIZE) ** 0.5 / ALPHA
    assert 0.999 < found.abs().max() <= 1
    assert found.mean().abs() < 0.015
    assert found.var().item() == pytest.approx(1 / 3, rel=0.02)
    counts = torch.histc(found, bins=20, min=-1, max=1)
    assert counts.min() > 0.9 * counts.mean()
    # Neither neighbours in the sequence nor in the embedding go together.
    for other in (found.roll(1, 0), found.roll(1, 1), noise(ids, draw=1) * (400 * SIZE) ** 0.5 / ALPHA):
        assert (found * other).mean().abs() < 0.01


def test_it_is_of_the_sequence_and_the_step_alone() -> None:
    first, second = [5, 6, 7, 8, 9], [5, 6, 7]
    wanted = torch.cat([noise(first), noise(second)])
    packed = rows_of(
        torch.tensor([[*first, *second, 0, 0]]), torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1]]), None, ALPHA, 0
    )
    assert torch.equal(noise_of(packed, SIZE, torch.float32)[:8], wanted)
    padded = rows_of(torch.tensor([[*second, 0, 0], first]), None, torch.tensor([3, 5]), ALPHA, 0)
    found = noise_of(padded, SIZE, torch.float32).view(2, 5, SIZE)
    assert torch.equal(found[1], noise(first))
    assert torch.equal(found[0, :3], noise(second))
    assert not found[0, 3:].any()
    assert (noise(first)[:3] - noise(second)).abs().min() > 0
    assert len({noise(first, draw=draw_of(seed, step)).sum().item() for seed in (0, 1) for step in range(3)}) == 6


def test_embeddings_are_noisy_in_training_alone() -> None:
    model, batch, task = make_model("llama"), make_batch(), CausalLM()
    seen: list[torch.Tensor] = []
    embedding = model.get_input_embeddings()
    steps = iter(range(9))
    losses: list[bool] = []

    def summed_loss(model: nn.Module, batch: Any, *loss_grad: float | None) -> torch.Tensor:
        losses.append(model.training)
        seen.append(embedding(batch.input_ids))
        return seen[-1].sum()

    loss = EmbeddingNoise(embedding, ALPHA, seed=0, steps_taken=lambda: next(steps)).adding(summed_loss)
    plain = embedding(batch.input_ids)
    loss(model.train(), batch, 1.0).backward()
    loss(model, batch, 1.0)
    loss(model.eval(), batch)
    first, second, evaluated = (embeddings - plain for embeddings in seen)
    assert first.any()
    assert not torch.equal(first, second)
    assert not evaluated.any()
    lengths = batch.row_lengths
    assert lengths is not None
    bounds = ALPHA / (lengths * plain.shape[-1]).sqrt()
    assert (first.abs().amax((1, 2)) <= bounds).all()
    assert task.OWN_SETTINGS  # other tasks refuse the flag
