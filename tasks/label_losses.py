"""The losses of texts with labels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def label_losses(
    scores: torch.Tensor, wanted: torch.Tensor, class_weights: Sequence[float] = (), smoothing: float = 0.0
) -> torch.Tensor:
    """Cross-entropy, or the mean over classes of the binary one, or the squared error: fp32 [samples].

    Args:
        scores: fp32 [samples, classes], or [samples, 1] of a number.
        wanted: int64 [samples], the class; or fp32 [samples, classes], 1 where a text is of a class; or fp32 [samples].
        class_weights: of each class, times its loss; empty: all alike.
        smoothing: the share of the target that is spread evenly over the classes, if a text is of one.
    """
    if wanted.dtype == torch.int64:
        losses = F.cross_entropy(scores, wanted, reduction="none", label_smoothing=smoothing)
        return losses * losses.new_tensor(class_weights)[wanted] if class_weights else losses
    if wanted.dim() == 2:
        of_classes = F.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
        if class_weights:
            of_classes = of_classes * of_classes.new_tensor(class_weights)
        return of_classes.mean(-1)
    return (scores[:, 0] - wanted) ** 2
