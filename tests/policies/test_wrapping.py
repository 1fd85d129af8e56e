"""Sharding units are found in the model: the decoder layers, and the input embedding unless the head shares it."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.families.published import read_published
from policies.wrapping import find_layers, find_outer_norms, find_units, has_tied_embeddings
from tests.helpers.families import FAMILIES


def make_model(name: str, *, tied: bool) -> Any:
    config = copy.deepcopy(FAMILIES[name].config)
    config.tie_word_embeddings = tied
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", FAMILIES)
def test_units_are_the_decoder_layers_and_the_embedding_that_no_head_shares(name: str, tied: bool) -> None:
    family, model = FAMILIES[name], make_model(name, tied=tied)
    assert has_tied_embeddings(model) == tied
    wanted = list(model.get_submodule(family.layers)) if family.layers_are_units else []
    assert len(wanted) == (2 if family.layers_are_units else 0)
    assert Counter(map(id, find_layers(model))) == Counter(map(id, wanted))
    if wanted and not tied:
        wanted.append(model.get_input_embeddings())
    assert Counter(map(id, find_units(model))) == Counter(map(id, wanted))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_weight_is_in_two_units_and_the_head_is_in_none(name: str, tied: bool) -> None:
    """A weight that two units share would be sharded by one and found missing by the other."""
    model = make_model(name, tied=tied)
    owners = Counter(id(parameter) for unit in find_units(model) for parameter in set(unit.parameters()))
    assert not owners or max(owners.values()) == 1
    assert id(model.get_output_embeddings().weight) not in owners


def test_layers_that_share_weights_are_in_the_root_unit() -> None:
    """Zamba 2's layers of attention take turns with two sets of weights; the third has those of the first."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_published()["zamba2"].tiny_config(97))
    layers = find_layers(model)
    first, alone, again = (layer for layer in model.model.layers if hasattr(layer, "shared_transformer"))
    assert {first, alone, again} <= set(layers)
    assert set(layers) - set(find_units(model)) == {first, again}


@pytest.mark.parametrize(("name", "norms"), [("llama", ["model.norm"]), ("gemma2", ["model.norm"]), ("gpt2", [])])
def test_norms_outside_of_layers_are_found_unless_torch_has_a_kernel_for_them(name: str, norms: list[str]) -> None:
    model = make_model(name, tied=False)
    found = find_outer_norms(model, find_layers(model))
    assert [name for name, module in model.named_modules() if module in found] == norms


class Inner(nn.Linear):
    pass


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Inner(2, 2), Inner(2, 2)])


class Nested(nn.Module):
    """Blocks within blocks, as vision-language models have them, and one that stands alone."""

    _no_split_modules = ("Inner", "Outer")

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 2), nn.Linear(2, 5, bias=False)
        self.layers = nn.ModuleList([Outer(), Outer()])
        self.single = Inner(2, 2)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_nested_blocks_come_before_those_that_hold_them() -> None:
    model = Nested()
    units = find_units(model)
    assert Counter(type(unit).__name__ for unit in units) == {"Inner": 4, "Outer": 2, "Embedding": 1}
    for index, unit in enumerate(units):
        later = {id(module) for module in units[index + 1 :]}
        assert not any(id(module) in later for module in unit.modules())


def test_a_module_that_is_not_repeated_stays_in_the_root_unit() -> None:
    model = Nested()
    assert model.single not in find_units(model)


@pytest.mark.parametrize("names", [None, (), ("Elsewhere",)])
def test_a_model_that_names_no_blocks_of_its_own_is_one_unit(names: Any) -> None:
    """Its embedding alone would only be gathered once more."""
    model = Nested()
    model._no_split_modules = names
    assert find_units(model) == []
