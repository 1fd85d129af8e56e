"""Losses that are no sum over tokens (policies/loss/objectives.py), beside autograd's on whole logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from policies.loss.compiled_cross_entropy import _summed_cross_entropy
from policies.loss.objectives import loss_by_objective
from policies.loss.summed_loss import summed_cross_entropy

NUM_TOKENS, CHUNK, VOCAB = 23, 7, 50


def objective(losses: torch.Tensor) -> torch.Tensor:
    """Of four answers' losses, each a sum over its tokens, something that is not linear."""
    answers = torch.arange(NUM_TOKENS) % 4
    return F.softplus(torch.zeros(4, dtype=losses.dtype).index_add(0, answers, losses) * 0.1).sum()


@pytest.mark.parametrize("cross_entropy", [summed_cross_entropy, _summed_cross_entropy])
@pytest.mark.parametrize("loss_grad", [None, 3.0])
@pytest.mark.parametrize(
    ("head_trains", "dtype", "num_head_passes"),
    [(False, torch.float32, 1), (True, torch.float32, 2), (False, torch.bfloat16, 1), (False, torch.float16, 2)],
)
def test_a_frozen_head_is_computed_once_and_gradients_are_those_of_whole_logits(
    cross_entropy: Callable[..., torch.Tensor],
    loss_grad: float | None,
    head_trains: bool,
    dtype: torch.dtype,
    num_head_passes: int,
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(VOCAB, 16, dtype=dtype)
    hidden = torch.randn(1, NUM_TOKENS, 16, dtype=dtype)
    targets = torch.randint(VOCAB, (NUM_TOKENS,))
    targets[3] = -100
    wanted = [hidden.float().requires_grad_(), weight.float().requires_grad_()]
    whole = objective(F.cross_entropy(F.linear(wanted[0][0], wanted[1]), targets, reduction="none"))
    (whole * 3.0).backward()

    hidden, weight = hidden.requires_grad_(), weight.requires_grad_(head_trains)
    chunks, passes = list(zip(hidden.split(CHUNK, dim=1), targets.split(CHUNK), strict=True)), []

    def logits_of(part: torch.Tensor) -> torch.Tensor:
        passes.append(part.shape[1])
        return F.linear(part.squeeze(0), weight)

    loss = loss_by_objective(hidden, chunks, logits_of, cross_entropy, objective, loss_grad)
    (loss * 3.0).backward()
    assert sum(passes) == num_head_passes * NUM_TOKENS
    rounding = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(loss.detach(), whole.detach(), rtol=rounding, atol=0)
    for got, expected in [(hidden.grad, wanted[0].grad), *([(weight.grad, wanted[1].grad)] if head_trains else [])]:
        assert got is not None
        assert expected is not None
        assert (got.float() - expected).norm() <= rounding * expected.norm()
