"""Mixtures whose files have a tensor for each expert: read as transformers reads them, each rank its own part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from policies.weights.expert_files import find_experts_stored, merging_rules
from policies.weights.stored import SafetensorsTensors
from tests.helpers.loaded import load
from tests.helpers.mixtures import MIXTURES, mixture


@pytest.mark.parametrize("name", MIXTURES)
def test_values_are_those_that_transformers_merges(name: str, tmp_path: Path) -> None:
    # In many files: some hold a part of one expert's tensors.
    mixture(name).save_pretrained(tmp_path, max_shard_size="10KB")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    model, weights, _ = load(tmp_path)
    # Names of the others differ in more ways.
    assert ("rank 0 reads" in weights.notes[0]) == (name in ("mixtral", "nemotron_h"))
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_a_rank_reads_a_part_of_the_experts(tmp_path: Path) -> None:
    model = mixture("qwen3_moe")
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    files, name = SafetensorsTensors(tmp_path.glob("*.safetensors")), "model.layers.1.mlp.experts.gate_up_proj"
    whole = model.get_parameter(name).detach()
    place = find_experts_stored(merging_rules(model), name, tuple(whole.shape), files)
    assert place is not None
    with safe_open(place.path, framework="pt") as file:
        assert torch.equal(place.read(file), whole)
        part = (slice(2, 4), slice(0, 48), slice(0, 32))
        assert torch.equal(place.read(file, part), whole[part])


@pytest.mark.parametrize("change", ["an expert is missing", "one has another shape", "there are more"])
def test_files_that_hold_other_experts_are_not_merged(change: str, tmp_path: Path) -> None:
    model = mixture("qwen3_moe")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name, shape = "model.layers.0.mlp.experts.down_proj", (4, 32, 24)
    if change == "an expert is missing":
        del tensors["model.layers.0.mlp.experts.3.down_proj.weight"]
    elif change == "one has another shape":
        tensors["model.layers.0.mlp.experts.3.down_proj.weight"] = torch.ones(32, 25)
    else:
        shape = (3, 32, 24)  # config.json says fewer: the rest is left over, and the run refused
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    files = SafetensorsTensors([tmp_path / "model.safetensors"])
    found = find_experts_stored(merging_rules(model), name, shape, files)
    assert (found is not None) == (change == "there are more")
