"""Layers whose adapter peft would not find again, since it renames an adapter's keys as transformers does a file's."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.peft import LoraConfig
from policies.adapters.targets import choose_targets
from tests.helpers import random_documents
from tests.helpers.exports import export
from tests.helpers.families import LLAMA_LIKE
from tests.helpers.processes import ProcessGroup, read_metrics
from tests.helpers.reference import plain_eval_loss
from utils.errors import ConfigError

# A dense layer, and one with experts and a shared expert. Files call it `shared_expert`, the model `shared_experts`.
LAGUNA = transformers.LagunaConfig(
    **LLAMA_LIKE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
)
LINE = (
    "target_modules all-linear: leaves out 3 of 16 linear layers, model.layers.1.mlp.shared_experts.gate_proj and 2 "
    "others, since peft renames them when it loads an adapter of laguna models, and would not find them"
)


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(3, 500, (2, 40), generator=torch.Generator().manual_seed(0))
    return model(input_ids=ids).logits


def test_what_all_linear_trains_is_what_plain_peft_loads_and_what_is_merged(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LAGUNA).save_pretrained(base)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(base)
    flags = ["--model_name", str(base), "--output_dir", str(run), "--mixed_precision", "False", "--lr", "5e-2"]
    flags += ["--dataset", f"{random_documents.__file__}:get_custom_dataset", "--context_length", "96"]
    flags += ["--max_train_step", "2", "--num_workers_dataloader", "0"]
    (outcome,) = process_group.run([*flags, "--use_peft", "--lora_config.target_modules", "all-linear"], 1)
    assert outcome.status == 0, outcome.stderr
    assert LINE in outcome.stdout
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # peft warns of keys that it misses
        adapted = PeftModel.from_pretrained(load(base), run / "adapter").eval()
    evaluated = [event["loss"] for event in read_metrics(run) if event["event"] == "eval"][-1]
    assert plain_eval_loss(adapted) == pytest.approx(evaluated, rel=1e-5)
    assert (logits(adapted) - logits(load(base))).abs().max() > 0.01
    merged = load(export(run, tmp_path / "merged", "--merge", "--verify"))
    assert (logits(merged) - logits(adapted)).abs().max() < 1e-5


@pytest.mark.parametrize("target", ["gate_proj", "shared_experts.up_proj", "model.layers.1.mlp.shared_experts.up_proj"])
def test_a_name_of_such_a_layer_is_refused(target: str) -> None:
    model = AutoModelForCausalLM.from_config(LAGUNA)
    with pytest.raises(ConfigError, match=r"--lora_config.target_modules: peft renames model.layers.1.mlp.shared_exp"):
        choose_targets(model, LoraConfig(target_modules=("q_proj", target)))
    kept = ("q_proj", "mlp.gate_proj", "embed_tokens")
    assert choose_targets(model, LoraConfig(target_modules=kept)).modules == list(kept)
