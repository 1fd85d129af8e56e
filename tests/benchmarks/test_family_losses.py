"""The table of families (`benchmarks.family_losses`): one of each kind, and what it must see."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import transformers

from benchmarks.families import measured_losses
from benchmarks.families.random_weights import make_random_model
from benchmarks.families.tiny_configs import tiny_config
from benchmarks.family_losses import FamilyRow, measure_family, measure_missing, read_rows


@pytest.mark.parametrize(
    ("kind", "family", "packed"),
    [
        ("causal", "gemma3_text", "measured"),  # sliding windows and full attention
        ("causal", "phimoe", "measured"),  # its window is in the mask alone
        ("causal", "opt", "refused"),  # takes no note of position ids
        ("causal", "roberta", "refused"),  # its positions begin after the padding id
        ("seq2seq", "t5", ""),
    ],
)
def test_losses_are_those_of_transformers_and_labels_are_out_of_sight(kind: str, family: str, packed: str) -> None:
    row = measure_family(kind, family)
    padded = row.cells["padding"]
    assert padded.apart is not None
    assert padded.apart < measured_losses.TOLERANCE
    if packed == "measured":
        assert row.cells["packing"].apart is not None
        assert row.cells["packing"].apart < measured_losses.TOLERANCE
    elif packed == "refused":
        assert row.cells["packing"].refused.startswith("--batching_strategy: ")
    assert row.is_right


def test_a_model_with_labels_in_sight_is_refused_and_one_with_another_loss_is_wrong() -> None:
    both_ways = tiny_config("llama")
    both_ways.is_causal = False
    auto_model = transformers.AutoModelForCausalLM
    own = measured_losses.own_losses(
        make_random_model(auto_model, both_ways), measured_losses.make_samples(apart=False)
    )
    leaking = measured_losses.measure("llama", both_ways, auto_model, own, "padding")
    assert leaking.refused.startswith("--model_name: with LlamaForCausalLM positions see the tokens that follow them")
    other = measured_losses.measure(
        "llama", tiny_config("llama"), auto_model, [1.001 * loss for loss in own], "padding"
    )
    assert not other.is_right


def test_a_call_measures_only_what_the_file_lacks(tmp_path: Path) -> None:
    file = tmp_path / "losses.jsonl"
    cells = {"padding": measured_losses.Cell(apart=3e-8), "packing": measured_losses.Cell(refused="--flag: no")}
    row = FamilyRow("causal", "opt", cells)
    file.write_text(json.dumps(asdict(row)) + "\n")
    measure_missing(file, ["opt"])
    assert read_rows(file) == [row]
