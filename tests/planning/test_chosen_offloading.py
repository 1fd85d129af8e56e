"""How many layers' activations wait in host memory, by the plan; and that a run follows it and keeps its losses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from transformers import LlamaConfig

from configs.flags import parse_flags
from planning.cost.network_waits import RunNetwork
from planning.machines.hardware import parse_hardware
from planning.plan_file import PlanAtStart
from planning.planned_run import Plan, plan_of
from policies.activations.checkpointing import Checkpointing
from policies.activations.host_pool import chunk_bytes, pool_bytes
from tests.helpers.generated import flags, write_rows
from tests.helpers.processes import ProcessGroup, read_metrics
from tests.helpers.small_card import on_small_card
from tools.make_tiny_model import make_tiny_model
from utils.errors import ConfigError
from utils.units import GIB

NUM_LAYERS = 12
FULL, AUTO = "--activation_checkpointing full", "--activation_offloading auto"
LENGTH = 20_000
HIDDEN_BYTES = LENGTH * 2048 * 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "deep"
    shape = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "vocab_size": 32000}
    layers = {"num_hidden_layers": NUM_LAYERS, "max_position_embeddings": LENGTH}
    LlamaConfig(**shape, **layers, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return folder


def planned(model: Path, given: str, *, memory_gib: float | None = None, host_gib: float | None = None) -> Plan:
    shape = f"--use_peft --batch_size_training 1 --context_length {LENGTH} --run_validation False --tile_tokens 0"
    config = parse_flags(["--model_name", str(model), *shape.split(), *given.split()])
    return plan_of(config, parse_hardware("A100-40GB", device_memory_gib=memory_gib, host_memory_gib=host_gib))


def needed(plan: Plan) -> float:
    return plan.memory.peak_gib + plan.memory.overhead_gib


def test_auto_moves_the_fewest_layers_with_which_the_run_fits(model: Path) -> None:
    none, every = (planned(model, f"{FULL} {more}") for more in ("", "--activation_offloading"))
    memory_gib = (needed(none) + needed(every)) / 2 / 0.95
    found = planned(model, f"{FULL} {AUTO}", memory_gib=memory_gib)
    number = found.model.empty.num_offloaded
    assert 0 < number < NUM_LAYERS - 1
    assert found.memory.verdict == "fits"
    assert found.memory.moved_gib * GIB == pytest.approx(number * HIDDEN_BYTES)
    fewer = planned(model, f"{FULL} --activation_offloading --num_offloaded_layers {number - 1}", memory_gib=memory_gib)
    assert fewer.memory.verdict == "tight"
    same = planned(model, f"{FULL} --activation_offloading --num_offloaded_layers {number}", memory_gib=memory_gib)
    assert same.memory == found.memory
    assert [line for line in found.choices if "activation_offloading" in line] == [found.choices[-1]]
    assert found.choices[-1].startswith(f"activation_offloading: auto moves the first {number} of {NUM_LAYERS} layers'")
    assert found.choices[-1] in found.notes


def test_auto_recomputes_first_and_moves_nothing_where_that_is_enough(model: Path) -> None:
    full, auto = planned(model, FULL), "--activation_checkpointing auto"
    for room, mode, moves in ((1.2, "", False), (0.97, "full", True)):
        memory_gib = room * needed(full) / 0.95
        found = planned(model, f"{auto} {AUTO}", memory_gib=memory_gib)
        assert (found.model.empty.num_offloaded > 0) == moves
        assert found.memory.verdict == "fits"
        if not moves:
            without = planned(model, auto, memory_gib=memory_gib)
            assert found.model.empty.checkpointing == without.model.empty.checkpointing
            assert found.memory == without.memory
        else:
            assert found.model.empty.checkpointing == Checkpointing(mode)


def test_host_memory_is_planned_to_the_page(model: Path) -> None:
    none, every = (planned(model, f"{FULL} {more}") for more in ("", "--activation_offloading"))
    pages = (NUM_LAYERS - 1) * pool_bytes(HIDDEN_BYTES)
    host = [round(plan.memory.host_training_gib * GIB) for plan in (none, every)]
    assert host[1] - host[0] == chunk_bytes(pages)
    assert every.memory.pinned_gib * GIB == chunk_bytes(pages)


def test_beside_selective_the_inputs_move_and_products_stay(model: Path) -> None:
    given = "--activation_checkpointing selective"
    kept, moved = (planned(model, f"{given} {more}") for more in ("", "--activation_offloading"))
    assert moved.memory.moved_gib * GIB == pytest.approx((NUM_LAYERS - 1) * HIDDEN_BYTES)
    assert kept.memory.peak_gib - moved.memory.peak_gib > 0.7 * moved.memory.moved_gib


def test_auto_checkpointing_beside_it_recomputes_what_would_take_too_long_to_copy(model: Path) -> None:
    choice = planned(model, "--activation_checkpointing auto --activation_offloading")
    seconds = []
    for mode in ("off", "selective", "full"):
        plan = planned(model, f"--activation_checkpointing {mode} --activation_offloading")
        assert plan.time is not None
        if plan.memory.device_verdict == "fits":
            seconds.append(plan.time.seconds_per_step)
    assert choice.time is not None
    assert choice.time.seconds_per_step <= 1.0001 * min(seconds)
    off = planned(model, "--activation_checkpointing off --activation_offloading")
    assert any(note.startswith("activation_offloading: each step waits ") for note in off.notes)
    full = planned(model, f"{FULL} --activation_offloading")
    assert not any(note.startswith("activation_offloading: each step waits ") for note in full.notes)


def test_a_run_that_moves_more_than_the_host_has_is_refused(model: Path) -> None:
    given = f"{FULL} --activation_offloading"
    fits, lacks = (planned(model, given, host_gib=host_gib) for host_gib in (64, 2))
    for plan in (fits, lacks):
        network = RunNetwork(plan.resolved.policies.layout, None, plan.hardware)  # type: ignore[arg-type]
        at_start = PlanAtStart(plan.to_dict(), None, None, network, ())
        if plan is fits:
            at_start.check_host(plan.resolved.config)
            continue
        with pytest.raises(ConfigError, match=r"^--activation_offloading: .* \d+\.\d GiB of host memory, 0\.8 of them"):
            at_start.check_host(plan.resolved.config)
        config = plan.resolved.config
        nothing_moves = replace(config, train_config=replace(config.train_config, activation_offloading=False))
        at_start.check_host(nothing_moves)


@pytest.mark.slow
def test_a_run_moves_what_its_plan_says_and_its_losses_stay_to_the_bit(
    tmp_path: Path, process_group: ProcessGroup
) -> None:
    data, tiny = write_rows(tmp_path), tmp_path / "model"
    make_tiny_model(tiny, vocab_size=600, num_layers=6)
    argv = ["--context_length", "64", "--max_train_step", "2", "--save_model", "False"]
    argv += ["--activation_checkpointing", "full", "--spare_layers", "False"]
    losses, printed = {}, {}
    for offloading in ("False", "auto"):
        run = flags(tiny, data, tmp_path / offloading, *argv, "--activation_offloading", offloading)
        (outcome,) = process_group.train(partial(_with_small_tensors, on_small_card(run, 0.1, 1)), 1)
        printed[offloading] = outcome.stdout
        losses[offloading] = [
            event["loss"] for event in read_metrics(tmp_path / offloading) if event["event"] == "train"
        ]
    assert losses["auto"] == losses["False"]
    assert "activation_offloading: auto moves the first 5 of 6 layers' activations" in printed["auto"]


def _with_small_tensors(train: partial[int]) -> int:
    from policies.activations import offloading

    offloading.MIN_BYTES = 1
    return train()
