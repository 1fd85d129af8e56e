"""Mixtures whose routers' loss is trained: the same for any cut and layout, and after a kill; how busy experts are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.families import LLAMA_LIKE, MIXTURE_WITH_ROUTER_LOSS
from tests.helpers.processes import Outcome, ProcessGroup, log_lines, read_metrics, train_events
from tests.helpers.resuming import NUM_STEPS, as_if_killed_after, assert_bit_equal, flags_of, weights

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def mixture(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture") / "model"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MIXTURE_WITH_ROUTER_LOSS, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def whole(mixture: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """One rank, four rows a micro-batch; evaluated at the end."""
    run = tmp_path_factory.mktemp("whole") / "run"
    (outcome,) = process_group.train(flags_of(mixture, run, "--batch_size_training", "4"), 1)
    return run, outcome


def test_the_loss_and_the_experts_are_reported(whole: tuple[Path, Outcome]) -> None:
    run, outcome = whole
    lines = log_lines(outcome.stdout)
    assert "router_aux_loss_coef: 2, since config.json says output_router_logits" in lines
    event = [event for event in read_metrics(run) if event["event"] == "eval"][-1]
    share = event["busiest_expert_share"]
    assert 1 >= share > event["equal_expert_share"] == 0.25 > event["idlest_expert_share"]
    place = f"(layer {event['busiest_expert_layer']}, expert {event['busiest_expert']})"
    (line,) = [line for line in lines if line.startswith("experts: ")]
    assert line.startswith(f"experts: busiest {100 * share:.2g} % of tokens {place}, idlest ")


def test_two_ranks_and_recomputed_layers_take_the_same_steps(
    whole: tuple[Path, Outcome], mixture: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    flags = flags_of(mixture, tmp_path / "run", "--enable_fsdp", "--activation_checkpointing", "full")
    process_group.train(flags, 2)
    found, wanted = train_events(tmp_path / "run"), train_events(whole[0])
    for name in ("loss", "grad_norm"):
        assert [event[name] for event in found] == pytest.approx([event[name] for event in wanted], rel=TOLERANCE)
    evals = [
        [event for event in read_metrics(run) if event["event"] == "eval"][-1] for run in (tmp_path / "run", whole[0])
    ]
    assert evals[0]["busiest_expert_share"] == pytest.approx(evals[1]["busiest_expert_share"], abs=2e-3)


def test_a_killed_run_goes_on_bit_for_bit(
    whole: tuple[Path, Outcome], mixture: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    run = as_if_killed_after(6, whole[0], tmp_path / "run")
    process_group.train(flags_of(mixture, run, "--batch_size_training", "4", "--resume", "auto"), 1)
    assert_bit_equal(run, whole[0])


def test_without_the_loss_other_weights_are_trained_and_a_resumed_run_says_so(
    whole: tuple[Path, Outcome], mixture: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    off = ["--router_aux_loss_coef", "0", "--batch_size_training", "4"]
    (outcome,) = process_group.train(flags_of(mixture, tmp_path / "run", *off), 1)
    assert "router_aux_loss_coef" not in outcome.stdout
    name = "model.layers.0.mlp.gate.weight"
    assert (weights(tmp_path / "run")[name] - weights(whole[0])[name]).abs().max() > 1e-3
    run = as_if_killed_after(6, whole[0], tmp_path / "resumed")
    (outcome,) = process_group.run(flags_of(mixture, run, *off, "--resume", "auto"), 1)
    assert outcome.status == 2
    assert "--router_aux_loss_coef 0.0 (there None)" in outcome.stderr
    assert NUM_STEPS > 6


def test_it_is_planned_and_a_dense_model_is_refused(
    mixture: Path, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    asked = ["--router_aux_loss_coef", "0.01", "--dry_run"]
    (outcome,) = process_group.run(flags_of(mixture, tmp_path / "run", *asked), 1)
    assert outcome.status == 0, outcome.stderr
    (outcome,) = process_group.run(flags_of(tiny_model, tmp_path / "run", *asked), 1)
    assert outcome.status == 2
    (line,) = [line for line in outcome.stderr.splitlines() if line.startswith("error:")]
    assert line.startswith("error: --router_aux_loss_coef: ")
    assert line.endswith("is a llama model, which has no router that is trained with this loss; leave it out")


BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
GROUPS: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
SIGMOID = transformers.Glm4MoeConfig(
    **LLAMA_LIKE, **GROUPS, moe_intermediate_size=16, first_k_dense_replace=1, head_dim=8, dtype="bfloat16"
)


def test_biases_that_choose_experts_are_saved_to_the_bit_by_a_run_in_bf16(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SIGMOID, dtype=torch.bfloat16)
    values = torch.tensor([3.301, 3.302, 3.303, 3.304])
    dict(model.named_buffers())[BIAS].data = values.clone()
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "model")
    flags = ["--enable_fsdp", "--pure_bf16", "--max_train_step", "2", "--activation_checkpointing", "full"]
    process_group.train(flags_of(tmp_path / "model", tmp_path / "run", *flags), 2)
    saved = weights(tmp_path / "run")
    assert saved[BIAS].dtype == torch.float32
    assert torch.equal(saved[BIAS], values)
    assert saved["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
