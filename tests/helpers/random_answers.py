"""Random pairs of answers, tokenized, and a plain loop that learns which one is preferred."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from data.batches.packing import pack_best_fit
from tests.helpers.reference import CONTEXT_LENGTH, GLOBAL_BATCH, LR, reference_order

NUM_PAIRS = {"train": 46, "validation": 7}
Scores = tuple[torch.Tensor, torch.Tensor]
"""The log-probabilities of a chosen and a rejected answer."""


def get_custom_dataset(dataset_config: Any, tokenizer: Any, split: str) -> list[dict[str, list[int]]]:
    """Rows of two texts end to end, which begin with the same prompt; a model of 600 tokens reads them."""
    generator = np.random.default_rng(len(split))
    return [_pair(generator) for _ in range(NUM_PAIRS[split])]


def _pair(generator: np.random.Generator) -> dict[str, list[int]]:
    prompt = generator.integers(3, 600, generator.integers(1, 12)).tolist()
    answers = [generator.integers(3, 600, generator.integers(1, 16)).tolist() for _ in range(2)]
    return {
        "input_ids": [token for answer in answers for token in (*prompt, *answer)],
        "labels": [token for answer in answers for token in (*[-100] * len(prompt), *answer)],
        "sample_lengths": [len(prompt) + len(answer) for answer in answers],
    }


def texts_of(row: dict[str, list[int]]) -> list[tuple[list[int], list[int]]]:
    """The tokens and the labels of both texts."""
    cut = row["sample_lengths"][0]
    return [(row["input_ids"][part], row["labels"][part]) for part in (slice(cut), slice(cut, None))]


def prompt_length(row: dict[str, list[int]]) -> int:
    """The tokens before the first answer."""
    return next(place for place, label in enumerate(row["labels"]) if label != -100)


def scores_of(model: Any, row: dict[str, list[int]]) -> tuple[Scores, tuple[int, int]]:
    """The log-probabilities of both answers, and their tokens."""
    scores, lengths = [], []
    for ids, labels in texts_of(row):
        log_probabilities = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        is_answer = torch.tensor(labels[1:]) != -100
        targets = torch.tensor(ids[1:])[is_answer]
        scores.append(log_probabilities[is_answer].gather(1, targets.unsqueeze(1)).sum())
        lengths.append(len(targets))
    return (scores[0], scores[1]), (lengths[0], lengths[1])


PairLoss = Callable[[Scores, tuple[int, int], Scores], torch.Tensor]
"""A pair's loss, from its answers' log-probabilities, their lengths, and the log-probabilities before training."""


def train_plainly(model: Any, loss_of: PairLoss, *, batching: str, num_steps: int) -> list[tuple[float, float]]:
    """One pair at a time, torch's own AdamW and clipping; the loss and the gradient norm of each step."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0)
    pairs = get_custom_dataset(None, None, "train")
    with torch.no_grad():
        before = [scores_of(model, pair)[0] for pair in pairs]
    lengths = [len(pair["input_ids"]) for pair in pairs]
    if batching == "packing":  # the prompt is there once, and its last token again before the rejected answer
        lengths = [length - prompt_length(pair) + 1 for length, pair in zip(lengths, pairs, strict=True)]
    rows = pack_best_fit(lengths, CONTEXT_LENGTH) if batching == "packing" else [[index] for index in range(len(pairs))]
    results = []
    for step in range(num_steps):
        epoch, step_of_epoch = divmod(step, -(-len(rows) // GLOBAL_BATCH))
        for group in optimizer.param_groups:
            group["lr"] = LR * 0.85**epoch
        order = reference_order(len(rows), epoch, None if batching == "packing" else lengths)
        batch = [index for row in order[step_of_epoch * GLOBAL_BATCH :][:GLOBAL_BATCH] for index in rows[row]]
        loss_sum = 0.0
        for index in batch:
            loss = loss_of(*scores_of(model, pairs[index]), before[index])
            (loss / len(batch)).backward()
            loss_sum += loss.item()
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss_sum / len(batch), grad_norm.item()))
    return results
