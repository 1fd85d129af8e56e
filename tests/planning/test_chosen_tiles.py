"""Tiles are chosen where a run does not fit without them, the largest that do, and counted by the plan."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
from transformers import LlamaConfig, OPTConfig

from configs.flags import parse_flags
from planning.machines.hardware import parse_hardware
from planning.memory import run_passes
from planning.planned_run import Plan, plan_of
from policies.activations.checkpointing import Checkpointing
from utils.errors import ConfigError

FULL = "--activation_checkpointing full"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config.json whose MLP is eight times as wide as its hidden states."""
    shape = {"hidden_size": 1024, "intermediate_size": 8192, "num_attention_heads": 8, "vocab_size": 32000}
    folder = tmp_path_factory.mktemp("models") / "wide"
    config = LlamaConfig(**shape, num_hidden_layers=2, max_position_embeddings=65536)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return folder


def planned(model: Path, given: str, memory_gib: float = 40.0, choice: Checkpointing | None = None) -> Plan:
    shape = "--batch_size_training 1 --context_length 32768 --run_validation False --use_peft"
    shape += f" --lora_config.target_modules all-linear {given}"
    config = parse_flags(["--model_name", str(model), *shape.split()])
    return plan_of(config, parse_hardware("A100-40GB", device_memory_gib=memory_gib), checkpointing=choice)


def test_the_largest_tiles_with_which_a_run_fits_are_taken_and_none_if_it_fits_without(wide: Path) -> None:
    whole, *tiled = [planned(wide, f"{FULL} --tile_tokens {tokens}").memory for tokens in (0, 16384, 8192, 4096)]
    peaks = [memory.peak_gib for memory in tiled]
    assert whole.peak_gib > 1.5 * peaks[0]
    assert peaks == sorted(peaks, reverse=True)

    def chosen(memory_gib: float, given: str = FULL) -> Checkpointing:
        return planned(wide, given, memory_gib).model.empty.checkpointing

    def room(peak_gib: float) -> float:
        return (peak_gib + whole.overhead_gib) / 0.94

    assert chosen(room(whole.peak_gib)) == Checkpointing("full")
    assert chosen(room(peaks[0])) == Checkpointing("full", tile_tokens=16384)
    assert chosen(room((peaks[0] + peaks[1]) / 2)) == Checkpointing("full", tile_tokens=8192)
    assert chosen(room((peaks[0] + peaks[1]) / 2), f"{FULL} --tile_tokens 0") == Checkpointing("full")
    # It fits with none: what helps most is taken.
    assert chosen(room(peaks[-1] / 2)).tile_tokens in (4096, 8192)
    # Which layers are recomputed is chosen again, since tiles make room.
    found = planned(wide, "--activation_checkpointing auto", room(1.3 * peaks[0]))
    assert found.memory.verdict == "fits"
    assert found.model.empty.checkpointing.tile_tokens
    of_tiles, of_layers = found.choices
    assert of_tiles.startswith("tile_tokens: auto is ")
    assert "MLPs in tiles of" in of_layers


@pytest.mark.parametrize("given", [FULL, "--activation_checkpointing off", f"{FULL} --compile --activation_offloading"])
def test_a_plan_of_three_tiles_is_that_of_all(given: str, wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given += " --tile_tokens 5000"  # of 32,768: the last one is smaller
    found = planned(wide, given).memory
    monkeypatch.setattr(run_passes, "some_tiles", nullcontext)
    assert planned(wide, given).memory == found


def test_an_earlier_choice_is_taken_as_it_is(wide: Path) -> None:
    choice = Checkpointing("full", tile_tokens=4096)
    found = planned(wide, FULL, choice=choice)
    assert found.model.empty.checkpointing == choice
    assert found.memory.peak_gib == planned(wide, f"{FULL} --tile_tokens 4096").memory.peak_gib


def test_a_number_is_refused_for_layers_without_an_mlp_of_their_own_and_auto_is_not(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "ffn_dim": 4096, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = OPTConfig(**shape, vocab_size=97, max_position_embeddings=65536)
    config.architectures = ["OPTForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"^--tile_tokens: .*: its layers have no MLP in a module of its own"):
        planned(tmp_path, f"{FULL} --tile_tokens 4096")
    assert planned(tmp_path, FULL, 1.0).model.empty.checkpointing == Checkpointing("full")


def test_tiles_come_before_host_memory(wide: Path) -> None:
    whole = planned(wide, f"{FULL} --tile_tokens 0").memory
    found = planned(wide, f"{FULL} --activation_offloading auto", whole.peak_gib)
    assert found.memory.verdict == "fits"
    assert found.model.empty.checkpointing.tile_tokens
    assert found.model.empty.num_offloaded == 0


def test_what_was_chosen_stays_where_the_batch_is_one_tile(wide: Path) -> None:
    """Weights and their states need more than there is; layers are spared all the same."""
    given = ["--model_name", str(wide), "--batch_size_training", "1", "--context_length", "2048", "--pure_bf16"]
    given += ["--run_validation", "False", *FULL.split()]
    found, whole = (
        plan_of(parse_flags([*given, *more]), parse_hardware("A100-40GB", device_memory_gib=0.5))
        for more in ([], ["--tile_tokens", "0"])
    )
    assert found.memory == whole.memory
    assert found.memory.verdict == "does_not_fit"
    assert found.model.empty.checkpointing == whole.model.empty.checkpointing
    assert found.choices == whole.choices
