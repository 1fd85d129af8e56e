"""--deterministic: the same bits each time, or one line that says why not."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from utils.errors import RunError
from utils.seeding import deterministic_kernels_named, use_deterministic_kernels


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    use_deterministic_kernels()
    yield
    torch.use_deterministic_algorithms(False)


def test_an_operation_without_a_deterministic_kernel_ends_the_run_in_one_line() -> None:
    with (
        pytest.raises(RunError, match=r"^--deterministic: torch has no .* kernel for put_, .*; leave .* out$"),
        deterministic_kernels_named(),
    ):
        torch.zeros(4).put_(torch.tensor([1]), torch.ones(1))


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="size of tensor"), deterministic_kernels_named():
        torch.ones(2) + torch.ones(3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_attention_has_the_same_gradients_each_time() -> None:
    torch.manual_seed(0)
    heads = torch.randn(3, 2, 8, 4096, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    found = []
    for _ in range(5):
        output = F.scaled_dot_product_attention(*heads, is_causal=True)
        found += torch.autograd.grad(output.square().sum(), heads)
    assert all(torch.equal(gradient, found[0]) for gradient in found[1:])
