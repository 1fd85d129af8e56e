"""Rows sorted by expert, and back, beside plain indexing."""

from __future__ import annotations

import pytest
import torch

from policies.experts.row_order import rows_of_tokens, sort_by_expert, tokens_of_rows

NUM_TOKENS, NUM_CHOSEN, NUM_EXPERTS = 50, 3, 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_go_to_their_experts_and_back_with_their_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    chosen = torch.stack([torch.randperm(NUM_EXPERTS - 1)[:NUM_CHOSEN] for _ in range(NUM_TOKENS)])
    order = sort_by_expert(chosen, NUM_EXPERTS)
    assert torch.equal(order.ends, chosen.flatten().bincount(minlength=NUM_EXPERTS).cumsum(0).int())
    assert order.ends[-1] == order.ends[-2], "the last expert has no rows"
    assert torch.equal(order.expert_of_row, chosen.flatten().sort().values.int())

    tokens = torch.randn(NUM_TOKENS, 16, dtype=dtype, requires_grad=True)
    rows = rows_of_tokens(tokens, order.order, order.places)
    assert torch.equal(rows, tokens[order.order // NUM_CHOSEN])
    factors = torch.randn(len(rows), 1, dtype=dtype)
    found = tokens_of_rows(rows * factors, order.order, order.places, NUM_TOKENS)
    expected = torch.zeros(NUM_TOKENS, 16).index_add(0, order.order // NUM_CHOSEN, (rows * factors).float())
    torch.testing.assert_close(found, expected.to(dtype))

    gradient = torch.randn_like(found)
    (found_gradient,) = torch.autograd.grad(found, tokens, gradient)
    of_rows = (gradient[order.order // NUM_CHOSEN] * factors).float()
    expected = torch.zeros(NUM_TOKENS, 16).index_add(0, order.order // NUM_CHOSEN, of_rows)
    torch.testing.assert_close(found_gradient, expected.to(dtype))


def test_no_tokens_have_no_rows() -> None:
    order = sort_by_expert(torch.zeros(0, NUM_CHOSEN, dtype=torch.int64), NUM_EXPERTS)
    tokens = torch.zeros(0, 16, requires_grad=True)
    rows = rows_of_tokens(tokens, order.order, order.places)
    found = tokens_of_rows(rows, order.order, order.places, 0)
    assert (rows.shape, found.shape) == ((0, 16), (0, 16))
    assert torch.autograd.grad(found.sum(), tokens)[0].shape == (0, 16)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_copies_and_sums_rows_as_a_cpu(dtype: torch.dtype) -> None:
    """Of a width that does not fill its kernels' blocks; twice, since sums have one order."""
    torch.manual_seed(0)
    num_tokens, chosen, width = 300, 8, 2880
    order = sort_by_expert(torch.stack([torch.randperm(32)[:chosen] for _ in range(num_tokens)]).cuda(), 32)
    tokens = torch.randn(num_tokens, width, device="cuda", dtype=dtype)
    rows = rows_of_tokens(tokens, order.order, order.places)
    assert torch.equal(rows, tokens[order.order // chosen])
    rows = torch.randn_like(rows)
    found, again = (tokens_of_rows(rows, order.order, order.places, num_tokens) for _ in range(2))
    expected = rows[order.places].view(num_tokens, chosen, width).float().sum(dim=1).to(dtype)
    torch.testing.assert_close(found, expected)
    assert torch.equal(found, again)
