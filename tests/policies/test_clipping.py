"""The gradient norm is the exact one, whatever the gradients' dtype, and clipping is torch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, AdamW

from policies.clipping import clip_grad_norm, sum_of_squares

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHAPES = [(7,), (3, 5), (64, 33), (1,), (128, 128), (2, 3, 4)]


def make_parameters(seed: int, scale: float, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for parameter in parameters[:-1]:  # the last took no part in this step
        parameter.grad = (scale * torch.randn(parameter.shape, generator=generator)).to(dtype)
    return parameters


def exact_norm(parameters: list[nn.Parameter]) -> float:
    return torch.cat([p.grad.double().flatten() for p in parameters if p.grad is not None]).norm().item()


@given(seed=st.integers(0, 10**6), scale=st.floats(1e-6, 1e6), threshold=st.floats(1e-3, 1e3))
@settings(max_examples=60, deadline=None)
def test_norm_and_clipped_gradients_are_torchs_own(seed: int, scale: float, threshold: float) -> None:
    ours, theirs = make_parameters(seed, scale), make_parameters(seed, scale)
    norm = clip_grad_norm(ours, threshold)
    wanted = torch.nn.utils.clip_grad_norm_(theirs, threshold)
    assert norm.item() == pytest.approx(wanted.item(), rel=1e-5)
    for parameter, other in zip(ours[:-1], theirs[:-1], strict=True):
        assert torch.allclose(parameter.grad, other.grad, rtol=1e-5, atol=0)
    assert ours[-1].grad is None


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_norm_of_bf16_gradients_is_not_rounded_to_bf16(seed: int, scale: float) -> None:
    parameters = make_parameters(seed, scale, torch.bfloat16)
    wanted = exact_norm(parameters)
    norm = clip_grad_norm(parameters, None)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_threshold_gradients_stay_as_they_are(dtype: torch.dtype) -> None:
    parameters, untouched = make_parameters(0, 100.0, dtype), make_parameters(0, 100.0, dtype)
    clip_grad_norm(parameters, None)
    for parameter, other in zip(parameters[:-1], untouched[:-1], strict=True):
        assert torch.equal(parameter.grad, other.grad)


def test_bf16_gradients_are_clipped_to_the_threshold_and_stay_bf16() -> None:
    parameters = make_parameters(0, 100.0, torch.bfloat16)
    clip_grad_norm(parameters, 0.5)
    assert exact_norm(parameters) == pytest.approx(0.5, rel=5e-3)
    assert parameters[0].grad.dtype == torch.bfloat16


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(value: float) -> None:
    parameters = make_parameters(0, 1.0)
    parameters[1].grad[0, 0] = value
    assert not clip_grad_norm(parameters, 1.0).isfinite()


def test_gradients_that_are_all_zero_have_norm_zero_and_stay_zero() -> None:
    parameters = make_parameters(0, 0.0)
    assert clip_grad_norm(parameters, 1.0).item() == 0
    assert not any(parameter.grad.any() for parameter in parameters[:-1])


@given(
    seed=st.integers(0, 10**6),
    size=st.floats(1e-6, 1e6),
    threshold=st.one_of(st.none(), st.floats(1e-3, 1e3)),
    exponent=st.integers(0, 24),
)
@settings(max_examples=60, deadline=None)
def test_a_scaled_loss_gives_the_norm_and_the_gradients_of_the_loss_itself(
    seed: int, size: float, threshold: float | None, exponent: int
) -> None:
    plain, scaled = make_parameters(seed, size), make_parameters(seed, size)
    for parameter in scaled[:-1]:
        parameter.grad *= 2.0**exponent
    norm = clip_grad_norm(scaled, threshold, scale=2.0**exponent)
    assert norm.item() == pytest.approx(clip_grad_norm(plain, threshold).item(), rel=1e-6)
    for parameter, other in zip(scaled[:-1], plain[:-1], strict=True):
        assert torch.allclose(parameter.grad, other.grad, rtol=1e-6, atol=0)


def test_a_scale_of_two_to_the_n_changes_no_bit_of_gradients_that_are_not_clipped() -> None:
    plain, scaled = make_parameters(0, 1.0), make_parameters(0, 1.0)
    for parameter in scaled[:-1]:
        parameter.grad *= 2.0**16
    clip_grad_norm(scaled, None, scale=2.0**16)
    for parameter, other in zip(scaled[:-1], plain[:-1], strict=True):
        assert torch.equal(parameter.grad, other.grad)


@pytest.mark.parametrize("threshold", [None, 0.5, 1e6])
@pytest.mark.parametrize("exponent", [0, 16])
def test_an_optimizer_that_divides_gradients_itself_makes_the_same_steps(
    threshold: float | None, exponent: int
) -> None:
    """Torch's fused AdamW and its plain loop, over steps of which some are clipped."""
    ours, theirs = make_parameters(0, 1.0), make_parameters(0, 1.0)
    fused, plain = AdamW(ours, lr=0.1, fused=True), AdamW(theirs, lr=0.1, foreach=False)
    for step in range(5):
        for mine, other, fresh in zip(ours, theirs, make_parameters(step, 10.0 ** (step - 3)), strict=True):
            mine.grad = None if fresh.grad is None else fresh.grad * 2.0**exponent
            other.grad = fresh.grad
        norm = clip_grad_norm(ours, threshold, scale=2.0**exponent, optimizer=fused)
        wanted = clip_grad_norm(theirs, threshold, optimizer=plain)
        assert norm.item() == pytest.approx(wanted.item(), rel=1e-6)
        fused.step()
        plain.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=1e-6, atol=1e-7)
        for key in ("exp_avg", "exp_avg_sq") if mine.grad is not None else ():
            difference = (fused.state[mine][key] - plain.state[other][key]).abs().max()
            assert difference <= 1e-6 * plain.state[other][key].abs().max()


def test_gradients_are_divided_once_by_either_the_optimizer_or_clipping() -> None:
    for make, clipped in ((lambda p: AdamW(p, fused=True), False), (lambda p: SGD(p, lr=1.0), True)):
        parameters, untouched = make_parameters(0, 100.0), make_parameters(0, 100.0)
        clip_grad_norm(parameters, 0.5, optimizer=make(parameters))
        for parameter, other in zip(parameters[:-1], untouched[:-1], strict=True):
            assert torch.equal(parameter.grad, other.grad) != clipped


@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_one_kernel_reads_large_and_small_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = [(16,), (3, 5), (512, 1024), (70_001,), (4096, 80), (4096, 80)]
    tensors = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    tensors[-1] = tensors[-1].T  # which it leaves to torch's kernel, as it does those of 15 and of 70,001 numbers
    wanted = sum(tensor.double().square().sum() for tensor in tensors)
    assert sum_of_squares(tensors, in_kernel=True).item() == pytest.approx(float(wanted), rel=1e-6)
    tensors[2][-1, -1] = float("inf")
    assert not sum_of_squares(tensors, in_kernel=True).isfinite()
