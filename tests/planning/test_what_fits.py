"""What is proposed for a run that does not fit is a command that the configs take, and whose plan fits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import LlamaConfig

from benchmarks.runs.shapes import SHAPES
from configs.changed_flags import changed_flags
from configs.flags import parse_flags
from planning.alternatives.find_runs import command_of, find_runs, find_table, sorted_runs
from planning.alternatives.less_memory import needed_flags
from planning.alternatives.what_fits import fits_table, predictor, what_fits
from planning.machines.cards import Card
from planning.machines.hardware import Hardware, parse_hardware
from planning.machines.planned_environment import planned_hardware
from planning.plan_table import plan_table, verdict_line
from planning.planned_run import plan_of
from ranks.environment import lone_process
from reporting.tables import print_for_people
from resolving.data_facts import DataFacts
from tests.helpers.processes import ROOT
from tools.plan import main

GIVEN = ["--random_weights", "--dry_run", "--context_length", "2048"]


def model_folder(folder: Path, num_layers: int) -> str:
    """A folder with the config.json of so many of TinyLlama-1.1B's layers."""
    shape = SHAPES["tinyllama"] | {"num_hidden_layers": num_layers}
    LlamaConfig(**shape, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Four layers: 0.3 billion parameters."""
    return model_folder(tmp_path, 4)


def test_help_on_finding_runs_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--find", "--help"]) == 0
    assert "--find [--sort time|price]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("memory_gib", "marked", "unmarked"),
    [
        # Weights, gradients and states in fp32 are 4.6 GiB, activations 4 if none is recomputed: one change is enough.
        pytest.param(
            8, "--use_peft True", "--batch_size_training 1 --gradient_accumulation_steps 8", marks=pytest.mark.full
        ),
        # Only several together fit without changing what is trained.
        pytest.param(4.5, "--use_peft True", "--optimizer_cpu_offload True", marks=pytest.mark.slow),
    ],
)
def test_what_is_proposed_fits_and_is_not_refused(
    memory_gib: float, marked: str, unmarked: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model_name", model, *GIVEN, "--dry_run_hardware", "RTX-3090", "--batch_size_training", "8"]
    argv += ["--device_memory_gib", str(memory_gib)]
    argv += ["--activation_checkpointing", "off", "--tile_tokens", "0"] if memory_gib == 8 else []
    predict = predictor(parse_flags(argv), DataFacts(), lone_process())
    plan = predict(parse_flags(argv))
    assert plan.memory.verdict == "does_not_fit"
    changes = what_fits(argv, plan, predict)
    for change in changes:
        planned = predict(parse_flags(changed_flags(argv, change.flags)))
        assert planned.memory.verdict != "does_not_fit"
        assert planned.memory.peak_gib == change.peak_gib
        if change.keeps_result:  # the same rows in every optimizer step
            assert planned.resolved.batches.global_batch_size == plan.resolved.batches.global_batch_size
    times = [change.slower for change in changes if change.slower is not None]
    assert times == sorted(times)
    flags = {keeps: [" ".join(c.flags) for c in changes if c.keeps_result == keeps] for keeps in (True, False)}
    assert any(marked in line for line in flags[False])
    assert any(unmarked in line for line in flags[True])
    print_for_people(fits_table(changes, plan.memory))
    printed = capsys.readouterr().out
    assert printed.count("changes") == len(flags[False])


@pytest.mark.slow
def test_a_row_that_is_too_long_for_a_card_is_shared_by_more(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Sharded over two cards, the row takes as much of each as of one."""
    argv = ["--model_name", model, *GIVEN[:2], "--dry_run_hardware", "RTX-3090", "--batch_size_training", "1"]
    argv += ["--context_length", "32768", "--rope_scaling", "yarn", "--use_peft", "--quantization", "4bit"]
    argv += ["--activation_checkpointing", "full", "--activation_offloading", "--tile_tokens", "1024"]
    argv += ["--optimizer", "SGD", "--device_memory_gib", "2.4"]
    predict = predictor(parse_flags(argv), DataFacts(), lone_process())
    plan = predict(parse_flags(argv))
    (shared,) = [change for change in what_fits(argv, plan, predict) if "--context_parallel_size" in change.flags]
    assert shared.what == "2 cards, each row shared by 2"
    assert shared.keeps_result
    print_for_people(plan_table(predict(parse_flags(changed_flags(argv, shared.flags)))))
    assert "1 per step and 2 ranks that share rows" in " ".join(capsys.readouterr().out.split())


def test_a_cpu_has_no_memory_beside_its_own_to_offload_to(model: str) -> None:
    argv = ["--model_name", model, *GIVEN, "--batch_size_training", "1", "--enable_fsdp", "--mixed_precision", "False"]
    roomy = plan_of(parse_flags(argv), Hardware(Card("CPU", 64.0, is_gpu=False))).memory
    hardware = Hardware(Card("CPU", roomy.peak_gib + roomy.overhead_gib - 0.6, is_gpu=False))
    plain, offloaded = (plan_of(parse_flags([*argv, *more]), hardware) for more in ([], ["--fsdp_cpu_offload"]))
    assert offloaded.memory.peak_gib < plain.memory.peak_gib
    assert offloaded.memory.margin_gib < plain.memory.margin_gib + 0.5
    assert offloaded.memory.verdict == plain.memory.verdict == "does_not_fit"
    found = what_fits(argv, plain, lambda config: plan_of(config, hardware))
    assert found
    assert not any("offload" in " ".join(change.flags) for change in found)


def test_a_host_with_too_little_memory_is_told_and_what_would_fit_spares_it(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything offloaded fits the cards; four ranks of it do not fit a small host."""
    argv = ["--model_name", model, *GIVEN, "--batch_size_training", "1", "--enable_fsdp", "--fsdp_cpu_offload"]
    argv += ["--dry_run_hardware", "4xV100-32GB"]
    predict = predictor(parse_flags(argv), DataFacts(), lone_process())
    roomy = predict(parse_flags(argv))
    assert (roomy.memory.verdict, roomy.memory.host_capacity_gib) == ("fits", None)
    argv += ["--host_memory_gib", str(4 * roomy.memory.host_gib - 2)]
    plan = predict(parse_flags(argv))
    assert (plan.memory.verdict, plan.memory.device_verdict) == ("does_not_fit", "fits")
    assert re.match(r"does not fit: .* GiB of host memory per rank are 0.50 GiB more than the ", verdict_line(plan))
    changes = what_fits(argv, plan, predict)
    assert ("--fsdp_cpu_offload", "False") in [change.flags for change in changes]
    for change in changes:
        assert predict(parse_flags(changed_flags(argv, change.flags))).memory.verdict != "does_not_fit"
    print_for_people(fits_table(changes, plan.memory))
    assert "host GiB" in capsys.readouterr().out


def test_no_flag_is_proposed_that_says_what_holds_anyway() -> None:
    adapter = ("--use_peft", "True", "--quantization", "4bit", "--pure_bf16", "False")
    assert needed_flags(["--model_name", "M"], adapter) == adapter[:4]
    assert needed_flags(["--model_name", "M", "--pure_bf16"], adapter) == adapter
    assert needed_flags(["--model_name", "M", "--use_peft"], adapter) == adapter[2:4]


@pytest.mark.slow
def test_the_table_of_runs_holds_what_the_configs_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_folder(tmp_path, 1)  # each of some seventy plans computes every layer
    argv = ["--model_name", model, *GIVEN, "--batch_size_training", "4", "--dry_run_hardware", "RTX-3090"]
    argv += ["--price_per_hour", "0.5", "--device_memory_gib", "4"]
    config = parse_flags(argv)
    predict = predictor(config, DataFacts(), lone_process())
    hardware = planned_hardware(config.train_config, config.planning_config, lone_process())
    found = sorted_runs(find_runs(argv, config, hardware, predict), "price")
    assert {one.method for one in found} == {"full", "lora", "qlora"}
    assert {one.optimizer for one in found} == {"AdamW", "AdamW8bit", "anyprecision", "SGD"}
    assert {one.plan.resolved.policies.precision.name for one in found} == {"fp32", "bf16-mixed", "bf16-true"}
    fits = [one.fits for one in found]
    assert fits == sorted(fits, reverse=True)
    assert {True, False} == set(fits)
    prices = [one.price or 0.0 for one in found if one.fits]
    assert prices == sorted(prices)
    assert prices[0] == pytest.approx(0.5 / 3600 * 1e6 / (found[0].tokens_per_second or 0.0))
    for one in found:
        assert parse_flags(changed_flags(argv, one.flags))
        rows = one.plan.resolved.batches.global_batch_size
        assert rows == max(4, one.plan.resolved.batches.rows_per_micro_batch)
    command = command_of(found[0], argv)
    assert command.startswith(f"python finetuning.py --model_name {model} --random_weights --context_length 2048 ")
    assert "--dry_run" not in command
    print_for_people(find_table(found))
    assert capsys.readouterr().out.count("bf16-true") > 3


def test_find_prints_the_table_of_runs(tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With as little memory as leaves few runs to plan: most would not fit even with one row."""
    flags = ["--find", "--sort", "price", "--model_name", str(tiny_model), "--batching_strategy", "padding"]
    flags += ["--dry_run_hardware", "T4", "--device_memory_gib", "0.5", "--price_per_hour", "0.4"]
    assert main(flags) == 0
    printed = capfd.readouterr().out
    assert printed.count(" no ") > 10
    assert "per million" in printed


def test_the_commands_of_the_page_are_taken() -> None:
    lines = [
        line for line in (ROOT / "docs/planning.md").read_text().splitlines() if line.startswith("python -m tools")
    ]
    assert len(lines) > 1
    for line in lines:
        flags = line.replace(" --find", "").replace(" --sort price", "").split()[3:]
        planning = parse_flags([*flags, "--dry_run"]).planning_config
        assert parse_hardware(planning.dry_run_hardware, device_memory_gib=planning.device_memory_gib)


def test_find_refuses_flags_that_a_run_would_be_refused(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--find", "--sort", "price", "--model_name", model, "--random_weights"]
    assert main([*flags, "--dry_run_hardware", "4xV100"]) == 2
    assert "'V100' is one of V100-16GB or V100-32GB" in capfd.readouterr().err
    assert main([*flags, "--dry_run_hardware", "T4", "--lr", "fast"]) == 2
    assert capfd.readouterr().err.startswith("error: --lr: ")
