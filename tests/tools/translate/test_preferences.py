"""Files of other tools that train on pairs of answers become runs that do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.flags import parse_flags
from configs.run import RunConfig
from tests.helpers.translated import translate_text
from tools.translate.__main__ import main

AXOLOTL = """base_model: m
learning_rate: 1e-5
rl: {rl}
{more}
sequence_len: 1024
adapter: lora
datasets:
  - path: owner/pairs
    type: chat_template.default
    field_messages: messages
    field_chosen: chosen
    field_rejected: rejected
excess_length_strategy: truncate
"""
LLAMA_FACTORY = """model_name_or_path: m
stage: dpo
finetuning_type: lora
dataset: pairs
dataset_dir: .
cutoff_len: 1024
learning_rate: 5.0e-6
{more}
"""
TRL = "--model_name_or_path m --dataset_name owner/pairs --use_peft --lora_dropout 0.05 {more}"


def settings_of(config: RunConfig) -> tuple[Any, ...]:
    own = config.preference_config
    return config.train_config.loss_type, own.beta, own.simpo_gamma, own.orpo_weight, own.preference_smoothing


@pytest.mark.parametrize(
    ("rl", "more", "wanted"),
    [
        ("dpo", "rl_beta: 0.2\ndpo_label_smoothing: 0.1", ("dpo", 0.2, 1.0, 0.1, 0.1)),
        ("simpo", "rl_beta: 2.5\nsimpo_gamma: 0.8\ncpo_alpha: 0", ("simpo", 2.5, 0.8, 0.1, 0.0)),
        ("orpo", "orpo_alpha: 0.3", ("orpo", None, 1.0, 0.3, 0.0)),
    ],
)
def test_axolotl(
    rl: str, more: str, wanted: tuple[Any, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, printed, _ = translate_text(AXOLOTL.format(rl=rl, more=more), tmp_path, capsys)
    assert settings_of(config) == wanted
    train = config.train_config
    assert (train.dataset, train.context_length, train.truncation) == ("preference_dataset", 2048, "left")
    assert config.value("preference_dataset.data_path") == "owner/pairs"
    assert "sequence_len: it is of one text, and --context_length of both" in printed


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ("", ("dpo", 0.1, 1.0, 0.1, 0.0)),
        ("pref_loss: sigmoid\npref_beta: 0.3\npref_ftx: 0.0", ("dpo", 0.3, 1.0, 0.1, 0.0)),
        ("pref_loss: orpo\npref_beta: 0.3", ("orpo", None, 1.0, 0.3, 0.0)),
        ("pref_loss: simpo", ("simpo", 0.1, 0.5, 0.1, 0.0)),
    ],
)
def test_llama_factory(more: str, wanted: tuple[Any, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"}
    entry = {"file_name": "pairs.json", "ranking": True, "columns": columns}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"pairs": entry}))
    (tmp_path / "pairs.json").write_text("[]")
    config, _, _ = translate_text(LLAMA_FACTORY.format(more=more), tmp_path, capsys)
    assert settings_of(config) == wanted
    assert (config.train_config.dataset, config.train_config.context_length) == ("preference_dataset", 2048)
    assert str(config.value("preference_dataset.data_path")).endswith("pairs.json")


@pytest.mark.parametrize(
    ("command", "more", "wanted"),
    [
        ("trl dpo", "", ("dpo", 0.1, 1.0, 0.1, 0.0)),
        ("trl dpo", "--beta 0.5 --loss_type sigmoid --precompute_ref_log_probs", ("dpo", 0.5, 1.0, 0.1, 0.0)),
        ("python examples/scripts/orpo.py", "--beta 0.2", ("orpo", None, 1.0, 0.2, 0.0)),
        (
            "accelerate launch examples/scripts/cpo.py",
            "--loss_type simpo --beta 2 --simpo_gamma 0.9 --cpo_alpha 0 --label_smoothing 0.1",
            ("simpo", 2.0, 0.9, 0.1, 0.1),
        ),
    ],
)
def test_trl(
    command: str, more: str, wanted: tuple[Any, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    words = [*command.split(), *TRL.format(more=more).split(), "--max_length", "512"]
    assert main(["--tool", "trl", "--out", str(recipe), "--", *words]) == 0, capsys.readouterr().err
    config = parse_flags(["--config", str(recipe)])
    assert settings_of(config) == wanted
    assert (config.train_config.dataset, config.train_config.context_length) == ("preference_dataset", 1024)
    assert (config.train_config.lr, config.lora_config.lora_dropout) == (1e-6, 0.0)
