"""What is recomputed: with auto as little as the memory needs, with full what saves memory. Neither changes a loss."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from transformers import LlamaConfig, MixtralConfig

from configs.flags import parse_flags
from planning.machines.hardware import parse_hardware
from planning.planned_run import Plan, plan_of
from policies.activations.checkpointing import MODES, Checkpointing
from tests.helpers.generated import flags, write_rows
from tests.helpers.pairwise import slow_but
from tests.helpers.processes import ProcessGroup, log_lines, read_metrics, run_command
from tests.helpers.small_card import on_small_card
from tools.make_tiny_model import make_tiny_model

AUTO = "--activation_checkpointing auto"
NUM_LAYERS, MANY_LAYERS = 4, 12


def write_config(folder: Path, num_layers: int) -> Path:
    """A config.json; a plan needs no more."""
    shape = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "vocab_size": 32000}
    LlamaConfig(**shape, num_hidden_layers=num_layers, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def one_billion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("models") / "one_billion", NUM_LAYERS)


def planned(model: Path, given: str, *, cards: str = "A100-40GB", memory_gib: float | None = None) -> Plan:
    shape = "--batch_size_training 8 --context_length 2048 --run_validation False --tile_tokens 0"
    config = parse_flags(["--model_name", str(model), *shape.split(), *given.split()])
    return plan_of(config, parse_hardware(cards, device_memory_gib=memory_gib))


def of_one_row(model: Path, given: str, choice: Checkpointing | None = None) -> Plan:
    """The plan of a run whose gradients are large next to the activations of its layers."""
    shape = "--batch_size_training 1 --context_length 2048 --run_validation False --activation_checkpointing full"
    config = parse_flags(["--model_name", str(model), *shape.split(), *given.split()])
    return plan_of(config, parse_hardware("2xA100-40GB" if "fsdp" in given else "A100-40GB"), checkpointing=choice)


@pytest.mark.parametrize("given", slow_but(1, ["--use_peft --compile", "--pure_bf16", "--enable_fsdp --pure_bf16"]))
def test_of_any_memory_it_takes_what_fits_and_is_never_slower_than_a_fixed_choice(
    given: str, one_billion: Path
) -> None:
    cards = "2xA100-40GB" if "fsdp" in given else "A100-40GB"
    fixed = {mode: planned(one_billion, f"{given} --activation_checkpointing {mode}", cards=cards) for mode in MODES}
    most, least = (fixed[mode].memory.peak_gib for mode in ("off", "full"))
    for share in (1.2, 0.5, -0.2):  # of what checkpointing saves, kept
        memory_gib = (least + share * (most - least) + fixed["off"].memory.overhead_gib) / 0.94
        found = planned(one_billion, f"{given} {AUTO}", cards=cards, memory_gib=memory_gib)
        choice = found.model.empty.checkpointing
        if share > 1:
            assert choice == Checkpointing("off")
        elif share < 0:
            assert choice == Checkpointing("full")
            assert found.memory.verdict != "fits"
            continue
        else:
            assert 0 < choice.num_first < NUM_LAYERS or choice == Checkpointing("selective")
        assert found.memory.verdict == "fits"
        assert found.time is not None
        for plan in fixed.values():
            if plan.memory.peak_gib + plan.memory.overhead_gib <= 0.95 * memory_gib and plan.time is not None:
                assert found.time.seconds_per_step <= 1.0001 * plan.time.seconds_per_step
        if choice.num_first > 1:  # one layer less does not fit
            less = Checkpointing(choice.mode, choice.first, choice.num_first - 1)
            config, hardware = found.resolved.config, found.hardware
            assert plan_of(config, hardware, checkpointing=less).memory.verdict != "fits"


def test_without_known_speeds_the_memory_alone_decides(one_billion: Path) -> None:
    lora = "--use_peft --compile False"
    off, full = (planned(one_billion, f"{lora} --activation_checkpointing {mode}") for mode in ("off", "full"))
    memory_gib = (off.memory.peak_gib + full.memory.peak_gib) / 2 + off.memory.overhead_gib
    found = planned(one_billion, f"{lora} {AUTO}", cards="1xGPU", memory_gib=memory_gib)
    assert found.time is None
    assert found.memory.verdict == "fits"
    assert found.model.empty.checkpointing.modes == ("off", "selective")


def test_of_a_mixture_a_tenth_of_the_memory_stays_free(one_billion: Path, tmp_path: Path) -> None:
    shape = {"hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 16, "num_hidden_layers": NUM_LAYERS}
    config = MixtralConfig(**shape, num_key_value_heads=8, vocab_size=32000, architectures=["MixtralForCausalLM"])
    config.save_pretrained(tmp_path / "mixture")
    for model, kept in ((one_billion, True), (tmp_path / "mixture", False)):
        off = planned(model, "--use_peft --activation_checkpointing off").memory
        memory_gib = (off.peak_gib + off.overhead_gib) / 0.93
        found = planned(model, f"--use_peft {AUTO}", memory_gib=memory_gib)
        assert (found.model.empty.checkpointing == Checkpointing("off")) == kept
        assert kept or found.memory.margin_gib >= 0.1 * memory_gib


def test_a_dry_run_says_what_it_would_choose(one_billion: Path, tmp_path: Path) -> None:
    words = ["--batch_size_training", "8", "--context_length", "2048", "--use_peft", "--compile", "--dry_run"]
    words += ["--dry_run_hardware", "1xGPU", "--device_memory_gib", "4.6"]
    done = run_command("--model_name", str(one_billion), *words, "--dry_run_json", str(tmp_path / "plan.json"))
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in log_lines(done.stdout) if line.startswith("activation_checkpointing: auto is "))
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["activation_checkpointing"] in line
    assert "in the others" in line
    assert plan["verdict"] == "fits"


def test_what_is_offloaded_moves_from_the_device_to_the_host_in_the_plan(one_billion: Path) -> None:
    given = "--use_peft --activation_checkpointing full"
    kept, moved = (planned(one_billion, f"{given} {more}") for more in ("", "--activation_offloading"))
    hidden_gib = 8 * 2048 * 2048 * 2 / 2**30  # rows x width x hidden size, bf16
    activations = [plan.memory.phases["forward"].activations for plan in (kept, moved)]
    assert activations[0] - activations[1] == pytest.approx((NUM_LAYERS - 1) * hidden_gib, rel=1e-3)
    assert moved.memory.moved_gib == pytest.approx((NUM_LAYERS - 1) * hidden_gib, rel=1e-6)
    assert moved.memory.host_training_gib - kept.memory.host_training_gib == 0.25  # a chunk of the pool
    assert moved.time is not None
    assert kept.time is not None
    assert moved.time.step.host_transfers == kept.time.step.host_transfers == 0  # computing hides them
    all_moved = planned(one_billion, "--use_peft --activation_checkpointing off --activation_offloading")
    assert all_moved.time is not None
    assert all_moved.time.step.host_transfers > 0


@pytest.mark.slow
def test_all_ranks_take_the_choice_and_losses_stay_to_the_bit(
    tiny_model: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    data = write_rows(tmp_path)
    argv = ["--enable_fsdp", "--batch_size_training", "8", "--context_length", "64", "--mixed_precision", "False"]
    argv += ["--max_train_step", "2", "--save_model", "False", "--activation_checkpointing"]
    needed, losses, memory_gib = {}, {}, 10.0
    for mode in ("off", "full", "auto"):
        run = flags(tiny_model, data, tmp_path / mode, *argv, mode)
        outcomes = process_group.train(on_small_card(run, memory_gib, 2), 2)
        losses[mode] = [event["loss"] for event in read_metrics(tmp_path / mode) if event["event"] == "train"]
        plan = json.loads((tmp_path / mode / "plan.json").read_text())
        needed[mode] = plan["peak_gib"] + plan["overhead_gib"]
        memory_gib = (needed["off"] + needed.get("full", 0)) / 2 / 0.95
    assert losses["auto"] == losses["off"]
    resolved = yaml.safe_load((tmp_path / "auto" / "run.yaml").read_text())["resolved"]
    assert resolved["activation_checkpointing"].endswith(" in the first layer, off in the others")
    assert outcomes[0].stdout.count("activation_checkpointing: auto is ") == 1
    assert "auto is" not in outcomes[1].stdout


@pytest.mark.parametrize(
    "given", slow_but(1, ["--pure_bf16", "--compile", "--enable_fsdp --optimizer SGD", "--pure_bf16 --optimizer SGD"])
)
def test_full_spares_the_layers_whose_activations_cost_no_memory(given: str, tmp_path: Path) -> None:
    model = write_config(tmp_path / "model", MANY_LAYERS)
    every, spared = (of_one_row(model, given, choice) for choice in (Checkpointing("full"), None))
    choice = spared.model.empty.checkpointing
    assert (choice.mode, choice.first) == ("off", "full")
    assert 0 < choice.num_first < MANY_LAYERS
    (line,) = spared.choices
    assert line.startswith(f"activation_checkpointing: {choice}, since ")
    assert spared.memory.peak_gib == pytest.approx(every.memory.peak_gib, rel=2e-3)
    assert every.time is not None
    assert spared.time is not None
    assert spared.time.seconds_per_step < every.time.seconds_per_step


def test_a_run_spares_what_its_plan_says_and_its_losses_stay_to_the_bit(
    tmp_path: Path, process_group: ProcessGroup
) -> None:
    data, model = write_rows(tmp_path), tmp_path / "model"
    make_tiny_model(model, vocab_size=600, num_layers=6)
    argv = ["--batch_size_training", "1", "--context_length", "64", "--num_epochs", "1"]
    argv += ["--max_train_step", "3", "--save_model", "False"]
    losses, printed = {}, {}
    for mode in ("off", "full"):
        run = flags(model, data, tmp_path / mode, *argv, "--activation_checkpointing", mode)
        (outcome,) = process_group.train(on_small_card(run, 10.0, 1), 1)
        printed[mode] = outcome.stdout
        losses[mode] = [event["loss"] for event in read_metrics(tmp_path / mode) if event["event"] == "train"]
    resolved = yaml.safe_load((tmp_path / "full" / "run.yaml").read_text())["resolved"]
    assert re.fullmatch(r"full in the first (layer|\d layers), off in the others", resolved["activation_checkpointing"])
    assert printed["full"].count("does not raise the peak") == 1
    assert "does not raise the peak" not in printed["off"]
    assert losses["full"] == losses["off"]


@pytest.mark.parametrize(
    "given",
    ["--use_peft", "--gradient_accumulation_steps 2", "--activation_offloading", "--spare_layers False"],
)
def test_full_recomputes_every_layer_where_each_saves_memory_and_where_it_is_asked_to(
    given: str, tmp_path: Path
) -> None:
    model = write_config(tmp_path / "model", MANY_LAYERS)
    plan = of_one_row(model, f"--pure_bf16 {given}")
    assert plan.model.empty.checkpointing == Checkpointing("full")
    assert plan.choices == ()


@pytest.mark.slow
def test_a_run_that_is_resumed_on_fewer_ranks_accumulates_and_so_spares_nothing(
    tmp_path: Path, process_group: ProcessGroup
) -> None:
    data, model, run = write_rows(tmp_path), tmp_path / "model", tmp_path / "run"
    make_tiny_model(model, vocab_size=600, num_layers=6)
    argv = ["--enable_fsdp", "--batch_size_training", "1", "--context_length", "64", "--mixed_precision", "False"]
    argv += ["--save_model", "False", "--activation_checkpointing", "full", "--num_epochs", "1"]
    found = []
    for ranks, more in ((2, ["--max_train_step", "1"]), (1, ["--max_train_step", "2", "--resume", "auto"])):
        process_group.train(on_small_card(flags(model, data, run, *argv, *more), 10.0, ranks), ranks)
        resolved = yaml.safe_load((run / "run.yaml").read_text())["resolved"]
        plan = json.loads((run / "plan.json").read_text())
        for values in (resolved, plan):
            found.append((values["gradient_accumulation_steps"], values["activation_checkpointing"] == "full"))
    assert found == [(1, False), (1, False), (2, True), (2, True)]


def test_a_resumed_run_takes_the_choice_of_its_checkpoint_as_long_as_that_fits_on_the_same_cards(
    tmp_path: Path, process_group: ProcessGroup
) -> None:
    data, model, run = write_rows(tmp_path), tmp_path / "model", tmp_path / "run"
    make_tiny_model(model, vocab_size=600, num_layers=4)
    argv = ["--batch_size_training", "8", "--context_length", "64", "--mixed_precision", "False", "--num_epochs", "1"]
    argv += ["--save_model", "False"]
    needed = {}
    for mode in ("off", "full"):
        words = [*argv, "--activation_checkpointing", mode, "--max_train_step", "1"]
        process_group.train(on_small_card(flags(model, data, tmp_path / mode, *words), 10.0, 1), 1)
        plan = json.loads((tmp_path / mode / "plan.json").read_text())
        needed[mode] = plan["peak_gib"] + plan["overhead_gib"]
    small, large = sum(needed.values()) / 2 / 0.95, 2 * needed["off"]

    def go_on(num_steps: int, memory_gib: float, *more: str, card: str = "GPU") -> tuple[str, list[str]]:
        words = [*argv, *AUTO.split(), *more, "--max_train_step", str(num_steps), "--resume", "auto"]
        (outcome,) = process_group.train(on_small_card(flags(model, data, run, *words), memory_gib, 1, card), 1)
        resolved = yaml.safe_load((run / "run.yaml").read_text())["resolved"]
        lines = [line for line in log_lines(outcome.stdout) if line.startswith("activation_checkpointing: ")]
        return resolved["activation_checkpointing"], lines

    first, _ = go_on(1, small)
    assert first.endswith("off in the others")
    assert go_on(2, large) == (first, [f"activation_checkpointing: {first}, as in the checkpoint"])
    choice, lines = go_on(3, large, card="CARD")
    assert (choice, lines[0]) == (
        "off",
        f"activation_checkpointing: {first} in the checkpoint; chosen anew, since it was made for GPU",
    )
    choice, lines = go_on(4, 0.99 * needed["off"], card="CARD")
    assert choice != "off"
    assert lines[0].endswith("off in the checkpoint; chosen anew, since it does not fit any more")
    _, lines = go_on(5, large, "--loss_chunk_size", "100", card="CARD")
    assert lines[0].endswith("chosen anew, since it was made with another --loss_chunk_size")


def test_on_a_cpu_it_is_the_default_and_says_so(tiny_model: Path, tmp_path: Path, process_group: ProcessGroup) -> None:
    data = write_rows(tmp_path)
    argv = flags(tiny_model, data, tmp_path / "run", *AUTO.split(), "--context_length", "64", "--max_train_step", "1")
    (outcome,) = process_group.train([*argv, "--save_model", "False"], 1)
    assert "activation_checkpointing: auto is off, this run's default" in outcome.stdout
