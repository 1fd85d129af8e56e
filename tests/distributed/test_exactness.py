"""Losses and gradient norms are those of a plain loop, however the batch is cut and the model is laid out."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.aot_eager import with_aot_eager
from tests.helpers.made import Made
from tests.helpers.pairwise import select
from tests.helpers.processes import ProcessGroup, run_command
from tests.helpers.reference import assert_agrees, flags_for, lora_flags, reference_run

NUM_STEPS = 6
SPLITS = [(1, 8, 1), (1, 2, 4), (1, 1, 8), (2, 4, 1), (2, 1, 4), (4, 2, 1)]  # ranks, micro-batch, accumulation
STRATEGIES = {1: ["SINGLE", "FULL_SHARD"], 2: ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]}
STRATEGIES[4] = [*STRATEGIES[2], "HYBRID_SHARD"]
LORA_TARGETS = {"full": (), "lora": ("q_proj", "v_proj", "down_proj"), "lora-head": ("q_proj", "lm_head")}


@dataclass(frozen=True)
class Case:
    split: tuple[int, int, int]
    strategy: str
    method: str
    batching: str
    extra: tuple[str, ...] = ()

    @property
    def num_frozen(self) -> int:
        """Layers that --freeze_layers freezes: its default, one of two."""
        return 1 if "--freeze_layers" in self.extra else 0

    @property
    def settings(self) -> dict[str, str]:
        """The extra flags by name; one without a value is there ("")."""
        words = [*self.extra, "--"]
        pairs = itertools.pairwise(words)
        return {name: "" if value.startswith("--") else value for name, value in pairs if name.startswith("--")}

    def __str__(self) -> str:
        ranks, micro_batch, accumulation = self.split
        extra = "".join(f"-{word.strip('-')}" for word in self.extra)
        return f"{ranks}x{micro_batch}x{accumulation}-{self.strategy}-{self.method}-{self.batching}{extra}"

    def flags(self, model: Path, output: Path) -> list[str]:
        _, micro_batch, accumulation = self.split
        flags = flags_for(model, output, batching=self.batching, num_steps=NUM_STEPS)
        flags += ["--batch_size_training", str(micro_batch), "--gradient_accumulation_steps", str(accumulation)]
        flags += ["--run_validation", "False", "--save_model", "False"]
        if self.strategy != "SINGLE":
            flags += ["--enable_fsdp", "--fsdp_config.sharding_strategy", self.strategy]
        if self.strategy == "HYBRID_SHARD":
            flags += ["--fsdp_config.sharding_group_size", "2", "--fsdp_config.replica_group_size", "2"]
        if self.batching == "packing":
            flags += ["--loss_chunk_size", "50"]  # several chunks; the padded cases have one
        return [*flags, *(lora_flags(targets) if (targets := LORA_TARGETS[self.method]) else []), *self.extra]


CASES = [
    Case(split, strategy, method, batching)
    for split in SPLITS
    for strategy, method, batching in itertools.product(STRATEGIES[split[0]], ["full", "lora"], ["packing", "padding"])
]
SHARDED_GRADIENTS = ("--accumulate_unsharded", "False")
CASES += [
    Case((2, 1, 4), "FULL_SHARD", "full", "packing", SHARDED_GRADIENTS),
    Case((2, 1, 4), "SHARD_GRAD_OP", "lora", "padding", SHARDED_GRADIENTS),
    Case((4, 1, 2), "HYBRID_SHARD", "full", "padding"),
    Case((4, 1, 2), "HYBRID_SHARD", "full", "packing", SHARDED_GRADIENTS),
    Case((1, 2, 4), "SINGLE", "full", "packing", ("--activation_checkpointing", "full")),
    Case((2, 4, 1), "FULL_SHARD", "full", "packing", ("--activation_checkpointing", "full")),
]
CASES += [Case((2, 1, 4), "FULL_SHARD", "lora-head", "packing"), Case((2, 1, 4), "NO_SHARD", "lora-head", "packing")]
OFFLOAD, CPU_STEP, FREEZE = ("--fsdp_cpu_offload",), ("--optimizer_cpu_offload",), ("--freeze_layers",)
SELECTIVE, ROOT = ("--activation_checkpointing", "selective"), ("--fsdp_config.wrap", "root")
CASES += [
    Case((1, 2, 4), "FULL_SHARD", "full", "padding", OFFLOAD),
    Case((2, 1, 4), "FULL_SHARD", "full", "packing", (*OFFLOAD, *SHARDED_GRADIENTS)),
    Case((2, 1, 4), "FULL_SHARD", "lora", "packing", OFFLOAD),
    Case((2, 4, 1), "SHARD_GRAD_OP", "full", "packing", OFFLOAD),
    Case((2, 1, 4), "NO_SHARD", "full", "padding", OFFLOAD),
    Case((4, 1, 2), "HYBRID_SHARD", "lora", "padding", OFFLOAD),
    Case((1, 2, 4), "SINGLE", "full", "packing", CPU_STEP),
    Case((1, 8, 1), "SINGLE", "lora", "padding", CPU_STEP),
    Case((2, 1, 4), "FULL_SHARD", "full", "padding", CPU_STEP),
    Case((2, 1, 4), "NO_SHARD", "full", "packing", CPU_STEP),
    Case((4, 2, 1), "SHARD_GRAD_OP", "lora", "packing", CPU_STEP),
    Case((2, 1, 4), "FULL_SHARD", "full", "packing", ROOT),
    Case((2, 4, 1), "SHARD_GRAD_OP", "full", "padding", ROOT),
    Case((4, 1, 2), "HYBRID_SHARD", "lora", "packing", ROOT),
    Case((1, 2, 4), "SINGLE", "full", "packing", SELECTIVE),
    Case((2, 1, 4), "FULL_SHARD", "full", "padding", SELECTIVE),
    Case((2, 1, 4), "NO_SHARD", "lora", "padding", SELECTIVE),
    Case((4, 2, 1), "FULL_SHARD", "lora", "packing", SELECTIVE),
    Case((1, 2, 4), "SINGLE", "full", "packing", FREEZE),
    Case((1, 2, 4), "SINGLE", "lora", "packing", FREEZE),
    Case((2, 1, 4), "NO_SHARD", "full", "padding", FREEZE),
    Case((2, 1, 4), "NO_SHARD", "lora", "packing", FREEZE),
    Case((2, 1, 4), "FULL_SHARD", "full", "packing", FREEZE),
    Case((2, 1, 4), "FULL_SHARD", "lora", "padding", FREEZE),
    Case((2, 1, 4), "SHARD_GRAD_OP", "lora", "packing", (*FREEZE, *SHARDED_GRADIENTS)),
    Case((4, 1, 2), "HYBRID_SHARD", "full", "padding", FREEZE),
    Case((4, 2, 1), "FULL_SHARD", "lora", "packing", (*FREEZE, *OFFLOAD, *SELECTIVE, *ROOT)),
    Case((2, 1, 4), "FULL_SHARD", "full", "packing", (*FREEZE, *CPU_STEP, *SELECTIVE)),
    Case((2, 1, 4), "FULL_SHARD", "full", "packing", ("--compile_optimizer",)),
    Case((1, 2, 4), "SINGLE", "full", "packing", ("--use_fast_kernels", "False")),
]
SETTINGS = sorted({setting for case in CASES for setting in case.settings})


def values_of(case: Case) -> tuple[Hashable, ...]:
    """What is to occur: each extra setting is a value of its own, so a case with several of them stands for all."""
    given = case.settings
    ranks, _, accumulation = case.split
    return (ranks, accumulation > 1, case.strategy, case.method, case.batching, *(given.get(name) for name in SETTINGS))


def is_dear(case: Case) -> bool:
    """Several settings at once, and the compiled optimizer: each has a fast test of its own, here or elsewhere."""
    return "--compile_optimizer" in case.extra or len(case.settings) > 2


BY_TWO, BY_FOUR = ("--context_parallel_size", "2"), ("--context_parallel_size", "4")
# Ranks that share rows count once in the global batch of 8. Two key heads are repeated for four ranks.
SHARED_CASES = [
    Case((2, 2, 4), "NO_SHARD", "full", "packing", BY_TWO),
    Case((2, 1, 8), "FULL_SHARD", "full", "packing", (*BY_TWO, "--activation_checkpointing", "full")),
    Case((2, 4, 2), "SHARD_GRAD_OP", "lora", "padding", (*BY_TWO, *SELECTIVE)),
    Case((4, 4, 1), "HYBRID_SHARD", "full", "padding", BY_TWO),
    Case((4, 2, 4), "FULL_SHARD", "lora", "packing", BY_FOUR),
]

# Every strategy and number of ranks goes through torchrun (or python, for one process), python in a new
# interpreter, not a fork; tests/ranks/test_launchers.py has ranks that are none.
REAL_CASE = Case((1, 1, 8), "SINGLE", "lora", "padding")
COMMAND_LINE_CASES = [
    REAL_CASE,
    Case((2, 4, 1), "FULL_SHARD", "full", "packing"),
    Case((1, 2, 4), "FULL_SHARD", "full", "padding"),
    Case((2, 4, 1), "SHARD_GRAD_OP", "full", "padding"),
    Case((4, 2, 1), "HYBRID_SHARD", "full", "packing"),
    Case((4, 2, 1), "NO_SHARD", "lora", "packing"),
]
MORE_COMMAND_LINE_CASES = [
    Case((1, 8, 1), "SINGLE", "full", "packing"),
    Case((2, 1, 4), "FULL_SHARD", "lora", "packing"),
    Case((2, 1, 4), "NO_SHARD", "full", "packing"),
    Case((4, 2, 1), "FULL_SHARD", "lora", "padding"),
]
# Which activations are kept, and what FSDP adds, is for dynamo and AOT autograd to trace, under aot_eager; inductor's
# kernels are those of one rank.
COMPILED_CASES = [
    (Case((1, 2, 4), "SINGLE", "full", "packing", ("--compile", *SELECTIVE)), "aot_eager"),
    (Case((2, 1, 4), "FULL_SHARD", "full", "packing", ("--compile",)), "aot_eager"),
    (Case((1, 2, 4), "FULL_SHARD", "full", "packing", ("--compile",)), "inductor"),
]


@pytest.fixture(scope="module")
def models(tiny_model: Path, tied_model: Path) -> dict[str, Path]:
    """Untied and tied embeddings are sharded differently: each takes half of the cases."""
    return {"packing": tiny_model, "padding": tied_model}


@pytest.fixture(scope="module")
def references(models: dict[str, Path]) -> Made:
    """By method, batching and number of frozen layers."""

    def reference(method: str, batching: str, num_frozen: int) -> list[tuple[float, float]]:
        return reference_run(
            models[batching],
            batching=batching,
            num_steps=NUM_STEPS,
            lora_targets=LORA_TARGETS[method],
            num_frozen=num_frozen,
        )

    return Made(reference)


@pytest.mark.parametrize("case", select(CASES, values_of, fast=lambda case: not is_dear(case)), ids=str)
def test_losses_and_grad_norms_are_those_of_a_plain_loop(
    case: Case, references: Made, models: dict[str, Path], process_group: ProcessGroup, tmp_path: Path
) -> None:
    process_group.train(case.flags(models[case.batching], tmp_path / "run"), world_size=case.split[0])
    assert_agrees(tmp_path / "run", references[case.method, case.batching, case.num_frozen])


@pytest.mark.parametrize("case", SHARED_CASES, ids=str)
def test_so_they_are_if_ranks_share_rows(
    case: Case, references: Made, models: dict[str, Path], process_group: ProcessGroup, tmp_path: Path
) -> None:
    process_group.train(case.flags(models[case.batching], tmp_path / "run"), world_size=case.split[0])
    assert_agrees(tmp_path / "run", references[case.method, case.batching, case.num_frozen])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [*COMMAND_LINE_CASES, *(pytest.param(case, marks=pytest.mark.full) for case in MORE_COMMAND_LINE_CASES)],
    ids=str,
)
def test_so_they_are_through_the_command_line(
    case: Case, references: Made, models: dict[str, Path], tmp_path: Path
) -> None:
    nproc = case.split[0] if case.split[0] > 1 or case.strategy != "SINGLE" else None
    flags = case.flags(models[case.batching], tmp_path / "run")
    done = run_command(*flags, nproc=nproc, real=case == REAL_CASE)
    assert done.returncode == 0, done.stderr
    assert_agrees(tmp_path / "run", references[case.method, case.batching, case.num_frozen])


@pytest.mark.slow
@pytest.mark.parametrize(("case", "backend"), COMPILED_CASES, ids=str)
def test_so_they_are_compiled(
    case: Case, backend: str, references: Made, models: dict[str, Path], process_group: ProcessGroup, tmp_path: Path
) -> None:
    flags = case.flags(models[case.batching], tmp_path / "run")
    process_group.train(with_aot_eager(flags) if backend == "aot_eager" else flags, case.split[0])
    assert_agrees(tmp_path / "run", references[case.method, case.batching, 0])
