"""Whatever trains has a plan: ways of training drawn at random are planned, or refused."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from benchmarks.drawn.methods import (
    ADAPTERS,
    KINDS,
    LORA,
    LOSSES,
    QUANTIZATIONS,
    TINY,
    draw_method,
    draw_plan,
    make_models,
)
from configs.flags import parse_flags
from planning.machines.cards import Card
from planning.machines.hardware import Hardware, parse_hardware
from planning.planned_run import Plan, plan_of
from resolving.data_facts import DataFacts
from utils.errors import ConfigError

CPU = Hardware(Card("CPU", 24.0, is_gpu=False, host_memory_gib=24.0))
NEW_TOKENS = DataFacts(num_embeddings=TINY["vocab_size"] + 2, new_tokens=(TINY["vocab_size"], TINY["vocab_size"] + 1))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


def planned(model: Path, flags: dict[str, str], hardware: Hardware = CPU) -> Plan:
    if model.name == "image":
        flags = {"--dataset": "caption_dataset", "--caption_dataset.data_path": "pictures"} | flags
    config = parse_flags(["--model_name", str(model), *(word for item in flags.items() for word in item)])
    return plan_of(config, hardware, NEW_TOKENS if config.train_config.add_special_tokens else DataFacts())


@pytest.mark.parametrize(
    ("hardware", "flags"),
    [
        (CPU, {}),
        (parse_hardware("H100-80GB"), {"--pure_bf16": "True"}),
        *(pytest.param(CPU, quantization, marks=pytest.mark.slow) for quantization in QUANTIZATIONS),
    ],
    ids=str,
)
def test_every_adapter_of_a_causal_model_has_a_plan(hardware: Hardware, flags: dict[str, str], models: Path) -> None:
    """Among them LLaMA-Adapter, whose products autocast casts in a run, and new tokens, whose ids are real numbers."""
    for adapter in ADAPTERS:
        if "--use_peft" in adapter or "--quantization" not in flags:
            assert planned(models / "causal", adapter | flags, hardware).memory.peak_gib > 0, adapter


@pytest.mark.parametrize("hardware", [CPU, parse_hardware("2xH100-80GB")], ids=str)
def test_every_loss_has_a_plan(hardware: Hardware, models: Path) -> None:
    for dataset, loss in LOSSES:
        for more in ({}, LORA, {"--optimizer": "muon", "--enable_fsdp": "True"}):
            flags = {"--dataset": dataset, f"--{dataset}.data_path": "x", **more, **loss}
            assert planned(models / "causal", flags, hardware).memory.peak_gib > 0, flags


@pytest.mark.parametrize(
    "first",
    [
        0,
        *(pytest.param(first, marks=pytest.mark.full) for first in (15, 30, 45, 60)),
    ],
)
def test_ways_of_training_drawn_at_random_have_a_plan_or_are_refused(first: int, models: Path) -> None:
    num_planned = 0
    for number in range(first, first + 15):
        draw = random.Random(number)
        flags, asked = draw_method(draw), draw_plan(draw)
        name = asked.get("--dry_run_hardware")
        with contextlib.suppress(ConfigError):
            plan = planned(models / KINDS[number % 3], flags, parse_hardware(name) if name else CPU)
            assert plan.to_dict()["peak_gib"] > 0, flags
            num_planned += 1
    assert num_planned >= 5
