"""A loss that is not finite ends the run, and names the step and the rows at fault."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from data.batches.order import epoch_order
from tests.helpers.processes import read_metrics, run_command
from tests.helpers.refusals import Bench, error_lines


def test_a_loss_that_is_not_finite_ends_the_run_and_names_step_and_rows(bench: Bench) -> None:
    given = ["--fsdp_config.optimizer", "SGD", "--lr", "1e18", "--batching_strategy", "padding"]
    given += ["--batch_size_training", "3", "--seed", "5", "--save_metrics"]
    (outcome,) = bench.group.run(bench.flags(*given), 1)
    assert outcome.status == 1, outcome.stderr
    assert "Traceback" not in outcome.stderr
    (line,) = error_lines(outcome.stderr)
    assert "step 2" in line
    rows = epoch_order(12, seed=5, epoch=0, global_batch_size=3, lengths=np.ones(12))[3:6] + 1  # counted from 1
    assert f": {', '.join(map(str, sorted(rows)))}." in line
    assert "held NaN or infinity before training" not in line
    events = read_metrics(bench.output)
    assert [event["step"] for event in events if event["event"] == "train"] == [1]
    assert events[-1]["event"] == "end"
    assert events[-1]["status"] == "failed"
    assert events[-1]["step"] == 1
    assert not (bench.output / "model").exists()


def model_with_a_poisoned_token(bench: Bench, token: int) -> Path:
    """A model that gives NaN for every text with this token, and for no other."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(bench.model)
    config.tie_word_embeddings = False
    model = AutoModelForCausalLM.from_config(config)
    model.get_input_embeddings().weight.data[token] = float("nan")
    model.save_pretrained(bench.folder / "poisoned")
    AutoTokenizer.from_pretrained(bench.model).save_pretrained(bench.folder / "poisoned")
    return bench.folder / "poisoned"


@pytest.mark.parametrize(
    ("world_size", "flags"),
    # In the last one backward updates weights in place before the loss is read.
    [(1, []), (2, []), pytest.param(2, ["--enable_fsdp", "--fsdp_cpu_offload"], marks=pytest.mark.slow)],
)
def test_only_the_row_at_fault_is_named(bench: Bench, world_size: int, flags: list[str]) -> None:
    """It is in a step that is read while the next one is computed: neither the first nor the last, nor a due one."""
    rows = "[{'input_ids': [5, 599 if i == 7 else 6, 8], 'labels': [5, 6, 8]} for i in range(24)]"
    given = ["--model_name", str(model_with_a_poisoned_token(bench, 599)), *bench.dataset_function(f"return {rows}")]
    given += ["--batch_size_training", "1", "--gradient_accumulation_steps", str(4 // world_size)]
    given += ["--batching_strategy", "padding", "--run_validation", "False", "--seed", "8", *flags]
    outcomes = bench.group.run(bench.flags(*given), world_size)
    assert [outcome.status for outcome in outcomes] == [1] * world_size, outcomes[0].stderr
    order = epoch_order(24, seed=8, epoch=0, global_batch_size=4, lengths=np.full(24, 3))
    step = order.tolist().index(7) // 4 + 1
    assert 2 < step < 6
    (line,) = error_lines(outcomes[0].stderr)
    assert f"step {step}:" in line
    assert ": 8." in line  # counted from 1
    assert "It comes from the weights, not from the data: model.embed_tokens.weight hold" in line
    events = read_metrics(bench.output)
    assert [event["step"] for event in events if event["event"] == "train"] == list(range(1, step))
    assert events[-1]["status"] == "failed"
    assert not (bench.output / "model").exists()


def model_with_nan(bench: Bench) -> Path:
    model = bench.copy_of_model()
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model


def test_weights_that_are_not_finite_are_not_quantized(bench: Bench) -> None:
    """Packed they would be finite, and nothing would tell."""
    given = ["--use_peft", "--quantization", "4bit", "--model_name", str(model_with_nan(bench))]
    message = bench.refused(*given, world_size=2)
    assert message.startswith("error: --model_name: model.layers.1.mlp.up_proj.weight holds NaN, infinity, or numbers")


@pytest.mark.parametrize(
    ("given", "world_size"),
    [(["--enable_fsdp"], 2), (["--use_peft"], 1)],
    ids=["shards", "LoRA"],
)
def test_weights_that_were_not_finite_before_training_are_blamed_and_not_the_data(
    bench: Bench, given: list[str], world_size: int
) -> None:
    model = model_with_nan(bench)
    outcome = bench.group.run(bench.flags("--model_name", str(model), *given), world_size)[0]
    assert outcome.status == 1, outcome.stderr
    (line,) = error_lines(outcome.stderr)
    assert line.startswith("error: step 1: the loss is not finite")
    assert "It comes from the weights, not from the data: model.layers.1.mlp.up_proj.weight" in line
    assert "held NaN or infinity before training; get that model or adapter again" in line


@pytest.mark.slow
def test_torchrun_shows_a_loss_that_is_not_finite_once(bench: Bench) -> None:
    given = ["--enable_fsdp", "--fsdp_config.optimizer", "SGD", "--lr", "1e18", "--batching_strategy", "padding"]
    done = run_command(*bench.flags(*given, "--batch_size_training", "1"), nproc=2, cwd=bench.folder)
    assert done.returncode != 0
    (line,) = error_lines(done.stderr)
    assert "step 2" in line
    assert 'finetuning.py", line' not in done.stderr, "a traceback of this project"
    assert set(re.findall(r"exitcode\s*: (-?\d+)", done.stderr)) == {"1"}, done.stderr
    events = read_metrics(bench.output)
    assert events[-1]["event"] == "end"
    assert events[-1]["status"] == "failed"
    assert not (bench.output / "model").exists()
