"""Weights: complete or refused, never unpickled, in the dtype that was asked for whatever the file's."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from configs.errors import ConfigError
from configs.flags import parse_flags
from policies.loading import load_model, load_model_config
from tasks.causal_lm import AUTO_MODEL
from utils.seeding import seed_everything

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def model_copy(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "copy"))


def load(folder: Path, dtype: torch.dtype = torch.float32, *flags: str) -> Any:
    config = parse_flags(["--model_name", str(folder), *flags])
    return load_model(config, load_model_config(config), AUTO_MODEL, dtype, CPU)


@pytest.mark.parametrize("asked", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_weights_are_in_the_dtype_that_was_asked_for(
    stored: torch.dtype, asked: torch.dtype, tiny_model: Path, tmp_path: Path
) -> None:
    reference = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=stored)
    reference.save_pretrained(tmp_path)
    model = load(tmp_path, asked)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == asked, name
        assert torch.equal(parameter, reference.get_parameter(name).to(asked)), name


@pytest.mark.parametrize("asked", DTYPES)
def test_random_weights_are_in_the_dtype_that_was_asked_for(
    asked: torch.dtype, tiny_model: Path, tmp_path: Path
) -> None:
    """Also where config.json says another one."""
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert {parameter.dtype for parameter in load(tmp_path, asked, "--random_weights").parameters()} == {asked}


def test_random_weights_need_config_json_alone_and_are_a_function_of_the_seed(model_copy: Path) -> None:
    for file in model_copy.glob("*.safetensors"):
        file.unlink()

    def draw(seed: int) -> dict[str, torch.Tensor]:
        seed_everything(seed)
        return load(model_copy, torch.float32, "--random_weights").state_dict()

    first, again, other = draw(1), draw(1), draw(2)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert all(tensor.isfinite().all() for tensor in first.values())


def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_its_name(model_copy: Path) -> None:
    file = model_copy / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"--model_name: .* lack 1 tensors, model\.layers\.1\.mlp\.up_proj\.weight"):
        load(model_copy)


def test_a_checkpoint_of_another_shape_is_refused(model_copy: Path) -> None:
    file = model_copy / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.ones(5)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="--model_name"):
        load(model_copy)


def test_a_damaged_checkpoint_is_refused(model_copy: Path) -> None:
    file = model_copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="--model_name"):
        load(model_copy)


def test_pickled_weights_are_refused_with_a_command_that_converts_them(model_copy: Path) -> None:
    wanted = load(model_copy).state_dict()
    (model_copy / "model.safetensors").unlink()
    torch.save(wanted, model_copy / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="pickled weights") as refusal:
        load(model_copy)
    command = re.search(r'python -c "(.*)"', str(refusal.value))
    assert command
    done = subprocess.run([sys.executable, "-c", command[1]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = load(model_copy).state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())


@pytest.mark.parametrize(
    ("files", "message"), [([], "no config.json"), (["config.json"], r"no \*\.safetensors weights")]
)
def test_a_folder_that_is_no_model_is_refused(files: list[str], message: str, tiny_model: Path, tmp_path: Path) -> None:
    for name in files:
        shutil.copy(tiny_model / name, tmp_path)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        load(tmp_path / "nowhere")
