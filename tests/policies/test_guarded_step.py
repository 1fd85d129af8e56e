"""A step that is queued before the host looks at its numbers is left out by the device if they are not finite."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from policies.clipping import clip_grad_norm
from policies.guarded_step import step_if_finite
from policies.optimizers.compiled_adamw import CompiledAdamW

NOT_FINITE = [(math.nan, 1.0), (1.0, math.inf), (-math.inf, math.nan)]


def make_parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(3, 1024), (7,)]]


def set_gradients(parameters: list[nn.Parameter], *, are_finite: bool) -> None:
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.1 if are_finite else math.nan)


def tensors_of(parameters: list[nn.Parameter], optimizer: Optimizer) -> list[torch.Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.detach().clone() for tensor in (*parameters, *states)]


@pytest.mark.parametrize("kind", ["fused", pytest.param("compiled", marks=pytest.mark.slow)])
def test_nothing_changes_unless_all_numbers_are_finite(kind: str) -> None:
    parameters = make_parameters()
    ours: AdamW = AdamW(parameters, fused=True) if kind == "fused" else CompiledAdamW(parameters, large=2048)
    for numbers in [(1.0, 2.0), *NOT_FINITE]:
        are_finite = all(map(math.isfinite, numbers))
        set_gradients(parameters, are_finite=are_finite)
        clip_grad_norm(parameters, 1.0, optimizer=ours)
        before = tensors_of(parameters, ours)
        assert step_if_finite(ours, torch.tensor(numbers), may_recover=True)
        after = tensors_of(parameters, ours)
        if are_finite:
            assert not any(map(torch.equal, before, after))
        else:
            assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("kind", ["fused", pytest.param("compiled", marks=pytest.mark.slow)])
def test_steps_after_one_that_was_left_out_are_as_if_it_had_not_been(kind: str) -> None:
    results = []
    for leaves_out in (False, True):
        parameters = make_parameters()
        ours: AdamW = AdamW(parameters, fused=True) if kind == "fused" else CompiledAdamW(parameters, large=2048)
        for numbers in [(1.0, 2.0), *([(math.nan, 1.0)] if leaves_out else []), (1.0, 3.0)]:
            set_gradients(parameters, are_finite=math.isfinite(numbers[0]))
            assert step_if_finite(ours, torch.tensor(numbers), may_recover=True)
        results.append(copy.deepcopy(tensors_of(parameters, ours)))
    assert all(map(torch.equal, *results))


def test_other_optimizers_and_weights_elsewhere_are_for_the_host_to_step() -> None:
    parameters = make_parameters()
    set_gradients(parameters, are_finite=True)
    for optimizer, device in ((SGD(parameters, foreach=True), "cpu"), (AdamW(parameters, fused=True), "meta")):
        before = tensors_of(parameters, optimizer)
        assert not step_if_finite(optimizer, torch.ones(2, device=device), may_recover=True)
        assert all(map(torch.equal, before, tensors_of(parameters, optimizer)))


@pytest.mark.parametrize("kind", ["fused", pytest.param("compiled", marks=pytest.mark.slow)])
def test_if_the_run_cannot_recover_all_updates_after_one_that_was_left_out_are_left_out(kind: str) -> None:
    parameters = make_parameters()
    ours: AdamW = AdamW(parameters, fused=True) if kind == "fused" else CompiledAdamW(parameters, large=2048)
    for numbers in [(1.0, 2.0), (math.nan, 1.0), (1.0, 3.0), (2.0, 1.0)]:
        set_gradients(parameters, are_finite=math.isfinite(numbers[0]))
        before = tensors_of(parameters, ours)
        assert step_if_finite(ours, torch.tensor(numbers), may_recover=False)
        after = tensors_of(parameters, ours)
        assert any(map(torch.equal, before, after)) == (numbers != (1.0, 2.0))
        assert all(map(torch.equal, before, after)) == (numbers != (1.0, 2.0))
