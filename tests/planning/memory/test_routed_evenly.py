"""A mixture whose code asks which experts have tokens has a plan, which keeps for a choice what a real pass keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.families.published import read_published
from configs.flags import parse_flags
from planning.machines.hardware import parse_hardware
from planning.planned_run import plan_of

ROWS, LENGTH = 4, 128


def longcat(choices: int) -> Any:
    """A tiny config without experts that compute nothing, so that what is kept depends on no router."""
    config: Any = read_published()["longcat_flash"].tiny_config(64)
    config.zero_expert_num, config.moe_topk = 0, choices
    config.architectures = ["LongcatFlashForCausalLM"]
    return config


def planned_bytes(config: Any, folder: Path) -> float:
    """Of activations, in forward."""
    config.save_pretrained(folder)
    shape = f"--batch_size_training {ROWS} --context_length {LENGTH} --run_validation False"
    uncompiled = "--mixed_precision False --compile False --activation_checkpointing off"
    flags = ["--model_name", str(folder), "--random_weights", *shape.split(), *uncompiled.split()]
    return plan_of(parse_flags(flags), parse_hardware("H100-80GB")).memory.phases["forward"].activations * 2**30


def kept_bytes(config: Any) -> float:
    """Of what a real forward pass keeps for backward, weights aside."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    ids = torch.randint(0, 64, (ROWS, LENGTH))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.model(ids, use_cache=False).last_hidden_state
    assert hidden.requires_grad
    return float(sum(storage.nbytes() for place, storage in kept.items() if place not in weights))


def test_a_plan_of_longcat_keeps_what_a_real_pass_keeps(tmp_path: Path) -> None:
    planned = [planned_bytes(longcat(choices), tmp_path / str(choices)) for choices in (2, 6)]
    kept = [kept_bytes(longcat(choices)) for choices in (2, 6)]
    assert planned[1] - planned[0] == pytest.approx(kept[1] - kept[0], rel=0.05)
