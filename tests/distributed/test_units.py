"""What is gathered at a time: layer by layer, the whole model where that is asked for, or where there are no layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers import random_documents
from tests.helpers.processes import ProcessGroup, train_events


def train(group: ProcessGroup, model: Path, output: Path, *flags: str, ranks: int) -> str:
    """Three steps; what rank 0 printed."""
    argv = ["--model_name", str(model), "--output_dir", str(output), "--max_train_step", "3", "--save_model", "False"]
    argv += ["--dataset", f"{random_documents.__file__}:get_custom_dataset", "--run_validation", "False"]
    argv += ["--context_length", "96", "--num_workers_dataloader", "0", "--batching_strategy", "padding"]
    argv += ["--batch_size_training", "2", "--global_batch_size", "4", *flags]
    return group.train(argv, ranks)[0].stdout


def resolved(output: Path) -> dict:
    return yaml.safe_load((output / "run.yaml").read_text())["resolved"]


@pytest.mark.parametrize(
    ("flags", "num_units"),
    [
        (["--enable_fsdp"], 4),  # two layers, the embedding, and what is left
        (["--enable_fsdp", "--wrap", "root"], 1),
        pytest.param(["--enable_fsdp", "--sharding_strategy", "NO_SHARD"], 0, marks=pytest.mark.slow),
        pytest.param([], 0, marks=pytest.mark.slow),
    ],
)
def test_the_run_says_how_many_units_it_gathers(
    flags: list[str], num_units: int, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    printed = train(process_group, tiny_model, tmp_path / "run", *flags, ranks=2)
    assert resolved(tmp_path / "run")["num_units"] == num_units
    assert "wrap:" not in printed


@pytest.mark.slow
def test_copies_that_are_cast_may_be_one_unit(tiny_model: Path, process_group: ProcessGroup, tmp_path: Path) -> None:
    """Under NO_SHARD a cast weight is a unit's: all at once have fewer hooks, and the same numbers."""
    losses = []
    for wrap, num_units in (("layer", 4), ("root", 1)):
        flags = ["--enable_fsdp", "--sharding_strategy", "NO_SHARD", "--mixed_precision", "--wrap", wrap]
        train(process_group, tiny_model, tmp_path / wrap, *flags, ranks=2)
        assert resolved(tmp_path / wrap)["num_units"] == num_units
        losses.append([event["loss"] for event in train_events(tmp_path / wrap)])
    assert losses[0] == losses[1]


def test_where_nothing_is_cast_or_gathered_units_are_refused(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    flags = ["--model_name", str(tiny_model), "--output_dir", str(tmp_path / "run"), "--enable_fsdp"]
    (outcome,) = process_group.run([*flags, "--sharding_strategy", "NO_SHARD", "--wrap", "root"], 1)
    assert outcome.status == 2
    assert "--wrap: root has no effect under NO_SHARD with fp32" in outcome.stderr


@pytest.mark.slow
def test_a_model_without_layers_is_one_unit_and_the_run_says_so(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = transformers.CTRLConfig(
        vocab_size=600, n_embd=32, dff=48, n_layer=2, n_head=4, n_positions=128, resid_pdrop=0.0, embd_pdrop=0.0
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "model")
    flags = ["--enable_fsdp", "--activation_checkpointing", "auto"]  # which is the default on GPUs
    printed = train(process_group, tmp_path / "model", tmp_path / "sharded", *flags, ranks=2)
    assert printed.count("wrap: this model names no repeated layers; it is gathered as one unit") == 1
    assert printed.count("activation_checkpointing: off") == 1
    assert resolved(tmp_path / "sharded")["num_units"] == 1
    assert resolved(tmp_path / "sharded")["activation_checkpointing"] == "off"
    train(process_group, tmp_path / "model", tmp_path / "alone", ranks=1)
    losses = [[event["loss"] for event in train_events(tmp_path / name)] for name in ("sharded", "alone")]
    assert losses[0] == pytest.approx(losses[1], rel=2e-5)
