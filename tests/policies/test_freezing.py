"""Frozen layers keep their weights to the bit, cost no gradients, and everything else trains."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from configs.flags import parse_flags
from policies.activations.checkpointing import Checkpointing, checkpoint_layers
from policies.freezing import freeze_layers
from policies.optimizers.build import build_optimizer
from policies.wrapping import find_layers
from tests.helpers import random_documents
from tests.helpers.pairwise import keep_fast, slow_but
from tests.helpers.processes import ProcessGroup
from tools.export import main as export

LAYOUTS = {
    "SINGLE": (1, []),
    "NO_SHARD": (2, []),
    "FULL_SHARD": (2, ["--enable_fsdp"]),
    "FULL_SHARD, offloaded": (2, ["--enable_fsdp", "--fsdp_cpu_offload"]),
}
LORA = ["--use_peft", "--lora_config.r", "4", "--lora_config.lora_dropout", "0"]


def train(group: ProcessGroup, layout: str, model: Path, folder: Path, *flags: str) -> Path:
    """Three steps."""
    ranks, layout_flags = LAYOUTS[layout]
    argv = ["--model_name", str(model), "--output_dir", str(folder), *layout_flags, *flags, "--lr", "5e-3"]
    argv += ["--dataset", f"{random_documents.__file__}:get_custom_dataset", "--run_validation", "False"]
    argv += ["--num_workers_dataloader", "0", "--context_length", "96", "--max_train_step", "3"]
    argv += ["--batch_size_training", "1", "--global_batch_size", "4"]
    group.train(argv, ranks)
    return folder


def adapted(model_folder: Path) -> tuple[nn.Module, nn.Module]:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])), model


@pytest.mark.parametrize("layout", keep_fast(LAYOUTS, ["SINGLE", "FULL_SHARD"]))
def test_the_saved_model_has_the_frozen_layers_of_the_base_and_the_rest_trained(
    layout: str, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    run = train(process_group, layout, tiny_model, tmp_path / "run", "--freeze_layers", "--num_freeze_layers", "1")
    base, saved = load_file(tiny_model / "model.safetensors"), load_file(run / "model/model.safetensors")
    assert saved.keys() == base.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, base[name]) == (".layers.0." in name), name


@pytest.mark.parametrize("layout", slow_but(1, ["NO_SHARD", "FULL_SHARD, offloaded"]))
def test_frozen_adapters_are_saved_as_they_were(
    layout: str, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    first = train(process_group, layout, tiny_model, tmp_path / "first", *LORA) / "adapter"
    flags = ["--use_peft", "--from_peft_checkpoint", str(first), "--freeze_layers"]
    second = train(process_group, layout, tiny_model, tmp_path / "second", *flags) / "adapter"
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (first, second))
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]) == (".layers.0." in name), name
    assert export([str(second.parent / "checkpoints/step-00000003"), "--to", str(tmp_path / "exported")]) == 0
    exported = load_file(tmp_path / "exported/adapter_model.safetensors")
    assert exported.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in exported.items())


def test_what_is_frozen_reaches_no_optimizer(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    freeze_layers(model, [model.get_decoder()], 1)
    config = parse_flags(["--model_name", "m"])
    groups = build_optimizer(model, config.train_config, config.fsdp_config).param_groups
    held = {id(parameter) for group in groups for parameter in group["params"]}
    assert held == {id(p) for name, p in model.named_parameters() if ".layers.0." not in name}


@pytest.mark.parametrize("mode", ["off", "selective", "full"])
def test_no_gradient_is_computed_below_the_first_layer_that_trains(mode: str, tiny_model: Path) -> None:
    model, base = adapted(tiny_model)
    freeze_layers(model, [base.get_decoder()], 1)
    checkpoint_layers(find_layers(base), Checkpointing(mode))
    learned: list[bool] = []
    for layer in base.model.layers:
        layer.register_forward_hook(lambda module, inputs, output: learned.append(output.requires_grad))
    model.train()(input_ids=torch.arange(12)[None], use_cache=False).logits.sum().backward()
    assert learned == [False, True]
    assert all((p.grad is not None) == (".layers.1." in n and "lora_" in n) for n, p in model.named_parameters())
