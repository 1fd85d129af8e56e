"""Model FLOPs of a step of a decoder: what the mathematics needs."""

from __future__ import annotations

from typing import Any

from torch import nn

from data.counts import BatchCounts
from utils.parameters import Counted, count_weights


class StepFlops:
    """Counts the model FLOPs of a step. Recomputation is not counted.

    A matrix of n weights costs 2n per token in forward, 2n for its input's gradient, and, if it is trained, 2n more for
    its own gradient. The head only meets label tokens. Attention costs 4 x heads x head_dim per layer and visited
    (query, key) pair in forward and twice that in backward (Chowdhery et al., "PaLM", 2022, appendix B, with causal
    pairs counted exactly).
    """

    def __init__(self, model: Any) -> None:
        """
        Args:
            model: without a wrapper around it, sharded or not.
        """
        head = model.get_output_embeddings()
        head_weights = {id(parameter) for parameter in head.parameters()} if head is not None else set()
        lookups = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} - head_weights
        matrices = [m for m in count_weights(model) if m.parameter.dim() > 1 and id(m.parameter) not in lookups]
        self.per_label_token = sum(_flops_per_token(m) for m in matrices if id(m.parameter) in head_weights)
        self.per_token = sum(_flops_per_token(m) for m in matrices if id(m.parameter) not in head_weights)
        text = model.config.get_text_config()
        heads = getattr(text, "num_attention_heads", 0)
        head_dim = getattr(text, "head_dim", None) or getattr(text, "hidden_size", 0) // max(1, heads)
        self.per_pair = 3 * 4 * heads * head_dim * getattr(text, "num_hidden_layers", 0)

    def count(self, counts: BatchCounts) -> float:
        """FLOPs of forward and backward over a global batch."""
        return (
            counts.num_tokens * self.per_token
            + counts.num_label_tokens * self.per_label_token
            + counts.num_attended_pairs * self.per_pair
        )


def _flops_per_token(matrix: Counted) -> int:
    return matrix.num_weights * (6 if matrix.parameter.requires_grad else 4)
