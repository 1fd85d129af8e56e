"""Saved adapters whose numbers no training leaves are refused before the first step, a merge or an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from policies.adapters.saved import AdapterMismatchError, attach_adapter, read_adapter_config, set_adapter
from tests.helpers.adapter_kinds import adapt, config_of
from tests.helpers.families import make_model
from utils.errors import ConfigError

LORA = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
PREFIX = peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")


def save(settings: Any, folder: Path) -> Path:
    peft.get_peft_model(make_model("llama"), settings).save_pretrained(str(folder), save_embedding_layers=False)
    return folder / "adapter_model.safetensors"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("lora_alpha", float("nan"), "lora_alpha nan"),
        ("lora_alpha", -float("inf"), "lora_alpha -inf"),
        ("lora_alpha", 1e308, r"lora_alpha 1e\+308"),  # fp32 cannot hold it
        ("lora_alpha", True, "lora_alpha true"),
        ("alpha_pattern", {"q_proj": float("nan")}, "alpha_pattern.q_proj nan"),
    ],
)
def test_a_scale_that_is_no_number_is_refused(name: str, value: Any, said: str, tmp_path: Path) -> None:
    save(LORA, tmp_path)
    values = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(values | {name: value}))
    with pytest.raises(ConfigError, match=rf"^--x: .*/adapter_config.json says {said}, which is no finite number; "):
        read_adapter_config(tmp_path, "--x")


def test_an_adapter_that_holds_nan_is_refused_by_name(tmp_path: Path) -> None:
    file = save(LORA, tmp_path)
    tensors = load_file(file)
    name = max(tensors)
    tensors[name][0, 0] = torch.nan
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=rf"^--from_peft_checkpoint: .*\({name} holds NaN or infinity\)"):
        adapt(make_model("llama"), config_of("--from_peft_checkpoint", str(tmp_path)))


def test_a_prefix_with_another_tensor_beside_it_is_refused(tmp_path: Path) -> None:
    tensors = load_file(save(PREFIX, tmp_path))
    adapted, own_names = attach_adapter(make_model("llama"), read_adapter_config(tmp_path, "--x"))
    set_adapter(adapted, own_names, tensors)
    extra = {"lora_A.weight": torch.zeros(2)}
    with pytest.raises(AdapterMismatchError, match=r"^it holds, unlike its kind, lora_A\.weight$"):
        set_adapter(adapted, own_names, tensors | extra)
