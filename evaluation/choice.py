"""Choice: whether the reference is the answer that the model holds likeliest, of all that the validation set has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from data.sequences.tokenized import TokenSequence
from data.tokens.labels import IGNORE_INDEX
from evaluation.measure import Measure, Scorer
from policies.sharding import reshard
from tasks.generation import PromptedAnswer
from tasks.task import Task
from utils.errors import ConfigError

MOST = 20  # answers: the model computes each of them after each prompt


class LikeliestAnswer(Measure):
    """100 if the reference is the likeliest answer, by the sum of its tokens' log-probabilities after the prompt.

    `evaluation.generation` computes it, since no text tells it.
    """

    NAME = "choice"
    NAMES = ("choice",)
    IS_DEFAULT = False

    def make_scorer(self) -> Scorer:
        return lambda reference, text: {}


def options_of(prompted: Iterable[PromptedAnswer], task: Task, num_positions: int | None) -> tuple[np.ndarray, ...]:
    """The different answers of a validation set, int32 [tokens] each.

    Raises:
        ConfigError: if there are none to choose from, or too many, or the model has no room for one of them.
    """
    flag, samples = "--eval_metric: choice", list(prompted)
    if task.NAME != "causal_lm":
        raise ConfigError(f"{flag} is for causal language models; leave it out")
    options = {sample.answer.tobytes(): sample.answer for sample in samples}
    if not 2 <= len(options) <= MOST:
        raise ConfigError(
            f"{flag} takes the different answers of the validation samples for options, 2 to {MOST} of them, and there "
            f"are {len(options):,}; leave it out"
        )
    longest = max(len(sample.prompt) for sample in samples) + max(map(len, options.values()))
    if num_positions is not None and longest > num_positions:
        raise ConfigError(
            f"{flag}: the longest prompt and option have {longest:,} tokens, more than the {num_positions:,} positions "
            "of this model; give a smaller --context_length"
        )
    return tuple(options.values())


@torch.no_grad()
def likeliest(
    model: nn.Module,
    task: Task,
    collate: Callable[[list[Any]], Any],
    prompts: Sequence[np.ndarray],
    options: Sequence[np.ndarray],
    device: torch.device,
) -> list[int]:
    """Which option is the likeliest after each prompt. The model may be sharded: every rank must call this.

    Args:
        collate: makes a batch of rows, as the run does.
    """
    training, scores = model.training, torch.zeros(len(options), len(prompts), dtype=torch.float64)
    model.eval()
    # Rows are of other lengths than the run's, for which layers may be compiled.
    with torch.compiler.set_stance("force_eager"):
        for number, option in enumerate(options):
            batch = collate([[_joined(prompt, option)] for prompt in prompts])
            losses = task.token_losses(model, batch.to(device)).double().cpu()
            scores[number].index_add_(0, batch.target_positions.cpu() // batch.input_ids.shape[1], -losses)
    model.train(training)
    reshard(model)
    return scores.argmax(0).tolist()


def _joined(prompt: np.ndarray, option: np.ndarray) -> TokenSequence:
    labels = np.concatenate([np.full_like(prompt, IGNORE_INDEX), option])
    return TokenSequence(np.concatenate([prompt, option]), labels, 0)
