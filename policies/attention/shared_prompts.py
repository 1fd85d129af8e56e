"""The trial of pairs that share their prompt, before training: a rejected answer sees its prompt, and not the chosen
answer that lies between them in the row.

`policies.attention.packing_leaks` tries packed rows, and goes first: here they are what is compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from data.sequences.pairs import AnswerPair
from data.tokens.labels import IGNORE_INDEX
from policies.attention.packing_leaks import NUM_TRIES, documents, without_labels
from policies.sharding import reshard
from utils.errors import ConfigError

PROMPT, ANSWER = 24, 12  # tokens; a row of the run may be shorter
Losses = Callable[[list[list[Any]]], torch.Tensor]


@torch.no_grad()
def check_shared_prompts(
    model: nn.Module, token_losses_of: Losses, *, vocab_size: int, row_length: int, tolerance: float
) -> None:
    """Refuse shared prompts if the rejected answer's losses depend on the chosen one, or not on the prompt, or are
    others than with a prompt of its own. Every rank must call this.

    Args:
        token_losses_of: the losses of rows' label tokens, by the collation and the forward pass that training uses.
        row_length: the most tokens of a row of the run, 8 or more; no row of the trial is longer.
        tolerance: by how much losses may differ, relative: kernels round otherwise.

    Raises:
        ConfigError: if so.
    """
    generator, training = np.random.default_rng(0), model.training
    # The longest row has two prompts and three answers.
    prompt, answer = max(2, min(PROMPT, row_length // 4)), max(1, min(ANSWER, row_length // 6))
    prompts, chosen, rejected, after = (
        documents(generator, vocab_size, length) for length in (prompt, answer, answer, answer)
    )
    prompts[:, -1] = prompts[0, -1]  # the rejected part has it itself

    def losses(prompt: int = 0, answer: int = 0, last: int = 0) -> torch.Tensor:
        pair = _pair(prompts[prompt], chosen[answer], rejected[0])
        return token_losses_of([[pair, without_labels(after[last], 1)]]).double().cpu()

    model.eval()
    with torch.compiler.set_stance("force_eager"):  # as in `check_row_isolates`
        plain, others = losses(), range(1, NUM_TRIES + 1)
        alone = _pair(prompts[0], chosen[0], rejected[0]).texts
        apart = token_losses_of([[*alone, without_labels(after[0], 1)]]).double().cpu() - plain
        rounding = float((losses(last=1) - plain).abs().max())
        by_chosen = min(float((losses(answer=other) - plain).abs().max()) for other in others)
        by_prompt = min(float((losses(prompt=other) - plain).abs().max()) for other in others)
    model.train(training)
    reshard(model)
    sees_chosen = by_chosen > max(1e-5 * float(plain.abs().max()), 10 * rounding)
    is_other = float(apart.abs().mean()) > tolerance * max(1.0, float(plain.mean()))
    if sees_chosen or is_other or by_prompt <= rounding:
        raise ConfigError(
            "--share_prompts: with this model a rejected answer would not see its prompt alone; give --share_prompts "
            "False"
        )


def _pair(prompt: np.ndarray, chosen: np.ndarray, rejected: np.ndarray) -> AnswerPair:
    """A pair that shares its prompt. Only the rejected answer has labels."""
    ids = np.concatenate([prompt, chosen, prompt[-1:], rejected])
    labels = np.full_like(ids, IGNORE_INDEX)
    labels[-len(rejected) :] = rejected
    num_chosen = len(prompt) + len(chosen)
    return AnswerPair(ids, labels, 0, num_chosen, np.zeros(2, np.float32), len(prompt) - 1)
