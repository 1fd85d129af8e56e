"""The optimizer of a run: what it trains, and the defaults of AdamW and SGD."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from transformers import AutoModelForCausalLM

from configs.flags import parse_flags
from configs.fsdp import FsdpConfig
from configs.training import TrainConfig
from policies.optimizers.build import build_optimizer
from utils.errors import ConfigError

LR = 0.02


def sections(*flags: str) -> tuple[TrainConfig, FsdpConfig]:
    config = parse_flags(["--model_name", "m", "--lr", str(LR), *flags])
    return config.train_config, config.fsdp_config


def test_the_optimizer_holds_what_is_trained_and_nothing_else(tiny_model: Path) -> None:
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_model), peft.LoraConfig(target_modules=["q_proj", "v_proj"])
    )
    groups = build_optimizer(model, *sections()).param_groups
    held = {id(parameter) for group in groups for parameter in group["params"]}
    assert held == {id(parameter) for name, parameter in model.named_parameters() if "lora_" in name}


def test_a_tied_weight_is_held_once(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    held = [parameter for group in build_optimizer(model, *sections()).param_groups for parameter in group["params"]]
    assert len(held) == len({id(parameter) for parameter in held}) == len(list(model.parameters()))


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing is trainable"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False), *sections())


def test_adamw_is_the_default_and_decays_only_where_asked() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), *sections())
    assert type(optimizer) is AdamW
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0]
    assert build_optimizer(nn.Linear(2, 2), *sections("--weight_decay", "0.1")).param_groups[0]["weight_decay"] == 0.1


@pytest.mark.parametrize(("flags", "momentum"), [((), 0.9), (("--momentum", "0.5"), 0.5), (("--momentum", "0"), 0.0)])
def test_sgd_has_momentum_09_unless_told_otherwise(flags: tuple[str, ...], momentum: float) -> None:
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(model, *sections("--optimizer", "SGD", *flags))
    assert type(optimizer) is SGD
    before = model.weight.detach().clone()
    for _ in range(2):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    assert torch.allclose(model.weight, before - LR * (1 + (1 + momentum)))


@pytest.mark.parametrize("name", ["AdamW", "anyprecision", "AdamW8bit"])
def test_betas_are_those_of_the_flags(name: str) -> None:
    (group,) = build_optimizer(
        nn.Linear(2, 2), *sections("--optimizer", name, "--adam_beta1", "0.8", "--adam_beta2", "0.95")
    ).param_groups
    assert group["betas"] == (0.8, 0.95)
    assert build_optimizer(nn.Linear(2, 2), *sections("--optimizer", name)).param_groups[0]["betas"] == (0.9, 0.999)
