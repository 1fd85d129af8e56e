"""Losses of preferences are those of a plain loop over pairs, however the batch is cut and the model is laid out."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import BitsAndBytesConfig

from tests.helpers import random_answers
from tests.helpers.made import Made
from tests.helpers.processes import ProcessGroup, read_metrics
from tests.helpers.random_answers import PairLoss, Scores, scores_of, train_plainly
from tests.helpers.reference import assert_agrees, flags_for, lora_flags, plain_model

NUM_STEPS = 4
TARGETS = ("q_proj", "v_proj", "down_proj")
Lengths = tuple[int, int]


def dpo(scores: Scores, lengths: Lengths, before: Scores, beta: float = 0.1, flipped: float = 0.0) -> torch.Tensor:
    ratio = beta * ((scores[0] - before[0]) - (scores[1] - before[1]))
    return -(1 - flipped) * F.logsigmoid(ratio) - flipped * F.logsigmoid(-ratio)


def simpo(scores: Scores, lengths: Lengths, before: Scores, beta: float = 2.0, gamma: float = 1.0) -> torch.Tensor:
    return -F.logsigmoid(beta * (scores[0] / lengths[0] - scores[1] / lengths[1]) - gamma)


def orpo(scores: Scores, lengths: Lengths, before: Scores, weight: float = 0.1) -> torch.Tensor:
    chosen, rejected = ((score / length).double() for score, length in zip(scores, lengths, strict=True))
    odds = [(mean.exp() / (1 - mean.exp())).log() for mean in (chosen, rejected)]
    return (-chosen - weight * F.logsigmoid(odds[0] - odds[1])).float()


LOSSES: dict[str, tuple[PairLoss, list[str]]] = {
    "dpo": (dpo, []),
    "dpo smoothed": (partial(dpo, beta=0.4, flipped=0.2), ["--beta", "0.4", "--preference_smoothing", "0.2"]),
    "simpo": (simpo, []),
    "simpo other": (partial(simpo, beta=1.0, gamma=0.3), ["--beta", "1", "--simpo_gamma", "0.3"]),
    "orpo": (orpo, []),
    "orpo heavy": (partial(orpo, weight=1.0), ["--orpo_weight", "1"]),
}
KINDS = {
    "full": ([], {}),
    "lora": (lora_flags(TARGETS), {"lora_targets": TARGETS}),
    "qlora": (
        [*lora_flags(TARGETS), "--quantization", "4bit"],
        {
            "lora_targets": TARGETS,
            "quantization": BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
            ),
        },
    ),
}


@pytest.fixture(scope="module")
def references(tiny_model: Path) -> Made:
    def reference(loss: str, kind: str, batching: str) -> list[tuple[float, float]]:
        model = plain_model(tiny_model, **KINDS[kind][1])
        return train_plainly(model, LOSSES[loss][0], batching=batching, num_steps=NUM_STEPS)

    return Made(reference)


def flags_of(model: Path, output: Path, loss: str, kind: str, batching: str) -> list[str]:
    flags = flags_for(model, output, batching=batching, num_steps=NUM_STEPS)
    flags[flags.index("--dataset") + 1] = f"{random_answers.__file__}:get_custom_dataset"
    flags += ["--loss_type", loss.split()[0], *LOSSES[loss][1], *KINDS[kind][0]]
    return [*flags, "--loss_chunk_size", "50", "--save_model", "False", "--save_every_steps", "0"]


@pytest.mark.parametrize(
    ("loss", "kind", "split", "batching", "more"),
    [
        ("dpo", "full", (2, 1, 4), "packing", ["--enable_fsdp"]),
        ("dpo", "lora", (2, 2, 2), "padding", []),
        ("simpo", "full", (1, 2, 4), "padding", []),
        ("orpo", "full", (1, 8, 1), "packing", []),
        pytest.param("dpo smoothed", "full", (1, 4, 2), "padding", [], marks=pytest.mark.slow),
        pytest.param("dpo", "qlora", (2, 1, 4), "packing", ["--enable_fsdp"], marks=pytest.mark.slow),
        pytest.param("simpo other", "lora", (2, 4, 1), "packing", ["--enable_fsdp"], marks=pytest.mark.slow),
        pytest.param("orpo heavy", "lora", (2, 1, 4), "packing", [], marks=pytest.mark.slow),
        pytest.param("orpo", "full", (2, 4, 1), "padding", ["--enable_fsdp"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_any_split_trains_as_the_plain_loop(
    loss: str,
    kind: str,
    split: tuple[int, int, int],
    batching: str,
    more: list[str],
    tiny_model: Path,
    references: Made,
    process_group: ProcessGroup,
    tmp_path: Path,
) -> None:
    ranks, micro_batch, accumulation = split
    flags = [*flags_of(tiny_model, tmp_path / "run", loss, kind, batching), "--run_validation", "False", *more]
    flags += ["--batch_size_training", str(micro_batch), "--gradient_accumulation_steps", str(accumulation)]
    process_group.train(flags, ranks)
    assert_agrees(tmp_path / "run", references[loss, kind, batching])


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_evaluation_tells_which_answers_are_preferred(
    ranks: int, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    flags = [*flags_of(tiny_model, tmp_path / "run", "simpo", "full", "packing"), "--eval_before_training"]
    flags[flags.index("--max_train_step") + 1] = "1"
    process_group.train([*flags, "--val_batch_size", "2"], ranks)
    (found,) = [event for event in read_metrics(tmp_path / "run") if event["event"] == "eval" and event["step"] == 0]
    model, losses, rewards = plain_model(tiny_model), [], []
    with torch.no_grad():
        for pair in random_answers.get_custom_dataset(None, None, "validation"):
            scores, lengths = scores_of(model, pair)
            losses.append(simpo(scores, lengths, scores).item())
            rewards.append([2 * (score / length).item() for score, length in zip(scores, lengths, strict=True)])
    chosen, rejected = (math.fsum(side) / len(rewards) for side in zip(*rewards, strict=True))
    wanted = {
        "loss": math.fsum(losses) / len(losses),
        "reward_accuracy": sum(one > other for one, other in rewards) / len(rewards),
        "reward_margin": chosen - rejected,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "num_pairs": len(losses),
    }
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)
    assert "perplexity" not in found
