"""Tokens whose experts a single rounding could change. Two kernels that round apart may send them to other experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NEAR = 4.0
"""Scores are near each other if roundings move them by a quarter of the distance between them."""

NEIGHBORS = 4
"""Places above and below the last one chosen, at which it is seen how far roundings move scores."""

_CHOICES = (torch.ops.aten.topk.default, torch.ops.aten.argmax.default)


class Choice(NamedTuple):
    """The scores of which an operator chose the highest ones."""

    scores: torch.Tensor  # [..., candidates], fp32
    num_chosen: int


class RouterChoices(TorchDispatchMode):
    """Notes the scores of every choice of the highest ones while it is active: of experts, in all of transformers'
    routers. A mode sees operators, so it needs to know no family."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Choice] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CHOICES and args[0].is_floating_point():
            # As their schemas have it: topk(scores, k, dim=-1, ...), argmax(scores, dim=None, ...)
            is_topk = func is torch.ops.aten.topk.default
            places = dict(zip(("scores", "k", "dim") if is_topk else ("scores", "dim"), args, strict=False))
            dim = {**places, **(kwargs or {})}.get("dim", -1 if is_topk else None)
            if dim is not None and args[0].dim():
                scores = args[0].detach().float().movedim(dim, -1)
                self.found.append(Choice(scores, int(places["k"]) if is_topk else 1))
        return func(*args, **kwargs or {})


def near_ties(choices: Sequence[Choice], moved: Sequence[Choice], num_tokens: int) -> torch.Tensor:
    """Which tokens' choices a rounding might change: bool [tokens].

    Args:
        choices: of a layer.
        moved: the same ones, in a computation that differs by roundings.
    """
    near = torch.zeros(num_tokens, dtype=torch.bool)
    if len(choices) != len(moved):
        return ~near
    for one, other in zip(choices, moved, strict=True):
        num_rows = math.prod(one.scores.shape[:-1])
        is_choice = one.num_chosen < one.scores.shape[-1]
        # A row of scores may be of a group of experts, of which each token has several.
        if is_choice and num_rows and num_rows % num_tokens == 0 and one.scores.shape == other.scores.shape:
            near |= _near(one, other).reshape(num_tokens, -1).any(-1).cpu()
    return near


def _near(one: Choice, other: Choice) -> torch.Tensor:
    """bool, of the shape of scores without their last dimension."""
    k = one.num_chosen
    highest, places = one.scores.topk(min(k + NEIGHBORS, one.scores.shape[-1]))
    # Candidates that are out of question have -inf, and the distance of two of them is no number.
    moves = (other.scores.gather(-1, places) - highest).abs().nan_to_num(nan=0.0, posinf=torch.inf)
    moved = moves[..., max(0, k - NEIGHBORS) :].amax(-1)
    return highest[..., k - 1] - highest[..., k] <= NEAR * moved
