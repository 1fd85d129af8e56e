"""The saved folder: plain transformers and peft load it and find the weights that the run evaluated."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers import random_documents
from tests.helpers.made import Made
from tests.helpers.pairwise import keep_fast, select_product, slow_but
from tests.helpers.processes import ProcessGroup, read_metrics, train_events
from tests.helpers.reference import plain_eval_loss

LAYOUTS = {"SINGLE": (1, []), "NO_SHARD": (2, []), "FULL_SHARD": (2, ["--enable_fsdp"])}
TIES, METHODS = ("tied", "untied"), ("full", "lora")
LORA = ["--use_peft", "--lora_config.r", "4", "--lora_config.lora_dropout", "0"]
LORA += ["--lora_config.target_modules", "q_proj,v_proj,down_proj"]
STEPS = ["--max_train_step", "4", "--lr", "5e-3"]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def models(tiny_model: Path, tied_model: Path) -> dict[str, Path]:
    return {"tied": tied_model, "untied": tiny_model}


def flags_of(model: Path, output: Path, *flags: str) -> list[str]:
    common = ["--model_name", str(model), "--output_dir", str(output), "--num_workers_dataloader", "0"]
    common += ["--dataset", f"{random_documents.__file__}:get_custom_dataset", "--context_length", "96"]
    return [*common, "--batch_size_training", "1", "--global_batch_size", "4", *flags]


@pytest.fixture(scope="module")
def runs(models: dict[str, Path], process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The folder of each run, by layout, tie and method."""

    def run(layout: str, tie: str, method: str) -> Path:
        ranks, flags = LAYOUTS[layout]
        folder = tmp_path_factory.mktemp("export") / "run"
        flags = [*flags, *STEPS, *(LORA if method == "lora" else [])]
        process_group.train(flags_of(models[tie], folder, *flags), ranks)
        return folder

    return Made(run)


def load_plain(run: Path, base: Path) -> Any:
    """As a user would: nothing of the project's."""
    if (run / "model").exists():
        return AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), run / "adapter")


def eval_events(run: Path) -> list[dict[str, Any]]:
    return [event for event in read_metrics(run) if event["event"] == "eval"]


def is_sharded(case: tuple[str, ...]) -> bool:
    return case[0] == "FULL_SHARD"


CASES = select_product(LAYOUTS, TIES, METHODS, fast=lambda case: case[0] != "NO_SHARD")
# Of what depends on the method alone.
SHARDED = [("FULL_SHARD", "tied", method) for method in METHODS]
ALL_CASES = [*itertools.product(LAYOUTS, TIES, METHODS)]
ONE_OF_EACH_METHOD = keep_fast(ALL_CASES, SHARDED, full=[case for case in ALL_CASES if case not in SHARDED])


@pytest.mark.parametrize(("layout", "tie", "method"), CASES)
def test_the_saved_folder_has_the_loss_that_the_run_evaluated(
    layout: str, tie: str, method: str, runs: Made, models: dict[str, Path]
) -> None:
    run = runs[layout, tie, method]
    loss = plain_eval_loss(load_plain(run, models[tie]).eval())
    assert loss == pytest.approx(eval_events(run)[-1]["loss"], rel=TOLERANCE)
    assert loss != pytest.approx(plain_eval_loss(AutoModelForCausalLM.from_pretrained(models[tie])), rel=1e-4)


@pytest.mark.parametrize(("tie", "method"), slow_but(1, itertools.product(TIES, METHODS), num_slow=1))
def test_every_layout_saves_the_same_weights(tie: str, method: str, runs: Made, models: dict[str, Path]) -> None:
    wanted = load_plain(runs["SINGLE", tie, method], models[tie]).state_dict()
    for layout in ("NO_SHARD", "FULL_SHARD"):
        found = load_plain(runs[layout, tie, method], models[tie]).state_dict()
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert (found[name] - tensor).abs().max() < 1e-4, f"{layout}: {name}"


@pytest.mark.parametrize(("layout", "tie"), select_product(LAYOUTS, TIES, fast=is_sharded))
def test_the_saved_config_is_the_base_models_own(layout: str, tie: str, runs: Made, models: dict[str, Path]) -> None:
    """The class that wraps the model in training is not the model's, and what training switches off is not its wish."""
    saved = json.loads((runs[layout, tie, "full"] / "model/config.json").read_text())
    base = json.loads((models[tie] / "config.json").read_text())
    assert saved["architectures"] == ["LlamaForCausalLM"]
    assert saved == base


@pytest.mark.parametrize(("layout", "tie", "method"), ONE_OF_EACH_METHOD)
def test_the_tokenizer_is_beside_the_weights(
    layout: str, tie: str, method: str, runs: Made, models: dict[str, Path]
) -> None:
    saved = AutoTokenizer.from_pretrained(runs[layout, tie, method] / ("model" if method == "full" else "adapter"))
    base = AutoTokenizer.from_pretrained(models[tie])
    text = "Anna: shall we meet at 6?\nBob: yes!"
    assert saved(text).input_ids == base(text).input_ids
    assert (saved.bos_token, saved.eos_token, saved.pad_token) == (base.bos_token, base.eos_token, base.pad_token)
    assert len(saved) == len(base)


@pytest.mark.parametrize(("layout", "tie"), select_product(LAYOUTS, TIES, fast=is_sharded))
def test_an_adapter_folder_holds_the_adapter_alone_and_names_its_base(
    layout: str, tie: str, runs: Made, models: dict[str, Path]
) -> None:
    folder = runs[layout, tie, "lora"] / "adapter"
    assert not list(folder.glob("model*.safetensors"))
    assert (folder / "adapter_model.safetensors").stat().st_size < 100_000
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(models[tie])
    assert settings["inference_mode"] is True
    assert settings["r"] == 4


@pytest.mark.parametrize(("layout", "tie", "method"), ONE_OF_EACH_METHOD)
def test_a_finished_run_leaves_this_and_nothing_half_written(layout: str, tie: str, method: str, runs: Made) -> None:
    run = runs[layout, tie, method]
    weights = "model" if method == "full" else "adapter"
    assert sorted(path.name for path in run.iterdir()) == sorted(
        [weights, "checkpoints", "metrics.jsonl", "plan.json", "run.yaml"]
    )
    assert yaml.safe_load((run / "run.yaml").read_text())["saved"] == {"step": 4, "folder": weights}


@pytest.mark.parametrize(("layout", "tie"), select_product(LAYOUTS, TIES, fast=is_sharded))
def test_training_goes_on_from_a_saved_adapter(
    layout: str, tie: str, runs: Made, models: dict[str, Path], process_group: ProcessGroup, tmp_path: Path
) -> None:
    before = runs[layout, tie, "lora"]
    ranks, flags = LAYOUTS[layout]
    flags = [*flags, "--use_peft", "--from_peft_checkpoint", str(before / "adapter"), "--eval_before_training"]
    flags += ["--max_train_step", "3", "--lr", "1e-2"]
    process_group.train(flags_of(models[tie], tmp_path / "run", *flags), ranks)
    assert eval_events(tmp_path / "run")[0]["loss"] == pytest.approx(eval_events(before)[-1]["loss"], rel=TOLERANCE)
    steps = train_events(tmp_path / "run")
    assert all(event["grad_norm"] > 0 for event in steps)
    after = load_plain(tmp_path / "run", models[tie])
    assert plain_eval_loss(after) == pytest.approx(eval_events(tmp_path / "run")[-1]["loss"], rel=TOLERANCE)


@pytest.mark.parametrize(
    ("layout", "method"),
    [
        ("SINGLE", "full"),
        pytest.param("FULL_SHARD", "lora", marks=pytest.mark.slow),
        pytest.param("SINGLE", "lora", marks=pytest.mark.full),
        pytest.param("FULL_SHARD", "full", marks=pytest.mark.full),
    ],
)
def test_the_best_evaluations_weights_are_kept_and_not_the_last(
    layout: str, method: str, models: dict[str, Path], process_group: ProcessGroup, tmp_path: Path
) -> None:
    """The learning rate rises until the run gets worse."""
    ranks, flags = LAYOUTS[layout]
    flags = [*flags, "--eval_every_steps", "2", "--max_train_step", "18", "--warmup_steps", "18"]
    flags += ["--lr", "0.3", *(LORA if method == "lora" else [])]
    run = tmp_path / "run"
    process_group.train(flags_of(models["tied"], run, *flags), ranks)
    evals = eval_events(run)
    best = min(evals, key=lambda event: event["loss"])
    assert best["loss"] < evals[-1]["loss"] - 0.01, "the run did not get worse: the test shows nothing"
    assert best is not evals[0]
    loss = plain_eval_loss(load_plain(run, models["tied"]).eval())
    assert loss == pytest.approx(best["loss"], rel=TOLERANCE)
    assert yaml.safe_load((run / "run.yaml").read_text())["saved"]["step"] == best["step"]
    assert read_metrics(run)[-1]["best_eval_loss"] == best["loss"]
    assert not list(run.glob("*.incomplete"))
    assert not list(run.glob("*.replaced"))


@pytest.mark.parametrize("layout", slow_but(1, LAYOUTS))
def test_without_validation_the_last_weights_are_saved(
    layout: str, runs: Made, models: dict[str, Path], process_group: ProcessGroup, tmp_path: Path
) -> None:
    ranks, flags = LAYOUTS[layout]
    flags = [*flags, *STEPS, "--run_validation", "False"]
    process_group.train(flags_of(models["tied"], tmp_path / "run", *flags), ranks)
    found = load_plain(tmp_path / "run", models["tied"])
    wanted = load_plain(runs[layout, "tied", "full"], models["tied"])
    for name, tensor in wanted.state_dict().items():
        assert torch.allclose(found.state_dict()[name], tensor, atol=1e-6), name


def test_save_model_false_saves_nothing(models: dict[str, Path], process_group: ProcessGroup, tmp_path: Path) -> None:
    flags = ["--save_model", "False", "--max_train_step", "1"]
    process_group.train(flags_of(models["tied"], tmp_path / "run", *flags), 1)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoints",
        "metrics.jsonl",
        "plan.json",
        "run.yaml",
    ]
