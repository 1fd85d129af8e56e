"""Saved adapters whose numbers no training leaves are refused before the first step, a merge or an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from policies.adapters.patterns import try_patterns
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


@pytest.mark.parametrize(("name", "value"), [("target_modules", r"(\w+\.?)+z"), ("rank_pattern", {r"(\w+\.?)+z": 4})])
def test_a_pattern_whose_match_would_not_end_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    save(LORA, tmp_path)
    values = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(values | {name: value}))
    settings = read_adapter_config(tmp_path, "--x")
    with pytest.raises(ValueError, match=rf"^{name} in adapter_config\.json took over 0\.5 s to match .*; write a "):
        try_patterns(make_model("llama"), settings, seconds=0.5)


def test_patterns_are_tried_before_peft_matches_them(tmp_path: Path) -> None:
    save(LORA, tmp_path)
    settings = read_adapter_config(tmp_path, "--x")
    settings.target_modules, settings.rank_pattern = r".*\.(q_proj|v_proj)", {r"layers\.\d+\..*q_proj": 4}
    adapted, own_names = attach_adapter(make_model("llama"), settings)
    assert adapted.get_parameter(next(name for name in own_names if "q_proj.lora_A" in name)).shape[0] == 4
    settings.target_modules = "("
    with pytest.raises(
        ValueError, match=r"^target_modules in adapter_config\.json is no regular expression: .*missing"
    ):
        attach_adapter(make_model("llama"), settings)


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
