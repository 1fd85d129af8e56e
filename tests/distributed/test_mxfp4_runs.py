"""gpt-oss as published, in MXFP4, is read, trained and exported as the same model in bf16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from policies.weights.stored import SafetensorsTensors
from tests.helpers.mxfp4_folder import dequantized_by_transformers, save_in_mxfp4
from tests.helpers.processes import ProcessGroup, train_events
from tests.helpers.reference import FAST_LR, flags_for, lora_flags
from tools.export import main as export
from tools.generate import main as generate

SHARDED = ("--enable_fsdp",)


@pytest.fixture(scope="module")
def published(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_in_mxfp4(tmp_path_factory.mktemp("published") / "model", tiny_model)


@pytest.fixture(scope="module")
def plain(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dequantized_by_transformers(published, tmp_path_factory.mktemp("plain") / "model")


def test_its_tensors_are_those_that_transformers_dequantizes(published: Path, plain: Path) -> None:
    found, expected = SafetensorsTensors(published.glob("*.safetensors")), load_file(plain / "model.safetensors")
    assert found.index.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found.read(name), tensor), name
        assert (found.index[name].shape, found.index[name].dtype) == (tensor.shape, tensor.dtype)


CASES = [
    ("2 ranks, all weights", 2, SHARDED),
    ("1 rank, nf4", 1, (*lora_flags(["q_proj", "v_proj"]), "--quantization", "4bit")),
    ("2 ranks, mxfp4", 2, (*lora_flags(["q_proj", "v_proj"]), "--quantization", "mxfp4", *SHARDED)),
    ("1 rank, mxfp4, experts by name", 1, (*lora_flags(["gate_up_proj", "down_proj"]), "--quantization", "mxfp4")),
    ("2 ranks, nf4", 2, (*lora_flags(["q_proj", "v_proj"]), "--quantization", "4bit", *SHARDED)),
]


@pytest.mark.parametrize(("ranks", "given"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_it_trains_as_the_model_in_bf16_and_leaves_plain_weights(
    ranks: int,
    given: tuple[str, ...],
    published: Path,
    plain: Path,
    process_group: ProcessGroup,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    losses = {}
    for name, model in (("published", published), ("plain", plain)):
        flags = flags_for(model, tmp_path / name, batching="padding", num_steps=2, lr=FAST_LR)
        flags += ["--global_batch_size", "8", "--batch_size_training", "2", "--run_validation", "False", *given]
        printed = process_group.train(flags, ranks)[0].stdout
        assert ("weights: 4 tensors in MXFP4, dequantized as they are read" in printed) == (name == "published")
        losses[name] = [(event["loss"], event["grad_norm"]) for event in train_events(tmp_path / name)]
    assert losses["published"] == losses["plain"]
    saved = tmp_path / "published/model"
    if "--use_peft" in given:
        saved = tmp_path / "merged"
        assert export([str(tmp_path / "published/adapter"), "--to", str(saved), "--merge", "--verify"]) == 0
        assert load_file(saved / "model.safetensors").keys() == load_file(plain / "model.safetensors").keys()
        assert "in memory" not in capsys.readouterr().out, "tensors are merged one by one"
        if "4bit" in given and ranks == 1:
            further = flags_for(published, tmp_path / "further", batching="padding", num_steps=1)
            further += ["--use_peft", "--quantization", "4bit", "--run_validation", "False"]
            further += ["--from_peft_checkpoint", str(tmp_path / "published/adapter")]
            process_group.train(further, 1)
            (found,) = train_events(tmp_path / "further")
            assert found["loss"] < losses["published"][0][0], "it goes on from what was learned"
            assert generate([str(tmp_path / "published"), "--prompt", "a", "--max_new_tokens", "2"]) == 0
    settings = json.loads((saved / "config.json").read_text())
    assert "quantization_config" not in settings
    assert not {"_experts_implementation", "experts_implementation"} & settings.keys()


@pytest.mark.parametrize("more", [{}, {"trainable_token_indices": [3]}], ids=["by tensor", "whole"])
def test_adapters_of_experts_merge_into_plain_weights(
    more: dict[str, Any], published: Path, plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = peft.LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"], **more
    )
    settings.init_lora_weights = False
    base = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    adapted = peft.get_peft_model(base, settings)
    settings.base_model_name_or_path = str(published)
    adapted.save_pretrained(tmp_path / "adapter")
    assert export([str(tmp_path / "adapter"), "--to", str(tmp_path / "merged"), "--merge", "--dtype", "fp32"]) == 0
    assert ("the whole model is merged at once" in capsys.readouterr().out) == bool(more)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.arange(3, 40).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=ids).logits, adapted(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
