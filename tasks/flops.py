"""Model FLOPs of a step of a decoder, or of an encoder-decoder: those of the mathematics, however it is computed."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import nn
from transformers import PreTrainedConfig

from data.batches.counts import BatchCounts
from utils.layer_configs import head_dim_of, layer_configs
from utils.parameters import Counted, count_weights

Cost = Callable[[Counted], float]


def flops_per_token(matrix: Counted) -> float:
    """FLOPs of a matrix for a token, forward and backward."""
    return matrix.num_weights * (6 if matrix.parameter.requires_grad else 4)


class Flops(Protocol):
    """Counts the model FLOPs of steps."""

    def count(self, counts: BatchCounts) -> float:
        """FLOPs of forward and backward over a global batch."""


class UnknownFlops:
    """Counts nothing, as for an encoder-decoder that reads images."""

    def count(self, counts: BatchCounts) -> float:
        return math.nan


class StepFlops:
    """Counts the model FLOPs of a step. Recomputation is not counted.

    A matrix of n weights costs 2n per token in forward, 2n for its input's gradient, and, if it is trained, 2n more for
    its own gradient. The head only meets label tokens, and a token only those experts that it is routed to. Attention
    costs 4 x heads x head_dim per layer and visited (query, key) pair in forward and twice that in backward (Chowdhery
    et al., "PaLM", 2022, appendix B, with causal pairs counted exactly; in a sliding window of w tokens, Jiang et al.,
    "Mistral 7B", 2023, section 2, a query visits w keys at most). Layers with a state: `_flops_of_states`.
    """

    def __init__(
        self,
        model: Any,
        cost: Cost = flops_per_token,
        left_out: Sequence[Counted] = (),
        *,
        attends_both_ways: bool = False,
    ) -> None:
        """
        Args:
            model: without a wrapper around it, sharded or not.
            cost: of a matrix for each token (of experts, if it met all); a plan counts bytes and the like so, too.
            left_out: matrices that meet no tokens, as those of a vision encoder.
            attends_both_ways: it is an encoder, whose windows are not counted.
        """
        of_head, of_others = matrices_of(model)
        of_elsewhere = {id(matrix.parameter) for matrix in left_out}
        of_others = [matrix for matrix in of_others if id(matrix.parameter) not in of_elsewhere]
        # Experts that share one tensor count with all of their weights, so they are scaled to those a token meets.
        met = shares_of_experts(model)
        self.per_label_token = sum(map(cost, of_head))
        self.per_token = sum(cost(matrix) * met.get(id(matrix.parameter), 1) for matrix in of_others)
        # Whatever else a plan counts so, it counts of matrices alone.
        self.of_states = _flops_of_states(model) if cost is flops_per_token else 0
        self.per_pair = sum(map(_flops_per_pair, _attending(model.config)))
        self._attention = None if attends_both_ways else _costs_in_windows(model.config)

    def count(self, counts: BatchCounts) -> float:
        """FLOPs of forward and backward over a global batch. In windows all sequences count as of one length."""
        return (
            counts.num_tokens * (self.per_token + self.of_states)
            + counts.num_label_tokens * self.per_label_token
            + counts.num_attended_pairs * self.per_pair * self.share_in_windows(counts)
        )

    def share_in_windows(self, counts: BatchCounts) -> float:
        """The share of causal attention that sliding windows leave."""
        return 1.0 if self._attention is None else _share_of(self._attention, visited_length(counts))


class Seq2SeqFlops:
    """Counts the model FLOPs of a step of an encoder-decoder.

    The keys and values of the decoder's attention to the encoder are computed for each source token, everything else
    in the decoder for each token that it reads.
    """

    def __init__(self, model: Any, cost: Cost = flops_per_token) -> None:
        """
        Args: as of `StepFlops`.
        """
        of_head, of_others = matrices_of(model)
        in_decoder = {id(parameter): name for name, parameter in model.get_decoder().named_parameters()}
        of_source = [m for m in of_others if _reads_source(in_decoder.get(id(m.parameter)))]
        self.per_label_token = sum(map(cost, of_head))
        self.per_source_token = sum(map(cost, of_source))
        self.per_decoder_token = sum(map(cost, of_others)) - self.per_source_token
        config = model.config
        num_decoder_layers = getattr(config, "decoder_layers", None) or config.num_decoder_layers
        self.per_encoder_pair = _flops_per_pair(config) * config.num_hidden_layers
        self.per_decoder_pair = _flops_per_pair(config) * num_decoder_layers

    def count(self, counts: BatchCounts) -> float:
        """FLOPs of forward and backward over a global batch."""
        return (
            (counts.num_tokens - counts.num_decoder_tokens) * self.per_source_token
            + counts.num_decoder_tokens * self.per_decoder_token
            + counts.num_label_tokens * self.per_label_token
            + counts.num_attended_pairs * self.per_encoder_pair
            + (counts.num_decoder_pairs + counts.num_cross_pairs) * self.per_decoder_pair
        )


# In the attention to the encoder, as BART and Pegasus name it, and as T5 does.
_CROSS_KEYS_AND_VALUES = re.compile(r"\bencoder_attn\.[kv]_proj\b|\bEncDecAttention\.[kv]\b")


def _reads_source(name_in_decoder: str | None) -> bool:
    """Whether a matrix is multiplied with the source's tokens: one of the encoder, which has no name in the decoder."""
    return name_in_decoder is None or _CROSS_KEYS_AND_VALUES.search(name_in_decoder) is not None


def shares_of_experts(model: Any) -> dict[int, float]:
    """The fraction of a mixture's experts that a token is routed to, by the ids of their parameters; empty without.

    Experts are one parameter `[experts, ...]` of a module of that name, or a list of modules. The factors of their
    adapters are inside a wrapper of that name: [experts * r, in] and [out, r * experts].
    """
    num_met = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    if not num_met:
        return {}
    return {
        id(weights.parameter): num_met / _num_experts(module, weights.shape)
        for name, module in model.named_modules()
        # The router is no part of `experts`: every token meets all of it.
        if name.rpartition(".")[2] == "experts"
        for weights in count_weights(module)
        if len(weights.shape) > 1
    }


def _num_experts(module: Any, shape: Sequence[int]) -> int:
    """How many experts share a tensor of this shape inside a module of experts."""
    if isinstance(module, nn.ModuleList):
        return len(module)
    num_experts: int = shape[0] if len(shape) == 3 else getattr(module, "num_experts", shape[0])
    return num_experts


def matrices_of(model: Any) -> tuple[list[Counted], list[Counted]]:
    """The matrices that are multiplied with: the head's, and all others."""
    head = model.get_output_embeddings()
    head_weights = {id(parameter) for parameter in head.parameters()} if head is not None else set()
    # An embedding is looked up, not multiplied, unless the head shares its weight.
    lookups = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} - head_weights
    matrices = [m for m in count_weights(model) if len(m.shape) > 1 and id(m.parameter) not in lookups]
    return (
        [m for m in matrices if id(m.parameter) in head_weights],
        [m for m in matrices if id(m.parameter) not in head_weights],
    )


_WITHOUT_ATTENTION = {"linear_attention", "conv", "moe", "mlp"}  # as transformers names the kinds of layers


def _attending(model_config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """The configs of the layers that have attention between pairs of tokens."""
    layers = layer_configs(model_config)
    kinds = getattr(model_config.get_text_config(), "layer_types", None) or ["full_attention"] * len(layers)
    return [layer for layer, kind in zip(layers, kinds, strict=False) if kind not in _WITHOUT_ATTENTION]


def visited_length(counts: BatchCounts) -> float:
    """The length of sequences in which a token meets as many others, by causal attention, as here on average."""
    return max(1.0, 2 * counts.num_attended_pairs / max(1, counts.num_tokens) - 1)


def _costs_in_windows(model_config: PreTrainedConfig) -> Counter[int | None]:
    """FLOPs for a pair, of all layers with such a window; None: without one."""
    costs = Counter[int | None]()
    for layer, window in zip(_attending(model_config), _windows(model_config), strict=True):
        costs[window] += _flops_per_pair(layer)
    return costs


def _share_of(costs: Counter[int | None], length: float) -> float:
    """The share of causal attention, of sequences of so many tokens, whose keys are in the windows."""
    full = costs.total() * _pairs_within(length, length)
    cut = sum(cost * _pairs_within(length, window or length) for window, cost in costs.items())
    return cut / full if full else 1.0


def _pairs_within(length: float, window: float) -> float:
    """(query, key) pairs of causal attention in a window, the query's own token counted."""
    window = min(window, length)
    return window * (window + 1) / 2 + (length - window) * window


def _windows(model_config: PreTrainedConfig) -> list[int | None]:
    """The sliding window of each layer with attention; None: it sees all before."""
    kinds = getattr(model_config.get_text_config(), "layer_types", None)
    layers = layer_configs(model_config)
    pairs = zip(layers, kinds or ["sliding_attention"] * len(layers), strict=False)
    return [
        (getattr(layer, "sliding_window", None) or None) if kind == "sliding_attention" else None
        for layer, kind in pairs
        if kind not in _WITHOUT_ATTENTION
    ]


def _flops_of_states(model: Any) -> int:
    """FLOPs for a token, forward and backward, of the layers that pass a state on: delta rules and Mamba.

    A head's state is a matrix. A delta rule multiplies it with the key, adds an outer product, and multiplies it with
    the query (Yang et al., "Gated Delta Networks", 2024, equation 10); Mamba does without the first (Dao and Gu,
    "Transformers are SSMs", 2024, section 2). Each costs 2 per element, and twice that in backward. Kernels that
    compute in chunks do more; what they do more is not counted, as nothing is that is computed again.
    """
    return sum(3 * 2 * _products_with_state(module) for module in model.modules() if hasattr(module, "A_log"))


def _products_with_state(layer: Any) -> int:
    """Elements of a layer's state, times its products for each token."""
    if hasattr(layer, "ssm_state_size"):
        elements: int = layer.intermediate_size * layer.ssm_state_size
        return 2 * elements
    if hasattr(layer, "head_v_dim"):
        return 3 * int(layer.num_v_heads * layer.head_k_dim * layer.head_v_dim)
    return 3 * int(layer.num_heads * layer.head_dim**2)  # Kimi's


def _flops_per_pair(config: PreTrainedConfig) -> int:
    """FLOPs of one layer for a pair, forward and backward."""
    return 3 * 4 * getattr(config, "num_attention_heads", 0) * head_dim_of(config)
