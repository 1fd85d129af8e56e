"""Keys of other tools that change what counts in the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.translated import translate_text

BEGINNINGS = {
    "trl": "model_name_or_path: m\ndataset_name: a/b\nuse_peft: true\n",
    "llamafactory": "model_name_or_path: m\nstage: sft\nfinetuning_type: lora\ndataset_dir: .\n",
    "axolotl": "base_model: m\nlearning_rate: 1e-4\nadapter: lora\ndatasets: [{path: a/b, type: alpaca}]\n",
}


@pytest.mark.parametrize(
    ("tool", "key", "setting", "value"),
    [
        ("trl", "loss_type: dft", "train_config.loss_type", "dft"),
        ("trl", "loss_type: chunked_nll", "train_config.loss_type", "cross_entropy"),
        ("llamafactory", "use_dft_loss: true", "train_config.loss_type", "dft"),
        ("llamafactory", "pissa_init: true", "lora_config.init_lora_weights", "pissa_niter_16"),
        ("llamafactory", "pissa_init: true\npissa_iter: -1", "lora_config.init_lora_weights", "pissa"),
        ("axolotl", "peft_init_lora_weights: olora", "lora_config.init_lora_weights", "olora"),
        ("axolotl", "loraplus_lr_ratio: 16", "lora_config.lr_ratio", 16.0),
        ("llamafactory", "loraplus_lr_ratio: 16", "lora_config.lr_ratio", 16.0),
        ("llamafactory", "use_muon: true", "fsdp_config.optimizer", "Muon"),
        ("axolotl", "optimizer: muon", "fsdp_config.optimizer", "Muon"),
        ("trl", "neftune_noise_alpha: 5", "train_config.neftune_noise_alpha", 5.0),
        ("llamafactory", "neftune_noise_alpha: 5", "train_config.neftune_noise_alpha", 5.0),
        ("axolotl", "noisy_embedding_alpha: 5", "train_config.neftune_noise_alpha", 5.0),
    ],
)
def test_a_key_becomes_its_setting(
    tool: str, key: str, setting: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, printed, _ = translate_text(f"{BEGINNINGS[tool]}{key}\n", tmp_path, capsys)
    assert config.value(setting) == value
    assert f"no counterpart: {key.partition(':')[0]}" not in printed
