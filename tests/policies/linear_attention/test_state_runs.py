"""Runs of Qwen3.5 and its mixture of experts: padded and packed, they have the losses that transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import finetuning
from tests.helpers.processes import read_metrics, train_events
from tests.helpers.small_configs import SMALL

ROWS = """
def get_rows(dataset_config, tokenizer, split):
    lengths = (31, 5, 18, 9, 40, 12, 3, 22) if split == "train" else (17, 8, 33)
    return [{"input_ids": (ids := [5 + (7 * n * n + 3 * k) % 500 for k in range(n)]), "labels": ids} for n in lengths]
"""
SIZES: dict[str, Any] = SMALL | {
    "vocab_size": 600,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
CONFIGS: dict[str, Any] = {
    "Qwen3_5ForCausalLM": transformers.Qwen3_5TextConfig(**SIZES),
    "Qwen3_5MoeForCausalLM": transformers.Qwen3_5MoeTextConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
}
LORA = ["--use_peft", "--lora_config.target_modules", "all-linear", "--lora_config.lora_dropout", "0"]


def reference_loss(model: Any, split: str) -> float:
    """The mean of transformers' own losses over all label tokens, each document alone."""
    scope: dict[str, Any] = {}
    exec(ROWS, scope)
    total, count = 0.0, 0
    for row in scope["get_rows"](None, None, split):
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            total += model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    return total / count


@pytest.mark.parametrize(
    ("name", "flags"),
    [("Qwen3_5ForCausalLM", []), ("Qwen3_5MoeForCausalLM", LORA)],
)
def test_padded_and_packed_runs_have_transformers_own_loss_and_one_gradient(
    name: str,
    flags: list[str],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    assert type(model).__name__ == name
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.dim() > 1 else 1)  # far from uniform: a leak changes the loss
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "model")
    (tmp_path / "rows.py").write_text(ROWS)

    def run(folder: str) -> list[dict[str, Any]]:
        words = ["--model_name", str(tmp_path / "model"), "--dataset", f"{tmp_path}/rows.py:get_rows", *flags]
        words += ["--batch_size_training", "8", "--num_epochs", "2", "--context_length", "64", "--save_model", "False"]
        words += ["--eval_before_training", "--output_dir", str(tmp_path / folder), "--num_workers_dataloader", "0"]
        assert finetuning.main(words) == 0
        return read_metrics(tmp_path / folder)

    start, evaluated, *_ = run("padded")
    assert (start["num_train_samples"], start["num_train_rows"]) == (8, 8)
    assert evaluated["loss"] == pytest.approx(reference_loss(model, "validation"), rel=1e-5)
    printed = capsys.readouterr().out
    assert "--batching_strategy is padding: without flash-linear-attention (pip install -r requirements-" in printed

    (tmp_path / "packages/fla").mkdir(parents=True)
    (tmp_path / "packages/fla/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "packages")
    start, packed_evaluation, *_ = run("packed")
    assert (start["num_train_samples"], start["num_train_rows"]) == (8, 3)
    assert packed_evaluation["loss"] == pytest.approx(evaluated["loss"], rel=1e-5)
    padded, packed = (train_events(tmp_path / folder) for folder in ("padded", "packed"))
    assert padded[0]["loss"] == pytest.approx(reference_loss(model, "train"), rel=1e-5)
    for one, other in zip(padded, packed, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    assert padded[-1]["loss"] < padded[0]["loss"]
