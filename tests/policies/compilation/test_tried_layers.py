"""With --compile auto layers are tried before the first step: a run is compiled as with --compile, or not at all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from checkpointing.finding import Checkpoint
from checkpointing.state_json import read_state
from tests.helpers.aot_eager import with_aot_eager
from tests.helpers.generated import flags
from tests.helpers.pairwise import slow_but
from tests.helpers.processes import ProcessGroup, log_lines, train_events
from tests.helpers.tried_layers import MISTAKES, with_trial

SHORT = ("--context_length", "64", "--num_epochs", "1", "--run_validation", "False", "--save_every_steps", "2")
REASONS = {
    "computes something else": "model.layers.1 (LlamaDecoderLayer) computes something else if it is compiled: ",
    "does not compile": "model.layers.1 (LlamaDecoderLayer) does not compile (backend=",
    "fails in backward": "model.layers.1 (LlamaDecoderLayer) could not be tried (RuntimeError: view size is not",
}


def numbers(run: Path) -> list[tuple[float, float]]:
    """The loss and gradient norm of each step."""
    return [(event["loss"], event["grad_norm"]) for event in train_events(run)]


def test_a_run_whose_layers_pass_is_that_with_compile_bit_for_bit_and_so_is_its_resumed_rest(
    tiny_model: Path, samples: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    given, tried = (flags(tiny_model, samples, tmp_path / name, *SHORT) for name in ("given", "tried"))
    process_group.train(with_aot_eager([*given, "--compile", "--max_train_step", "4"]), 1)
    (outcome,) = process_group.train(with_trial([*tried, "--max_train_step", "2"]), 1)
    assert "--compile auto" not in outcome.stdout
    checkpoint = tmp_path / "tried/checkpoints/step-00000002"
    assert Checkpoint(checkpoint, read_state(checkpoint)).was_compiled is True
    # Its plan says that four steps take no time, but it was compiled when it began.
    resumed = with_trial([*tried, "--max_train_step", "4", "--resume", "auto"], card="H100-80GB")
    (outcome,) = process_group.train(resumed, 1)
    assert "--compile auto" not in outcome.stdout
    assert numbers(tmp_path / "tried") == numbers(tmp_path / "given")


def test_a_run_that_is_planned_to_end_before_it_is_compiled_is_the_uncompiled_one(
    tiny_model: Path, samples: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    given, tried = (
        flags(tiny_model, samples, tmp_path / name, *SHORT, "--max_train_step", "2") for name in ("given", "tried")
    )
    process_group.train([*given, "--compile", "False"], 1)
    (outcome,) = process_group.train(with_trial(tried, card="H100-80GB"), 1)
    (line,) = [line for line in log_lines(outcome.stdout) if line.startswith("--compile auto")]
    assert re.fullmatch(
        r"--compile auto is False: the whole run is planned to take \S+ s, and compiling takes 10 at least; give "
        "--compile to compile all the same",
        line,
    )
    assert numbers(tmp_path / "tried") == numbers(tmp_path / "given")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(("--use_peft",), marks=pytest.mark.full),  # DistributedDataParallel
        ("--enable_fsdp", "--sharding_strategy", "SHARD_GRAD_OP", "--batching_strategy", "padding"),
    ],
)
def test_so_is_a_run_of_two_ranks(
    layout: tuple[str, ...], tiny_model: Path, samples: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    given, tried = (
        flags(tiny_model, samples, tmp_path / name, *SHORT, *layout, "--max_train_step", "3")
        for name in ("given", "tried")
    )
    process_group.train(with_aot_eager([*given, "--compile"]), 2)
    outcome, _ = process_group.train(with_trial(tried), 2)
    assert "--compile auto" not in outcome.stdout
    assert numbers(tmp_path / "tried") == numbers(tmp_path / "given")


@pytest.mark.parametrize("mistake", slow_but(1, MISTAKES))
def test_a_layer_that_fails_is_named_and_the_run_is_the_uncompiled_one(
    mistake: str, tiny_model: Path, samples: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    given, tried = (flags(tiny_model, samples, tmp_path / name, *SHORT) for name in ("given", "tried"))
    process_group.train([*given, "--max_train_step", "2", "--compile", "False"], 1)
    (outcome,) = process_group.train(with_trial([*tried, "--max_train_step", "2"], mistake), 1)
    (line,) = [line for line in log_lines(outcome.stdout) if line.startswith("--compile auto")]
    assert line.startswith(f"--compile auto is False: {REASONS[mistake]}")
    assert numbers(tmp_path / "tried") == numbers(tmp_path / "given")


@pytest.mark.parametrize("mistake", slow_but(1, MISTAKES[:2]))
def test_if_a_layer_fails_on_one_rank_no_rank_compiles(
    mistake: str, tiny_model: Path, samples: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    given, tried = (
        flags(tiny_model, samples, tmp_path / name, *SHORT, "--enable_fsdp", "--max_train_step", "2")
        for name in ("given", "tried")
    )
    process_group.train([*given, "--compile", "False"], 2)
    outcome, _ = process_group.train(with_trial(tried, mistake, ranks=(1,)), 2)
    (line,) = [line for line in log_lines(outcome.stdout) if line.startswith("--compile auto")]
    assert line.startswith(f"--compile auto is False: {REASONS[mistake]}")
    assert numbers(tmp_path / "tried") == numbers(tmp_path / "given")
