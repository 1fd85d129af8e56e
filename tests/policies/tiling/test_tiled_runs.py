"""Whole runs in tiles have the losses of whole layers, under every layout, with adapters, padded and packed."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.activations.checkpointing import MODES
from tests.helpers.aot_eager import with_aot_eager
from tests.helpers.generated import flags
from tests.helpers.pairwise import slow_but
from tests.helpers.processes import ProcessGroup, log_lines, train_events
from tests.helpers.tried_layers import MISTAKES, with_trial

LORA = ("--use_peft", "--target_modules", "all-linear", "--lora_dropout", "0")
OFFLOADED = ("--activation_checkpointing", "full", "--activation_offloading")
RUNS = {
    "one rank, packed": (1, ()),
    "sharded, full": (2, ("--enable_fsdp", "--activation_checkpointing", "full")),
    "sharded, padded, offloaded": (2, ("--enable_fsdp", "--batching_strategy", "padding", *OFFLOADED)),
    "replicated, selective": (2, ("--activation_checkpointing", "selective")),
    "sharded adapters on 4 bits": (2, ("--enable_fsdp", "--quantization", *LORA, "--activation_checkpointing", "full")),
    "compiled, sharded": (2, ("--enable_fsdp", "--compile", "--activation_checkpointing", "full")),
}


@pytest.mark.parametrize(("num_ranks", "given"), slow_but(1, RUNS.values()), ids=list(RUNS))
def test_losses_and_gradient_norms_are_those_of_whole_layers(
    num_ranks: int,
    given: tuple[str, ...],
    tiny_model: Path,
    samples: Path,
    tmp_path: Path,
    process_group: ProcessGroup,
) -> None:
    found = {}
    for tokens in ("0", "48"):
        argv = flags(tiny_model, samples, tmp_path / tokens, "--context_length", "128", *given)
        argv += ["--max_train_step", "3", "--tile_tokens", tokens, "--save_model", "False", "--run_validation", "False"]
        argv += ["--mixed_precision", "False", "--lr", "1e-3"]
        process_group.train(with_aot_eager(argv) if "--compile" in given else argv, num_ranks)
        found[tokens] = train_events(tmp_path / tokens)
    assert found["0"][0]["loss"] == pytest.approx(found["48"][0]["loss"], rel=1e-6)
    for whole, tiled in zip(found["0"], found["48"], strict=True):
        assert tiled["loss"] == pytest.approx(whole["loss"], rel=1e-5)
        assert tiled["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)


@pytest.mark.slow
def test_a_resumed_run_goes_on_bit_for_bit_with_adapters_that_drop_out(
    tiny_model: Path, samples: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    argv = ["--tile_tokens", "48", "--context_length", "128", "--activation_checkpointing", "full", "--use_peft"]
    argv += ["--target_modules", "all-linear", "--lora_dropout", "0.2", "--save_model", "False"]
    argv += ["--run_validation", "False", "--num_epochs", "3", "--lr", "1e-3"]
    for name, steps in (("whole", [4]), ("stopped", [2, 4])):
        for last in steps:
            words = flags(tiny_model, samples, tmp_path / name, *argv, "--max_train_step", str(last))
            process_group.train([*words, "--resume", "auto"], 1)
    whole, stopped = ([event["loss"] for event in train_events(tmp_path / name)] for name in ("whole", "stopped"))
    assert len(whole) == 4
    assert stopped == whole


TRIED = [("full", ""), *(("full", mistake) for mistake in MISTAKES), *((mode, "") for mode in MODES if mode != "full")]


@pytest.mark.parametrize(("mode", "mistake"), slow_but(0, TRIED, num_slow=3))
def test_compiled_layers_in_tiles_pass_their_trial_and_wrong_ones_do_not(
    mode: str, mistake: str, tiny_model: Path, samples: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    argv = ["--tile_tokens", "48", "--context_length", "128", "--activation_checkpointing", mode, "--max_train_step"]
    argv += ["2", "--save_model", "False", "--run_validation", "False"]
    given, tried = (flags(tiny_model, samples, tmp_path / name, *argv) for name in ("given", "tried"))
    process_group.train([*given, "--compile", "False"] if mistake else with_aot_eager([*given, "--compile"]), 1)
    (outcome,) = process_group.train(with_trial(tried, mistake), 1)
    found = [line for line in log_lines(outcome.stdout) if line.startswith("--compile auto is False")]
    assert len(found) == bool(mistake), found
    losses = [[event["loss"] for event in train_events(tmp_path / name)] for name in ("given", "tried")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6) if mistake else losses[1] == losses[0]
