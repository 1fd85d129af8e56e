"""Figures of an evaluation of whole texts, made of sums over its samples, so batches and ranks just add theirs up."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

FIGURES_OF_CLASSES = {"accuracy": True, "macro_f1": True}
FIGURES_OF_NUMBERS = {"mse": False, "correlation": True}
"""Whether higher is better."""


def sums_of_classes(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """fp64 [1 + 3 x classes]: texts that are all right, then for each class those that are found and right, those that
    are found, and those that are of it. A text whose scores are NaN is not right, and found to be of no class.

    Args:
        scores: fp64 [samples, classes].
        wanted: int64 [samples], the class; or [samples, classes], 1 where a text is of a class, which is found if its
            score is above 0, a probability of one half.
    """
    has_scores = ~scores.isnan().any(-1)
    if wanted.dtype == torch.int64:
        of_class = torch.nn.functional.one_hot(wanted, scores.shape[1]).double()
        found = torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[1]) * has_scores[:, None].double()
    else:
        of_class, found = wanted.double(), ((scores > 0) & has_scores[:, None]).double()
    is_right = ((of_class == found).all(-1) & has_scores).double().sum()
    return torch.cat([is_right[None], (of_class * found).sum(0), found.sum(0), of_class.sum(0)])


def figures_of_classes(sums: Sequence[float], num_samples: int) -> dict[str, float]:
    """Accuracy, the share of texts that are all right; and the mean of the F1 of classes that are found or there."""
    num_classes = len(sums) // 3
    right, found, there = (sums[1 + part * num_classes :][:num_classes] for part in range(3))
    of_classes = [2 * r / (f + t) for r, f, t in zip(right, found, there, strict=True) if f + t]
    return {"accuracy": sums[0] / num_samples, "macro_f1": math.fsum(of_classes) / max(1, len(of_classes))}


def sums_of_numbers(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """fp64 [6]: squared errors, and the sums that a correlation is made of. Both are fp64 [samples]."""
    parts = ((found - wanted) ** 2, found, wanted, found**2, wanted**2, found * wanted)
    return torch.stack([part.sum() for part in parts])


def figures_of_numbers(sums: Sequence[float], num_samples: int) -> dict[str, float]:
    """The mean squared error, and Pearson's correlation if neither side is constant."""
    errors, x, y, xx, yy, xy = sums
    figures = {"mse": errors / num_samples}
    variances = (num_samples * xx - x * x, num_samples * yy - y * y)
    # Of equal numbers roundings alone are left, a share of their squares.
    if all(variance > 1e-12 * num_samples * squares for variance, squares in zip(variances, (xx, yy), strict=True)):
        figures["correlation"] = (num_samples * xy - x * y) / math.sqrt(variances[0] * variances[1])
    return figures
