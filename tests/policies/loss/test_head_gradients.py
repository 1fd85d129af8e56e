"""A head's gradients come with its loss: as exact as before, in no more memory, and never silently wrong."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from policies.loss.head_gradients import loss_with_gradients
from policies.loss.summed_loss import summed_cross_entropy, use_summed_loss
from tasks.causal_lm import CausalLM
from tests.helpers.causal_models import make_batch, make_model, reference_loss
from tests.helpers.small_device import SmallDevice

TASK = CausalLM()

TOKENS, WIDTH, VOCAB, CHUNK = 96, 32, 4000, 16


class Work:
    """A head, its input, and targets of which some are no labels."""

    def __init__(self, dtype: torch.dtype, *, bias: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.head = nn.Linear(WIDTH, VOCAB, bias=bias, dtype=dtype)
        with torch.no_grad():
            self.head.weight.copy_(0.3 * torch.randn(VOCAB, WIDTH, generator=generator))
        self.input = torch.randn(1, TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
        self.targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
        self.targets[::5] = -100

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(hidden)[0]
        return logits

    def chunks(self, hidden: torch.Tensor, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(hidden.split(size, dim=1), self.targets.split(size), strict=True))

    def loss(self, size: int = CHUNK, loss_grad: float | None = None) -> torch.Tensor:
        hidden = self.input.tanh()
        return loss_with_gradients(hidden, self.chunks(hidden, size), self.logits_of, summed_cross_entropy, loss_grad)

    def recomputed_loss(self, size: int = CHUNK) -> torch.Tensor:
        """The same loss, its logits computed again in backward."""

        def of_chunk(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return summed_cross_entropy(self.logits_of(hidden), targets)

        chunks = self.chunks(self.input.tanh(), size)
        if len(chunks) == 1:
            return of_chunk(*chunks[0])
        return torch.stack([checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks]).sum()

    def gradients(self) -> list[torch.Tensor]:
        return [tensor.grad for tensor in (self.input, *self.head.parameters()) if tensor.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [CHUNK, TOKENS])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_the_peak_of_a_step_is_no_higher_than_if_logits_were_computed_again(
    dtype: torch.dtype, size: int, num_micro_batches: int
) -> None:
    peaks = []
    for name in ("loss", "recomputed_loss"):
        work = Work(dtype)
        with SmallDevice() as device:
            for _ in range(num_micro_batches):
                (getattr(work, name)(size) / 7).backward()
        peaks.append(device.peak)
    assert peaks[0] <= peaks[1] + 64  # numbers


def test_sums_of_bf16_gradients_over_chunks_are_as_exact_as_autograds() -> None:
    """The reference is in fp64, on the same bf16 weights and inputs."""
    exact, found, before = Work(torch.bfloat16), Work(torch.bfloat16, bias=True), Work(torch.bfloat16, bias=True)
    nn.init.zeros_(found.head.bias)
    nn.init.zeros_(before.head.bias)
    weight = exact.head.weight.detach().double().requires_grad_()
    logits = exact.input.detach().tanh().double()[0] @ weight.t()
    F.cross_entropy(logits, exact.targets, reduction="sum").backward()
    found.loss(4).backward()
    before.recomputed_loss(4).backward()

    def error(work: Work) -> float:
        return float((work.head.weight.grad.double() - weight.grad).norm() / weight.grad.norm())

    assert error(found) <= error(before)
    assert error(found) < 4e-3
    for mine, other in zip(found.gradients(), before.gradients(), strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine - other).norm() <= 2e-2 * other.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_are_rounded_once_if_the_gradient_of_the_loss_is_said_before(dtype: torch.dtype) -> None:
    """Of fp16 the small ones would be lost without the loss scale, and infinite ones stay infinite."""
    small = 2.0**-18 / 3
    for loss_grad in (small, 2.0**15 / 3, 1e9):
        said, wanted = Work(dtype), Work(dtype)
        (said.loss(TOKENS, loss_grad) * loss_grad).backward()
        (wanted.recomputed_loss(TOKENS) * loss_grad).backward()
        for mine, other in zip(said.gradients(), wanted.gradients(), strict=True):
            assert torch.equal(mine.nan_to_num(7.0), other.nan_to_num(7.0))
    unsaid = Work(dtype)
    (unsaid.loss(TOKENS) * small).backward()
    exact = Work(torch.float32)
    (exact.loss(TOKENS) * small).backward()
    assert unsaid.head.weight.grad.float() == pytest.approx(exact.head.weight.grad, abs=1e-5)


def test_a_gradient_of_the_loss_that_is_not_the_one_that_was_said_does_not_pass() -> None:
    for freeze_input in (False, True):
        work = Work(torch.float32)
        work.input.requires_grad_(not freeze_input)
        (work.loss(loss_grad=0.25) * 0.5).backward()
        assert any(gradient.isnan().any() for gradient in work.gradients())


def test_the_gradient_of_the_weight_is_handed_on_without_a_copy() -> None:
    work = Work(torch.float32)
    loss = work.loss(loss_grad=0.25)
    kept = {gradient.data_ptr() for gradient in loss.grad_fn.saved_tensors}  # type: ignore[union-attr]
    (loss * 0.25).backward()
    assert work.head.weight.grad.data_ptr() in kept


def test_what_is_trained_decides_which_gradients_there_are() -> None:
    for freeze_input, freeze_head in [(True, False), (False, True), (True, True)]:
        work, wanted = Work(torch.float32, bias=True), Work(torch.float32, bias=True)
        wanted.head.load_state_dict(work.head.state_dict())
        for each in (work, wanted):
            each.input.requires_grad_(not freeze_input)
            each.head.weight.requires_grad_(not freeze_head)
            each.head.bias.requires_grad_(not freeze_head)
        loss, reference = work.loss(), wanted.recomputed_loss()
        assert loss.item() == pytest.approx(reference.item(), rel=1e-6)
        assert loss.requires_grad == reference.requires_grad == (not (freeze_input and freeze_head))
        if loss.requires_grad:
            loss.backward()
            reference.backward()
        assert len(work.gradients()) == len(wanted.gradients()) == (not freeze_input) + 2 * (not freeze_head)
        for mine, other in zip(work.gradients(), wanted.gradients(), strict=True):
            assert torch.allclose(mine, other, rtol=1e-5, atol=1e-6)


def test_parameters_that_share_a_gradient_are_not_added_to_twice() -> None:
    """Both get the very same tensor from autograd."""
    work, first, second = Work(torch.float32), nn.Parameter(torch.zeros(VOCAB)), nn.Parameter(torch.zeros(VOCAB))
    hidden = work.input.tanh()
    chunks = work.chunks(hidden, CHUNK)
    loss_with_gradients(
        hidden, chunks, lambda part: work.logits_of(part) + (first + second), summed_cross_entropy, None
    ).backward()
    wanted = torch.zeros(VOCAB, requires_grad=True)
    F.cross_entropy(work.logits_of(work.input.tanh()) + wanted, work.targets, reduction="sum").backward()
    for bias in (first, second):
        assert torch.allclose(bias.grad, wanted.grad, rtol=1e-5, atol=1e-6)


def test_a_second_backward_and_a_second_derivative_are_errors() -> None:
    loss = Work(torch.float32).loss()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    work = Work(torch.float32)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(work.loss(), work.head.weight, create_graph=True)
    work = Work(torch.float32)
    with pytest.raises(RuntimeError, match="inside of a function being transformed"):
        torch.func.grad(lambda hidden: loss_of_input(work, hidden))(work.input.detach())


def loss_of_input(work: Work, hidden: torch.Tensor) -> torch.Tensor:
    return loss_with_gradients(hidden, work.chunks(hidden, CHUNK), work.logits_of, summed_cross_entropy, 1.0)


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_adapters_of_the_head_get_the_gradients_of_a_plain_loop(name: str, use_dora: bool) -> None:
    targets = ["q_proj", "lm_head"]
    torch.manual_seed(0)
    reference: Any = peft.get_peft_model(
        make_model(name), peft.LoraConfig(r=4, target_modules=targets, use_dora=use_dora)
    )
    for key, parameter in reference.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(parameter, std=0.1)
    model = copy.deepcopy(reference)
    base = model.get_base_model()
    use_summed_loss(base, TASK.backbone(base), 7, TASK.compute_logits)
    batch = make_batch()
    wanted, loss = reference_loss(reference, batch), TASK.summed_loss(model, batch)
    wanted.backward()
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    for (key, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        if other.grad is not None:
            assert torch.allclose(parameter.grad, other.grad, rtol=1e-4, atol=1e-5), key
