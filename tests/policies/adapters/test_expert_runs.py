"""Runs with LoRA on experts: as peft's own, under every layout, resumed, loaded by plain peft, merged, and planned."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from tests.helpers.aot_eager import with_aot_eager
from tests.helpers.made import Made
from tests.helpers.mixtures import mixture
from tests.helpers.processes import ProcessGroup, read_metrics, train_events
from tests.helpers.reference import assert_agrees, flags_for, plain_eval_loss, reference_run
from tests.helpers.resuming import as_if_killed_after, assert_bit_equal
from tools.export import main as export_main

NUM_STEPS = 4
LAYOUTS: dict[str, tuple[int, list[str]]] = {"SINGLE": (1, []), "FULL_SHARD": (2, ["--enable_fsdp"])}
LORA = ["--use_peft", "--lora_config.r", "4", "--lora_config.lora_dropout", "0"]
LORA += ["--lora_config.target_modules", "all-linear"]
# A dense layer, and one with experts and a shared expert, in each of three projections.
PARAMETERS = ["gate_proj.weight", "up_proj.weight", "down_proj.weight", "experts.gate_up_proj", "experts.down_proj"]
MODULES = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("model") / "deepseek_v3"
    mixture("deepseek_v3", vocab_size=600).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def flags_of(base: Path, output: Path, ranks: int) -> list[str]:
    """Eight rows a step, in micro-batches of two."""
    flags = flags_for(base, output, batching="packing", num_steps=NUM_STEPS)
    return [*flags, "--batch_size_training", "2", "--gradient_accumulation_steps", str(4 // ranks)]


@pytest.fixture(scope="module")
def runs(base: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The folder of each run, by layout."""

    def run(layout: str) -> Path:
        ranks, flags = LAYOUTS[layout]
        folder = tmp_path_factory.mktemp("experts") / "run"
        given = [*flags_of(base, folder, ranks), *LORA, *flags, "--save_every_steps", "2", "--keep_last", "9"]
        process_group.train(given, ranks)
        return folder

    return Made(run)


def evaluated(run: Path) -> list[float]:
    return [event["loss"] for event in read_metrics(run) if event["event"] == "eval"]


def load_plain(folder: Path, base: Path) -> Any:
    """As a user would: nothing of the project's. peft warns of what it does not find."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return peft.PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder
        ).eval()


def test_every_layout_trains_as_a_plain_loop_with_pefts_own_layers(runs: Made, base: Path) -> None:
    settings = peft.LoraConfig(r=4, lora_alpha=32, target_modules=MODULES, target_parameters=PARAMETERS)
    reference = reference_run(base, batching="packing", num_steps=NUM_STEPS, adapter=settings)
    for layout in LAYOUTS:
        assert_agrees(runs[layout], reference)
    factors = load_file(runs["SINGLE"] / "adapter/adapter_model.safetensors")
    assert all(factor.abs().max() > 1e-3 for name, factor in factors.items() if "lora_B" in name), "it learned nothing"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plain_peft_loads_what_a_run_saves(layout: str, runs: Made, base: Path) -> None:
    folder = runs[layout] / "adapter"
    loss = plain_eval_loss(load_plain(folder, base))
    assert loss == pytest.approx(evaluated(runs[layout])[-1], rel=1e-5)
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert sorted(settings["target_parameters"]) == sorted(PARAMETERS)
    assert settings["lora_dropout"] == 0


def test_a_checkpoint_is_exported_and_merged(runs: Made, base: Path, tmp_path: Path) -> None:
    run = runs["FULL_SHARD"]
    assert export_main([str(run), "--to", str(tmp_path / "adapter"), "--verify"]) == 0
    assert plain_eval_loss(load_plain(tmp_path / "adapter", base)) == pytest.approx(evaluated(run)[-1], rel=1e-5)
    assert export_main([str(run), "--to", str(tmp_path / "merged"), "--merge", "--verify"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert plain_eval_loss(merged) == pytest.approx(evaluated(run)[-1], rel=1e-5)


def test_a_resumed_run_is_bit_equal(runs: Made, base: Path, process_group: ProcessGroup, tmp_path: Path) -> None:
    ranks, flags = LAYOUTS["FULL_SHARD"]
    killed = as_if_killed_after(2, runs["FULL_SHARD"], tmp_path / "killed")
    given = [*flags_of(base, killed, ranks), *LORA, *flags, "--save_every_steps", "2"]
    process_group.train([*given, "--keep_last", "9", "--resume", "auto"], ranks)
    assert_bit_equal(killed, runs["FULL_SHARD"])


def test_training_goes_on_from_a_saved_adapter(
    runs: Made, base: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    before = runs["SINGLE"]
    flags = [*flags_of(base, tmp_path / "run", 2), *LAYOUTS["FULL_SHARD"][1], "--eval_before_training"]
    process_group.train([*flags, "--use_peft", "--from_peft_checkpoint", str(before / "adapter")], 2)
    assert evaluated(tmp_path / "run")[0] == pytest.approx(evaluated(before)[-1], rel=1e-5)
    loss = plain_eval_loss(load_plain(tmp_path / "run/adapter", base))
    assert loss == pytest.approx(evaluated(tmp_path / "run")[-1], rel=1e-5)


@pytest.mark.parametrize(
    "flags",
    [
        ["--activation_checkpointing", "full"],
        pytest.param(["--activation_checkpointing", "selective"], marks=pytest.mark.slow),
        pytest.param(["--compile"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_recomputed_and_compiled_layers_train_the_same(
    flags: list[str], runs: Made, base: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    given = [*flags_of(base, tmp_path / "run", 1), *LORA, *flags, "--run_validation", "False"]
    process_group.train(with_aot_eager(given) if "--compile" in flags else given, 1)
    for found, wanted in zip(train_events(tmp_path / "run"), train_events(runs["SINGLE"]), strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=2e-5)


@pytest.fixture(scope="module")
def on_packed(base: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a base in 4 bits, its experts too."""
    ranks, flags = LAYOUTS["FULL_SHARD"]
    folder = tmp_path_factory.mktemp("packed") / "run"
    given = [*flags_of(base, folder, ranks), *LORA, *flags, "--quantization", "4bit", "--save_every_steps", "2"]
    process_group.train([*given, "--keep_last", "9"], ranks)
    return folder


def test_on_packed_experts_it_trains_as_on_their_values(base: Path, on_packed: Path) -> None:
    """Shared experts and the dense layer are packed, too, and adapted by their parameters."""
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    settings = peft.LoraConfig(r=4, lora_alpha=32, target_modules=MODULES, target_parameters=PARAMETERS)
    reference = reference_run(base, batching="packing", num_steps=NUM_STEPS, adapter=settings, quantization=nf4)
    assert_agrees(on_packed, reference)


def test_a_checkpoint_says_how_many_weights_are_packed(on_packed: Path) -> None:
    for state_file in on_packed.glob("checkpoints/step-*/state.json"):
        packed = json.loads(state_file.read_text())["packed_weights"]
        assert packed["experts"] == 4 * 3 * 32 * 24, "one layer has experts"
        assert packed["linear"] > 0
