"""Losses and gradients of preferences next to those of TRL's trainers, on the same pairs, in fp32.

    python -m benchmarks.preference_losses

Needs trl (its DPOTrainer, and its experimental CPOTrainer and ORPOTrainer). A tiny random model computes 12 pairs of
token ids: by the trainer's own `compute_loss`, padded, and here packed, by the chunked head. Prints for each loss both
values and the largest difference of a gradient; the exit status is 1 if one differs by more than 1e-5. TRL's ORPO adds
the cross-entropy of the prompt, too, as a mean over the batch's tokens, so its pairs have a prompt of one token and
come one at a time.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from configs.preference import LossType, PreferenceConfig
from data.sequences.pairs import AnswerPair, build_pairs
from policies.loss.summed_loss import use_summed_loss
from tasks.causal_batches import Collator
from tasks.pair_batches import PairCollator
from tasks.preference import Preference
from tasks.preference_losses import PreferenceLoss
from tools.make_tiny_model import make_tiny_model

TOLERANCE = 1e-5
SIZES: dict[str, Any] = {"vocab_size": 600, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 4}
CASES: dict[str, tuple[LossType, PreferenceConfig, type[Any], type[Any], dict[str, Any]]] = {
    "dpo": ("dpo", PreferenceConfig(), DPOTrainer, DPOConfig, {"beta": 0.1}),
    "dpo, beta 0.5": ("dpo", PreferenceConfig(beta=0.5), DPOTrainer, DPOConfig, {"beta": 0.5}),
    "simpo": (
        *("simpo", PreferenceConfig(), CPOTrainer, CPOConfig),
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0},
    ),
    "simpo, smoothed": (  # DPOTrainer reads no label_smoothing for this loss
        *("simpo", PreferenceConfig(preference_smoothing=0.1), CPOTrainer, CPOConfig),
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0, "label_smoothing": 0.1},
    ),
    "orpo": ("orpo", PreferenceConfig(), ORPOTrainer, ORPOConfig, {"beta": 0.1}),
}


def random_pairs(num_pairs: int, longest_prompt: int) -> list[AnswerPair]:
    """Pairs of random token ids."""
    draw, rows = np.random.default_rng(0), []
    for _ in range(num_pairs):
        prompt = draw.integers(3, 600, draw.integers(1, longest_prompt + 1)).tolist()
        answers = [draw.integers(3, 600, draw.integers(1, 20)).tolist() for _ in range(2)]
        rows.append(
            {
                "input_ids": [token for answer in answers for token in (*prompt, *answer)],
                "labels": [token for answer in answers for token in (*[-100] * len(prompt), *answer)],
                "sample_lengths": [len(prompt) + len(answer) for answer in answers],
            }
        )
    pairs = build_pairs(rows, name="random", context_length=512)
    return [pairs[index] for index in range(len(pairs))]


def padded(pairs: Sequence[AnswerPair]) -> dict[str, torch.Tensor]:
    """The batch of TRL's trainers: chosen texts, then rejected ones, or each under names of its own."""
    texts = [text for side in (0, 1) for pair in pairs for text in (pair.texts[side],)]
    width = max(len(text.input_ids) for text in texts)
    ids, labels = np.zeros((len(texts), width), np.int64), np.full((len(texts), width), -100)
    mask = np.zeros_like(ids)
    for row, text in enumerate(texts):
        place = slice(0, len(text.input_ids))
        ids[row, place], labels[row, place], mask[row, place] = text.input_ids, text.labels, 1
    batch = {"input_ids": ids, "attention_mask": mask, "completion_mask": (labels != -100).astype(np.int64)}
    for side, part in (("chosen", slice(0, len(pairs))), ("rejected", slice(len(pairs), None))):
        batch |= {f"{side}_input_ids": ids[part], f"{side}_attention_mask": mask[part], f"{side}_labels": labels[part]}
    return {name: torch.from_numpy(value) for name, value in batch.items()}


def gradients(model: Any, compute: Callable[[], torch.Tensor]) -> tuple[float, list[torch.Tensor]]:
    """The loss, and the gradients of all parameters."""
    model.zero_grad()
    loss = compute()
    loss.backward()
    return loss.item(), [parameter.grad.clone() for parameter in model.parameters()]


def compare(name: str, folder: Path) -> tuple[float, float, float]:
    """The loss here, that of TRL, and the largest difference of a gradient."""
    kind, settings, trainer_class, config_class, options = CASES[name]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    trained = copy.deepcopy(base)
    with torch.no_grad():  # a step away from the reference
        for parameter in trained.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    own, reference = copy.deepcopy(trained), copy.deepcopy(base)  # before the trainer wraps them
    text = {"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}
    trainer = trainer_class(
        model=trained,
        args=config_class(output_dir=str(folder / "trl"), use_cpu=True, bf16=False, report_to="none", **options),
        train_dataset=datasets.Dataset.from_dict(text),
        processing_class=tokenizer,
        **({"ref_model": base} if kind == "dpo" else {}),
    )
    task = Preference(PreferenceLoss(kind, settings))
    use_summed_loss(own, task.backbone(own), 7, task.compute_logits)
    collate = PairCollator(Collator(packing=True, padding_id=0))
    pairs = random_pairs(12, 1 if kind == "orpo" else 9)
    if kind == "dpo":
        use_summed_loss(reference, task.backbone(reference), 7, task.compute_logits)
        scores = task.answer_scores(reference.eval(), collate([pairs])).numpy()
        pairs = [pair._replace(reference=score) for pair, score in zip(pairs, scores, strict=True)]
    groups = [[pair] for pair in pairs] if kind == "orpo" else [pairs]
    theirs = gradients(
        trainer.model, lambda: torch.stack([trainer.compute_loss(trainer.model, padded(g)) for g in groups]).mean()
    )
    ours = gradients(own, lambda: task.summed_loss(own, collate([pairs])) / len(pairs))
    difference = max(float((a - b).abs().max()) for a, b in zip(ours[1], theirs[1], strict=True))
    return ours[0], theirs[0], difference


def main() -> int:
    worst = 0.0
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_tiny_model(Path(temporary) / "tiny", tie_word_embeddings=False, **SIZES)
        for name in CASES:
            ours, theirs, difference = compare(name, folder)
            print(f"{name}: loss here {ours:.7f}, TRL {theirs:.7f}, largest difference of a gradient {difference:.1e}")
            worst = max(worst, abs(ours - theirs), difference)
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
