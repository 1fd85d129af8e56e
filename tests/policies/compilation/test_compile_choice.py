"""What --compile auto, the default, comes to: on one GPU and on several, in plans, on machines that cannot compile."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from transformers import AutoConfig

from checkpointing.finding import Checkpoint
from configs.flags import parse_flags
from planning.machines.hardware import parse_hardware
from planning.machines.planned_environment import planned_environment
from planning.planned_run import plan_of
from policies.compilation.choice import decide_compilation
from policies.linear_attention import kernels
from policies.linear_attention.choice import LOOPS_WITHOUT_KERNEL, why_slow_to_compile
from resolving.resolved import resolve
from tests.helpers.no_compiler import agreeing_without_compiler
from tests.helpers.processes import ProcessGroup
from utils.device import DeviceFacts

CPU = DeviceFacts("cpu", 2**36, has_bf16=False)
GPU = DeviceFacts("cuda", 2**36, has_bf16=True)
HOST = socket.gethostname()
LLAMA, T5 = AutoConfig.for_model("llama"), AutoConfig.for_model("t5")


@pytest.mark.parametrize("cards", ["H200", "4xH100-80GB"])
def test_by_default_gpus_compile_layers_that_pass_a_trial(cards: str, tiny_model: Path) -> None:
    config = parse_flags(["--model_name", str(tiny_model), "--enable_fsdp"])
    resolved = resolve(config, planned_environment(parse_hardware(cards), config.train_config))
    assert resolved.config.train_config.compile is True
    assert resolved.chose_to_compile
    assert resolved.policies.compile_is_tried
    assert resolved.config.notes == config.notes


@pytest.mark.parametrize(
    ("given", "family", "was_compiled", "reason"),
    [
        ("--use_peft --use_dora", "llama", None, "torch.compile cannot trace peft's DoRA"),
        ("--flop_counter", "llama", None, "--flop_counter cannot count inside compiled code"),
        ("", "llama", False, "the checkpoint was trained uncompiled; give --compile"),
    ],
)
@pytest.mark.parametrize("asked", ["", "--compile auto"])
def test_on_gpus_a_line_says_what_stands_against_it(
    asked: str, given: str, family: str, was_compiled: bool | None, reason: str
) -> None:
    config = parse_flags(["--model_name", "m", *asked.split(), *given.split()])
    decided = decide_compilation(config, AutoConfig.for_model(family), GPU, was_compiled=was_compiled)
    assert decided.train_config.compile is False
    (note,) = set(decided.notes) - set(config.notes)
    assert note.startswith(f"--compile auto is False: {reason}")


def test_a_run_tries_layers_that_a_plan_takes_for_uncompiled_unless_their_family_is_known_to_compile() -> None:
    config = parse_flags(["--model_name", "m"])
    for model_config in (LLAMA, T5):
        assert decide_compilation(config, model_config, GPU).train_config.compile is True
    assert decide_compilation(config, LLAMA, GPU, is_planned=True).notes == config.notes
    planned = decide_compilation(config, T5, GPU, is_planned=True)
    assert planned.train_config.compile is False
    assert planned.notes[-1].startswith("--compile auto is False: a run tries at its start whether t5 layers compile;")


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize(
    ("family", "package"),
    [
        ("qwen3_5_text", "flash-linear-attention (pip "),
        *((family, "mamba-ssm (see ") for family in ("mamba", "falcon_mamba", "jamba", "zamba")),
    ],
)
def test_a_loop_over_tokens_without_its_kernel_is_not_compiled_unless_it_was_asked_for(
    family: str, package: str, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "is_there", lambda package: is_there)
    states, default = AutoConfig.for_model(family), parse_flags(["--model_name", "m"])
    decided = decide_compilation(default, states, GPU)
    assert decided.train_config.compile is is_there
    assert is_there or decided.notes[-1].startswith(f"--compile auto is False: without {package}")
    asked = parse_flags(["--model_name", "m", "--compile"])
    assert decide_compilation(asked, states, GPU).train_config.compile is True


@pytest.mark.parametrize("family", sorted(LOOPS_WITHOUT_KERNEL))
def test_a_loop_over_tokens_that_has_no_kernel_is_not_compiled(family: str) -> None:
    decided = decide_compilation(parse_flags(["--model_name", "m"]), AutoConfig.for_model(family), GPU)
    assert decided.train_config.compile is False
    assert decided.notes[-1].startswith(f"--compile auto is False: the loop over tokens of {family} layers takes")


@pytest.mark.parametrize("family", ["mamba2", "bamba", "nemotron_h", "deepseek_v4"])
def test_states_without_a_loop_over_tokens_are_tried(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "is_there", lambda package: False)
    assert why_slow_to_compile(AutoConfig.for_model(family)) is None


@pytest.mark.parametrize(
    ("words", "compiled"),
    [
        ("--max_train_step 3", False),
        ("--max_train_step 3 --compile", True),
        ("--max_train_step 10000000", True),
        ("", True),
    ],
)
def test_a_plan_of_a_run_that_ends_before_it_is_compiled_is_uncompiled_unless_it_was_asked_for(
    words: str, compiled: bool, tiny_model: Path
) -> None:
    config = parse_flags(["--model_name", str(tiny_model), *words.split()])
    plan = plan_of(config, parse_hardware("H100-80GB"))
    assert plan.resolved.config.train_config.compile is compiled
    assert any("--compile auto is False: the whole run is planned" in note for note in plan.notes) is not compiled


def test_on_a_cpu_a_line_says_so_if_it_was_asked_for_or_changes_the_run() -> None:
    given, default = (parse_flags(["--model_name", "m", *words]) for words in (["--compile", "auto"], []))
    said = [
        decide_compilation(given, LLAMA, CPU),
        decide_compilation(default, LLAMA, CPU, was_compiled=True),
    ]
    for decided in (decide_compilation(default, LLAMA, CPU), *said):
        assert decided.train_config.compile is False
    assert decide_compilation(default, T5, CPU).notes == default.notes
    for decided in said:
        assert decided.notes[-1].startswith("--compile auto is False: it is for GPUs; give --compile")


@pytest.mark.parametrize(
    ("line", "device", "compiled"),
    [
        ("", GPU, True),
        ("", CPU, False),
        ("--compile", CPU, True),
        ("--compile False", GPU, False),
        ("--compile_optimizer False", GPU, False),
        ("--optimizer SGD", GPU, False),
        ("--optimizer_cpu_offload", GPU, False),
        ("--compile_optimizer", CPU, True),
    ],
)
def test_the_step_of_adamw_is_compiled_with_the_layers(line: str, device: DeviceFacts, compiled: bool) -> None:
    config = parse_flags(["--model_name", "m", *line.split()])
    assert decide_compilation(config, LLAMA, device).fsdp_config.compile_optimizer is compiled


@pytest.mark.parametrize(
    ("settings", "was_compiled"), [({"compile": True}, True), ({"compile": False}, False), ({}, None)]
)
def test_a_checkpoint_says_whether_it_was_trained_compiled(
    settings: dict[str, bool], was_compiled: bool | None
) -> None:
    checkpoint = Checkpoint(Path("step-00000001"), {"settings": {"train_config": settings}})
    assert checkpoint.was_compiled is was_compiled


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ((), ""),
        pytest.param((1,), f"rank 1 on {HOST} cannot compile (", marks=pytest.mark.slow),
        ((0, 1), f"rank 0 on {HOST} cannot compile, nor can 1 more of 2 ("),
    ],
)
def test_all_ranks_compile_or_none(
    ranks: tuple[int, ...], reason: str, tiny_model: Path, process_group: ProcessGroup
) -> None:
    argv = ["--model_name", str(tiny_model), "--enable_fsdp"]
    outcomes = process_group.train(agreeing_without_compiler(argv, ranks, "2xH100-80GB"), 2)
    first, second = (outcome.stdout.splitlines() for outcome in outcomes)
    came_to = json.dumps({"compile": not ranks, "compile_optimizer": not ranks, "compile_is_tried": not ranks})
    assert (first[-1], second) == (came_to, [came_to])
    said = [line for line in first if line.startswith("--compile auto is False: ")]
    assert len(said) == (1 if ranks else 0)
    assert all(reason in line and "/nowhere/c++" in line for line in said)


def test_a_rank_that_cannot_compile_ends_a_run_with_compile_before_weights_are_read(
    tiny_model: Path, process_group: ProcessGroup
) -> None:
    argv = ["--model_name", str(tiny_model), "--enable_fsdp", "--compile"]
    for outcome in process_group.run(agreeing_without_compiler(argv, (1,), "2xH100-80GB"), 2):
        assert outcome.status == 2
        assert f"--compile: rank 1 on {HOST} cannot compile (" in outcome.stderr
        assert "give --compile False, or leave it out" in outcome.stderr
