"""Of a model of image and text: its parts, the units they are gathered in, and which layers LoRA means."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForImageTextToText

from benchmarks.pictures.shapes import IMAGE_SHAPES
from configs.peft import LoraConfig
from policies.adapters.targets import choose_targets, default_targets
from policies.freezing import freeze_parts
from policies.wrapping import find_layers, find_units
from tests.helpers.image_models import MODELS
from utils.model_parts import vision_part


def make(name: str) -> Any:
    return AutoModelForImageTextToText.from_config(MODELS[name]()[0])


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("blip2_opt", {"Blip2EncoderLayer": 2, "Blip2QFormerLayer": 2, "OPTDecoderLayer": 2}),
        ("blip2_t5", {"Blip2EncoderLayer": 2, "Blip2QFormerLayer": 2, "T5Block": 4}),
        ("llava", {"CLIPEncoderLayer": 2, "LlamaDecoderLayer": 2, "Embedding": 1}),
        ("idefics3", {"Idefics3EncoderLayer": 2, "LlamaDecoderLayer": 2, "Embedding": 1}),
    ],
)
def test_layers_of_towers_and_qformers_are_units_too(name: str, wanted: dict[str, int]) -> None:
    assert Counter(type(unit).__name__ for unit in find_units(make(name))) == wanted


@pytest.mark.parametrize(
    ("shape", "tower"),
    [("qwen3-vl-4b", "Qwen3VLVisionModel"), ("qwen2.5-vl-7b", "Qwen2_5_VisionTransformerPretrainedModel")],
)
def test_a_vision_encoder_of_small_layers_is_one_unit(shape: str, tower: str) -> None:
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(IMAGE_SHAPES[shape]()[0])
    num_layers = len(find_layers(model.get_decoder()))
    found = Counter(type(unit).__name__ for unit in find_units(model))
    assert found[tower] == 1
    assert sum(found.values()) - found["Embedding"] == num_layers + 1
    apart = Counter(type(unit).__name__ for unit in find_units(model, vision_at_once=False))
    assert not apart[tower]
    assert sum(apart.values()) - apart["Embedding"] == len(find_layers(model)) > num_layers + 1


@pytest.mark.parametrize(("width", "is_one_unit"), [(1536, True), (2048, False)])
def test_a_vision_encoder_of_a_billion_parameters_is_gathered_layer_by_layer(width: int, is_one_unit: bool) -> None:
    config = IMAGE_SHAPES["qwen3-vl-4b"]()[0]
    config.vision_config.hidden_size, config.vision_config.intermediate_size = width, 4 * width
    config.text_config.intermediate_size *= 8
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    (tower,) = vision_part(model)
    assert (sum(parameter.numel() for parameter in tower.parameters()) <= 10**9) == is_one_unit
    assert (tower in find_units(model)) == is_one_unit


def test_named_classes_are_units_inner_ones_first() -> None:
    model = make("blip2_opt")
    units = find_units(model, ("Blip2Encoder", "Blip2EncoderLayer"))
    assert [type(unit).__name__ for unit in units] == ["Blip2EncoderLayer"] * 2 + ["Blip2Encoder"]


@pytest.mark.parametrize(
    ("flags", "still_trained"),
    [
        (["freeze_vision"], {"query_tokens", "qformer", "language_projection", "language_model"}),
        (["freeze_qformer"], {"vision_model", "language_projection", "language_model"}),
        (["freeze_language_model"], {"vision_model", "query_tokens", "qformer", "language_projection"}),
        (["freeze_vision", "freeze_language_model"], {"query_tokens", "qformer", "language_projection"}),
    ],
)
def test_a_frozen_part_is_frozen_whole_and_nothing_else(flags: list[str], still_trained: set[str]) -> None:
    model = make("blip2_opt")
    names = ("freeze_vision", "freeze_qformer", "freeze_language_model")
    freeze_parts(model, model, SimpleNamespace(**{name: name in flags for name in names}))  # type: ignore[arg-type]
    trained = {name.split(".")[0] for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = {name.split(".")[0] for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert trained == still_trained
    assert not trained & frozen


def test_a_vision_encoder_inside_the_decoder_is_no_part_of_the_language_model() -> None:
    model = make("idefics1")
    model.requires_grad_(True)
    names = ("freeze_vision", "freeze_qformer", "freeze_language_model")
    train: Any = SimpleNamespace(**{name: name == "freeze_language_model" for name in names})
    freeze_parts(model, model, train)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(name.startswith("model.vision_model.") for name in trained)


def test_lora_means_the_language_model_and_a_tower_only_by_a_name_of_its_own() -> None:
    model = make("llava")
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    chosen = choose_targets(model, LoraConfig()).modules
    assert set(chosen) == {name for name in linears if "language_model" in name and name[-6:] in ("q_proj", "v_proj")}
    assert "fc1" in choose_targets(model, LoraConfig(target_modules=("q_proj", "fc1"))).modules  # CLIP's alone
    every = choose_targets(model, LoraConfig(target_modules=("all-linear",))).modules
    assert every
    assert all("language_model" in name for name in every)


@pytest.mark.parametrize("name", MODELS)
def test_the_default_targets_are_queries_and_values_of_the_language_model(name: str) -> None:
    model, config = make(name), MODELS[name]()[0]
    targets = choose_targets(
        model, LoraConfig(target_modules=default_targets(config, LoraConfig().target_modules))
    ).modules
    assert {target.rpartition(".")[2] for target in targets} in ({"q_proj", "v_proj"}, {"q", "v"})
    text = config.get_text_config()
    num_attentions = 3 if text.is_encoder_decoder else 1  # of the encoder, of the decoder, and between them
    num_attentions += name == "idefics1"  # each layer looks at the image, too
    assert len(targets) == 2 * num_attentions * text.num_hidden_layers
