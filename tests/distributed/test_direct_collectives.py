"""Runs with --direct_collectives have the losses, norms and weights of those without, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.aot_eager import with_aot_eager
from tests.helpers.pairwise import slow_but
from tests.helpers.processes import Outcome, ProcessGroup, log_lines, read_metrics
from tests.helpers.resuming import as_if_killed_after, assert_bit_equal, flags_of

ONE_MICRO_BATCH = ["--batch_size_training", "2"]  # two ranks sum bf16 gradients in bf16 then
LORA = ["--use_peft", "--lora_config.r", "4", "--num_replicated_layers", "0", "--lora_config.target_modules"]
CAST = " (gradients are cast to be summed in fp32)"
COPIES = " (copies of the model are summed, too)"
# The flags, and of four units (embedding, layers, root) how many train, how many are reduced directly, and why not.
CASES: dict[str, tuple[list[str], tuple[int, int, str]]] = {
    "bf16, clipped": (["--pure_bf16", *ONE_MICRO_BATCH, "--gradient_clipping"], (4, 4, "")),
    "fp32, accumulated": ([], (4, 4, "")),
    "lora, recomputed": (
        [*LORA, "q_proj,v_proj", "--mixed_precision", "True", "--activation_checkpointing", "full"],
        (2, 2, ""),
    ),
    "compiled, cast": (["--mixed_precision", "True", "--reduce_dtype", "bf16", "--compile"], (4, 4, "")),
    "qlora": ([*LORA, "all-linear", "--quantization", "4bit"], (2, 2, "")),
    "states in host memory": (["--pure_bf16", *ONE_MICRO_BATCH, "--optimizer_cpu_offload"], (4, 4, "")),
    "generating": (["--eval_generate", "--max_new_tokens", "3", "--run_validation", "True"], (4, 4, "")),
    "kept, summed in fp32": (["--sharding_strategy", "SHARD_GRAD_OP", "--pure_bf16"], (4, 0, CAST)),
    "in groups": (["--hsdp", "--sharding_group_size", "2"], (4, 0, COPIES)),
}


def run(case: str, model: Path, folder: Path, group: ProcessGroup, *flags: str) -> list[Outcome]:
    given, _ = CASES[case]
    evaluation = [] if "--run_validation" in given else ["--run_validation", "False"]
    argv = ["--enable_fsdp", "--max_train_step", "4", "--save_every_steps", "2", *evaluation, *given, *flags]
    argv = flags_of(model, folder, *argv)
    return group.train(with_aot_eager(argv) if "--compile" in argv else argv, 4 if "--hsdp" in argv else 2)


@pytest.mark.parametrize("case", slow_but(2, list(CASES), num_slow=3))
def test_a_run_has_the_bits_of_the_packed_one(
    case: str, tiny_model: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    packed, direct = tmp_path / "packed", tmp_path / "direct"
    run(case, tiny_model, packed, process_group)
    outcomes = run(case, tiny_model, direct, process_group, "--direct_collectives")
    assert_bit_equal(direct, packed)
    _, (num_trained, num_reduced, why) = CASES[case]
    (line,) = (line for line in log_lines(outcomes[0].stdout) if "direct_collectives" in line)
    assert line == (
        f"direct_collectives: weights of 4 of 4 units are gathered, and gradients of {num_reduced} of {num_trained} "
        f"reduced, without packing{why}"
    )
    assert "direct_collectives" not in outcomes[1].stdout
    sent = [next(e for e in read_metrics(folder) if e["event"] == "communication") for folder in (direct, packed)]
    for kind in ("all_gather", "reduce_scatter"):
        assert sent[0][f"{kind}_sent_gb"] == pytest.approx(sent[1][f"{kind}_sent_gb"])


@pytest.mark.slow
def test_a_run_goes_on_packed(tiny_model: Path, tmp_path: Path, process_group: ProcessGroup) -> None:
    case, whole = "bf16, clipped", tmp_path / "whole"
    run(case, tiny_model, whole, process_group, "--direct_collectives")
    killed = as_if_killed_after(2, whole, tmp_path / "killed")
    run(case, tiny_model, killed, process_group, "--resume", "auto")
    assert_bit_equal(killed, whole)
