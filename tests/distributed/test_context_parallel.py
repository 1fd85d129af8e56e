"""Runs whose ranks share rows: evaluated, generating, mixing experts, compiled, and going on by other numbers of ranks.

That their steps are those of a plain loop: test_exactness.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.aot_eager import with_aot_eager
from tests.helpers.families import MIXTURE_WITH_ROUTER_LOSS
from tests.helpers.processes import ProcessGroup, log_lines, read_metrics
from tests.helpers.resuming import as_if_killed_after, flags_of, results

BY_TWO, BY_FOUR = ("--context_parallel_size", "2"), ("--context_parallel_size", "4")
FIGURES = ("loss", "rouge1", "busiest_expert_share")
PLAIN_STEPS = ("--optimizer", "SGD", "--lr", "0.1")  # AdamW makes large steps of small gradients' rounding


def evaluations(run: Path) -> list[dict[str, Any]]:
    events = [event for event in read_metrics(run) if event["event"] == "eval"]
    return [{name: event[name] for name in (*FIGURES, "num_label_tokens") if name in event} for event in events]


def samples(run: Path) -> list[dict[str, Any]]:
    lines = (run / "samples.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "time"} for line in lines]


def assert_alike(found: Path, wanted: Path) -> None:
    for one, other in zip(results(found), results(wanted), strict=True):
        assert one[:2] == other[:2]
        assert one[2:6] == pytest.approx(other[2:6], rel=2e-5)
    for one_evaluation, other_evaluation in zip(evaluations(found), evaluations(wanted), strict=True):
        assert one_evaluation == pytest.approx(other_evaluation, rel=2e-5)


@pytest.fixture(scope="module")
def whole(tiny_model: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows on one rank; answers are generated, and steps saved."""
    run = tmp_path_factory.mktemp("whole") / "run"
    process_group.train(flags_of(tiny_model, run, *GENERATING), 1)
    return run


GENERATING = ("--eval_generate", "--max_generate_samples", "3", "--max_new_tokens", "4", "--eval_every_steps", "4")


def test_losses_evaluations_answers_and_checkpoints_are_those_of_whole_rows(
    whole: Path, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    (outcome, _) = process_group.train(flags_of(tiny_model, tmp_path / "run", *GENERATING, *BY_TWO), 2)
    assert_alike(tmp_path / "run", whole)
    assert samples(tmp_path / "run") == samples(whole)
    (steps,) = [line for line in log_lines(outcome.stdout) if line.startswith("steps")]
    assert steps.rstrip().endswith("of 4 rows = 1 per micro-batch x 4 x 1 group of 2 ranks that share rows")
    # By one rank, and by four that share rows, of a checkpoint of two: to rounding.
    for ranks, shared in ((1, ()), (4, BY_FOUR)):
        moved = as_if_killed_after(3, tmp_path / "run", tmp_path / f"moved{ranks}")
        process_group.train(flags_of(tiny_model, moved, *GENERATING, *shared, "--resume", "auto"), ranks)
        assert_alike(moved, whole)


SETTINGS = {
    "a stream": ("--streaming", "--batching_strategy", "packing", "--run_validation", "False"),
    "4 bits": ("--use_peft", "--quantization", "4bit", "--lora_config.lora_dropout", "0", "--enable_fsdp"),
    "tiles": ("--tile_tokens", "16", "--activation_checkpointing", "full", "--activation_offloading"),
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS)
def test_so_they_are_with(settings: str, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path) -> None:
    for name, shared in (("whole", ()), ("shared", BY_TWO)):
        process_group.train(flags_of(tiny_model, tmp_path / name, *SETTINGS[settings], *shared), 2)
    assert_alike(tmp_path / "shared", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("batching", ["packing", "padding"])
def test_experts_are_evened_out_over_all_ranks(
    batching: str, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MIXTURE_WITH_ROUTER_LOSS, dtype=torch.float32).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "model")
    for name, ranks, shared in (("whole", 1, ()), ("shared", 2, (*BY_TWO, "--enable_fsdp"))):
        flags = flags_of(tmp_path / "model", tmp_path / name, "--batching_strategy", batching, *PLAIN_STEPS, *shared)
        process_group.train(flags, ranks)
    assert_alike(tmp_path / "shared", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["off", "full", "selective"])
def test_compiled_layers_exchange_in_their_graphs(
    checkpointing: str, whole: Path, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    flags = flags_of(
        tiny_model, tmp_path / "run", *BY_TWO, "--compile", "--activation_checkpointing", checkpointing, *GENERATING
    )
    process_group.train(with_aot_eager(flags), 2)
    assert_alike(tmp_path / "run", whole)
