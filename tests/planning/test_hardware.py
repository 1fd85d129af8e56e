"""Hardware by the names that people and drivers write; what is not known is refused with the nearest name."""

from __future__ import annotations

import pytest

from planning.machines.cards import CARDS, find_card
from planning.machines.hardware import Hardware, parse_hardware
from utils.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "number", "card"),
    [
        ("4xV100-32GB", 4, "V100-32GB"),
        ("4 x v100 32gb", 4, "V100-32GB"),
        ("v100-16", 1, "V100-16GB"),
        ("Tesla V100-SXM2-16GB", 1, "V100-16GB"),
        ("8*NVIDIA A100-SXM4-80GB", 8, "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", 1, "A100-80GB"),
        ("A100-PCIE-40GB", 1, "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", 1, "H100-80GB"),
        ("8XH100-SXM-80", 8, "H100-80GB"),
        ("h100 nvl", 1, "H100-94GB"),
        ("NVIDIA H200", 1, "H200"),
        ("8xH200-141GB", 8, "H200"),
        ("b200", 1, "B200"),
        ("NVIDIA A10G", 1, "A10G"),
        ("Tesla T4", 1, "T4"),
        ("4xT4-16GB", 4, "T4"),
        ("2x3090", 2, "RTX 3090"),
        ("NVIDIA GeForce RTX 4090", 1, "RTX 4090"),
        ("4090-24GB", 1, "RTX 4090"),
        ("L40S-48GB", 1, "L40S"),
        ("l4", 1, "L4"),
        ("8xAMD Instinct MI300X", 8, "MI300X"),
        ("NVIDIA A10", 1, "A10"),
        ("a10-24gb", 1, "A10"),
        ("NVIDIA A30", 1, "A30"),
        ("2xA40-48GB", 2, "A40"),
        ("NVIDIA RTX A6000", 1, "RTX A6000"),
        ("a6000", 1, "RTX A6000"),
        ("NVIDIA GeForce RTX 5090", 1, "RTX 5090"),
        ("5090", 1, "RTX 5090"),
        ("NVIDIA RTX 6000 Ada Generation", 1, "RTX 6000 Ada"),
        ("4xNVIDIA GB200", 4, "GB200"),
        ("GB200-186GB", 1, "GB200"),
    ],
)
def test_a_card_is_found_by_what_people_and_drivers_call_it(text: str, number: int, card: str) -> None:
    hardware = parse_hardware(text, nodes=2)
    assert (hardware.cards_per_node, hardware.card.name) == (number, card)
    assert hardware.world_size == 2 * number


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("8xH10", "did you mean H100-"),
        ("4xV100", "'V100' is one of V100-16GB or V100-32GB; name its memory, too"),
        ("A100", "A100-40GB or A100-80GB"),
        ("H200-80GB", "did you mean H100-80GB?"),
        ("quantum", "no figures of 'quantum' are known; known are T4, V100-16GB"),
        ("0xT4", "'0xT4' is no NUMBERxCARD, like 4xV100-32GB"),
        ("4x", "no figures of '4x' are known"),
        ("4xGPU", "describe another card, without its speed, by its size, like 1x24GB, or by --device_memory_gib"),
        (None, "not given; name the cards, like 4xV100-32GB"),
    ],
)
def test_what_is_not_known_is_refused_with_the_nearest_name(text: str | None, named: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_hardware(text)
    assert str(refusal.value).startswith("--dry_run_hardware: ")
    assert named in str(refusal.value)


def test_a_card_can_be_described_by_its_memory_alone() -> None:
    assert parse_hardware(None, device_memory_gib=24).card.memory_gib == 24
    four = parse_hardware("4xGPU", device_memory_gib=10.5)
    assert (four.cards_per_node, four.card.memory_gib, four.card.bf16_tflops) == (4, 10.5, None)
    limited = parse_hardware("A100-80GB", device_memory_gib=74.5).card
    assert (limited.memory_gib, limited.bf16_tflops) == (74.5, 312)


def test_a_card_of_some_size_has_no_more_than_the_least_card_with_that_label() -> None:
    hardware = parse_hardware("2x24GB")
    assert (hardware.cards_per_node, hardware.name) == (2, "2xGPU of 24 GB")
    assert hardware.card.memory_gib == pytest.approx(
        min(find_card(name).memory_gib for name in ("L4", "A10G")), abs=0.01
    )
    assert parse_hardware("1x12 GiB").card.memory_gib == 12
    labels = {"T4": 16, "A30": 24, "RTX 5090": 32, "A40": 48, "A100-80GB": 80, "H200": 141, "B200": 192}
    for name, label in labels.items():
        assert parse_hardware(f"1x{label}GB").card.memory_gib <= find_card(name).memory_gib


def test_hardware_says_what_it_is() -> None:
    assert parse_hardware("4xV100-32GB").name == "4xV100-32GB"
    assert parse_hardware("8xH200", nodes=2).name == "2 nodes of 8xH200"
    assert Hardware(CARDS[0]).world_size == 1


def test_figures_are_dense_and_in_proportion() -> None:
    """A slip of a factor of two, or of a unit, would show here."""
    for card in CARDS:
        assert find_card(card.name) is card
        assert all((card.source, card.fp32_tflops, card.fp16_tflops, card.memory_gb_per_second))
        assert card.has_bf16 == (card.bf16_tflops is not None)
        assert card.bf16_tflops in (None, card.fp16_tflops)
        assert card.has_float8 == (card.float8_tflops is not None)
        assert card.float8_tflops is None or card.float8_tflops == pytest.approx(2 * card.bf16_tflops, rel=0.01)
        assert 1.9 < card.fp16_tflops / card.fp32_tflops < 32  # from consumer cards to Hopper's tensor cores
        assert 60 < card.fp16_tflops * 1e3 / card.memory_gb_per_second < 450  # FLOPs per byte
