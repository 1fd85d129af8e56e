"""Muon is torch's for the matrices of layers, and torch's AdamW for embeddings, head and vectors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS
from torch.optim._muon import _zeropower_via_newtonschulz as zeropower
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from configs.flags import parse_flags
from policies.optimizers.build import build_optimizer
from policies.optimizers.muon import KIND

FLAGS = "--model_name m --optimizer Muon --lr 0.01 --weight_decay 0.1"


def test_a_step_is_that_of_torch(tiny_model: Path) -> None:
    config = parse_flags(FLAGS.split())
    model, other = (AutoModelForCausalLM.from_pretrained(tiny_model) for _ in range(2))
    optimizer = build_optimizer(model, config.train_config, config.fsdp_config)
    is_matrix = {n: p.dim() == 2 and "embed" not in n and "lm_head" not in n for n, p in other.named_parameters()}
    assert 0 < sum(is_matrix.values()) < len(is_matrix)
    matrices, rest = ([p for n, p in other.named_parameters() if is_matrix[n] == wanted] for wanted in (True, False))
    theirs = [
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.01, weight_decay=0.1, fused=True),
    ]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for parameter, twin in zip(model.parameters(), other.parameters(), strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            twin.grad = parameter.grad.clone()
        for one in (optimizer, *theirs):
            one.step()
    for parameter, twin in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, twin)


@pytest.mark.parametrize("shape", [(48, 20), (20, 48), (32, 32)])
def test_planned_flops_are_those_of_its_iterations(shape: tuple[int, int]) -> None:
    matrix = torch.ones(shape, dtype=torch.bfloat16, device="meta")
    with FlopCounterMode(display=False) as counter:
        zeropower(matrix, (DEFAULT_A, DEFAULT_B, DEFAULT_C), DEFAULT_NS_STEPS, EPS)
    assert KIND.product_flops(matrix) == counter.get_total_flops()
    assert KIND.product_flops(matrix[0]) == 0
