"""The sharded copy of `--dist_checkpoint_root_folder`: complete, and readable by torch into a plain model."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import PeftModel
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM

from tests.helpers import random_documents
from tests.helpers.made import Made
from tests.helpers.pairwise import keep_fast, slow_but
from tests.helpers.processes import ProcessGroup

LAYOUTS = {"SINGLE": (1, []), "NO_SHARD": (2, []), "FULL_SHARD": (2, ["--enable_fsdp"])}
LORA = ["--use_peft", "--lora_config.r", "4", "--lora_config.lora_dropout", "0"]


# Every layout and tie once; whether a head is tied is the same to every layout.
CASES = keep_fast(
    itertools.product(LAYOUTS, ["tied", "untied"]),
    [("FULL_SHARD", "tied")],
    full=[("SINGLE", "tied"), ("NO_SHARD", "untied"), ("FULL_SHARD", "untied")],
)


def train(group: ProcessGroup, layout: str, model: Path, folder: Path, *flags: str, lr: str = "5e-3") -> Path:
    """Four steps; the run is in `folder`/run, and its sharded copy is returned."""
    ranks, layout_flags = LAYOUTS[layout]
    argv = ["--model_name", str(model), "--output_dir", str(folder / "run"), *layout_flags]
    argv += ["--dataset", f"{random_documents.__file__}:get_custom_dataset", "--run_validation", "False"]
    argv += ["--num_workers_dataloader", "0", "--context_length", "96", "--max_train_step", "4", "--lr", lr]
    argv += ["--batch_size_training", "1", "--global_batch_size", "4"]
    argv += ["--dist_checkpoint_root_folder", str(folder / "copies"), *flags]
    group.train(argv, ranks)
    return folder / "copies"


def keys(copy: Path) -> set[str]:
    return set(HuggingFaceStorageReader(str(copy)).read_metadata().state_dict_metadata)


@pytest.mark.parametrize(("layout", "tie"), CASES)
def test_a_plain_model_in_one_process_loads_the_copy(
    layout: str, tie: str, models: dict[str, Path], process_group: ProcessGroup, tmp_path: Path
) -> None:
    copy = train(process_group, layout, models[tie], tmp_path) / f"fine-tuned-{models[tie].name}"
    assert (copy / "COMPLETE").exists()
    model = AutoModelForCausalLM.from_pretrained(models[tie], dtype=torch.float32)
    state: dict[str, Any] = {"model": model.state_dict()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(copy)))
    model.load_state_dict(state["model"])
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model", dtype=torch.float32).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name
    assert not any(key.startswith("optimizer") for key in keys(copy))


@pytest.fixture(scope="module")
def with_optimizer(tiny_model: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The copy, with the optimizer's state, in a folder that a flag names; by layout."""

    def copy(layout: str) -> Path:
        folder = tmp_path_factory.mktemp("optimizer")
        named = ["--save_optimizer", "--dist_checkpoint_folder", "with/optimizer"]
        return train(process_group, layout, tiny_model, folder, *named) / "with/optimizer-tiny"

    return Made(copy)


@pytest.mark.parametrize("layout", ["SINGLE", *slow_but(0, ["NO_SHARD"]), "FULL_SHARD"])
def test_save_optimizer_adds_the_optimizers_state(layout: str, with_optimizer: Made, tiny_model: Path) -> None:
    copy = with_optimizer[layout]
    assert (copy / "COMPLETE").exists()
    metadata = HuggingFaceStorageReader(str(copy)).read_metadata().state_dict_metadata
    parameters = dict(AutoModelForCausalLM.from_pretrained(tiny_model).named_parameters())
    for name, parameter in parameters.items():
        for average in ("exp_avg", "exp_avg_sq"):
            assert metadata[f"optimizer.state.{name}.{average}"].size == parameter.shape
    name = "model.layers.0.mlp.up_proj.weight"
    state = {"optimizer": {"state": {name: {"exp_avg_sq": torch.zeros_like(parameters[name])}}}}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(copy)))
    average = state["optimizer"]["state"][name]["exp_avg_sq"]
    assert (average >= 0).all()
    assert average.max() > 0


def test_optimizer_states_of_every_layout_are_the_same(with_optimizer: Made) -> None:
    name, found = "model.layers.1.self_attn.q_proj.weight", []
    for layout in LAYOUTS:
        state: dict[str, Any] = {"optimizer": {"state": {name: {"exp_avg": torch.zeros(32, 32)}}}}
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(with_optimizer[layout])))
        found.append(state["optimizer"]["state"][name]["exp_avg"])
    assert found[0].abs().max() > 0
    assert torch.allclose(found[1], found[0], atol=1e-6)
    assert torch.allclose(found[2], found[0], atol=1e-6)


@pytest.fixture(scope="module")
def models(tiny_model: Path, tied_model: Path) -> dict[str, Path]:
    return {"tied": tied_model, "untied": tiny_model}


@pytest.mark.parametrize(("layout", "tie"), CASES)
def test_of_an_adapter_the_copy_holds_the_adapter_alone(
    layout: str, tie: str, models: dict[str, Path], process_group: ProcessGroup, tmp_path: Path
) -> None:
    copy = train(process_group, layout, models[tie], tmp_path, *LORA) / f"fine-tuned-{models[tie].name}"
    assert (copy / "COMPLETE").exists()
    saved = keys(copy)
    assert len(saved) == 2 * 2 * 2
    assert all("lora_" in key for key in saved)
    base = AutoModelForCausalLM.from_pretrained(models[tie], dtype=torch.float32)
    wanted = PeftModel.from_pretrained(base, tmp_path / "run/adapter").state_dict()
    state = {
        "model": {key.removeprefix("model."): torch.zeros_like(wanted[key.removeprefix("model.")]) for key in saved}
    }
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(copy)))
    for name, tensor in state["model"].items():
        assert torch.equal(tensor, wanted[name]), name


@pytest.mark.slow
def test_an_earlier_copy_in_the_folder_is_replaced(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """From two ranks to one: what the second rank wrote before must not be read again."""
    train(process_group, "FULL_SHARD", tiny_model, tmp_path, lr="1e-4")
    copy = train(process_group, "SINGLE", tiny_model, tmp_path, "--overwrite") / "fine-tuned-tiny"
    state: dict[str, Any] = {"model": AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(copy)))
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model").state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in state["model"].items())
    assert (copy / "COMPLETE").exists()


def test_without_save_model_there_is_no_copy(tiny_model: Path, process_group: ProcessGroup, tmp_path: Path) -> None:
    copy = train(process_group, "SINGLE", tiny_model, tmp_path, "--save_model", "False") / "fine-tuned-tiny"
    assert sorted(path.name for path in copy.iterdir()) == ["latest", "step-00000004"]
